"""Which device holds which blocks: devices as the user names them, blocks shared out by memory, and what each device's share needs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from exl3.cache import PAGE, Cache
from exl3.errors import ArgumentError
from exl3.files import Checkpoint
from exl3.models import memory
from exl3.models.tensors import PIECE, Found, find_tensors

Device = torch.device | str


@dataclass(frozen=True)
class Share:
    """What one device gets: some blocks, where their tensors lie on disk, and the memory they take beside the cache."""

    device: torch.device
    blocks: int
    found: Found
    weights_bytes: int
    cache_shapes: tuple[tuple[int, int], ...]
    workspace_bytes: int

    def cache_bytes_per_token(self, k_bits: int = 16, v_bits: int = 16) -> int:
        """Bytes one token takes in the cache of this share's layers."""
        return sum(Cache.bytes_per_token(heads, dim, k_bits, v_bits) for heads, dim in self.cache_shapes)

    def need(self, tokens: int = 0) -> memory.Need:
        """Bytes with an fp16 cache of `tokens`."""
        return memory.Need(self.weights_bytes, tokens * self.cache_bytes_per_token(), self.workspace_bytes)

    @property
    def room(self) -> int:
        """Bytes that weights and workspace leave for the cache; negative where not even they fit."""
        return memory.available_bytes(self.device) - memory.reserve_bytes(self.device) - self.need().total_bytes


def parse_devices(device: Any) -> list[torch.device]:
    """The devices meant by one name or several ("cuda:0,cuda:1", a list); "auto": all cards. Cards get their number. Raises ArgumentError
    for a name torch doesn't know."""
    names = device.split(",") if isinstance(device, str) else list(device) if isinstance(device, (list, tuple)) else [device]
    if names == ["auto"]:
        names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    return [_parse(name.strip() if isinstance(name, str) else name) for name in names] or [_parse("")]


def _parse(name: Any) -> torch.device:
    try:
        found = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device is {name!r}; use cpu, cuda or cuda:N, auto, or several as cuda:0,cuda:1 ({str(error).splitlines()[0][:80]})"
        ) from None
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device is {name!r}; models run on cpu and cuda")
    if found.type == "cpu":
        return torch.device("cpu")  # there is one, whatever its number
    if found.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return found


def place(model: Any, checkpoint: Checkpoint, device: Any, tokens: int | None, split: Sequence[int] | None) -> None:
    """Place `model` (bound to `checkpoint`, still empty) on the device or devices named. split: blocks on each; default: "auto" fills the
    cards one by one and takes as few as hold weights and `tokens` of cache (default: the model's limit); several devices of one kind
    share in proportion to their free memory; cards beside the CPU are filled first."""
    devices = parse_devices(device)
    count = len(model.blocks)
    if split is not None:
        counts = list(split) if isinstance(split, Sequence) else []
        if len(counts) != len(devices) or any(type(n) is not int or n < 1 for n in counts) or sum(counts) != count:
            raise ArgumentError(
                f"split is {split!r} for {len(devices)} devices; give the number of layers on each, at least 1, {count} in all"
            )
    elif len(devices) == 1:
        counts = [count]
    else:
        spread = device != "auto" and len({d.type for d in devices}) == 1
        counts = _share_out(model, checkpoint, devices, tokens or model.config.max_position_embeddings, spread)
    used = [(d, n) for d, n in zip(devices, counts) if n]
    model.place(used[0][0], split=used if len(used) > 1 else None)


def _share_out(model: Any, checkpoint: Checkpoint, devices: list[torch.device], tokens: int, spread: bool) -> list[int]:
    """Blocks on each of `devices`; the embedding goes with the first block, norm and head with the last."""
    free = [memory.available_bytes(d) - memory.reserve_bytes(d) for d in devices]
    on_cpu, dense = max(memory.workspace_bytes(model), PIECE), not checkpoint.is_exl3
    needs = [memory.card_workspace_bytes(model, dense, d) if d.type == "cuda" else on_cpu for d in devices]
    rooms = [max(0, n - need) for n, need in zip(free, needs)]
    fixed, per_token = _block_bytes(model, checkpoint, devices[0])
    if sum(fixed) + tokens * sum(per_token) > sum(rooms):  # a shorter context, then
        tokens = max(PAGE, (sum(rooms) - sum(fixed)) // max(1, sum(per_token)))
    costs = [f + tokens * t for f, t in zip(fixed, per_token)]
    counts = [0] * len(devices)
    if spread and sum(rooms) > 0:
        total = sum(costs)
        ends = [end / sum(rooms) for end in accumulate(rooms)]
        for cost, end in zip(costs, accumulate(costs)):
            middle = (end - cost / 2) / total
            counts[min(len([e for e in ends if e < middle]), len(ends) - 1)] += 1
        return counts
    d, used = 0, 0
    for cost in costs:
        while used + cost > rooms[d] and d < len(devices) - 1:
            d, used = d + 1, 0
        counts[d] += 1
        used += cost
    return counts


def _block_bytes(model: Any, checkpoint: Checkpoint, device: torch.device) -> tuple[list[int], list[int]]:
    """(bytes of weights, bytes of one cached token) of every block, the ends' tensors added to the first and last."""
    parts, keys = model.parts, [block.key for block in model.blocks]
    outer = [key for key in parts if key not in keys]
    groups = [[key] for key in keys]
    groups[0] += [key for key in outer if key == model.embed_key]
    groups[-1] += [key for key in outer if key != model.embed_key]
    fixed = [resident_bytes(_find_again(model, {key: parts[key] for key in group}, checkpoint), device) for group in groups]
    per_token = [sum(Cache.bytes_per_token(*shape) for shape in model.cache_shapes_of([block])) for block in model.blocks]
    return fixed, per_token


def _find_again(model: Any, parts: dict[str, Any], checkpoint: Checkpoint) -> Found:
    """`find_tensors` without the warnings, which were given when all was looked up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_tensors(model, parts, checkpoint)


def shares(model: Any, checkpoint: Checkpoint, all_found: Found) -> list[Share]:
    """What each device gets of a placed model; `all_found`: where all its tensors lie."""
    found = []
    parts, stages = model.parts, model.stages
    keys = {block.key for block in model.blocks}
    for stage in stages:
        mine = {block.key for block in stage.blocks}
        mine |= {key for key in parts if key not in keys and (stage.first if key == model.embed_key else stage.last)}
        some = {key: part for key, part in parts.items() if key in mine}
        here = all_found if len(stages) == 1 else _find_again(model, some, checkpoint)
        weights = resident_bytes(here, stage.device)
        workspace = _workspace_bytes(model, here, stage.device)
        found.append(Share(stage.device, len(stage.blocks), here, weights, tuple(model.cache_shapes_of(stage.blocks)), workspace))
    return found


def by_device(placed: Sequence[Share]) -> list[Share]:
    """The shares with those of one device taken together, for comparing with its memory."""
    found: dict[torch.device, Share] = {}
    for share in placed:
        had = found.get(share.device)
        if had is not None:
            share = replace(
                had,
                blocks=had.blocks + share.blocks,
                weights_bytes=had.weights_bytes + share.weights_bytes,
                cache_shapes=had.cache_shapes + share.cache_shapes,
                workspace_bytes=max(had.workspace_bytes, share.workspace_bytes),
            )
        found[share.device] = share
    return list(found.values())


def _workspace_bytes(model: Any, found: Found, device: torch.device) -> int:
    """Beside weights and cache: what a prefill chunk and recorded steps take, or what reading the weights takes meanwhile."""
    weights = resident_bytes(found, device)
    if device.type == "cpu":
        return max(memory.workspace_bytes(model), min(weights, PIECE))
    dense = any(files.kind == "dense" and linear is not model.lm_head for linear, files in found.linears.values())
    return max(memory.card_workspace_bytes(model, dense, device), min(weights, PIECE) if dense else 0)


def resident_bytes(found: Found, device: torch.device) -> int:
    """Bytes the weights take on `device`: as stored; dense matrices on a card in two bytes a value."""
    if device.type == "cpu":
        return found.nbytes
    total = found.nbytes
    for _, files in found.linears.values():
        if files.kind == "dense" and not files.tied:
            total += 2 * files.in_features * files.out_features - files.nbytes
    return total


def context(model: Any, placed: Sequence[Share], max_tokens: int | None) -> int:
    """Tokens of context to allow: what was asked, if its fp16 cache fits, or the model's own limit cut down to what fits."""
    if max_tokens is not None:
        for share in placed:
            memory.check(share.need(max_tokens), share.device, f"{max_tokens} tokens of context")
        return max_tokens
    fits = [share.room // max(share.cache_bytes_per_token(), 1) // PAGE * PAGE for share in placed]
    return int(min(model.config.max_position_embeddings, max(PAGE, min(fits))))
