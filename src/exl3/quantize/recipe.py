"""Recipes: a rate for every tensor, read from and written to a small, strict subset of YAML (no YAML library needed).

    # comment
    target_bpw: 3.25
    head_bits: 6
    embed_bits: 16
    tensors:
      "model.layers.*.self_attn.*": 4
      model.layers.0.mlp.down_proj: 3.5

Keys are exact tensor keys or shell patterns; the last entry that matches a tensor wins; an entry that matches nothing and a tensor that
no entry covers are errors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from exl3.codec.rings import RATES
from exl3.errors import ArgumentError
from exl3.quantize.allocate import Spec

_LINE = re.compile(r"""^(\s*)(?:"([^"]*)"|'([^']*)'|([^\s"'#:][^:#"']*?))\s*:\s*(.*)$""")
_NUMBERS = ("target_bpw", "achieved_bpw", "head_bits", "embed_bits")


@dataclass
class Recipe:
    tensors: list[tuple[str, float]]
    numbers: dict[str, float] = field(default_factory=dict)
    place: str = "recipe"  # for messages

    @property
    def head_bits(self) -> float | None:
        return self.numbers.get("head_bits")

    @property
    def embed_bits(self) -> float | None:
        """Of the token embedding."""
        return self.numbers.get("embed_bits")

    def rates(self, specs: Sequence[Spec], codebook: str) -> dict[str, float]:
        """Rate of each spec's key; 16 leaves a tensor unquantized."""
        result: dict[str, float] = {}
        for pattern, rate in self.tensors:
            if rate != 16 and (rate not in RATES or (rate != int(rate) and codebook != "mul1")):
                raise ArgumentError(
                    f"{self.place}: {pattern}: {rate:g} is not a rate of codebook {codebook} (1-8, 16, and 1.5, 2.5, 3.5 with mul1)"
                )
            keys = [s.key for s in specs if s.key == pattern or fnmatchcase(s.key, pattern)]
            if not keys:
                hint = "; the head's rate is head_bits" if pattern.split(".")[-1] == "lm_head" else ""
                raise ArgumentError(
                    f"{self.place}: {pattern!r} matches no tensor of this model; its tensors look like {specs[0].key}{hint}"
                )
            result.update(dict.fromkeys(keys, rate))
        missing = [s.key for s in specs if s.key not in result]
        if missing:
            raise ArgumentError(f"{self.place}: {len(missing)} tensors have no rate, the first is {missing[0]}; add an entry or a pattern")
        return result


def _scalar(text: str, place: str) -> float:
    text = re.sub(r"\s+#.*$", "", text).strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ArgumentError(f"{place}: {text!r} is not a number")
    return value


def parse_recipe(text: str, place: str = "recipe") -> Recipe:
    """Recipe from its text; ArgumentError with the line number for everything outside the subset."""
    tensors: list[tuple[str, float]] = []
    numbers: dict[str, float] = {}
    inside = False
    seen = False
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#") or line.strip() == "---":
            continue
        where = f"{place}, line {number}"
        match = _LINE.match(line)
        if match is None or "\t" in match[1]:
            raise ArgumentError(f"{where}: expected 'key: number', got {line.strip()!r}")
        indent, value = match[1], match[5]
        key = next(g for g in match.groups()[1:4] if g is not None)
        if not indent:
            inside = key == "tensors"
            if inside:
                seen = True
                if re.sub(r"#.*$", "", value).strip() not in ("", "{}"):
                    raise ArgumentError(f"{where}: 'tensors:' must be followed by indented 'key: rate' lines")
            elif key in _NUMBERS:
                numbers[key] = _scalar(value, where)
            else:
                raise ArgumentError(f"{where}: unknown key {key!r}; known: tensors, {', '.join(_NUMBERS)}")
        elif inside:
            tensors.append((key, _scalar(value, where)))
        else:
            raise ArgumentError(f"{where}: an indented line outside 'tensors:'")
    if not seen or not tensors:
        raise ArgumentError(f"{place}: it must have a mapping 'tensors:' with at least one entry")
    return Recipe(tensors, numbers, place)


def read_recipe(path: str | Path) -> Recipe:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ArgumentError(f"recipe {path}: cannot be read ({e})") from None
    return parse_recipe(text, f"recipe {path}")


def format_recipe(rates: dict[str, float], numbers: dict[str, float]) -> str:
    """The text of a recipe that `parse_recipe` and YAML readers take."""
    lines = [f"{k}: {v:g}" for k, v in numbers.items()] + ["tensors:"]
    return "\n".join(lines + [f'  "{key}": {rate:g}' for key, rate in rates.items()]) + "\n"
