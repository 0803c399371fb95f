"""Writes a synthetic EXL3 directory of a named shape, so that nobody has to download a model to measure one.

    python benchmarks/make_model.py 8B OUT_DIR [--bits 4] [--head-bits 6] [--codebook mul1] [--layers N] [--seed 0] [--device cuda]

The trellis bits are random (any bits are a legal code) and the scales are set so that activations stay tame: speed is that of a real
model, text is noise. There is no tokenizer: feed token ids.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPES = {
    # hidden, inner, heads, kv heads, head dim, vocabulary, layers, rope theta
    "tiny": (256, 512, 4, 2, 64, 1024, 2, 10000.0),
    "135M": (576, 1536, 9, 3, 64, 49152, 30, 100000.0),
    "1B": (2048, 8192, 32, 8, 64, 128256, 16, 500000.0),
    "8B": (4096, 14336, 32, 8, 128, 128256, 32, 500000.0),
    "70B": (8192, 28672, 64, 8, 128, 128256, 80, 500000.0),
}
MARKERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED, "3inst": None}
CODE_RMS = {"mul1": 1.0003, "mcg": 1.2441, "3inst": 1.2437}


def linear(key: str, n_in: int, n_out: int, bits: float, codebook: str, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of one EXL3 linear (format section 1.5), padded to multiples of 128; outputs have about the input's rms."""
    rows, columns = -(-n_in // 128) * 8, -(-n_out // 128) * 8
    here = {"generator": generator, "device": generator.device}
    signs = torch.randint(0, 2, (rows * 16 + columns * 16,), **here) * 2.0 - 1.0
    scale = 1 / (CODE_RMS[codebook] * n_in**0.5)
    tensors = {
        f"{key}.trellis": torch.randint(-32768, 32768, (rows, columns, round(16 * bits)), dtype=torch.int16, **here),
        f"{key}.suh": (signs[: rows * 16] * scale).half(),
        f"{key}.svh": signs[rows * 16 :].half(),
    }
    tensors[f"{key}.svh"][n_out:] = 0
    if MARKERS[codebook] is not None:
        marker = MARKERS[codebook] or 0
        tensors[f"{key}.{codebook}"] = torch.tensor(marker - 2**32, dtype=torch.int32)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=float, default=4)
    parser.add_argument("--head-bits", type=float, default=6)
    parser.add_argument("--codebook", choices=MARKERS, default="mul1")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the bits are drawn; a card is faster and draws others")
    options = parser.parse_args()
    hidden, inner, heads, kv, dim, vocab, layers, theta = SHAPES[options.shape]
    layers = options.layers or layers
    generator = torch.Generator(options.device).manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    shards: dict[str, str] = {}
    total = 0

    def write(number: int, tensors: dict[str, Tensor]) -> None:
        nonlocal total
        name = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file({key: t.cpu() for key, t in tensors.items()}, options.out / name)
        shards.update(dict.fromkeys(tensors, name))
        total += sum(t.nbytes for t in tensors.values())
        print(f"{name}: {sum(t.nbytes for t in tensors.values()) / 1e6:.0f} MB", flush=True)

    for i in range(layers):
        prefix = f"model.layers.{i}"
        tensors = {f"{prefix}.{norm}.weight": torch.ones(hidden).half() for norm in ("input_layernorm", "post_attention_layernorm")}
        for key, n_in, n_out in (
            ("self_attn.q_proj", hidden, heads * dim),
            ("self_attn.k_proj", hidden, kv * dim),
            ("self_attn.v_proj", hidden, kv * dim),
            ("self_attn.o_proj", heads * dim, hidden),
            ("mlp.gate_proj", hidden, inner),
            ("mlp.up_proj", hidden, inner),
            ("mlp.down_proj", inner, hidden),
        ):
            tensors |= linear(f"{prefix}.{key}", n_in, n_out, options.bits, options.codebook, generator)
        for projections in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            for key in projections[1:]:  # one rotation serves projections of one input, as converters make them
                tensors[f"{prefix}.{key}.suh"] = tensors[f"{prefix}.{projections[0]}.suh"].clone()
        write(i + 1, tensors)
    ends = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator, device=options.device).half(),
        "model.norm.weight": torch.ones(hidden).half(),
    }
    write(layers + 1, ends | linear("lm_head", hidden, vocab, options.head_bits, options.codebook, generator))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "quantization_config": {
            "quant_method": "exl3",
            "version": "1.6.5",
            "bits": options.bits,
            "head_bits": options.head_bits,
            "codebook": options.codebook,
        },
    }
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    (options.out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


if __name__ == "__main__":
    main()
