"""How much memory a model takes, from headers alone, and how much there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from exl3.cache import PAGE, Cache
from exl3.errors import ResourceError
from exl3.ops import folded, staging
from exl3.ops.memory import available_bytes, reserve_bytes


def cache_bytes_per_token(model: Any, k_bits: int = 16, v_bits: int = 16) -> int:
    """Bytes one token takes in the cache, all layers."""
    return sum(Cache.bytes_per_token(heads, head_dim, k_bits, v_bits) for heads, head_dim in model.cache_shapes)


@dataclass(frozen=True)
class Need:
    """Bytes a load takes: weights as they will lie in memory, cache, workspace (activations of one prefill chunk and the logits)."""

    weights_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.workspace_bytes


def workspace_bytes(model: Any, tokens: int = 2048) -> int:
    """Bytes of activations for a prefill chunk of `tokens`: stream, q/k/v, intermediate and a row of logits, in fp32."""
    c = model.config
    width = 2 * c.hidden_size + 2 * (c.num_attention_heads + c.kv_heads) * c.head_size + 3 * c.intermediate_size
    return int(4 * (tokens * width + 16 * c.vocab_size))


GRAPHS = 40 << 20  # recorded steps of all sizes with their pool, and attention's partial results; measured


def card_workspace_bytes(model: Any, dense: bool, device: torch.device, tokens: int = 2048) -> int:
    """The same on a card, within a few MB of what is measured: the peak of a prefill chunk is the stream, the rotary tables, the larger of
    q, k, v with the attention's result and the MLP's inner values, and the rotated inputs of the products (that of a small one is let go
    when a larger one needs more); steps come on top. Where products of many rows rebuild their matrices (ops.folded) the largest of them
    and a normalised input are added, gate and up are held apart if they are among them, and only smaller chunks have rotated inputs.
    `dense`: no EXL3 matrices."""
    c = model.config
    half = 2 * tokens
    attention = 2 * (c.num_attention_heads + c.kv_heads) * c.head_size
    tables = sum(rotary.dim for rotary in model.rotaries.values())
    inner = (c.hidden_size, c.intermediate_size)
    shapes = [inner, inner[::-1], *((c.hidden_size, n * c.head_size) for n in (c.num_attention_heads, c.kv_heads))]
    rebuilt = [shape for shape in shapes if not dense and folded.measured(device) and folded.worth(tokens, *shape)]
    mlp, rotated = (3 if dense else 1) * c.intermediate_size, 0
    if inner in rebuilt:
        mlp = 2 * c.intermediate_size + c.hidden_size
    for width in () if dense else sorted({c.hidden_size, c.intermediate_size}):
        rows = [folded.least_rows(*s) - 1 if s in rebuilt else tokens for s in shapes if s[0] == width]
        rotated += 2 * min(tokens, max(rows)) * -(-width // 128) * 128
    largest = max((2 * n_in * n_out for n_in, n_out in rebuilt), default=0)
    chunk = half * (2 * c.hidden_size + 2 * tables + max(attention, mlp)) + rotated + largest
    return int(max(chunk, 4 * 64 * c.vocab_size) + GRAPHS)


def staging_bytes(shapes: Sequence[tuple[int, int]]) -> int:
    """Bytes of the fp16 window through which a card prefills over a quantized cache of (kv_heads, head_dim) layers; see ops.staging."""
    plan = staging.plan()
    return max((4 * heads * dim * PAGE * plan.pages for heads, dim in shapes), default=0) if plan.mode else 0


def check(need: Need, device: torch.device | str, what: str) -> None:
    """Raise ResourceError unless `need` fits on `device` beside the reserve."""
    have, reserve = available_bytes(device), reserve_bytes(device)
    if need.total_bytes > have - reserve:
        mib = 1 << 20
        hint = "" if torch.device(device).type == "cuda" else ", or a smaller EXL3_HOST_MEM_RESERVE_MB"
        raise ResourceError(
            f"{what} needs {need.total_bytes / mib:.0f} MiB on {device} (weights {need.weights_bytes / mib:.0f}, "
            f"cache {need.cache_bytes / mib:.0f}, workspace {need.workspace_bytes / mib:.0f}); {have / mib:.0f} MiB are free, "
            f"of which {reserve / mib:.0f} stay in reserve. Use fewer max_tokens, a lower bitrate, another device{hint}"
        )
