"""Prefill through the package flash-attn (2.6 or later), where `EXL3_PREFER_FA2` asks for it and it is installed: over fp16 caches, whose
pages it reads as they are. Quantized caches, sinks and recorded steps stay with the built-in kernels."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exl3 import settings
from exl3.ops.transfer import put


@functools.cache
def function() -> Callable[..., Tensor] | None:
    """flash-attn's function for packed rows over pages; None where it is not asked for, or not installed (a warning says so, once)."""
    if not settings.get("EXL3_PREFER_FA2"):
        return None
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError as error:
        warnings.warn(
            f"EXL3_PREFER_FA2 is set, but flash-attn can't be imported ({error}): the built-in kernels run; `pip install flash-attn`, or "
            "unset it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    found: Callable[..., Tensor] = flash_attn_varlen_func
    return found


def wanted(q: Tensor, layer: Any, batch: Any, sinks: Tensor | None) -> bool:
    """Whether this pass goes through flash-attn: a prefill pass on an NVIDIA card over an fp16 cache."""
    if q.device.type != "cuda" or torch.version.hip or not getattr(batch, "runs", None) or function() is None:
        return False
    return serves(q, layer, sinks)


def serves(q: Tensor, layer: Any, sinks: Tensor | None) -> bool:
    """Whether flash-attn has a kernel for it."""
    plain = layer.k_bits == layer.v_bits == 16 and q.dtype == torch.float16 and sinks is None
    return bool(plain and layer.head_dim <= 256 and layer.head_dim % 8 == 0)


def attention(call: Callable[..., Tensor], q: Tensor, layer: Any, batch: Any, scale: float, window: int, softcap: float) -> Tensor:
    """As `ops.attention`, for a batch whose `runs` are known."""
    counts = [count for _, count in batch.runs]
    lengths = [first + count for first, count in batch.runs]

    def ends(sizes: list[int]) -> Tensor:
        return put(torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32), q.device)

    return call(
        q, layer.k, layer.v, ends(counts), ends(lengths), max(counts), max(lengths), softmax_scale=scale, causal=True,
        window_size=(window - 1, 0) if window else (-1, -1), softcap=softcap, block_table=batch.block_table,
    )  # fmt: skip
