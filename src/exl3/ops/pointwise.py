"""Norms, rotary positions, activations and the small in-place operations of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.ops import blocks, checks, native, reference
from exl3.ops.products import output


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
    """weight * x / sqrt(mean(x^2) + eps) over rows of x `(rows, n)`; weight fp32 `(n,)` or None.

    residual (fp32): residual += x in place, then the norm of residual. subtract_mean: LayerNorm without bias. accumulate:
    out (fp32) += norm.
    """
    op = native.serving("rms_norm", x, weight, residual, out)
    if op is None:
        return reference.rms_norm(
            x, weight, eps, residual=residual, subtract_mean=subtract_mean, out=out, accumulate=accumulate, dtype=dtype
        )
    x_stride = checks.rows("rms_norm", "x", x)
    rows, n = x.shape
    if weight is not None:
        checks.tensor("rms_norm", "weight", weight, checks.F32, shape=(n,), dense=True)
    residual_stride = 0
    if residual is not None:
        residual_stride = checks.rows("rms_norm", "residual", residual, n, checks.F32, written=True)
        if residual.shape[0] != rows:
            raise ArgumentError(f"rms_norm: residual has {residual.shape[0]} rows, x has {rows}")
        checks.apart("rms_norm", "residual", residual, "x", x)
        if out is not None:
            checks.apart("rms_norm", "out", out, "residual", residual)
    out, y_stride = output("rms_norm", x, n, out, accumulate, dtype, in_place=True)
    block = blocks.RMS_NORM.pack(
        x.data_ptr(), 0 if residual is None else residual.data_ptr(), 0 if weight is None else weight.data_ptr(), out.data_ptr(),
        x_stride, residual_stride, y_stride, rows, n, blocks.DTYPES[x.dtype], blocks.DTYPES[out.dtype], eps, subtract_mean, accumulate,
    )  # fmt: skip
    native.launch(op, x.device, block, x, residual, weight, out)
    return out


def rotary_table(positions: Tensor, inv_freq: Tensor, scale: float = 1.0, *, long: tuple[Any, ...] | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin), each `(tokens, half)` fp32, of positions int32 `(tokens,)` times inv_freq fp32 `(half,)`, both times `scale`.

    long = (inv_freq_long, scale_long, threshold, token_row, lengths): tokens whose row is longer than `threshold` use the long pair
    (longrope).
    """
    inv_freq_long, scale_long, threshold, token_row, lengths = long if long is not None else (None, 1.0, 0, None, None)
    op = native.serving("rotary_table", positions, inv_freq, inv_freq_long, token_row, lengths)
    if op is None:
        return reference.rotary_table(positions, inv_freq, scale, long=long)
    checks.tensor("rotary_table", "positions", positions, checks.I32, ndim=1, dense=True)
    checks.tensor("rotary_table", "inv_freq", inv_freq, checks.F32, ndim=1, dense=True)
    tokens, half = positions.shape[0], inv_freq.shape[0]
    if long is not None:
        checks.tensor("rotary_table", "inv_freq_long", inv_freq_long, checks.F32, shape=(half,), dense=True)
        checks.tensor("rotary_table", "token_row", token_row, checks.I32, shape=(tokens,), dense=True)
        checks.tensor("rotary_table", "lengths", lengths, checks.I32, ndim=1, dense=True)
    cos = torch.empty((tokens, half), dtype=torch.float32, device=positions.device)
    sin = torch.empty((tokens, half), dtype=torch.float32, device=positions.device)
    block = blocks.ROTARY_TABLE.pack(
        positions.data_ptr(), *(0 if t is None else t.data_ptr() for t in (token_row, lengths)), inv_freq.data_ptr(),
        0 if inv_freq_long is None else inv_freq_long.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        tokens, half, threshold, scale, scale_long,
    )  # fmt: skip
    native.launch(op, positions.device, block, positions, token_row, lengths, inv_freq, inv_freq_long, cos, sin)
    return cos, sin


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
    """In place on q and k `(tokens, heads, head_dim)`: per-head RMSNorm where q_norm or k_norm (fp32 `(head_dim,)`) is given, then rotation
    of the first `rotary_dim` values of each head by cos and sin `(tokens, rotary_dim/2)`: pairs (i, i + rotary_dim/2), or (2i, 2i+1) when
    interleaved. cos None: norms only."""
    op = native.serving("rotary", q, k, cos, sin, q_norm, k_norm)
    if op is None:
        reference.rotary_(q, k, cos, sin, rotary_dim, interleaved=interleaved, q_norm=q_norm, k_norm=k_norm, eps=eps)
        return
    q_stride = checks.heads("rotary_", "q", q)
    tokens, q_heads, head_dim = q.shape
    k_stride, k_heads = 0, 0
    if k is not None:
        k_stride, k_heads = checks.heads("rotary_", "k", k, (q.dtype,)), k.shape[1]
        if k.shape[0] != tokens or k.shape[2] != head_dim:
            raise ArgumentError(f"rotary_: k must have shape ({tokens}, kv_heads, {head_dim}), got {tuple(k.shape)}")
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_: cos and sin belong together")
    if cos is not None:
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ArgumentError(f"rotary_: rotary_dim {rotary_dim} must be even and at most head_dim {head_dim}")
        checks.tensor("rotary_", "cos", cos, checks.F32, shape=(tokens, rotary_dim // 2), dense=True)
        checks.tensor("rotary_", "sin", sin, checks.F32, shape=(tokens, rotary_dim // 2), dense=True)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            checks.tensor("rotary_", name, norm, checks.F32, shape=(head_dim,), dense=True)
    block = blocks.ROTARY.pack(
        q.data_ptr(), *(0 if t is None else t.data_ptr() for t in (k, cos, sin, q_norm, k_norm)), q_stride, k_stride,
        tokens, q_heads, k_heads, head_dim, rotary_dim, blocks.DTYPES[q.dtype], interleaved, eps,
    )  # fmt: skip
    native.launch(op, q.device, block, q, k, cos, sin, q_norm, k_norm)


def act_mul(
    gate: Tensor, up: Tensor | None, activation: str, params: Sequence[float] | None = None, *, out: Tensor | None = None
) -> Tensor:
    """act(gate) * up, or act(gate) where up is None, for `(rows, n)` of one dtype. activation: silu, gelu (erf), gelu_tanh, relu, relu2
    (squared) or xielu with params (alpha_p, alpha_n, beta, eps), softplus already applied. out: of gate's dtype; may be gate itself."""
    op = native.serving("act_mul", gate, up, out)
    if op is None:
        found = reference.act_mul(gate, up, activation, params)
        return found if out is None else out.copy_(found)
    code = blocks.ACTIVATIONS.get(activation, 0)
    if code == 0:
        raise ArgumentError(f"act_mul: activation {activation!r}: use one of {', '.join(a for a in blocks.ACTIVATIONS if a)}")
    if activation == "xielu" and (params is None or len(params) != 4):
        raise ArgumentError("act_mul: xielu needs params (alpha_p, alpha_n, beta, eps)")
    gate_stride = checks.rows("act_mul", "gate", gate)
    rows, n = gate.shape
    up_stride = 0
    if up is not None:
        up_stride = checks.rows("act_mul", "up", up, n, (gate.dtype,))
        if up.shape[0] != rows:
            raise ArgumentError(f"act_mul: up has {up.shape[0]} rows, gate has {rows}")
    if out is not None and out.dtype != gate.dtype:
        raise ArgumentError(f"act_mul: out must be {gate.dtype} as gate is, got {out.dtype}")
    y, y_stride = output("act_mul", gate, n, out, False, None, in_place=True)
    block = blocks.ACT_MUL.pack(
        gate.data_ptr(), 0 if up is None else up.data_ptr(), y.data_ptr(), gate_stride, up_stride, y_stride,
        rows, n, blocks.DTYPES[gate.dtype], code, *(params if params is not None else (0.0, 0.0, 0.0, 0.0)),
    )  # fmt: skip
    native.launch(op, gate.device, block, gate, up, y)
    return y


def add_(y: Tensor, x: Tensor, scale: float = 1.0) -> Tensor:
    """y += scale * x in place; y fp32, both contiguous and of one size."""
    op = native.serving("add", y, x)
    if op is None:
        return reference.add_(y, x, scale)
    checks.tensor("add_", "y", y, checks.F32, dense=True)
    checks.tensor("add_", "x", x, checks.FLOATS, shape=tuple(y.shape), dense=True)
    if x.dtype != torch.float32 or x.data_ptr() != y.data_ptr():
        checks.apart("add_", "y", y, "x", x)
    native.launch(op, y.device, blocks.ADD.pack(x.data_ptr(), y.data_ptr(), y.numel(), blocks.DTYPES[x.dtype], scale), y, x)
    return y


def softcap_(x: Tensor, scale: float, cap: float) -> Tensor:
    """x = cap * tanh(scale * x / cap) in place, fp32 and contiguous; cap 0: x *= scale."""
    op = native.serving("softcap", x)
    if op is None:
        return reference.softcap_(x, scale, cap)
    checks.tensor("softcap_", "x", x, checks.F32, dense=True)
    native.launch(op, x.device, blocks.SOFTCAP.pack(x.data_ptr(), x.numel(), scale, cap), x)
    return x
