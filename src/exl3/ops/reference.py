"""Every native operation in plain torch: right on any device and dtype, differentiable, slow.

These are the definitions the kernels are held to, and what runs where no native library serves a device or a gradient is
needed. Signatures equal those of `exl3.ops` (docs/architecture.md). Arithmetic is fp32, or fp64 where an input is fp64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from exl3.errors import ArgumentError

if TYPE_CHECKING:
    from exl3.ops.embedding import RingTable
    from exl3.ops.weight import Weight

PAGE = 256
"""Tokens in a cache page."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _store(result: Tensor, out: Tensor | None, accumulate: bool, dtype: torch.dtype | None) -> Tensor:
    if out is None:
        return result if dtype is None else result.to(dtype)
    if accumulate:
        return out.add_(result.to(out.dtype))
    return out.copy_(result)


def hadamard(n: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal Sylvester matrix of size n, a power of two (format section 4.1)."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / math.sqrt(n)).to(device=device, dtype=dtype)


def rotate(x: Tensor, pre: Tensor | None = None, post: Tensor | None = None, n_padded: int | None = None) -> Tensor:
    """post * H128(pre * x) over consecutive blocks of 128; x `(rows, n)` is extended with zeros to `(rows, n_padded)`."""
    n = x.shape[-1]
    n_padded = -(-n // 128) * 128 if n_padded is None else n_padded
    y = _wide(x)
    if pre is not None:
        y = y * pre[:n]
    y = F.pad(y, (0, n_padded - n))
    y = (y.unflatten(-1, (-1, 128)) @ hadamard(128, y.dtype, y.device)).flatten(-2)
    if post is not None:
        y = y * post
    return y.to(x.dtype)


def activate(x: Tensor, activation: str, params: Sequence[float] | None = None) -> Tensor:
    """silu, gelu (erf), gelu_tanh, relu, relu2 (squared) or xielu (params: alpha_p, alpha_n, beta, eps, softplus already applied)."""
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        return F.relu(x).square()
    if activation == "xielu":
        if params is None or len(params) != 4:
            raise ArgumentError("xielu: params must be (alpha_p, alpha_n, beta, eps)")
        alpha_p, alpha_n, beta, eps = params
        negative = (torch.expm1(x.clamp(max=eps)) - x) * alpha_n + beta * x
        return torch.where(x > 0, alpha_p * x * x + beta * x, negative)
    raise ArgumentError(f"activation {activation!r}: use one of silu, gelu, gelu_tanh, relu, relu2, xielu")


def act_mul(gate: Tensor, up: Tensor | None, activation: str, params: Sequence[float] | None = None) -> Tensor:
    """act(gate) * up, or act(gate) where `up` is None; `(rows, n)` in the dtype of gate."""
    y = activate(_wide(gate), activation, params)
    return (y if up is None else y * up).to(gate.dtype)


def linear(
    x: Tensor,
    weights: Weight | Sequence[Weight],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    out: Any = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """x @ W + bias for one EXL3 matrix or a tuple that shares the input; with `activation`, act(gate) * up of exactly two."""
    single = not isinstance(weights, tuple | list)
    group: list[Any] = [weights] if single else list(weights)  # type: ignore[arg-type]
    dtype = x.dtype if dtype is None else dtype
    h = _wide(x)
    if norm is not None:
        h = rms_norm(h, norm, eps)
    results = []
    for w in group:
        y = h @ w.reconstruct(original_basis=True).to(h.dtype)
        results.append(y if w.bias is None else y + w.bias.to(h.dtype))
    if activation is not None:
        return _store(activate(results[0], activation) * results[1], out, accumulate, dtype)
    outs = [None] * len(group) if out is None else [out] if isinstance(out, Tensor) else list(out)
    stored = tuple(_store(y, o, accumulate, dtype) for y, o in zip(results, outs))
    return stored[0] if single else stored


def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias for an unquantized weight `(out, in)`."""
    h = _wide(x)
    y = h @ weight.to(h.dtype).T
    if bias is not None:
        y = y + bias.to(h.dtype)
    return _store(y, out, accumulate, x.dtype if dtype is None else dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    residual: Tensor | None = None,
    subtract_mean: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis. With `residual`: residual += x first, then the norm of residual."""
    h = _wide(x)
    if residual is not None:
        residual.add_(h.to(residual.dtype))
        h = _wide(residual)
    if torch.is_grad_enabled() and h.requires_grad:
        h = h.clone()  # the stream goes on changing in place; what backward keeps must not
    if subtract_mean:
        h = h - h.mean(-1, keepdim=True)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return _store(y, out, accumulate, x.dtype if dtype is None else dtype)


def rotary_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0, *, long: tuple[Any, ...] | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin), each `(tokens, half)` fp32, of positions * inv_freq, times `scale`. `long` = (inv_freq_long, scale_long,
    threshold, token_row, lengths): tokens whose row is longer than `threshold` use the long pair (longrope)."""
    angle = positions.double()[:, None] * inv_freq.double()
    factor: Any = scale
    if long is not None:
        inv_freq_long, scale_long, threshold, token_row, lengths = long
        is_long = (lengths[token_row.clamp(min=0).long()] > threshold) & (token_row >= 0)
        angle = torch.where(is_long[:, None], positions.double()[:, None] * inv_freq_long.double(), angle)
        factor = torch.where(is_long, scale_long, scale)[:, None]
    return (angle.cos() * factor).float(), (angle.sin() * factor).float()


def rotary_(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_dim: int,
    *,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """In place on q and k `(tokens, heads, head_dim)`: per-head RMSNorm where given, then rotation of the first `rotary_dim`
    values of each head: pairs (i, i + rotary_dim/2), or (2i, 2i+1) when interleaved."""
    for x, norm in ((q, q_norm), (k, k_norm)):
        if x is None:
            continue
        h = _wide(x)
        if norm is not None:
            h = rms_norm(h, norm, eps)
        if cos is not None and sin is not None:
            c, s = cos[:, None, :].to(h.dtype), sin[:, None, :].to(h.dtype)
            r, rest = h[..., :rotary_dim], h[..., rotary_dim:]
            if interleaved:
                a, b = r[..., 0::2], r[..., 1::2]
                r = torch.stack([a * c - b * s, b * c + a * s], -1).flatten(-2)
            else:
                a, b = r.chunk(2, -1)
                r = torch.cat([a * c - b * s, b * c + a * s], -1)
            h = torch.cat([r, rest], -1)
        x.copy_(h)


def cache_append(layer: Any, k: Tensor, v: Tensor, batch: Any) -> None:
    """Writes k and v `(tokens, kv_heads, head_dim)` at each token's place; tokens with token_row -1 are skipped (format section 5)."""
    from exl3.codec import kvcache

    keep = batch.token_row >= 0
    rows, places = batch.token_row[keep].long(), batch.positions[keep].long()
    pages = batch.block_table[rows, places // PAGE].long()
    for x, bits, data, scales in ((k, layer.k_bits, layer.k, layer.k_scale), (v, layer.v_bits, layer.v, layer.v_scale)):
        x = x[keep]
        if bits == 16:
            data[pages, places % PAGE] = x.to(data.dtype)
        else:
            words, scale = kvcache.kv_quantize(x.to(torch.float16).flatten(1), bits, layer.compand)
            data[pages, places % PAGE] = words
            scales[pages, places % PAGE] = scale


def cache_read(layer: Any, block_table_row: Tensor, start: int, count: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    """Positions start .. start+count-1 of one row -> (k, v), each `(count, kv_heads, head_dim)`."""
    from exl3.codec import kvcache

    places = torch.arange(start, start + count, device=block_table_row.device)
    pages = block_table_row[places // PAGE].long()
    read = []
    for bits, data, scales in ((layer.k_bits, layer.k, layer.k_scale), (layer.v_bits, layer.v, layer.v_scale)):
        x = data[pages, places % PAGE]
        if bits != 16:
            x = kvcache.kv_dequantize(x, scales[pages, places % PAGE], bits, layer.compand)
        read.append(x.view(count, layer.kv_heads, layer.head_dim).to(dtype))
    return read[0], read[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float, sinks: Tensor | None) -> Tensor:
    """q (..., heads, Q, D), k and v (..., kv_heads, S, D), visible (Q, S) -> (..., heads, Q, D)."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:  # one more logit in the denominator, with no value behind it
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _visible(positions: Tensor, length: int, window: int) -> Tensor:
    seen = torch.arange(length, device=positions.device)[None, :]
    mask = seen <= positions[:, None]
    return mask & (seen > positions[:, None] - window) if window else mask


def attention(
    q: Tensor, layer: Any, batch: Any, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention of packed tokens q `(tokens, heads, head_dim)` over the cache (already appended): a token at position p
    sees positions max(0, p - window + 1) .. p of its row. Padding tokens (token_row -1) give zeros."""
    y = torch.zeros_like(q)
    for row in batch.token_row.unique().tolist():
        if row < 0:
            continue
        at = (batch.token_row == row).nonzero()[:, 0]
        positions = batch.positions[at]
        length = int(positions.max()) + 1
        k, v = cache_read(layer, batch.block_table[row], 0, length, torch.float32)
        out = _attend(
            q[at].float().transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), _visible(positions, length, window), scale, softcap, sinks
        )
        y[at] = out.transpose(0, 1).to(y.dtype)
    return y


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_start: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention within whole packed sequences, no cache: q `(tokens, heads, head_dim)`, k and v `(tokens, kv_heads, head_dim)`,
    row r holds tokens row_start[r] .. row_start[r+1]-1. Rows of one length run as one batch. Differentiable."""
    starts = row_start.tolist()
    sizes = [b - a for a, b in itertools.pairwise(starts)]
    if sizes and all(n == sizes[0] for n in sizes) and starts[0] == 0 and starts[-1] == len(q):
        parts = [(0, len(q), len(sizes))]
    else:
        parts = [(a, b, 1) for a, b in itertools.pairwise(starts)]
    outs = []
    for a, b, rows in parts:
        n = (b - a) // max(rows, 1)
        if n == 0:
            continue
        qr, kr, vr = (t[a:b].unflatten(0, (rows, n)).transpose(1, 2) for t in (q, k, v))
        if softcap or sinks is not None:
            positions = torch.arange(n, device=q.device)
            visible = _visible(positions if causal else torch.full_like(positions, n), n, window if causal else 0)
            out = _attend(_wide(qr), _wide(kr), _wide(vr), visible, scale, softcap, sinks).to(q.dtype)
        else:
            mask = _visible(torch.arange(n, device=q.device), n, window) if causal and 0 < window < n else None
            out = F.scaled_dot_product_attention(
                qr, kr, vr, attn_mask=mask, is_causal=causal and mask is None, scale=scale, enable_gqa=qr.shape[1] != kr.shape[1]
            )
        outs.append(out.transpose(1, 2).reshape(b - a, *q.shape[1:-1], v.shape[-1]))
    return torch.cat(outs) if outs else torch.zeros_like(q)


def embedding(ids: Tensor, table: Tensor | RingTable, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """scale * table[ids], `(tokens, n)`; an id outside the vocabulary gives zeros. `table` is `(vocab, n)` or a `RingTable`."""
    vocab = table.shape[0]
    known = (ids >= 0) & (ids < vocab)
    index = ids.clamp(0, vocab - 1).long()
    if isinstance(table, Tensor):
        rows = table[index]
    else:
        from exl3 import codec

        rows = codec.embedding_decode(table.trellis[index], table.signs, table.n)
    return (_wide(rows) * known[:, None] * scale).to(dtype)


def add_(y: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    """y += scale * x in place."""
    return y.add_(x.to(y.dtype), alpha=scale)


def softcap_(x: Tensor, scale: float, cap: float) -> Tensor:
    """x = cap * tanh(scale * x / cap) in place; cap 0: x *= scale."""
    return x.copy_(torch.tanh(x * (scale / cap)) * cap) if cap else x.mul_(scale)


def philox(seed: int, counter: int) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al. 2011): key = seed, counter = (counter low, counter high, 0, 0) -> four 32-bit words."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32 & mask, 0, 0]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0], c[1], c[2], c[3]


def distribution(logits: Tensor, params: Any, history: Tensor | None = None) -> Tensor:
    """The probabilities `(vocab,)` fp64 that `sample` draws from for one row; see there. Greedy: one-hot."""
    x = logits.double().clone()
    if history is not None and len(history):
        used, count = history.long().unique(return_counts=True)
        seen = x[used]
        seen = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        x[used] = seen - params.presence_penalty - params.frequency_penalty * count
    if params.temperature == 0:
        return F.one_hot(x.argmax(), len(x)).double()
    if not params.temperature_last:
        x = x / params.temperature
    order = torch.sort(x, descending=True, stable=True).indices
    if 0 < params.top_k < len(x):
        x = x.masked_fill(x < x[order[params.top_k - 1]], -math.inf)
    if params.top_p < 1:
        p = x[order].softmax(0)
        drop = p.cumsum(0) - p >= params.top_p
        drop[0] = False
        x[order[drop]] = -math.inf
    if params.min_p > 0:
        p = x.softmax(0)
        x = x.masked_fill(p < params.min_p * p.max(), -math.inf)
    return (x / params.temperature if params.temperature_last else x).softmax(0)


def sample(logits: Tensor, params: Tensor, history: Tensor | None = None, history_len: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token per row of logits `(rows, vocab)` fp32 -> (ids int32 `(rows,)`, probs fp32 `(rows,)`).

    Order, fixed: repetition penalty (positive logits divided, negative multiplied), presence and frequency penalties, all over
    the tokens of `history[:history_len]`; temperature (unless temperature_last); top-k (ties of the k-th are kept); top-p
    (smallest set reaching p, the token that crosses it is kept); min-p (relative to the largest); temperature_last; then
    one draw: the first id, in order of ids, whose cumulative probability exceeds u = (first Philox word of (seed, counter) + 0.5) / 2^32.
    Temperature 0 takes the largest logit after penalties, the lowest id among equals. probs: probability of the drawn id under the
    distribution drawn from; for a greedy row its softmax probability after penalties. -inf masks a token. A row with a NaN or +inf, or with
    nothing but -inf, gives id -1 and probability 0.
    """
    from exl3.ops.sampling import unpack_sample_params

    ids, probs = [], []
    for row, p in enumerate(unpack_sample_params(params)):
        x = logits[row].float().cpu()
        if bool(x.isnan().any()) or not math.isfinite(float(x.max())):
            ids.append(-1)
            probs.append(0.0)
            continue
        past = None
        if history is not None:
            past = history[row] if history_len is None else history[row, : int(history_len[row])]
            past = past[(past >= 0) & (past < len(x))].cpu()
        dist = distribution(x, p, past)
        if p.temperature == 0:
            chosen = int(dist.argmax())
            dist = distribution(x, type(p)(**{**vars(p), "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}), past)
        else:
            u = (philox(p.seed, p.counter)[0] + 0.5) / 2**32
            cumulative = dist.cumsum(0)
            chosen = int((cumulative <= u * float(cumulative[-1])).sum())
        ids.append(chosen)
        probs.append(float(dist[chosen]))
    return torch.tensor(ids, dtype=torch.int32, device=logits.device), torch.tensor(probs, dtype=torch.float32, device=logits.device)


def encode(tiles: Tensor, K: float, codebook: str, multiplier: int | None = None, *, seam_window: int = 0) -> tuple[Tensor, Tensor]:
    """Tail-biting trellis search (format section 7): tiles `(n, 256)` fp32 in stream order -> (states `(n, 256)`, uint16 bit patterns
    viewed as int16, decoded values `(n, 256)` fp32). `seam_window`: positions of the first pass round the seam; 0: the whole ring."""
    from exl3.codec.search import encode_reference

    states, values = encode_reference(tiles, K, codebook, multiplier, seam_window=seam_window)
    states = states.to(torch.int32)
    return ((states + 32768) % 65536 - 32768).to(torch.int16), values.float()
