"""Tiny random models with reference logits by transformers in fp32: every parameter non-trivial, so that ignoring
one changes the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, VOCAB = 64, 160

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}


def rope(theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


KINDS3 = ["sliding_attention", "sliding_attention", "full_attention"]
BY_KIND = {"sliding_attention": rope(10000.0), "full_attention": rope(1e6)}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}

# name -> (config class, model class, keys over BASE)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope(500000.0)}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope(500000.0) | LLAMA3}),
    "llama_linear": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope() | {"rope_type": "linear", "factor": 4.0}}),
    "llama_dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": rope() | {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
    ),
    "llama_yarn": ("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": rope() | YARN}),
    "llama_narrow": ("LlamaConfig", "LlamaForCausalLM", {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral_window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 32}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"rope_parameters": rope(1e6), "use_sliding_window": False}),
    "qwen2_window": ("Qwen2Config", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32, "rope_parameters": rope(1e6)}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": 64, "original_max_position_embeddings": 512}),
    "phi3_longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "rope_parameters": rope(partial_rotary_factor=0.75) | LONGROPE | {"original_max_position_embeddings": 128},
            "original_max_position_embeddings": 128,
        },
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "rope_parameters": rope(2e6)}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 32,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 32,
            "tie_word_embeddings": True,
            "layer_types": KINDS3,
            "rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope(1e6) | {"rope_type": "linear", "factor": 8.0}},
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {"rope_parameters": rope(500000.0)}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "sliding_window": 32,
            "layer_types": KINDS3,
            "rope_parameters": {"sliding_attention": rope(500000.0), "full_attention": rope(500000.0) | YARN},
        },
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"rope_parameters": rope(partial_rotary_factor=0.5), "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {"sliding_window": 32, "layer_types": KINDS3, "logit_scale": 0.25, "tie_word_embeddings": True, "rope_parameters": rope(50000.0)},
    ),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM", {"attention_bias": True, "attention_out_bias": True}),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM", {"use_bias": True, "rope_parameters": rope(500000.0)}),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 32, "layer_types": KINDS3}),
    "exaone4_full": ("Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "arcee": ("ArceeConfig", "ArceeForCausalLM", {}),
    "apertus": ("ApertusConfig", "ApertusForCausalLM", {"rope_parameters": rope(12e6)}),
}


@torch.no_grad()
def randomise(model: Any, seed: int) -> None:
    """Linear ~ N(0, 1.44 / fan_in), norms around one (or zero where one is added), biases and slopes away from zero."""
    rng = torch.Generator().manual_seed(seed)
    modules = dict(model.named_modules())
    for name, p in model.named_parameters():
        owner = type(modules[name.rpartition(".")[0]]).__name__

        def fill(p: Tensor, std: float, mean: float = 0.0) -> None:
            p.copy_(torch.randn(p.shape, generator=rng) * std + mean)

        if "embed_tokens" in name:
            tied = model.config.tie_word_embeddings
            fill(p, 2.0 * p.shape[1] ** -0.5 if tied or "Gemma" in type(model).__name__ else 1.0)
        elif "norm" in name and p.ndim == 1:
            fill(p, 0.2, 0.0 if "Gemma" in owner else 1.0)
        elif "alpha" in name:
            p.add_(0.1 * torch.randn(p.shape, generator=rng).to(p))
        elif p.ndim == 1:
            fill(p, 0.2)
        else:
            fill(p, 1.2 * p.shape[-1] ** -0.5)
    model.tie_weights()


def make(name: str, directory: Path, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Write a random model of family `name` (a key of FAMILIES) to `directory`; returns the transformers model in fp32, eager attention."""
    import transformers

    config_class, model_class, keys = FAMILIES[name]
    keys = {**BASE, **keys, **changes}
    config = getattr(transformers, config_class)(**keys)
    cls = getattr(transformers, model_class)
    torch.manual_seed(0)
    model = cls._from_config(config, attn_implementation="eager", dtype=torch.float32)
    randomise(model, sorted(FAMILIES).index(name))
    model = model.to(dtype)
    model.save_pretrained(directory)
    model = cls.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").float().eval()
    return model


def old_spelling(directory: Path) -> None:
    """Rewrite config.json with the keys files of 2023 to 2025 have: rope_theta, rope_scaling, partial_rotary_factor."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("rope_parameters", None) or {}
    if "full_attention" in settings:
        full, sliding = settings["full_attention"], settings["sliding_attention"]
        config["rope_theta"], config["rope_local_base_freq"] = full["rope_theta"], sliding["rope_theta"]
        settings = full
    else:
        config["rope_theta"] = settings.get("rope_theta")
    if "partial_rotary_factor" in settings:
        config["partial_rotary_factor"] = settings["partial_rotary_factor"]
    scaling = {k: v for k, v in settings.items() if k not in ("rope_theta", "partial_rotary_factor")}
    scaling["type"] = scaling.pop("rope_type", "default")
    config["rope_scaling"] = None if scaling["type"] == "default" else scaling
    path.write_text(json.dumps(config))


def ids(rows: int, tokens: int, vocab: int = VOCAB, seed: int = 7) -> Tensor:
    return torch.randint(3, vocab, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def kl(reference: Tensor, logits: Tensor) -> float:
    """Mean KL(reference || logits) over positions, in fp64."""
    p, q = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
