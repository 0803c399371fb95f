"""Writes tests/data/models: tiny models of five families with logits by transformers in fp32. Run by hand:
python tests/models/make_vectors.py

Two layers of hidden size 64, bf16 weights. NAME/ is the model directory, NAME.logits.safetensors holds `ids` (1, 48) and
`logits` (1, 48, 96).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from synthetic_models import YARN, ids, make, rope

OUT = Path(__file__).parents[1] / "data" / "models"
KINDS = ["sliding_attention", "full_attention"]
SMALL = {"num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 96}
MODELS = {
    "llama_llama3": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "gemma3": {"layer_types": KINDS, "sliding_window": 8},
    "phi3_longrope": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        },
    },
    "cohere2": {"layer_types": KINDS, "sliding_window": 8},
    "olmo3": {
        "layer_types": KINDS,
        "sliding_window": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {"sliding_attention": rope(5e5), "full_attention": rope(5e5) | YARN | {"original_max_position_embeddings": 16}},
    },
}


def main() -> None:
    for name, changes in MODELS.items():
        model = make(name, OUT / name, **SMALL, **changes)
        (OUT / name / "generation_config.json").unlink(missing_ok=True)
        tokens = ids(1, 48, 96)
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        save_file({"ids": tokens.int(), "logits": logits.contiguous()}, OUT / f"{name}.logits.safetensors")
        for file in (OUT / f"{name}.logits.safetensors", OUT / name / "model.safetensors"):
            os.chmod(file, 0o644)


if __name__ == "__main__":
    main()
