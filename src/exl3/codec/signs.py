"""Legacy packed signs `.su` / `.sv`: bit i of word j is channel 16 j + i, 1 for -1.0 and 0 for +1.0 (spec 1.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.errors import ArgumentError, FormatError


def unpack_signs(packed: Tensor) -> Tensor:
    """(n/16,) int16 -> (n,) fp16 of +1 and -1."""
    need_tensors(packed=packed)
    if packed.dtype not in (torch.int16, torch.uint16) or packed.dim() != 1:
        raise FormatError(f"packed signs must be a vector of int16, got {packed.dtype} of shape {tuple(packed.shape)}")
    bits = packed.view(torch.int16).to(torch.int32)[:, None] >> torch.arange(16, dtype=torch.int32, device=packed.device)
    return (1 - 2 * (bits & 1)).reshape(-1).to(torch.float16)


def pack_signs(values: Tensor) -> Tensor:
    """(n,) floating point, n a multiple of 16 -> (n/16,) int16 of their signs; magnitudes are lost."""
    need_tensors(values=values)
    if values.dim() != 1 or values.shape[0] % 16 or not values.dtype.is_floating_point:
        raise ArgumentError(f"signs must be a floating-point vector of a multiple of 16, got {values.dtype} of shape {tuple(values.shape)}")
    bits = torch.signbit(values).view(-1, 16).to(torch.int32) << torch.arange(16, dtype=torch.int32, device=values.device)
    words = bits.sum(dim=1, dtype=torch.int32)
    return (words - ((words & 0x8000) << 1)).to(torch.int16)
