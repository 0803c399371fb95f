"""Prefill through a dense fp16 window: pages of a row are read into a stage of fixed size, and attention runs over the stage.

What goes through it is said by `EXL3_QC_STAGING` (quantized caches; 0 nothing, 1 long chunks, 2 every chunk whose place is known on the
host), `EXL3_QC_STAGING_PAGES` (its size) and `EXL3_QC_PF_TWO_PASS_MIN_Q` (the shortest chunk). A window wider than the stage is taken
slice by slice and merged by the logarithm of the sums. Recorded steps never come here: their batch has no `runs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exl3 import settings
from exl3.ops.reference import PAGE

Attend = Callable[[Tensor, Any, Any], Tensor]
"""(q, layer, batch) -> y: attention as the kernel does it, options bound."""
Read = Callable[..., tuple[Tensor, Tensor]]
"""ops.cache_read with out=(k, v)"""


class Plan(NamedTuple):
    mode: int
    pages: int
    least: int


@functools.cache
def plan() -> Plan:
    """The settings, read once."""
    mode, pages = settings.get("EXL3_QC_STAGING"), settings.get("EXL3_QC_STAGING_PAGES")
    return Plan(int(str(mode)), int(str(pages)), int(str(settings.get("EXL3_QC_PF_TWO_PASS_MIN_Q"))))


def serves(device: torch.device) -> bool:
    """Whether attention on a device goes through the stage at all: on NVIDIA cards. Under ROCm it does not: torch's flash attention, which
    slices need, is there for some RDNA cards alone, and RDNA's prefill kernel decodes 32 positions once for 64 queries itself."""
    return device.type == "cuda" and not torch.version.hip


def wanted(layer: Any, batch: Any, plan: Plan) -> bool:
    """Whether a chunk of this batch goes through the stage."""
    runs = getattr(batch, "runs", None)
    if plan.mode == 0 or not runs or layer.k_bits == layer.v_bits == 16:
        return False
    return plan.mode == 2 or any(count >= plan.least for _, count in runs)


def attention(
    q: Tensor,
    layer: Any,
    batch: Any,
    plan: Plan,
    attend: Attend,
    read: Read,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a batch with `runs`, row by row; arguments and result as ops.attention."""
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    token = 0
    for row, (first, count) in enumerate(batch.runs):
        part = slice(token, token + count)
        token += count
        end = first + count
        start = max(0, first - window + 1) // PAGE * PAGE if window else 0
        pages = -(-(end - start) // PAGE)
        room = pages if plan.mode == 2 else plan.pages
        table = batch.block_table[row]
        plain = softcap == 0 and window == 0 and layer.head_dim <= 256
        if count < plan.least and plan.mode != 2:
            y[part] = attend(q[part], layer, _indices(batch, part))
        elif pages <= room:
            stage = _stage(layer, room)
            read(layer, table, start, end - start, out=(stage.k.view(-1, *stage.k.shape[2:]), stage.v.view(-1, *stage.v.shape[2:])))
            y[part] = attend(q[part], stage, _alone(batch.positions[part] - start, room))
        elif plain and count <= room * PAGE:
            y[part] = _sliced(q[part], layer, table, first, count, room, read, scale, sinks)
        else:
            y[part] = attend(q[part], layer, _indices(batch, part))
    y[token:] = 0
    return y


def _indices(batch: Any, part: slice) -> SimpleNamespace:
    return SimpleNamespace(positions=batch.positions[part], token_row=batch.token_row[part], block_table=batch.block_table)


def _alone(positions: Tensor, pages: int) -> SimpleNamespace:
    """One row over the pages of a stage in order."""
    row = torch.zeros_like(positions)
    table = torch.arange(pages, dtype=torch.int32, device=positions.device)[None]
    return SimpleNamespace(positions=positions, token_row=row, block_table=table)


def _stage(layer: Any, pages: int) -> SimpleNamespace:
    """A layer of fp16 pages; always of one size, so that the allocator gives the same memory to all layers."""
    shape = (2, pages, PAGE, layer.kv_heads, layer.head_dim)
    k, v = torch.empty(shape, dtype=torch.float16, device=layer.k.device)
    return SimpleNamespace(
        k=k, v=v, k_scale=None, v_scale=None, kv_heads=layer.kv_heads, head_dim=layer.head_dim, k_bits=16, v_bits=16, compand=0.0
    )


def _sliced(
    q: Tensor, layer: Any, table: Tensor, first: int, count: int, pages: int, read: Read, scale: float, sinks: Tensor | None
) -> Tensor:
    """Slices of what came before, then the chunk itself: softmax states merged in fp32."""
    stage = _stage(layer, pages)
    k, v = (t.view(-1, layer.kv_heads, layer.head_dim) for t in (stage.k, stage.v))
    size = pages * PAGE
    slices = [(at, min(size, first - at), False) for at in range(0, first, size)] + [(first, count, True)]
    heads = q.transpose(0, 1)[None].to(torch.float16)  # (1, heads, tokens, head_dim)
    if sinks is None:
        most = heads.new_full(heads.shape[:3], -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(most)
    else:
        most = sinks[None, :, None].expand(heads.shape[:3])
        total = torch.ones_like(most)
    result = torch.zeros(heads.shape, dtype=torch.float32, device=q.device)
    for start, n, causal in slices:
        read(layer, table, start, n, out=(k[:n], v[:n]))
        out, logarithm = _flash(heads, k[:n].transpose(0, 1)[None], v[:n].transpose(0, 1)[None], causal, scale)
        top = torch.maximum(most, logarithm)
        keep, weight = (most - top).exp(), (logarithm - top).exp()
        result = result * keep[..., None] + out * weight[..., None]
        total, most = total * keep + weight, top
    return (result / total[..., None])[0].transpose(0, 1).to(q.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """torch's flash attention with the logarithm of its sums: fp32 (1, heads, tokens, head_dim) and (1, heads, tokens)."""
    if q.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return found[0].float(), found[1]
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for t in (k, v))
    out, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.float(), k, v, 0.0, causal, scale=scale)
    return out, logarithm
