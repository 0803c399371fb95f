"""Copies between devices, distrusted until a first one between each pair of cards has arrived: peer access can lie."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from exl3 import settings

_PROBE = 1 << 18  # int32 values


def move(t: Tensor, device: torch.device) -> Tensor:
    """`t` on `device`, itself if it is there. Between two cards directly where that works, else through host memory."""
    if t.device == device:
        return t
    if t.device.type == device.type == "cuda" and not direct(t.device, device):
        return t.cpu().to(device)
    return t.to(device)


def direct(source: torch.device, target: torch.device) -> bool:
    """Whether copies from `source` to `target` need not go through host memory: EXLLAMA_NO_P2P_COPY, else what a probe says."""
    chosen = settings.get("EXLLAMA_NO_P2P_COPY")
    return not chosen if chosen is not None else _arrives(source, target)


@cache
def _arrives(source: torch.device, target: torch.device) -> bool:
    """Copies a pattern and compares it on the host, twice: the second copy may find the first one's bytes."""
    for start in (1, -(1 << 30)):
        pattern = torch.arange(start, start + _PROBE, dtype=torch.int32)
        if not torch.equal(pattern.to(source).to(target).cpu(), pattern):
            warnings.warn(f"copies from {source} to {target} arrive damaged: they go through host memory from now on", stacklevel=4)
            return False
    return True
