"""Copies between devices, ordered by their streams; between two cards through host memory where the direct way is broken."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from exl3 import settings


def copy_(target: Tensor, source: Tensor) -> Tensor:
    """target = source, shapes and dtypes equal, devices maybe not. Work queued on either device's current stream before and after it keeps
    its order. A copy to the CPU is complete on return; one from the CPU reads `source` before the call returns unless that is pinned."""
    a, b = source.device, target.device
    if a.type == b.type == "cuda" and a != b and not _direct(a.index, b.index):
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


@functools.cache
def _direct(a: int, b: int) -> bool:
    """Whether cards `a` and `b` exchange data directly: EXLLAMA_NO_P2P_COPY, or a trial copy both ways."""
    forced = settings.get("EXLLAMA_NO_P2P_COPY", "cuda")
    if forced is not None:
        return not forced
    pattern = torch.arange(1 << 16, dtype=torch.int32)
    for source, target in ((a, b), (b, a)):
        sent = pattern.to(f"cuda:{source}")
        got = torch.full_like(pattern, -1, device=f"cuda:{target}").copy_(sent)
        if not torch.equal(got.cpu(), pattern):
            text = f"copies from cuda:{source} to cuda:{target} arrive damaged: going through host memory"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
            return False
    return True
