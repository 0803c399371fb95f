"""Attention: grouped queries with the options of all families in one class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.nn.linear import Linear, project, project_out
from exl3.nn.norm import RMSNorm
from exl3.nn.rotary import Rotary


class Attention(nn.Module):
    """q, k, v projections, optional norms of q and k, rotation, attention, output projection.

    layer       index of this layer's keys and values in the cache
    rotary      None: no position embedding in this layer
    window      a token sees this many tokens up to and with itself; 0: all before it
    softcap     scores = cap * tanh(scores / cap); 0: none
    scale       factor on q . k, default head_dim ** -0.5
    qk_norm     None, "head" (RMSNorm over each head) or "whole" (over all heads at once, OLMo)
    sinks       one learned logit per head joins the softmax (GPT-OSS)
    Biases are used where the checkpoint holds them. A fused `qkv_proj` of the source is split by rows q | k | v.
    """

    sinks: Tensor | None
    dtype = torch.float32  # of q, k, v and the attention output; the model sets it

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: Rotary | None,
        *,
        window: int = 0,
        softcap: float = 0.0,
        scale: float | None = None,
        qk_norm: str | None = None,
        eps: float = 1e-6,
        plus_one: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.rotary = rotary
        self.window = window
        self.softcap = softcap
        self.scale = head_dim**-0.5 if scale is None else scale
        self.qk_norm = qk_norm
        q_size, kv_size = heads * head_dim, kv_heads * head_dim
        self.q_proj = Linear(hidden_size, q_size, fused=("qkv_proj", 0))
        self.k_proj = Linear(hidden_size, kv_size, fused=("qkv_proj", q_size))
        self.v_proj = Linear(hidden_size, kv_size, fused=("qkv_proj", q_size + kv_size))
        self.o_proj = Linear(q_size, hidden_size)
        if qk_norm is not None:
            self.q_norm = RMSNorm(head_dim if qk_norm == "head" else q_size, eps, plus_one=plus_one)
            self.k_norm = RMSNorm(head_dim if qk_norm == "head" else kv_size, eps, plus_one=plus_one)
        self.tensor_names = ("sinks",) if sinks else ()
        self.register_buffer("sinks", None)

    def set(self, sinks: Tensor) -> None:
        """Take the sinks `(heads,)`, kept as fp32."""
        self.sinks = sinks.float()

    def unload(self) -> None:
        self.sinks = None

    def forward(self, x: Tensor, batch: Any, *, norm: Any = None, residual: Tensor | None = None) -> Tensor:
        """x `(tokens, hidden_size)`, normalised by `norm` on the way in; the result is added to `residual` where given (fp32)."""
        q, k, v = project(x, (self.q_proj, self.k_proj, self.v_proj), norm=norm, dtype=self.dtype)
        return project_out(self.attend(q, k, v, batch), self.o_proj, residual)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Any) -> Tensor:
        """Projections `(tokens, heads * head_dim)` -> attention output of the same shape as q; appends to the cache if there is one."""
        tokens = q.shape[0]
        if self.qk_norm == "whole":
            q, k = self.q_norm(q, dtype=self.dtype), self.k_norm(k, dtype=self.dtype)
        q = q.view(tokens, self.heads, self.head_dim)
        k = k.view(tokens, self.kv_heads, self.head_dim)
        v = v.view(tokens, self.kv_heads, self.head_dim)
        rotation, more = self.rotation(batch)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        if batch.cache is not None:
            y = batch.cache.layers[self.layer].extend(q, k, v, batch, *rotation, **more, **options)
        else:
            if rotation or more:
                ops.rotary_(q, k, *(rotation or (None, None, 0)), **more)
            y = ops.sdpa(q, k, v, batch.row_start, **options)
        return y.view(tokens, self.heads * self.head_dim)

    def rotation(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the rotation of this step (cos, sin, dim) and of the norms of each head; empty where there is none."""
        norms: dict[str, Any] = {}
        if self.qk_norm == "head":
            norms = {"q_norm": self.q_norm.scale, "k_norm": self.k_norm.scale, "eps": self.q_norm.eps}
        if self.rotary is None:
            return (), norms
        return (*self.rotary.table(batch), self.rotary.dim), {"interleaved": self.rotary.interleaved, **norms}

    def quant_groups(self) -> list[list[Linear]]:
        """Linears the converter quantizes, in order of execution; members of one group share their input."""
        return [[self.q_proj, self.k_proj, self.v_proj], [self.o_proj]]
