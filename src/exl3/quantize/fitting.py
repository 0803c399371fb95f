"""Matrices within the memory of their device: all at once where they fit, in smaller parts, at last in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from exl3.models import memory
from exl3.quantize.linear import EncodeAt, Group, Quantized, Settings, quantize_groups
from exl3.quantize.regularize import padded


def quantize_within_memory(
    groups: list[Group], encode: EncodeAt, settings: Settings, progress: Callable[[int], None] | None = None
) -> list[Quantized]:
    """`quantize_groups` in parts as large as the device has room for; a matrix that alone is too large is worked on in host memory, with
    the encoder on the device."""
    device = groups[0].members[0].weight.device
    parts = _that_fit(groups, device)
    if len(parts) > 1:
        return [q for part in parts for q in quantize_within_memory(part, encode, settings, progress)]
    told = 0

    def tell(weights: int) -> None:
        nonlocal told
        told += weights
        if progress is not None:
            progress(weights)

    try:
        return quantize_groups(groups, encode, settings, tell)
    except torch.OutOfMemoryError:
        if not can_shrink(device):
            raise
    if progress is not None:
        progress(-told)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if len(groups) > 1 or len(groups[0].members) > 1:
        return [q for part in _halves(groups) for q in quantize_within_memory(part, encode, settings, progress)]
    return _on_host(groups[0], device, encode, settings, progress)


def can_shrink(device: torch.device) -> bool:
    """Whether there is something to do when memory ends: host memory has nowhere to go."""
    return device.type != "cpu"


def _that_fit(groups: list[Group], device: torch.device) -> list[list[Group]]:
    """Consecutive groups together as far as they should fit; a single group is always tried."""
    if device.type == "cpu":
        return [[g] for g in groups]
    room = memory.available_bytes(device) - memory.reserve_bytes(device)
    parts: list[list[Group]] = []
    used = room + 1
    for group in groups:
        need = _working_bytes(group)
        if used + need > room:
            parts.append([])
            used = 0
        parts[-1].append(group)
        used += need
    return parts


def _working_bytes(group: Group) -> int:
    """Peak bytes: Hessian, factors and what is made on the way to them; per weight its target, two forms of its values, states."""
    k = padded(group.members[0].weight.shape[1])
    weights = sum(k * padded(m.weight.shape[0]) for m in group.members)
    return 4 * k * k * (6 + len(group.members)) + 26 * weights


def _halves(groups: list[Group]) -> list[list[Group]]:
    if len(groups) > 1:
        return [groups[: len(groups) // 2], groups[len(groups) // 2 :]]
    members = groups[0].members
    return [[dataclasses.replace(groups[0], members=half)] for half in (members[: len(members) // 2], members[len(members) // 2 :])]


def _on_host(
    group: Group, device: torch.device, encode: EncodeAt, settings: Settings, progress: Callable[[int], None] | None
) -> list[Quantized]:
    def encode_there(tiles: Tensor, rate: float, seam_window: int) -> tuple[Tensor, Tensor]:
        states, values = encode(tiles.to(device), rate, seam_window)
        return states.cpu(), values.cpu()

    members = [dataclasses.replace(m, weight=m.weight.cpu()) for m in group.members]
    results = quantize_groups([dataclasses.replace(group, members=members)], encode_there, settings, progress)
    for q in results:
        q.report.on_host = True
    return results
