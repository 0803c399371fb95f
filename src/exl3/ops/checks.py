"""Argument checks of the operations: one line where all is well, an ArgumentError that names the argument where not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
F32 = (torch.float32,)
I32 = (torch.int32,)


def tensor(
    op: str,
    name: str,
    t: Any,
    dtypes: tuple[torch.dtype, ...],
    *,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    dense: bool = False,
) -> None:
    """Dtype, number of dimensions or exact shape, and with `dense` that all of it is contiguous."""
    if t.dtype in dtypes and (ndim is None or t.ndim == ndim) and (shape is None or t.shape == shape) and (not dense or t.is_contiguous()):
        return
    if not isinstance(t, Tensor):
        raise ArgumentError(f"{op}: {name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in dtypes:
        raise ArgumentError(f"{op}: {name} must be {' or '.join(str(d)[6:] for d in dtypes)}, got {str(t.dtype)[6:]}")
    if ndim is not None and t.ndim != ndim:
        raise ArgumentError(f"{op}: {name} must have {ndim} dimensions, got shape {tuple(t.shape)}")
    if shape is not None and t.shape != shape:
        raise ArgumentError(f"{op}: {name} must have shape {shape}, got {tuple(t.shape)}")
    raise ArgumentError(f"{op}: {name} must be contiguous, got strides {t.stride()} for shape {tuple(t.shape)}")


def rows(op: str, name: str, t: Tensor, n: int | None = None, dtypes: tuple[torch.dtype, ...] = FLOATS, *, written: bool = False) -> int:
    """A `(rows, n)` matrix whose rows are contiguous, and do not overlap where it is written -> its row stride in elements."""
    if t.dtype not in dtypes:
        tensor(op, name, t, dtypes)
    if t.ndim != 2 or (n is not None and t.shape[1] != n):
        raise ArgumentError(f"{op}: {name} must have shape (rows, {'n' if n is None else n}), got {tuple(t.shape)}")
    stride, last = t.stride()
    if (last != 1 and t.shape[1] > 1) or (written and stride < t.shape[1] and t.shape[0] > 1):
        apart = " that do not overlap" if written else ""
        raise ArgumentError(f"{op}: {name} must have contiguous rows{apart}, got strides {t.stride()} for shape {tuple(t.shape)}")
    return stride


def heads(op: str, name: str, t: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> int:
    """A `(tokens, heads, head_dim)` tensor whose tokens are contiguous -> its stride from token to token in elements."""
    if t.dtype not in dtypes:
        tensor(op, name, t, dtypes)
    if t.ndim != 3:
        raise ArgumentError(f"{op}: {name} must have shape (tokens, heads, head_dim), got {tuple(t.shape)}")
    stride, head, last = t.stride()
    if last != 1 or (head != t.shape[2] and t.shape[1] > 1) or (stride < t.shape[1] * t.shape[2] and t.shape[0] > 1):
        raise ArgumentError(f"{op}: {name} must have contiguous tokens, got strides {t.stride()} for shape {tuple(t.shape)}")
    return stride


def apart(op: str, name: str, out: Tensor, other_name: str, other: Tensor | None) -> None:
    """`out` must not share memory with `other`, unless they are the very same elements where the operation allows that."""
    if other is None or out.numel() == 0 or other.numel() == 0:
        return
    a, b = out.data_ptr(), other.data_ptr()
    if a < b + _span(other) and b < a + _span(out):
        raise ArgumentError(f"{op}: {name} and {other_name} share memory")


def _span(t: Tensor) -> int:
    """Bytes from the first to past the last element."""
    return t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))
