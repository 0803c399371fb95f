"""A Llama in plain fp64 torch, written from the paper's formulas, and directories of random ones: references that need no transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def random_weights(
    config: dict[str, Any], seed: int = 0, bias: tuple[str, ...] = (), head_dims: list[int] | None = None
) -> dict[str, Tensor]:
    """fp32 tensors of a Llama with Hugging Face names; `bias`: projections that get one; `head_dims`: per layer, over the config's."""
    rng = torch.Generator().manual_seed(seed)
    h, i, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]

    def normal(*shape: int, std: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=rng) * std + mean

    w = {"model.embed_tokens.weight": normal(v, h), "model.norm.weight": normal(h, std=0.2, mean=1.0)}
    for n in range(config["num_hidden_layers"]):
        d = head_dims[n] if head_dims else config.get("head_dim") or h // heads
        p = f"model.layers.{n}."
        w[f"{p}input_layernorm.weight"] = normal(h, std=0.2, mean=1.0)
        w[f"{p}post_attention_layernorm.weight"] = normal(h, std=0.2, mean=1.0)
        shapes = {"self_attn.q_proj": (heads * d, h), "self_attn.k_proj": (kv * d, h), "self_attn.v_proj": (kv * d, h)}
        shapes |= {"self_attn.o_proj": (h, heads * d), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
        for name, (out, inp) in shapes.items():
            w[f"{p}{name}.weight"] = normal(out, inp, std=1.2 * inp**-0.5)
            if name.rpartition(".")[2] in bias:
                w[f"{p}{name}.bias"] = normal(out, std=0.3)
    if not config["tie_word_embeddings"]:
        w["lm_head.weight"] = normal(v, h, std=2.0 * h**-0.5)
    return w


def write(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: t.contiguous() for k, t in weights.items()}, directory / "model.safetensors")
    return directory


def logits(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """ids `(rows, tokens)` -> logits `(rows, tokens, vocab)` in fp64. Head size of each layer from its q_proj."""
    w = {k: t.double() for k, t in weights.items()}
    eps, heads, kv = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    tokens = ids.shape[1]
    causal = torch.full((tokens, tokens), -math.inf, dtype=torch.float64).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[name]

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def rotate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(tokens).double()[:, None] * config["rope_theta"] ** (-torch.arange(half).double() / half)
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        p = f"model.layers.{n}."
        h = norm(x, f"{p}input_layernorm.weight")
        d = w[f"{p}self_attn.q_proj.weight"].shape[0] // heads
        q, k, v = (
            linear(h, f"{p}self_attn.{name}_proj").unflatten(-1, (count, d)).transpose(1, 2)
            for name, count in (("q", heads), ("k", kv), ("v", kv))
        )
        k, v = rotate(k).repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        y = (rotate(q) @ k.transpose(-1, -2) / math.sqrt(d) + causal).softmax(-1) @ v
        x = x + linear(y.transpose(1, 2).flatten(2), f"{p}self_attn.o_proj")
        h = norm(x, f"{p}post_attention_layernorm.weight")
        gate = linear(h, f"{p}mlp.gate_proj")
        x = x + linear(gate * gate.sigmoid() * linear(h, f"{p}mlp.up_proj"), f"{p}mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
