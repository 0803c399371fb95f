"""From a trellis to a weight matrix: W = diag(suh) H W^ H diag(svh), orientation (in, out), y = x @ W (spec 4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.codec.codebooks import check_codebook, check_codebook_rate, codebook_table
from exl3.codec.rings import TILE, check_trellis, unpack
from exl3.codec.rotation import BLOCK, walsh
from exl3.codec.tiles import tiles_to_matrix
from exl3.errors import FormatError

_CHUNK = 1 << 20  # weights decoded at a time: keeps the intermediates in the cache


def decode(trellis: Tensor, codebook: str, multiplier: int | None = None) -> Tensor:
    """The matrix in the rotated basis, W^, as the quantizer left it.

    trellis: (in/16, out/16, 16*K) int16; codebook: "3inst", "mcg" or "mul1"; multiplier: the 32-bit value of the
    tensor's marker, None for the codebook's usual one -> (in, out) fp16, exact.
    FormatError for a wrong dtype, shape, width, or a half rate without mul1; ArgumentError for an unknown codebook.
    """
    K = check_trellis(trellis)
    table = codebook_table(codebook, multiplier, trellis.device)
    check_codebook_rate(codebook, K)
    rows, cols, _ = trellis.shape
    out = torch.empty(16 * rows, 16 * cols, dtype=torch.float16, device=trellis.device)
    step = max(1, _CHUNK // (TILE * max(cols, 1)))
    for row in range(0, rows, step):
        states = unpack(trellis[row : row + step])
        values = table.index_select(0, states.view(-1)).view(states.shape)
        out[16 * row : 16 * (row + step)] = tiles_to_matrix(values)
    return out


def dequantize(trellis: Tensor, suh: Tensor, svh: Tensor, codebook: str, multiplier: int | None = None) -> Tensor:
    """The weight in its original basis, with padding: W = diag(suh) H W^ H diag(svh) in fp32.

    trellis: (in/16, out/16, 16*K) int16, in and out multiples of 128; suh: (in,), svh: (out,), fp16 as stored (any
    floating point); codebook and multiplier as in `decode` -> (in, out) fp32. A Hugging Face weight is its transpose,
    cropped to the true sizes. Errors as in `decode`, and FormatError for scales of a wrong dtype or shape.
    """
    K = check_trellis(trellis)
    check_codebook(codebook, multiplier)
    check_codebook_rate(codebook, K)
    check_scales(trellis, suh, svh)
    rows, cols, _ = trellis.shape
    left, right = suh.float().div(BLOCK)[:, None], svh.float()[None, :]  # the two 1/sqrt(128) in one exact division
    out = torch.empty(16 * rows, 16 * cols, dtype=torch.float32, device=trellis.device)
    step = BLOCK // 16 * max(1, _CHUNK // (BLOCK * 16 * max(cols, 1)))
    for row in range(0, rows, step):
        w = walsh(walsh(decode(trellis[row : row + step], codebook, multiplier), dim=0), dim=1)
        part = slice(16 * row, 16 * (row + step))
        out[part] = w.mul_(left[part]).mul_(right)
    return out


def check_scales(trellis: Tensor, suh: Tensor, svh: Tensor) -> None:
    """FormatError unless suh and svh fit a trellis whose sizes are multiples of 128."""
    shape = tuple(trellis.shape)
    for name, scale, size in (("suh", suh, 16 * trellis.shape[0]), ("svh", svh, 16 * trellis.shape[1])):
        if size % BLOCK:
            raise FormatError(f"trellis of shape {shape} covers {size} channels on the side of {name}; must be a multiple of {BLOCK}")
        if not isinstance(scale, Tensor) or not scale.dtype.is_floating_point:
            kind = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise FormatError(f"{name} must be a float16 tensor, got {kind}; packed signs (.su, .sv) go through unpack_signs first")
        if tuple(scale.shape) != (size,):
            raise FormatError(f"{name} must have shape ({size},) to fit a trellis of shape {shape}, got {tuple(scale.shape)}")
