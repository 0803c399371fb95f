"""Incoherence processing: signs, channel scales and Hadamard rotations that make a weight matrix look like unit Gaussian noise.

Follows section 5 of the quantizer description: W (k, n) = (in, out); W = diag(suh) H W_rot H diag(svh), H the blockwise 128-point
Hadamard. Beyond it: every 128-block of rows and of columns is brought to the same RMS by one factor, so that zero padding inside a
block (576 inputs in 640) doesn't waste the codebook's range.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from exl3.codec.rotation import hadamard

HADAMARD = 128
CHANNEL_FLOOR = 0.02  # of the mean importance: no channel is worth nothing
_EMPTY_CHANNEL = 0.1  # scale of an all-zero channel while it is processed


@lru_cache(maxsize=8)
def _hadamard(device: torch.device, dtype: torch.dtype) -> Tensor:
    return hadamard(HADAMARD, dtype).to(device)


def rotate_columns(w: Tensor) -> Tensor:
    """w H: the 128-point Hadamard on blocks of the last axis; `(rows, n)`, n a multiple of 128."""
    return (w.reshape(-1, HADAMARD) @ _hadamard(w.device, w.dtype)).view(w.shape)


def rotate_rows(w: Tensor) -> Tensor:
    """H w: the 128-point Hadamard on blocks of the first axis; `(k, n)`, k a multiple of 128."""
    k, n = w.shape
    return (_hadamard(w.device, w.dtype) @ w.view(k // HADAMARD, HADAMARD, n)).view(k, n)


def padded(n: int) -> int:
    """n rounded up to a multiple of 128."""
    return -(-n // HADAMARD) * HADAMARD


def pad_matrix(w: Tensor) -> Tensor:
    """Zero rows and columns up to multiples of 128."""
    k, n = w.shape
    return torch.nn.functional.pad(w, (0, padded(n) - n, 0, padded(k) - k)).contiguous()


def random_signs(name: str, n: int, seed: int = 0) -> Tensor:
    """n random signs as fp32 on the CPU; a function of (name, seed, n) alone, the same on every device and version."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randint(0, 2, (n,), generator=generator).float() * 2 - 1


@dataclass
class Regularized:
    """A rotated matrix near N(0, 1) and the scales that undo it: W = diag(suh) H rotated H diag(svh)."""

    rotated: Tensor  # (k, n) fp32, RMS 1
    suh: Tensor  # (k,) fp32, signed
    svh: Tensor  # (n,) fp32, signed; 0 for all-zero columns


def _block_rms(energy: Tensor) -> Tensor:
    """Root mean square per 128-block, spread back to channels; 1 for an all-zero block."""
    rms = energy.view(-1, HADAMARD).mean(1).sqrt()
    rms = torch.where(rms > 0, rms, torch.ones_like(rms))
    return rms.repeat_interleave(HADAMARD)


def column_rms(w: Tensor) -> Tensor:
    """RMS of each column, `(n,)`."""
    return w.square().mean(0).sqrt()


def channel_scale(weight: Tensor, channels: Tensor) -> Tensor:
    """Output scale of each column that makes a matrix's noise cost least: (energy / importance)^(1/4), mean 1 over non-empty columns.

    weight (k, n) fp32; channels (<= n,): importance, mean 1. The 128-point rotation gives each column of a block noise of the square of
    its scale, while the block's energy is the mean of (column / scale)^2; of their product this is the minimum (Cauchy-Schwarz).
    """
    energy = weight.square().mean(0)
    importance = torch.ones_like(energy)
    importance[: len(channels)] = channels.to(energy) + CHANNEL_FLOOR
    scale = (energy / importance).pow(0.25)
    return scale / scale[scale > 0].mean() if bool((scale > 0).any()) else torch.ones_like(scale)


def regularize(
    w: Tensor, input_signs: Tensor, output_signs: Tensor, *, out_scales: bool = True, scale: Tensor | None = None
) -> Regularized:
    """Rotates and scales `w`, `(k, n)` fp32 with k and n multiples of 128.

    `input_signs` (k,), `output_signs` (n,): +-1. `out_scales`: fold the columns' relative RMS into svh, or `scale`
    (n,), positive for columns that are not empty, in its place.
    """
    w = w.float()
    columns = column_rms(w)
    empty = columns == 0
    if scale is not None:
        scale = torch.where(empty, torch.full_like(columns, _EMPTY_CHANNEL), scale.to(columns))
    elif out_scales:
        mean = columns.sum() / (~empty).sum().clamp_min(1)
        scale = torch.where(empty, torch.full_like(columns, _EMPTY_CHANNEL), columns / mean)
    else:
        scale = torch.ones_like(columns)
    svh = output_signs.to(w) * scale
    w = rotate_columns(w / svh)
    block = _block_rms(w.square().mean(0))
    block = block / block.square().mean().sqrt()  # relative: the overall size belongs to suh
    w = w / block
    svh = torch.where(empty, torch.zeros_like(svh), svh * block)

    rows = w.square().mean(1).sqrt()
    usual = rows.sum() / (rows > 0).sum().clamp_min(1)  # also that of padding, or the factored metric would span too wide a range
    rows = torch.where(rows > 0, rows, torch.where(usual > 0, usual, _EMPTY_CHANNEL))
    suh = input_signs.to(w) * rows
    w = rotate_rows(w / suh.unsqueeze(1))
    block = _block_rms(w.square().mean(1))
    w = w / block.unsqueeze(1)
    return Regularized(w, suh * block, svh)


def restore(rotated: Tensor, suh: Tensor, svh: Tensor) -> Tensor:
    """diag(suh) H rotated H diag(svh), `(k, n)` fp32."""
    return rotate_columns(rotate_rows(rotated.float())) * suh.unsqueeze(1).float() * svh.float()
