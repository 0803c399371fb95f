"""Memory needs of a model directory from headers and config alone; no weight is read."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch

from exl3.cache import PAGE
from exl3.errors import ArgumentError
from exl3.files import Checkpoint
from exl3.models import build, loading, memory
from exl3.models.tensors import PIECE


@dataclass(frozen=True)
class Plan:
    """What loading a model takes on a device, in bytes, and the context that fits.

    weights_bytes          weights as they lie in memory
    cache_token_bytes      keys and values of one token, all layers, at the asked number of bits
    max_tokens             context asked for, or the model's own limit
    cache_bytes            cache of max_tokens, whole pages of 256 tokens
    workspace_bytes        activations of a prefill chunk and logits, or what a load needs meanwhile
    total_bytes            weights, cache and workspace
    available_bytes        free on the device now; reserve_bytes of it are left alone
    largest_context_tokens tokens of cache that fit beside weights and workspace, at most the model's own limit; 0: not even the weights fit
    fits                   whether max_tokens does
    """

    architecture: str
    device: str
    weights_bytes: int
    cache_token_bytes: int
    max_tokens: int
    cache_bytes: int
    workspace_bytes: int
    total_bytes: int
    available_bytes: int
    reserve_bytes: int
    largest_context_tokens: int
    fits: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    path: str | os.PathLike[str],
    device: torch.device | str | None = None,
    max_tokens: int | None = None,
    k_bits: int = 16,
    v_bits: int = 16,
) -> Plan:
    """Plan a load of the model in directory `path` on `device` (default: as `exl3.load` chooses) with a cache of `max_tokens` tokens
    at `k_bits` and `v_bits` (16, or 2 to 8). Raises what opening the directory raises; MissingTensorError names all that is missing."""
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if bits != 16 and not 2 <= bits <= 8:
            raise ArgumentError(f"{name} is {bits}; 2 to 8 or 16 are possible")
    if max_tokens is not None and max_tokens < 1:
        raise ArgumentError(f"max_tokens is {max_tokens}, at least 1 is needed")
    target = loading.default_device() if device is None else torch.device(device)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    found = loading.locate(model, checkpoint)
    weights = loading.resident_bytes(model, found, target)
    workspace = max(memory.workspace_bytes(model), min(weights, PIECE))
    per_token = memory.cache_bytes_per_token(model, k_bits, v_bits)
    limit = model.config.max_position_embeddings
    tokens = limit if max_tokens is None else max_tokens
    cache = -(-tokens // PAGE) * PAGE * per_token
    available, reserve = memory.available_bytes(target), memory.reserve_bytes(target)
    room = available - reserve - weights - workspace
    return Plan(
        architecture=checkpoint.config["architectures"][0],
        device=str(target),
        weights_bytes=weights,
        cache_token_bytes=per_token,
        max_tokens=tokens,
        cache_bytes=cache,
        workspace_bytes=workspace,
        total_bytes=weights + cache + workspace,
        available_bytes=available,
        reserve_bytes=reserve,
        largest_context_tokens=max(0, min(limit, room // (per_token * PAGE) * PAGE)),
        fits=cache <= room,
    )
