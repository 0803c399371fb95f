"""Copies between devices, distrusted until a first one between each pair of cards has arrived: peer access can lie."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.ops.transfer import direct


def move(t: Tensor, device: torch.device) -> Tensor:
    """`t` on `device`, itself if it is there. Between two cards directly where that works, else through host memory."""
    if t.device == device:
        return t
    if t.device.type == device.type == "cuda" and not direct(t.device, device):
        return t.cpu().to(device)
    return t.to(device)
