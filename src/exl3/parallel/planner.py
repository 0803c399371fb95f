"""Memory needs of a model directory from headers and config alone; no weight is read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from exl3.cache import PAGE
from exl3.errors import ArgumentError
from exl3.files import Checkpoint
from exl3.models import build, loading, memory
from exl3.models.placement import Share, by_device, place, shares


@dataclass(frozen=True)
class DevicePlan:
    """One device's share, in bytes; the fields are those of `Plan`."""

    device: str
    layers: int
    weights_bytes: int
    cache_token_bytes: int
    cache_bytes: int
    workspace_bytes: int
    total_bytes: int
    available_bytes: int
    reserve_bytes: int

    @property
    def room(self) -> int:
        """Bytes that weights, workspace and reserve leave for the cache."""
        return self.available_bytes - self.reserve_bytes - self.weights_bytes - self.workspace_bytes


@dataclass(frozen=True)
class Plan:
    """What loading a model takes, in bytes, and the context that fits. On several devices the bytes are sums; `parts` has each device's.

    weights_bytes          weights as they lie in memory
    cache_token_bytes      keys and values of one token, all layers, at the asked number of bits
    max_tokens             context asked for, or the model's own limit
    cache_bytes            cache of max_tokens, whole pages of 256 tokens
    workspace_bytes        activations of a prefill chunk, recorded steps and logits, or what a load needs meanwhile
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
    parts: tuple[DevicePlan, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(
    path: str | os.PathLike[str],
    device: Any = None,
    max_tokens: int | None = None,
    k_bits: int = 16,
    v_bits: int = 16,
    *,
    split: Sequence[int] | None = None,
) -> Plan:
    """Plan a load of the model in directory `path` on the device or devices named, as `exl3.load` takes them, with a cache of `max_tokens`
    tokens at `k_bits` and `v_bits` (16, or 2 to 8). Raises what opening the directory raises; MissingTensorError names all that is
    missing."""
    for name, bits in (("k_bits", k_bits), ("v_bits", v_bits)):
        if type(bits) is not int or (bits != 16 and not 2 <= bits <= 8):
            raise ArgumentError(f"{name} is {bits!r}; 2 to 8 or 16 are possible")
    loading.check_arguments(path, max_tokens)
    device = loading.default_device() if device is None else device
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    found = loading.locate(model, checkpoint)
    place(model, checkpoint, device, max_tokens, split)
    limit = model.config.max_position_embeddings
    tokens = limit if max_tokens is None else max_tokens
    placed = shares(model, checkpoint, found)
    parts, whole = (tuple([_part(share, tokens, k_bits, v_bits) for share in given]) for given in (placed, by_device(placed)))
    fitting = min(device.room // (device.cache_token_bytes * PAGE) * PAGE for device in whole)

    def total(name: str) -> int:
        return sum(getattr(device, name) for device in whole)

    return Plan(
        architecture=checkpoint.config["architectures"][0],
        device=",".join(part.device for part in parts),
        max_tokens=tokens,
        largest_context_tokens=max(0, min(limit, fitting)),
        fits=all(device.cache_bytes <= device.room for device in whole),
        parts=parts,
        **{name: total(name) for name in DevicePlan.__dataclass_fields__ if name.endswith("_bytes")},
    )


def _part(share: Share, tokens: int, k_bits: int, v_bits: int) -> DevicePlan:
    per_token = share.cache_bytes_per_token(k_bits, v_bits)
    cache = -(-tokens // PAGE) * PAGE * per_token
    staged = share.device.type == "cuda" and not k_bits == v_bits == 16
    workspace = share.workspace_bytes + (memory.staging_bytes(share.cache_shapes) if staged else 0)
    return DevicePlan(
        device=str(share.device),
        layers=share.blocks,
        weights_bytes=share.weights_bytes,
        cache_token_bytes=per_token,
        cache_bytes=cache,
        workspace_bytes=workspace,
        total_bytes=share.weights_bytes + cache + workspace,
        available_bytes=memory.available_bytes(share.device),
        reserve_bytes=memory.reserve_bytes(share.device),
    )
