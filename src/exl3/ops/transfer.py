"""Copies between devices, ordered by their streams; between two cards through host memory where the direct way is broken."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from exl3 import settings

_PROBE = 1 << 18  # int32 values


def copy_(target: Tensor, source: Tensor) -> Tensor:
    """target = source, shapes and dtypes equal, devices maybe not. Work queued on either device's current stream before and after it keeps
    its order. A copy to the CPU is complete on return; one from the CPU reads `source` before the call returns unless that is pinned."""
    a, b = source.device, target.device
    if a.type == b.type == "cuda" and a != b and not direct(a, b):
        source = source.cpu()
    target.copy_(source, non_blocking=True)
    if b.type == "cpu" and a.type == "cuda":
        torch.cuda.current_stream(a).synchronize()
    return target


def put(x: Tensor, device: torch.device) -> Tensor:
    """A small host tensor on `device`, without waiting for what is queued there: a copy from pageable memory would."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def move(x: Tensor, device: torch.device) -> Tensor:
    """`x` itself where it lies on `device`, else a copy there."""
    return x if x.device == device else copy_(torch.empty_like(x, device=device), x)


def direct(source: torch.device, target: torch.device) -> bool:
    """Whether copies from card `source` to card `target` need not go through host memory: EXLLAMA_NO_P2P_COPY, else what a probe says."""
    chosen = settings.get("EXLLAMA_NO_P2P_COPY")
    return not chosen if chosen is not None else _arrives(source, target)


@functools.cache
def _arrives(source: torch.device, target: torch.device) -> bool:
    """Copies a pattern and compares it on the host, twice: the second copy may find the first one's bytes."""
    for start in (1, -(1 << 30)):
        pattern = torch.arange(start, start + _PROBE, dtype=torch.int32)
        if not torch.equal(pattern.to(source).to(target).cpu(), pattern):
            warnings.warn(f"copies from {source} to {target} arrive damaged: they go through host memory from now on", stacklevel=4)
            return False
    return True
