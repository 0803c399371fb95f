"""A tiny Llama directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 2, 96, 3, 1, 120, 250


def write_model(path: Path, *, tied: bool = False, bias: bool = False, layers: int = LAYERS, seed: int = 0, **extra: object) -> Path:
    """Random weights; sizes that are no multiples of 128; every norm weight and bias non-trivial."""
    path.mkdir(parents=True)
    g = torch.Generator().manual_seed(seed)

    def w(*shape: int, scale: float | None = None) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) * (shape[-1] ** -0.5 if scale is None else scale)).half()

    head_dim = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": w(VOCAB, HIDDEN, scale=1.0), "model.norm.weight": 1 + w(HIDDEN, scale=0.2)}
    if not tied:
        tensors["lm_head.weight"] = w(VOCAB, HIDDEN)
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors[p + "input_layernorm.weight"] = 1 + w(HIDDEN, scale=0.2)
        tensors[p + "post_attention_layernorm.weight"] = 1 + w(HIDDEN, scale=0.2)
        shapes = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * head_dim, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * head_dim, HIDDEN),
        }
        shapes |= {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN)}
        shapes |= {"mlp.down_proj": (HIDDEN, INTERMEDIATE)}
        for name, shape in shapes.items():
            tensors[p + name + ".weight"] = w(*shape)
            if bias and "attn" in name:
                tensors[p + name + ".bias"] = w(shape[0], scale=0.1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu", "tie_word_embeddings": tied, "attention_bias": bias,
        "rope_theta": 10000.0, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config | extra))
    return path
