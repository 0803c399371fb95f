"""Products of very many rows on a card: each matrix is rebuilt in fp16 with its rotations and scales folded in, and torch multiplies.

`x @ W` through `Weight.reconstruct(original_basis=True)` and cuBLAS. One matrix at a time lies in memory, taken from torch's caching
allocator. Never in recorded steps: their rows are few. Which shapes gain was measured on an H200, so other cards keep the kernel that
decodes as it multiplies; so does EXL3_NO_FUSED_RECONSTRUCT.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exl3 import settings
from exl3.ops import native

LEAST_ROWS = 1024
"""The fewest rows that ever come here."""
LEAST_ROWS_WIDE = 1536
"""And with at least twice as many outputs as inputs: with many columns the kernel that decodes as it multiplies keeps up longer."""
MOST_BYTES = 512 << 20
"""The largest matrix that is rebuilt; anything larger (heads) is multiplied as it is."""

_MIXED = hasattr(torch.ops.aten.addmm, "dtype_out")  # fp16 operands, fp32 results: torch 2.9


@functools.cache
def measured(device: torch.device) -> bool:
    """Whether `device` is a card of the kind on which this was found faster, and the settings allow it."""
    if settings.get("EXL3_NO_FUSED_RECONSTRUCT", "cuda"):
        return False
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


def least_rows(in_features: int, out_features: int) -> int:
    """The fewest rows for which a matrix of this shape is rebuilt."""
    return LEAST_ROWS if out_features < 2 * in_features else LEAST_ROWS_WIDE


def worth(rows: int, in_features: int, out_features: int) -> bool:
    """Whether rebuilding this matrix and multiplying beats the fused kernel, by size alone."""
    return rows >= least_rows(in_features, out_features) and 2 * in_features * out_features <= MOST_BYTES


def serves(x: Tensor, group: Sequence[Any], norm: Tensor | None, activation: str | None, dtype: torch.dtype) -> bool:
    """Whether `linear` takes this product of `ops.Weight`s with results of `dtype`."""
    rows = x.shape[0]
    if rows < LEAST_ROWS or native.recording.keep is not None or not measured(x.device):
        return False
    if dtype != torch.float16 and (dtype != torch.float32 or activation is not None or not _MIXED):
        return False
    if x.dtype != torch.float16 and norm is None:
        return False
    return all(w.in_features % 8 == w.out_features % 8 == 0 and worth(rows, w.in_features, w.out_features) for w in group)


def linear(
    x: Tensor, group: Sequence[Any], norm: Tensor | None, eps: float, activation: str | None, outs: Sequence[Tensor], accumulate: bool
) -> None:
    """As ops.linear, arguments checked; `outs`: one tensor a matrix, one in all with an activation."""
    from exl3.ops import pointwise

    if norm is not None:
        x = pointwise.rms_norm(x, norm, eps, dtype=torch.float16)
    if activation is None:
        for w, out in zip(group, outs, strict=True):
            _multiply(x, w, out, accumulate)
        return
    gate, up = group
    _multiply(x, gate, outs[0], False)
    held = torch.empty(outs[0].shape, dtype=outs[0].dtype, device=x.device)
    _multiply(x, up, held, False)
    pointwise.act_mul(outs[0], held, activation, out=outs[0])


def _multiply(x: Tensor, w: Any, out: Tensor, accumulate: bool) -> None:
    matrix = w.reconstruct(original_basis=True, dtype=torch.float16)
    if out.dtype == torch.float16:
        if w.bias is None:
            torch.mm(x, matrix, out=out)
        else:
            torch.addmm(w.bias.half(), x, matrix, out=out)
        return
    if accumulate:
        torch.ops.aten.addmm.dtype_out(out, x, matrix, torch.float32, out=out)
    else:
        torch.ops.aten.mm.dtype_out(x, matrix, torch.float32, out=out)
    if w.bias is not None:
        out.add_(w.bias)
