"""Argument checks shared by the codec's files."""

from __future__ import annotations

from torch import Tensor

from exl3.errors import ArgumentError


def need_tensors(**arguments: object) -> None:
    """ArgumentError naming the first argument that is no torch.Tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
