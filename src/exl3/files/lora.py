"""PEFT LoRA adapters on disk: which matrices they change, by what rank and scale. Headers only until `read`."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import FormatError, MissingTensorError, UnsupportedError
from exl3.files.config import read_json
from exl3.files.linears import check_finite
from exl3.files.safetensors import TensorInfo, read_header
from exl3.files.slabs import read_tensors

_NAME = re.compile(r"^(?:base_model\.model\.)?(?P<key>.+)\.lora_(?P<side>[AB])(?:\.[^.]+)?\.weight$")
_SAFE = re.compile(r"(?!.*\)[*+{?])[^\n]{1,200}")  # a repeated group can take exponential time on a name that almost fits
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class LoraPair:
    """y += scaling * (x @ A^T) @ B^T for the matrix of module `key`; A `(rank, in_features)`, B `(out_features, rank)`."""

    key: str
    a: TensorInfo
    b: TensorInfo
    rank: int
    scaling: float

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def out_features(self) -> int:
        return self.b.shape[0]


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter directory: its adapter_config.json and its pairs by module key (names as in the base model)."""

    path: Path
    config: dict[str, Any]
    pairs: dict[str, LoraPair]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LoraAdapter:
        """Read and check adapter_config.json and the header of adapter_model.safetensors.

        Raises `MissingTensorError`, `FormatError` (halves that don't fit each other or the configured rank), `UnsupportedError`
        (other PEFT methods, DoRA, transposed weights, trained embeddings, biases or whole modules).
        """
        path = Path(path)
        config = read_json(path / "adapter_config.json", missing_ok=True)
        file = path / "adapter_model.safetensors"
        if config is None or not file.exists():
            absent = "adapter_config.json" if config is None else file.name
            raise MissingTensorError(f"{path}: no {absent}; a PEFT adapter is adapter_config.json and adapter_model.safetensors")
        _check_config(path, config)
        halves: dict[str, dict[str, TensorInfo]] = {}
        for name, info in read_header(file).tensors.items():
            match = _NAME.match(name)
            if match is None:
                raise UnsupportedError(f"{file}: {name!r} is no half of a LoRA pair (lora_A or lora_B of a linear layer)")
            pair = halves.setdefault(match["key"], {})
            if match["side"] in pair:
                raise FormatError(f"{file}: more than one lora_{match['side']} for {match['key']!r}")
            pair[match["side"]] = info
        if not halves:
            raise MissingTensorError(f"{file}: holds no LoRA tensors")
        return cls(path, config, {key: _pair(file, key, pair, config) for key, pair in halves.items()})

    def read(self, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """module key -> (A, B) with the scaling multiplied into B (in fp32, then rounded to `dtype`, default as stored)."""
        infos = {f"{key}/{side}": info for key, pair in self.pairs.items() for side, info in (("A", pair.a), ("B", pair.b))}
        raw = read_tensors(infos, device)
        result = {}
        for key, pair in self.pairs.items():
            a, b = raw[f"{key}/A"], raw[f"{key}/B"]
            check_finite(f"{key}.lora_A", a)
            check_finite(f"{key}.lora_B", b)
            result[key] = a.to(dtype or a.dtype), (b.float() * pair.scaling).to(dtype or b.dtype)
        return result


def _check_config(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: adapter of type {str(kind)[:40]!r}; only LORA is read")
    for key, why in (
        ("use_dora", "DoRA also rescales the base weights"),
        ("fan_in_fan_out", "weights stored (in, out) belong to Conv1D models"),
        ("modules_to_save", "it replaces whole modules of the base model"),
        ("trainable_token_indices", "it changes rows of the embedding"),
    ):
        if config.get(key):
            raise UnsupportedError(f"{path}: {key} is set: {why}, which is not read")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias is {config['bias']!r}: the adapter changes biases, which is not read")
    _positive(path, config.get("r"), "r")
    _positive(path, config.get("lora_alpha"), "lora_alpha")


def _positive(path: Path, value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise FormatError(f"{path}: adapter_config.json has {what} = {str(value)[:40]}, not a positive number")
    return value


def _pair(file: Path, key: str, pair: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> LoraPair:
    for side in "AB":
        if side not in pair:
            raise MissingTensorError(f"{file}: {key!r} has no lora_{side}")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise FormatError(f"{file}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {key!r} do not fit; they are (r, in) and (out, r)")
    if a.dtype not in _FLOATS or b.dtype not in _FLOATS:
        raise UnsupportedError(f"{file}: {key!r} has dtypes {a.dtype} and {b.dtype}; fp16, bf16 and fp32 are read")
    rank = a.shape[0]
    configured = _matching(config.get("rank_pattern"), key, config["r"])
    if rank != configured:
        raise FormatError(f"{file}: {key!r} has rank {rank}, adapter_config.json says {configured}")
    alpha = _positive(file.parent, _matching(config.get("alpha_pattern"), key, config["lora_alpha"]), "alpha")
    return LoraPair(key, a, b, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _matching(patterns: Any, key: str, default: Any) -> Any:
    """The value of the first pattern that equals `key` or its end after a dot, as a name or a regular expression."""
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            if key == pattern or key.endswith(f".{pattern}"):
                return value
            try:
                if _SAFE.fullmatch(pattern) and re.match(rf"(.*\.)?({pattern})$", key):
                    return value
            except re.error:
                continue
    return default
