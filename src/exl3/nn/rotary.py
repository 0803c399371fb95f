"""Rotary position embedding: inverse frequencies of every supported kind, and the table of one step.

Formulas: linear (position interpolation), dynamic (NTK by length), llama3 (Llama 3.1), yarn (arXiv 2309.00071), longrope
(arXiv 2402.13753). Where sources differ, transformers' reading is taken: YaRN's attention factor is the ratio of the two mscales
when both are given, else 0.1 ln(factor) + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exl3 import ops
from exl3.errors import FormatError, UnsupportedError

NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "max_position_embeddings",
    "original_max_position_embeddings",
)


def rope_parameters(config: dict[str, Any], kind: str | None = None, *, theta: float = 10000.0, partial: float = 1.0) -> dict[str, Any]:
    """The rope settings of `config` in one spelling: a dict with rope_type, rope_theta, partial_rotary_factor and the kind's own keys.

    Reads `rope_parameters` (flat, or by layer kind: `kind` picks), else `rope_theta`, `rope_scaling` and `partial_rotary_factor`.
    `theta` and `partial` are the family's defaults.
    """
    settings = config.get("rope_parameters") or {}
    if not isinstance(settings, dict):
        raise FormatError(f"config.json: rope_parameters is {type(settings).__name__}, an object is needed")
    if kind is not None and isinstance(settings.get(kind), dict):
        settings = settings[kind]
    elif settings and all(isinstance(value, dict) for value in settings.values()):
        settings = {}
    scaling = config.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise FormatError(f"config.json: rope_scaling is {type(scaling).__name__}, an object is needed")
    merged = {**scaling, **settings}
    rope_type = merged.get("rope_type") or merged.get("type") or "default"
    if not isinstance(rope_type, str):
        raise FormatError(f"config.json: rope_type is {rope_type!r}, a name is needed")
    found = {**merged, "rope_type": "longrope" if rope_type == "su" else rope_type}
    found.pop("type", None)
    for key, default in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if found.get(key) is None:
            found[key] = default if config.get(key) is None else config[key]
    for key in ("max_position_embeddings", "original_max_position_embeddings"):
        if found.get(key) is None and config.get(key) is not None:
            found[key] = config[key]
    for key in NUMBERS:
        if found.get(key) is not None and not _positive(found[key]):
            raise FormatError(f"config.json: {key} of the rope settings is {found[key]!r}, a number above 0 is needed")
    for key in ("mscale", "mscale_all_dim"):
        if found.get(key) and not _positive(found[key]):
            raise FormatError(f"config.json: {key} of the rope settings is {found[key]!r}, a number is needed")
    return found


def _positive(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < 1e15


def _powers(base: float, dim: int) -> Tensor:
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def _need(settings: dict[str, Any], *keys: str) -> list[Any]:
    missing = [key for key in keys if settings.get(key) is None]
    if missing:
        raise FormatError(f"config.json: rope type {settings['rope_type']!r} needs {', '.join(missing)}")
    return [settings[key] for key in keys]


def _default(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    return 1.0 / _powers(settings["rope_theta"], dim), 1.0


def _linear(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    (factor,) = _need(settings, "factor")
    return 1.0 / _powers(settings["rope_theta"], dim) / factor, 1.0


def _dynamic(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    factor, trained = _need(settings, "factor", "max_position_embeddings")
    length = max(length or 0, trained)
    base = settings["rope_theta"] * (factor * length / trained - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / _powers(base, dim), 1.0


def _llama3(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    factor, low, high, trained = _need(settings, "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if high <= low:
        raise FormatError(f"config.json: rope high_freq_factor {high} must be above low_freq_factor {low}")
    inv_freq = 1.0 / _powers(settings["rope_theta"], dim)
    turns = trained * inv_freq / (2 * math.pi)  # full turns within the trained length
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * (keep + (1 - keep) / factor), 1.0


def _yarn(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    (trained,) = _need(settings, "original_max_position_embeddings")
    factor = settings.get("factor") or _need(settings, "max_position_embeddings")[0] / trained
    base = settings["rope_theta"]

    def place(turns: float) -> float:  # the pair of dimensions that makes this many turns within the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = place(settings.get("beta_fast") or 32), place(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - first) / max(last - first, 1e-3)).clamp(0, 1)
    inv_freq = 1.0 / _powers(base, dim)

    def mscale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    scale = settings.get("attention_factor")
    if scale is None:
        a, b = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = mscale(a) / mscale(b) if a and b else mscale()
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, float(scale)


def _longrope(settings: dict[str, Any], dim: int, length: int | None) -> tuple[Tensor, float]:
    short, long, trained = _need(settings, "short_factor", "long_factor", "original_max_position_embeddings")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if not isinstance(factors, list) or len(factors) != dim // 2 or not all(map(_positive, factors)):
            have = len(factors) if isinstance(factors, list) else repr(factors)
            raise FormatError(f"config.json: rope {key} needs {dim // 2} numbers above 0, has {have}")
    factor = settings.get("factor") or _need(settings, "max_position_embeddings")[0] / trained
    scale = settings.get("attention_factor")
    if scale is None:
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    factors = long if length is not None and length > trained else short
    return 1.0 / (torch.tensor(factors, dtype=torch.float64) * _powers(settings["rope_theta"], dim)), float(scale)


KINDS: dict[str, Callable[[dict[str, Any], int, int | None], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def frequencies(settings: dict[str, Any], dim: int, length: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies fp32 `(dim / 2,)` and the factor on cos and sin, for `settings` as `rope_parameters` gives them.

    `length`: tokens of the sequence; only dynamic and longrope depend on it.
    """
    kind = settings["rope_type"]
    if kind not in KINDS:
        raise UnsupportedError(f"config.json: rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    inv_freq, scale = KINDS[kind](settings, dim, length)
    return inv_freq.float(), scale


class Rotary:
    """The rotary embedding of one kind of layer; all its layers share the table of a step, kept in `batch.tables[self.name]`.

    Two kinds depend on the length of the sequence. A whole-sequence pass takes the length that is there: longrope that of each
    row, dynamic that of the longest row. A pass over a cache takes `max_tokens`, the longest context this load allows, so that all
    keys of a conversation are rotated alike, however the prompt was cut into chunks and whoever shares its pages.
    """

    def __init__(self, settings: dict[str, Any], head_dim: int, *, name: str = "default", interleaved: bool = False) -> None:
        self.settings = settings
        self.name = name
        self.interleaved = interleaved
        self.dim = int(head_dim * settings["partial_rotary_factor"])
        if self.dim < 2 or self.dim % 2 or self.dim > head_dim:
            raise FormatError(f"config.json: rotary dimension {self.dim} of head_dim {head_dim}: an even number up to head_dim is needed")
        self.max_tokens: int | None = None
        self._on: dict[tuple[torch.device, int | None], tuple[Tensor, float]] = {}
        self._frequencies(torch.device("cpu"), None)  # unknown kinds and missing keys fail when the model is built

    def _frequencies(self, device: torch.device, length: int | None) -> tuple[Tensor, float]:
        if (device, length) not in self._on:
            inv_freq, scale = frequencies(self.settings, self.dim, length)
            self._on[device, length] = (inv_freq.to(device), scale)
        return self._on[device, length]

    def fill(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute (cos, sin), each `(tokens, dim / 2)` fp32, for `batch` and leave them in its tables."""
        kind, device = self.settings["rope_type"], batch.positions.device
        length, long = None, None
        if kind in ("dynamic", "longrope") and batch.cache is not None:
            length = self.max_tokens
        elif kind == "dynamic":
            length = int(batch.lengths.max())
        elif kind == "longrope":
            trained = int(self.settings["original_max_position_embeddings"])
            long = (*self._frequencies(device, trained + 1), trained, batch.token_row, batch.lengths)
        inv_freq, scale = self._frequencies(device, length)
        table = ops.rotary_table(batch.positions, inv_freq, scale, long=long)
        batch.tables[self.name] = table
        return table

    def table(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The table of this step, computed on first use."""
        found = batch.tables.get(self.name)
        return self.fill(batch) if found is None else found
