"""The rotation of EXL3: blocks of natural-order (Sylvester) Hadamard matrices over sqrt(n) (spec 4.1).

H[a, b] = (-1)**popcount(a & b) / sqrt(n) is symmetric and its own inverse. Weights use blocks of 128 on both sides,
embedding rows 256, the key/value cache 32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.errors import ArgumentError

BLOCK = 128


def hadamard(n: int = BLOCK, dtype: torch.dtype = torch.float32) -> Tensor:
    """H, orthonormal, (n, n); n a power of two."""
    _check_size(n)
    h = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return (h / math.sqrt(n)).to(dtype)


def walsh(x: Tensor, n: int = BLOCK, dim: int = -1) -> Tensor:
    """Unnormalised Walsh-Hadamard transform of each block of n along `dim`, by butterflies: sqrt(n) * H.

    fp64 stays fp64, everything else is computed and returned in fp32. Additions only: no setting of torch for faster
    matrix products can change the result.
    """
    _check_size(n)
    need_tensors(x=x)
    if x.is_complex() or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise ArgumentError(f"x must be real and have dimension {dim!r} to be rotated, got {x.dtype} of shape {tuple(x.shape)}")
    dim = dim % x.dim()
    size = x.shape[dim]
    if size % n:
        raise ArgumentError(f"dimension {dim} of shape {tuple(x.shape)} must be a multiple of {n} to be rotated")
    shape = x.shape
    inner = math.prod(shape[dim + 1 :])
    a = x.to(x.dtype if x.dtype == torch.float64 else torch.float32).contiguous()
    spare: Tensor | None = None
    step = 1
    while step < n and a.numel():
        source = a.view(-1, 2, step * inner)
        # the input itself is never overwritten: from the second step on two buffers take turns
        target = torch.empty_like(source) if spare is None else spare.view(source.shape)
        torch.add(source[:, 0], source[:, 1], out=target[:, 0])
        torch.sub(source[:, 0], source[:, 1], out=target[:, 1])
        spare = a if step > 1 else None
        a = target
        step *= 2
    return a.clone().view(shape) if n == 1 else a.view(shape)


def rotate(x: Tensor, n: int = BLOCK, dim: int = -1) -> Tensor:
    """x with every block of n along `dim` multiplied by H. fp32 (fp64 for fp64 input), a new tensor."""
    return walsh(x, n, dim).mul_(1 / math.sqrt(n))


def _check_size(n: int) -> None:
    if not isinstance(n, int) or n < 1 or n & (n - 1):
        raise ArgumentError(f"a Hadamard matrix of size {n!r} is not available; use a power of two")
