"""Linear, Embedding, norms, Attention and MLP apart, against formulas in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from exl3.cache import Batch, Cache
from exl3.errors import ArgumentError, UnsupportedError
from exl3.models.apertus import XIELU
from exl3.nn import MLP, Attention, Embedding, LayerNorm, Linear, RMSNorm, Rotary, rope_parameters


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("plus_one", [False, True])
def test_rms_norm(plus_one: bool) -> None:
    norm = RMSNorm(40, 1e-3, plus_one=plus_one)
    weight = randn(40, seed=1).bfloat16()
    norm.set(weight)
    assert norm.weight.dtype == torch.bfloat16 and norm.scale is not None and norm.scale.dtype == torch.float32
    x = 0.05 * randn(3, 40)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-3).sqrt() * (weight.double() + plus_one)
    assert torch.allclose(norm(x).double(), expected, atol=1e-6)
    assert norm(x, dtype=torch.float16).dtype == torch.float16
    residual = torch.ones(3, 40)
    assert norm.add_(x, residual) is residual
    assert torch.allclose(residual.double(), 1 + expected, atol=1e-6)


def test_layer_norm() -> None:
    norm = LayerNorm(40, 1e-5)
    norm.set(randn(40, seed=1))
    x = randn(3, 40) + 5
    assert torch.allclose(norm(x), torch.nn.functional.layer_norm(x, (40,), norm.weight, None, 1e-5), atol=1e-5)


def test_linear_dense_and_empty() -> None:
    linear = Linear(24, 16)
    assert not linear.loaded and linear.weight is not None and linear.weight.is_meta
    w, b = randn(16, 24, seed=1).bfloat16(), randn(16, seed=2).half()
    linear.set_dense(w, b)
    x = randn(5, 24)
    expected = x.double() @ w.double().T + b.double()
    assert linear.loaded and torch.allclose(linear(x).double(), expected, atol=1e-5)
    out = torch.ones(5, 16)
    assert linear(x, out=out, accumulate=True) is out
    assert torch.allclose(out.double(), expected + 1, atol=1e-5)
    assert linear(x, dtype=torch.float16).dtype == torch.float16
    linear.unload()
    assert not linear.loaded and linear.bias is None
    with pytest.raises(ArgumentError, match=r"\(16, 25\).*\(16, 24\)"):
        linear.set_dense(torch.zeros(16, 25))


def test_embedding() -> None:
    embedding = Embedding(10, 24, scale=3.0)
    table = randn(10, 24).half()
    embedding.set_dense(table)
    ids = torch.tensor([0, 9, 4, -1, 10], dtype=torch.int32)
    x = embedding(ids)
    assert x.dtype == torch.float32
    assert torch.allclose(x[:3], 3.0 * table[[0, 9, 4]].float())
    assert not x[3:].any()  # ids outside the table
    with pytest.raises(ArgumentError, match="embedding has shape"):
        embedding.set_dense(torch.zeros(11, 24))


def naive_attention(a: Attention, x: Tensor, rope: dict[str, Any] | None) -> Tensor:
    """One sequence x `(tokens, hidden)` in fp64, by the textbook."""
    tokens = len(x)
    x = x.double()

    def heads(linear: Linear, norm: Any, count: int) -> Tensor:
        assert linear.weight is not None
        y = x @ linear.weight.double().T
        if linear.bias is not None:
            y = y + linear.bias.double()
        if norm is not None and a.qk_norm == "whole":
            y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.scale.double()
        y = y.view(tokens, count, a.head_dim)
        if norm is not None and a.qk_norm == "head":
            y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.scale.double()
        return y.transpose(0, 1)

    def turn(y: Tensor) -> Tensor:
        if rope is None:
            return y
        dim = int(a.head_dim * rope.get("partial", 1.0))
        angle = torch.arange(tokens).double()[:, None] * 1e4 ** (-torch.arange(0, dim, 2).double() / dim)
        c, s = angle.cos(), angle.sin()
        r = y[..., :dim]
        p, q = (r[..., 0::2], r[..., 1::2]) if rope.get("interleaved") else (r[..., : dim // 2], r[..., dim // 2 :])
        p, q = p * c - q * s, q * c + p * s
        r = torch.stack([p, q], -1).flatten(-2) if rope.get("interleaved") else torch.cat([p, q], -1)
        return torch.cat([r, y[..., dim:]], -1)

    q_norm, k_norm = (a.q_norm, a.k_norm) if a.qk_norm else (None, None)
    q, k, v = turn(heads(a.q_proj, q_norm, a.heads)), turn(heads(a.k_proj, k_norm, a.kv_heads)), heads(a.v_proj, None, a.kv_heads)
    out = torch.zeros(tokens, a.heads, a.head_dim, dtype=torch.float64)
    for h in range(a.heads):
        g = h // (a.heads // a.kv_heads)
        for t in range(tokens):
            first = max(0, t - a.window + 1) if a.window else 0
            score = a.scale * (k[g, first : t + 1] @ q[h, t])
            if a.softcap:
                score = a.softcap * torch.tanh(score / a.softcap)
            weight = score.exp()
            total = weight.sum() + (a.sinks[h].double().exp() if a.sinks is not None else 0)
            out[t, h] = (weight / total) @ v[g, first : t + 1]
    y = out.view(tokens, -1) @ a.o_proj.weight.double().T  # type: ignore[union-attr]
    return y if a.o_proj.bias is None else y + a.o_proj.bias.double()


CASES: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({}, {}),
    ({}, None),
    ({"window": 5}, {}),
    ({"softcap": 2.0, "scale": 0.7}, {}),
    ({"qk_norm": "head", "eps": 1e-2}, {}),
    ({"qk_norm": "head", "plus_one": True}, None),
    ({"qk_norm": "whole"}, {"partial": 0.5}),
    ({"sinks": True, "window": 4}, {"interleaved": True}),
    ({"qk_norm": "whole", "softcap": 3.0, "window": 3, "sinks": True}, {"interleaved": True, "partial": 0.5}),
]


@pytest.mark.parametrize(("options", "rope"), CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_attention(options: dict[str, Any], rope: dict[str, Any] | None, biased: bool) -> None:
    rotary = None
    if rope is not None:
        settings = rope_parameters({"partial_rotary_factor": rope.get("partial", 1.0)})
        rotary = Rotary(settings, 16, interleaved=rope.get("interleaved", False))
    a = Attention(0, 40, 4, 2, 16, rotary, **options)
    for i, linear in enumerate((a.q_proj, a.k_proj, a.v_proj, a.o_proj)):
        bias = randn(linear.out_features, seed=20 + i) if biased else None
        linear.set_dense(randn(linear.out_features, linear.in_features, seed=10 + i) / math.sqrt(linear.in_features), bias)
    if a.qk_norm:
        a.q_norm.set(randn(a.q_norm.size, seed=30))
        a.k_norm.set(randn(a.k_norm.size, seed=31))
    if options.get("sinks"):
        a.set(randn(4, seed=32))
    x = randn(12, 40)
    expected = naive_attention(a, x, rope)
    batch = Batch.whole(torch.zeros(1, 12, dtype=torch.int32))
    assert torch.allclose(a(x, batch).double(), expected, atol=2e-5)
    residual = torch.ones(12, 40)
    assert a(x, batch, residual=residual) is residual
    assert torch.allclose(residual.double() - 1, expected, atol=2e-5)
    cache = Cache({"cache_shapes": [(2, 16)]}, 256, "cpu")
    parts = []
    for start, stop in ((0, 7), (7, 11), (11, 12)):
        step = Batch.packed([[0] * (stop - start)], [start], [[0]], cache, logits="all")
        parts.append(a(x[start:stop], step))
    assert torch.allclose(torch.cat(parts).double(), expected, atol=5e-3)


ACTS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("gated", [False, True])
def test_mlp(act: str, gated: bool) -> None:
    mlp = MLP(24, 40, act, gated=gated)
    names = ["gate_proj", "up_proj", "down_proj"] if gated else ["up_proj", "down_proj"]
    w = {}
    for i, name in enumerate(names):
        linear = getattr(mlp, name)
        linear.set_dense(randn(linear.out_features, linear.in_features, seed=i), randn(linear.out_features, seed=40 + i))
        w[name] = lambda x, m=linear: x @ m.weight.double().T + m.bias.double()
    x = randn(5, 24)
    up = w["up_proj"](x.double())
    inner = ACTS[act](w["gate_proj"](x.double())) * up if gated else ACTS[act](up)
    expected = w["down_proj"](inner)
    assert torch.allclose(mlp(x).double(), expected, rtol=1e-4, atol=1e-3)
    assert [[n for n, m in mlp.named_children() if m in group] for group in mlp.quant_groups()] == [names[:-1], ["down_proj"]]


def test_unknown_activation() -> None:
    with pytest.raises(UnsupportedError, match=r"'mish'.*silu"):
        MLP(8, 8, "mish")


def test_xielu_parameters() -> None:
    """alpha_p = softplus(a), alpha_n = beta + softplus(b): stored before softplus."""
    act = XIELU()
    act.set(torch.tensor([0.3]), torch.tensor([-0.2]), torch.tensor(0.5), torch.tensor(-1e-6))
    assert act.params == pytest.approx((math.log1p(math.exp(0.3)), 0.5 + math.log1p(math.exp(-0.2)), 0.5, -1e-6), rel=1e-6)
