"""Codes of the quantized key/value cache: groups of 32 values, rotated, scaled by their largest, 2 to 8 bits each (spec 5).

A run-time format, not part of a model directory. The grid is mid-rise: code q of b bits stands for
t = (2 q + 1) / 2**b - 1, so no code is zero. The compander f(t) = a t + (1 - a) t**3 spends more codes near zero.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.codec.rotation import walsh
from exl3.errors import ArgumentError

GROUP = 32
_NORM = 0.17677669529663688  # 1 / sqrt(32)


def kv_quantize(x: Tensor, bits: int, compand: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes and scales of keys or values.

    x: (..., 32*G) floating point, taken as fp16; bits: 2 .. 8; compand: a of the compander, 0 off
    -> (codes (..., G*bits) int32, scales (..., G) fp16). A group with NaN or Inf gets a scale that is not finite, so it
    never decodes to plausible numbers. ArgumentError for wrong sizes, bits or compand.
    """
    _check(bits, compand)
    need_tensors(x=x)
    if not x.dtype.is_floating_point or x.dim() < 1 or x.shape[-1] % GROUP:
        raise ArgumentError(f"x must be floating point, its last dimension a multiple of {GROUP}, got {x.dtype} of shape {tuple(x.shape)}")
    y = walsh(x.half().reshape(-1, GROUP), GROUP).mul_(_NORM)
    scale = y.abs().amax(dim=1) + 1e-10
    u = y * (1 / scale)[:, None]
    if 0 < compand < 1:
        u = _expand(u, compand)
    half = 1 << (bits - 1)
    codes = torch.nan_to_num(u * half + half).floor_().clamp_(0, 2 * half - 1).to(torch.int32)
    groups = x.shape[-1] // GROUP
    return _pack_planes(codes, bits).view(*x.shape[:-1], groups * bits), scale.half().view(*x.shape[:-1], groups)


def kv_dequantize(codes: Tensor, scales: Tensor, bits: int, compand: float = 0.0, *, rotated: bool = False) -> Tensor:
    """Inverse of `kv_quantize` up to rounding: (..., G*bits) int32, (..., G) fp16 -> (..., 32*G) fp16.

    rotated: leave the groups in the rotated basis, fp32, as attention kernels read them (they rotate the query and the
    output instead).
    """
    _check(bits, compand)
    need_tensors(codes=codes, scales=scales)
    if codes.dtype != torch.int32 or scales.dtype != torch.float16:
        raise ArgumentError(f"codes must be int32 and scales float16, got {codes.dtype} and {scales.dtype}")
    if codes.dim() != scales.dim() or codes.shape[:-1] != scales.shape[:-1] or codes.shape[-1] != bits * scales.shape[-1]:
        raise ArgumentError(f"codes (..., G*{bits}) and scales (..., G) do not fit: got {tuple(codes.shape)} and {tuple(scales.shape)}")
    q = _unpack_planes(codes.reshape(-1, bits), bits)
    t = (2 * q + 1).float() / (1 << bits) - 1
    if 0 < compand < 1:
        t = t * (compand + (1 - compand) * t * t)
    y = t.mul_(scales.reshape(-1, 1).float())
    shape = (*scales.shape[:-1], GROUP * scales.shape[-1])
    return y.view(shape) if rotated else walsh(y, GROUP).mul_(_NORM).half().view(shape)


def bit_planes(bits: int) -> tuple[tuple[int, int, int], ...]:
    """(width, right shift within the code, first word) of the planes of a group, most significant first: 7 -> 4, 2, 1."""
    planes, left, word = [], bits, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            left -= width
            planes.append((width, left, word))
            word += width
    return tuple(planes)


def _pack_planes(codes: Tensor, bits: int) -> Tensor:
    """(groups, 32) int32 codes -> (groups, bits) int32 words."""
    words = []
    for width, shift, _ in bit_planes(bits):
        part = (codes >> shift & ((1 << width) - 1)).to(torch.int64).view(-1, width, 32 // width)
        place = torch.arange(0, 32, width, device=codes.device)
        words.append((part << place).sum(dim=2))
    packed = torch.cat(words, dim=1)
    return (packed - ((packed & 0x80000000) << 1)).to(torch.int32)


def _unpack_planes(words: Tensor, bits: int) -> Tensor:
    """(groups, bits) int32 words -> (groups, 32) int32 codes."""
    codes = torch.zeros(words.shape[0], GROUP, dtype=torch.int32, device=words.device)
    for width, shift, first in bit_planes(bits):
        place = torch.arange(0, 32, width, dtype=torch.int32, device=words.device)
        part = words[:, first : first + width, None] >> place & ((1 << width) - 1)
        codes |= part.reshape(-1, GROUP) << shift
    return codes


def _expand(u: Tensor, a: float) -> Tensor:
    """f^-1 by Cardano's formula, in fp64: the two cube roots nearly cancel close to zero."""
    h = u.double() / (2 * (1 - a))
    root = (h * h + (a / (3 * (1 - a))) ** 3).sqrt()
    return (_cbrt(h + root) + _cbrt(h - root)).float()


def _cbrt(x: Tensor) -> Tensor:
    return x.sign() * x.abs().pow(1 / 3)


def _check(bits: int, compand: float) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ArgumentError(f"cache bits must be a whole number from 2 to 8, got {bits!r}")
    if not isinstance(compand, numbers.Real) or not 0 <= compand <= 1:
        raise ArgumentError(f"compand must lie in 0 .. 1 (0: off), got {compand!r}")
