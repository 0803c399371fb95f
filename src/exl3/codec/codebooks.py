"""Codebooks: fixed functions from a 16-bit state to an fp16 number (spec 3).

`3inst` and `mcg` hash the state and add two halves of the hash as fp16 numbers; `mul1` adds the four bytes of the
hash. Files may store another multiplier than the usual one; the stored one counts.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
from torch import Tensor

from exl3.errors import ArgumentError, FormatError

CODEBOOKS = ("3inst", "mcg", "mul1")
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
ADD_3INST = 64248484


def check_codebook(codebook: str, multiplier: int | None = None) -> int:
    """The multiplier to use, 0 .. 2**32-1: the codebook's own for None; markers may be given signed, as stored."""
    if codebook not in CODEBOOKS:
        raise ArgumentError(f"codebook {codebook!r} is unknown; use one of {', '.join(CODEBOOKS)}")
    if multiplier is None:
        return MULTIPLIERS[codebook]
    try:
        value = -(2**31) - 1 if isinstance(multiplier, bool) else operator.index(multiplier)  # ints of numpy and torch, too
    except TypeError:
        value = -(2**31) - 1
    if not -(2**31) <= value < 2**32:
        raise ArgumentError(f"multiplier {multiplier!r} must be a 32-bit integer, or None for the codebook's own")
    if codebook == "3inst" and value != MULTIPLIERS["3inst"]:
        raise ArgumentError("codebook 3inst has a fixed multiplier; pass None")
    return value & 0xFFFFFFFF


def check_codebook_rate(codebook: str, K: int | float) -> None:
    """FormatError for a half rate without mul1: no file may hold that (spec 1.5)."""
    if K != int(K) and codebook != "mul1":
        raise FormatError(f"K = {K} needs codebook mul1, but this tensor is {codebook}: its .mul1 marker is missing or it is damaged")


def codebook_table(codebook: str, multiplier: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """Values of all states: (65536,) fp16. The tensor is shared: do not write to it. ArgumentError for unknown names."""
    return _table(codebook, check_codebook(codebook, multiplier), torch.device(device))


def codebook_rms(codebook: str, multiplier: int | None = None) -> float:
    """Root mean square of all values: about 1.2437, 1.2441, 1.0003 for 3inst, mcg, mul1."""
    return float(codebook_table(codebook, multiplier).double().square().mean().sqrt())


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # the table outlives the mode of its first caller
def _table(codebook: str, multiplier: int, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return _table(codebook, multiplier, torch.device("cpu")).to(device)
    add = ADD_3INST if codebook == "3inst" else 0
    x = (torch.arange(65536, dtype=torch.int64, device="cpu") * multiplier + add) & 0xFFFFFFFF
    if codebook == "mul1":
        total = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
        constants = _half(torch.tensor([0x1EEE, 0xC931], device="cpu")).double()
        return ((1024 + total).double() * constants[0] + constants[1]).half()  # exact before the one rounding
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    return (_half(x & 0xFFFF).float() + _half(x >> 16).float()).half()  # the fp32 sum is exact: one rounding


def _half(bits: Tensor) -> Tensor:
    """fp16 numbers of the bit patterns 0 .. 65535."""
    return (bits - ((bits & 0x8000) << 1)).to(torch.int16).view(torch.float16)
