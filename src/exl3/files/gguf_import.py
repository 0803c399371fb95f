"""GGUF file to Hugging Face directory: weights dequantized, names and layouts turned back, config and tokenizer rebuilt."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError, FormatError, MissingTensorError, NumericalError, UnsupportedError
from exl3.files.config import check_target
from exl3.files.gguf import GGUF
from exl3.files.gguf_tokenizer import Vocabulary, build_tokenizer, tokenizer_config
from exl3.files.linears import all_finite
from exl3.files.shards import SHARD_SIZE, ShardWriter, check_disk, write_atomic, write_json

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NAMES = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": _BLOCK | _HEAD_NORMS,
    "gemma3": _BLOCK
    | _HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def import_gguf(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_size: float = SHARD_SIZE,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the model in GGUF file `source` as a Hugging Face directory `target`; returns the directory.

    `dtype` of the weights: float16, or bfloat16 for Gemma (its activations and norms leave fp16's range) and for files that hold
    bf16 tensors; norms and biases that it cannot hold exactly stay float32. `shard_size` in MiB, `progress(layers done, layers)`.
    Everything is checked before the first byte is written. Raises `UnsupportedError` (architecture, tensor type, tokenizer),
    `FormatError`, `MissingTensorError`, `ArgumentError` (`target` holds a model), `ResourceError` (disk), `NumericalError` (a weight
    beyond the range of `dtype`).
    """
    gguf = GGUF(source)
    model = _Model(gguf)
    config = model.config()
    names = model.names(config)
    vocabulary = Vocabulary(gguf.metadata)
    backend = build_tokenizer(vocabulary)
    if dtype is None:
        bf16 = model.arch == "gemma3" or any(t.type == "BF16" for t in gguf.tensors.values())
        dtype = torch.bfloat16 if bf16 else torch.float16
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ArgumentError(f"dtype of imported weights must be float16, bfloat16 or float32, not {dtype}")
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    target = Path(target)
    check_target(target, "target", replace=False)
    check_disk(target, sum(math.prod(t.shape) for t in gguf.tensors.values()) * dtype.itemsize, "the imported model")
    with ShardWriter(target, shard_size) as out:
        groups = list(_groups(names))
        for i, group in enumerate(groups):
            out.add({hf: _rounded(hf, model.tensor(name), dtype) for name, hf in group})
            if progress:
                progress(i + 1, len(groups))
        out.settle()
    write_atomic(target / "tokenizer.json", backend.to_str())
    write_json(target / "tokenizer_config.json", tokenizer_config(vocabulary, config["max_position_embeddings"]))
    ids = {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": vocabulary.ending_ids() or None, "pad_token_id": vocabulary.ids["pad"]}
    write_json(target / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    config |= {f"{role}_token_id": vocabulary.ids[role] for role in ("bos", "eos", "pad")}
    write_json(target / "config.json", config)
    return target


def _groups(names: dict[str, str]) -> Iterator[list[tuple[str, str]]]:
    """Pairs (GGUF name, new name): one group per block, so that no block is split over shards."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, hf in names.items():
        groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("blk.") else name, []).append((name, hf))
    yield from groups.values()


def _rounded(name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
    if not all_finite(t):
        raise NumericalError(f"{name}: the file holds NaN or Inf")
    y = t.to(dtype)
    if not all_finite(y):
        raise NumericalError(f"{name}: values up to {t.abs().max():.3g} do not fit {dtype}; import with dtype=bfloat16")
    return t if t.ndim == 1 and not torch.equal(y.float(), t) else y


class _Model:
    """The network part of a GGUF file: config.json from its metadata, new names, weights in Hugging Face's layout."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.arch = self._value("general.architecture", str)
        if self.arch not in ARCHITECTURES:
            raise UnsupportedError(f"{gguf.path}: architecture {self.arch!r}; imported are {', '.join(ARCHITECTURES)}")
        if (self._value("split.count", int, 1) or 1) > 1:
            raise UnsupportedError(f"{gguf.path}: one of several parts; join them first with `llama-gguf-split --merge`")
        if self._key("expert_count", int, 0):
            raise UnsupportedError(f"{gguf.path}: a mixture of experts, which is not imported")
        self.layers = self._key("block_count", int)
        self.hidden = self._key("embedding_length", int)
        self.heads = self._key("attention.head_count", int)
        if not (0 < self.layers <= len(gguf.tensors) and 0 < self.heads <= self.hidden):
            raise FormatError(f"{gguf.path}: {self.layers} blocks, {self.heads} heads and width {self.hidden} cannot be")
        self.kv_heads = self._key("attention.head_count_kv", int, self.heads)
        self.head_dim = self._key("attention.key_length", int, self.hidden // self.heads)
        if not (0 < self.kv_heads <= self.heads and 0 < self.head_dim <= 1 << 16):
            raise FormatError(f"{gguf.path}: {self.kv_heads} key/value heads of {self.head_dim} cannot be")

    _NONE: Any = object()

    def _value(self, key: str, kind: type, default: Any = _NONE) -> Any:
        value = self.gguf.metadata.get(key, default)
        if value is self._NONE:
            raise FormatError(f"{self.gguf.path}: metadata lacks {key}")
        if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            shown = "one value per layer" if kind is int and hasattr(value, "__len__") and not isinstance(value, str) else f"{value!r}"[:60]
            raise UnsupportedError(f"{self.gguf.path}: {key} is {shown}, expected one {kind.__name__}")
        return value

    def _key(self, key: str, kind: type, default: Any = _NONE) -> Any:
        return self._value(f"{self.arch}.{key}", kind, default)

    def _float(self, key: str, default: Any = _NONE) -> Any:
        """A float32 from the file as the shortest decimal that rounds to it: 1e-06, not 9.99999997e-07."""
        value = self._key(key, float, default)
        return value if value is default else float(f"{value:.7g}") if math.isfinite(value) else self._bad(key)

    def _bad(self, key: str) -> float:
        raise FormatError(f"{self.gguf.path}: {self.arch}.{key} is not finite")

    def config(self) -> dict[str, Any]:
        """config.json without dtype and token ids."""
        tensors = self.gguf.tensors
        if "token_embd.weight" not in tensors:
            raise MissingTensorError(f"{self.gguf.path}: no token_embd.weight")
        context = self._key("context_length", int)
        config: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self._key("feed_forward_length", int),
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self._float("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": context,
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "rope_theta": self._float("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "use_cache": True,
        }
        bias = "blk.0.attn_q.bias" in tensors
        if self.arch == "llama":
            own: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
            own |= {"attention_bias": bias, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
        elif self.arch == "qwen2":
            own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu"}
            own |= {"use_sliding_window": False, "sliding_window": None}
        elif self.arch == "qwen3":
            own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu"}
            own |= {"attention_bias": bias, "use_sliding_window": False, "sliding_window": None}
        else:
            own = self._gemma3()
        return {**own, **config}

    def _gemma3(self) -> dict[str, Any]:
        # the file does not store the attention scale; the 27B model (62 blocks) alone scales by width per head
        scalar = self.hidden // self.heads if self.layers == 62 else self.head_dim
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self._float("final_logit_softcapping", None),
            "rope_local_base_freq": self._float("rope.freq_base_swa", 10000.0),
            "sliding_window": self._key("attention.sliding_window", int),
            "sliding_window_pattern": 6,
            "layer_types": ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(self.layers)],
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self.gguf.tensors:
            return self._llama3_scaling(self.gguf.read("rope_freqs.weight").double())
        kind = self._key("rope.scaling.type", str, "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise UnsupportedError(f"{self.gguf.path}: rope scaling {kind!r}; imported are linear, yarn and llama3")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._float("rope.scaling.factor")}
        original = self._key("rope.scaling.original_context_length", int, None)
        return scaling if original is None else {**scaling, "original_max_position_embeddings": original}

    def _llama3_scaling(self, stored: Tensor) -> dict[str, Any]:
        """The file holds Llama 3.1's divisors of the frequencies, not their parameters; only the factor varies, and it is the largest."""
        factor, low, high, original = float(f"{stored.max():.5g}"), 1.0, 4.0, 8192
        n = self.head_dim // 2
        wavelength = 2 * math.pi * self._float("rope.freq_base", 10000.0) ** (torch.arange(n, dtype=torch.float64) / n)
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        right = 1 / ((1 - smooth) / factor + smooth)
        if stored.shape != right.shape or not torch.allclose(stored, right, rtol=1e-4):
            raise UnsupportedError(f"{self.gguf.path}: rope_freqs.weight does not hold Llama 3.1's frequency scaling")
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }

    def names(self, config: dict[str, Any]) -> dict[str, str]:
        """GGUF name -> Hugging Face name, embedding and blocks in order; all are there, none is left over, all have the right shape."""
        named: dict[str, str] = {}
        for name, info in self.gguf.tensors.items():
            stem, _, suffix = name.rpartition(".")
            if name == "rope_freqs.weight":
                continue
            new = _TOP.get(stem)
            parts = stem.split(".", 2)
            if (
                len(parts) == 3
                and parts[0] == "blk"
                and parts[1].isdigit()
                and int(parts[1]) < self.layers
                and parts[2] in _NAMES[self.arch]
            ):
                new = f"model.layers.{int(parts[1])}.{_NAMES[self.arch][parts[2]]}"
            if new is None or suffix not in ("weight", "bias"):
                raise UnsupportedError(f"{self.gguf.path}: tensor {name!r} is no part of a {self.arch} model as known here")
            named[name] = f"{new}.{suffix}"
            wanted = self._shape(stem.split(".")[-1], suffix, config)
            if info.shape != wanted:
                raise FormatError(f"{self.gguf.path}: tensor {name!r} has shape {list(info.shape)}, the metadata says {list(wanted)}")
        needed = ["output_norm.weight", *(f"blk.{i}.{part}.weight" for i in range(self.layers) for part in _NAMES[self.arch])]
        missing = [name for name in needed if name not in named]
        if missing:
            raise MissingTensorError(f"{self.gguf.path}: {len(missing)} tensors are missing: {', '.join(missing[:5])}")
        return dict(sorted(named.items(), key=lambda item: (item[0] == "output.weight", item[0].startswith("output_"), _order(item[0]))))

    def _shape(self, part: str, suffix: str, config: dict[str, Any]) -> tuple[int, ...]:
        h, i, d = self.hidden, config["intermediate_size"], self.head_dim
        q, kv, v = self.heads * d, self.kv_heads * d, config["vocab_size"]
        matrices = {"attn_q": (q, h), "attn_k": (kv, h), "attn_v": (kv, h), "attn_output": (h, q)}
        matrices |= {"ffn_gate": (i, h), "ffn_up": (i, h), "ffn_down": (h, i), "token_embd": (v, h), "output": (v, h)}
        if part in matrices:
            return matrices[part] if suffix == "weight" else matrices[part][:1]
        return (d,) if part in _HEAD_NORMS else (h,)

    def tensor(self, name: str) -> Tensor:
        """One weight in fp32 and in Hugging Face's layout."""
        t = self.gguf.read(name)
        part = name.split(".")[-2]
        if self.arch == "llama" and part in ("attn_q", "attn_k"):
            return _half_split(t, self.heads if part == "attn_q" else self.kv_heads)
        if self.arch == "gemma3" and part.endswith("norm"):
            return t - 1  # GGUF folds Gemma's "1 + weight" in
        return t


def _order(name: str) -> tuple[int, str]:
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1, name)


def _half_split(t: Tensor, heads: int) -> Tensor:
    """Rows of each head from GGUF's rotary order (pairs side by side) to Hugging Face's (first halves, then second halves)."""
    rows = t.shape[0] // heads
    return t.reshape(heads, rows // 2, 2, *t.shape[1:]).transpose(1, 2).reshape(t.shape).contiguous()
