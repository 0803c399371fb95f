"""Attention over the paged cache, and the cache's own reads and writes. `layer` is an `exl3.cache.Layer`, `batch` an `exl3.cache.Batch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.ops import blocks, checks, flash, native, reference, staging
from exl3.ops.pointwise import rotary_
from exl3.ops.reference import PAGE, sdpa

__all__ = ["attend", "attention", "cache_append", "cache_read", "sdpa"]


def _layer(layer: Any) -> tuple[Any, ...]:
    """The fields of exl3_cache_layer; the layer's own check made once, when the cache was built."""
    return (
        layer.k.data_ptr(), layer.v.data_ptr(), 0 if layer.k_scale is None else layer.k_scale.data_ptr(),
        0 if layer.v_scale is None else layer.v_scale.data_ptr(), layer.k.shape[0], layer.kv_heads, layer.head_dim,
        layer.k_bits, layer.v_bits, layer.compand,
    )  # fmt: skip


def _indices(op: str, tokens: int, batch: Any) -> tuple[int, int, int, int]:
    """Pointers of positions, token_row, block_table and the table's row stride."""
    positions, token_row, table = batch.positions, batch.token_row, batch.block_table
    if table is None:
        raise ArgumentError(f"{op}: batch.block_table is None: a step over a cache needs pages")
    checks.tensor(op, "batch.positions", positions, checks.I32, shape=(tokens,), dense=True)
    checks.tensor(op, "batch.token_row", token_row, checks.I32, shape=(tokens,), dense=True)
    if table.dtype != torch.int32 or table.ndim != 2 or (table.stride(1) != 1 and table.shape[1] > 1):
        checks.tensor(op, "batch.block_table", table, checks.I32, ndim=2, dense=True)
    return positions.data_ptr(), token_row.data_ptr(), table.data_ptr(), table.stride(0)


def cache_append(layer: Any, k: Tensor, v: Tensor, batch: Any) -> None:
    """Writes k and v `(tokens, kv_heads, head_dim)` into the layer at each token's place, quantizing where the layer does (format
    section 5). Tokens with batch.token_row -1 are skipped."""
    op = native.serving("cache_append", k, v, layer.k, batch.positions)
    if op is None:
        reference.cache_append(layer, k, v, batch)
        return
    tokens = k.shape[0]
    k_stride, v_stride = _new_heads("cache_append", k, v, layer, tokens, checks.FLOATS)
    positions, token_row, table, table_stride = _indices("cache_append", tokens, batch)
    block = blocks.CACHE_APPEND.pack(
        *_layer(layer),
        k.data_ptr(),
        v.data_ptr(),
        k_stride,
        v_stride,
        positions,
        token_row,
        table,
        tokens,
        table_stride,
        blocks.DTYPES[k.dtype],
    )
    native.launch(op, k.device, block, layer, k, v, batch)


def attention(
    q: Tensor, layer: Any, batch: Any, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of packed tokens q `(tokens, heads, head_dim)` over the cache, already appended -> the same shape and dtype.

    A token at position p sees positions max(0, p - window + 1) .. p of its row (window 0: all). softcap: cap * tanh(score / cap), 0 off.
    sinks: fp32 `(heads,)`, one more logit each in the softmax, without a value. Padding tokens (token_row -1) give zeros.
    """
    op = native.serving("attention", q, layer.k, batch.positions, sinks)
    if op is None:
        return reference.attention(q, layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    _check_heads("attention", q, layer, sinks)

    def over(q: Tensor, layer: Any, batch: Any) -> Tensor:
        y, block, space = _attention_block("attention", q, layer, batch, scale, window, softcap, sinks)
        native.launch(op, q.device, block, layer, q, y, batch, sinks, space)
        return y

    if flash.wanted(q, layer, batch, sinks) and (call := flash.function()):
        return flash.attention(call, q, layer, batch, scale, window, softcap)
    if _staged(q, layer, batch):
        plan = staging.plan()
        return staging.attention(
            q, layer, batch, plan, over, cache_read, scale=scale, window=window, softcap=softcap, sinks=sinks
        )  # fmt: skip
    return over(q, layer, batch)


def _staged(q: Tensor, layer: Any, batch: Any) -> bool:
    """Whether this pass goes through a dense window; see ops.staging."""
    return staging.serves(q.device) and staging.wanted(layer, batch, staging.plan())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    batch: Any,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rotary_dim: int = 0,
    *,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """What lies between a layer's projections: `rotary_` of q `(tokens, heads, head_dim)` and k `(tokens, kv_heads, head_dim)` where cos
    or a norm is given, `cache_append` of k and v, `attention` of q; arguments and result as theirs. One launch for decode steps on CUDA.
    What q and k hold afterwards is left open."""
    op = native.serving("attend", q, k, v, layer.k, batch.positions, cos, sin, q_norm, k_norm, sinks)
    if op is None or _staged(q, layer, batch) or flash.wanted(q, layer, batch, sinks):
        if cos is not None or q_norm is not None or k_norm is not None:
            rotary_(q, k, cos, sin, rotary_dim, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps)
        cache_append(layer, k, v, batch)
        return attention(q, layer, batch, scale=scale, window=window, softcap=softcap, sinks=sinks)
    head_dim = layer.head_dim
    _check_heads("attend", q, layer, sinks)
    strides = _new_heads("attend", k, v, layer, q.shape[0], (q.dtype,))
    if (cos is None) != (sin is None):
        raise ArgumentError("attend: cos and sin belong together")
    if cos is not None and sin is not None:
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ArgumentError(f"attend: rotary_dim {rotary_dim} must be even and at most head_dim {head_dim}")
        for name, t in (("cos", cos), ("sin", sin)):
            checks.tensor("attend", name, t, checks.F32, shape=(q.shape[0], rotary_dim // 2), dense=True)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            checks.tensor("attend", name, norm, checks.F32, shape=(head_dim,), dense=True)
    y, block, space = _attention_block("attend", q, layer, batch, scale, window, softcap, sinks)
    block = blocks.ATTEND.pack(
        *blocks.ATTENTION.unpack(block), k.data_ptr(), v.data_ptr(), *strides,
        *(0 if t is None else t.data_ptr() for t in (cos, sin, q_norm, k_norm)), rotary_dim, interleaved, eps,
    )  # fmt: skip
    native.launch(op, q.device, block, layer, q, k, v, y, batch, cos, sin, q_norm, k_norm, sinks, space)
    return y


def _check_heads(op: str, q: Tensor, layer: Any, sinks: Tensor | None) -> None:
    checks.heads(op, "q", q)
    heads, head_dim = q.shape[1:]
    if head_dim != layer.head_dim or heads % layer.kv_heads:
        raise ArgumentError(f"{op}: q {tuple(q.shape)} does not fit a cache of {layer.kv_heads} heads of {layer.head_dim}")
    if sinks is not None:
        checks.tensor(op, "sinks", sinks, checks.F32, shape=(heads,), dense=True)


def _new_heads(op: str, k: Tensor, v: Tensor, layer: Any, tokens: int, dtypes: tuple[torch.dtype, ...]) -> tuple[int, int]:
    """Strides of k and v, checked."""
    k_stride = checks.heads(op, "k", k, dtypes)
    v_stride = checks.heads(op, "v", v, (k.dtype,))
    shape = (tokens, layer.kv_heads, layer.head_dim)
    if k.shape != shape or v.shape != shape:
        raise ArgumentError(f"{op}: k and v must have shape {shape}, got {tuple(k.shape)} and {tuple(v.shape)}")
    return k_stride, v_stride


def _attention_block(
    name: str, q: Tensor, layer: Any, batch: Any, scale: float, window: int, softcap: float, sinks: Tensor | None
) -> tuple[Tensor, bytes, Tensor | None]:
    """The result's tensor, the argument block and its workspace."""
    tokens, heads, head_dim = q.shape
    positions, token_row, table, table_stride = _indices(name, tokens, batch)
    y = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
    head = (
        *_layer(layer), q.data_ptr(), y.data_ptr(), q.stride(0), heads * head_dim, positions, token_row, table,
        0 if sinks is None else sinks.data_ptr(),
    )  # fmt: skip
    tail = (tokens, heads, table_stride, blocks.DTYPES[q.dtype], scale, softcap, window)
    nbytes = native.backend(q.device).workspace("attention", blocks.ATTENTION.pack(*head, 0, 0, *tail))
    space = native.workspace("attention", q.device, nbytes)
    block = blocks.ATTENTION.pack(*head, 0 if space is None else space.data_ptr(), 0 if space is None else space.numel(), *tail)
    return y, block, space


def cache_read(
    layer: Any,
    block_table_row: Tensor,
    start: int,
    count: int,
    dtype: torch.dtype = torch.float16,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Positions start .. start+count-1 of the row whose pages block_table_row int32 `(pages,)` lists -> (k, v), each
    `(count, kv_heads, head_dim)` of `dtype`, decoded. `out`: two dense tensors of that dtype with room for them, filled from the front."""
    op = native.serving("cache_read", layer.k, block_table_row)
    shape = (count, layer.kv_heads, layer.head_dim)
    if out is not None:
        for name, t in zip(("out[0]", "out[1]"), out, strict=True):
            checks.tensor("cache_read", name, t, (dtype,), ndim=3, dense=True)
            if t.shape[0] < count or t.shape[1:] != shape[1:] or t.device != layer.k.device:
                raise ArgumentError(f"cache_read: {name} {tuple(t.shape)} on {t.device} has no room for {shape} on {layer.k.device}")
    if op is None:
        found = reference.cache_read(layer, block_table_row, start, count, dtype)
        if out is None:
            return found
        for t, x in zip(out, found, strict=True):
            t[:count].copy_(x)
        return out[0][:count], out[1][:count]
    checks.tensor("cache_read", "block_table_row", block_table_row, checks.I32, ndim=1, dense=True)
    if start < 0 or count < 0 or start + count > block_table_row.shape[0] * PAGE:
        raise ArgumentError(f"cache_read: positions {start} .. {start + count - 1} are outside the row's {block_table_row.shape[0]} pages")
    if dtype not in blocks.DTYPES:
        raise ArgumentError(f"cache_read: dtype must be float32, float16 or bfloat16, got {dtype}")
    k, v = (torch.empty(shape, dtype=dtype, device=layer.k.device) for _ in range(2)) if out is None else (t[:count] for t in out)
    block = blocks.CACHE_READ.pack(
        *_layer(layer), k.data_ptr(), v.data_ptr(), block_table_row.data_ptr(), start, count, blocks.DTYPES[dtype]
    )
    native.launch(op, layer.k.device, block, layer, k, v, block_table_row)
    return k, v
