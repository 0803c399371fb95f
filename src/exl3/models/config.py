"""config.json -> a checked dataclass. Each family lists exactly the keys it uses, with the defaults its published files leave out."""

from __future__ import annotations

import types
import typing
import warnings
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from exl3.errors import FormatError

C = TypeVar("C", bound="Config")

# key -> largest value that can be meant; anything above is a damaged file, refused before sizes are computed from it
LIMITS = {
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 11,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 30,
    "sliding_window": 1 << 30,
}
# keys in which 0 means "none"
MAY_BE_ZERO = {"sliding_window", "sliding_window_pattern", "max_window_layers", "attn_logit_softcapping", "final_logit_softcapping"}


@dataclass(kw_only=True)
class Config:
    """What all families read. `raw` is the dict it came from (the text part, where a file describes several parts)."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    raw: dict[str, Any] = field(default_factory=dict, repr=False)

    def warn_beyond_context(self, tokens: int, option: str) -> None:
        """A warning where rows of `tokens` tokens, set by `option`, have positions that the model was not trained for."""
        if tokens > self.max_position_embeddings:
            warnings.warn(
                f"rows of {tokens} tokens go beyond the {self.max_position_embeddings} positions that the model was made for, and what it "
                f"does there says little about it; give {option} {self.max_position_embeddings} or less",
                stacklevel=3,
            )

    @classmethod
    def from_dict(cls: type[C], config: dict[str, Any]) -> C:
        """Read the keys this family uses; others are ignored. Raises FormatError naming the key."""
        hints = typing.get_type_hints(cls)
        values: dict[str, Any] = {"raw": config}
        missing = []
        for f in fields(cls):
            value = config.get(f.name)
            if f.name == "raw":
                continue
            if value is not None:
                values[f.name] = _checked(f.name, value, hints[f.name])
            elif f.name in config and _optional(hints[f.name]):
                values[f.name] = None  # an explicit null, which is not the same as a key left out
            elif _required(f):
                missing.append(f.name)
        if missing:
            raise FormatError(f"config.json lacks {', '.join(missing)}, which {cls.__name__.removesuffix('Config')} needs")
        made = cls(**values)
        made._check_heads()
        return made

    def _check_heads(self) -> None:
        """Explicit head_dim wins; absent, hidden_size / num_attention_heads has to be whole."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise FormatError(
                    f"config.json: no head_dim, and hidden_size {self.hidden_size} is not a multiple of "
                    f"num_attention_heads {self.num_attention_heads}; add head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_attention_heads % self.num_key_value_heads:
            raise FormatError(
                f"config.json: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def kv_heads(self) -> int:
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_size(self) -> int:
        assert self.head_dim is not None
        return self.head_dim


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and types.NoneType in typing.get_args(hint)


def _required(f: Any) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _checked(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type; numbers must be positive, finite and within LIMITS."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        kind = typing.get_origin(kind) or kind
        if kind is bool and isinstance(value, bool):
            return value
        if kind is int and isinstance(value, int) and not isinstance(value, bool):
            return _positive(name, value)
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return _positive(name, float(value))
        if kind is str and isinstance(value, str):
            return value
        if kind is list and isinstance(value, list):
            return value
    wanted = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds if kind is not types.NoneType)
    raise FormatError(f"config.json: {name} is {value!r}, {wanted} is needed")


def _positive(name: str, value: Any) -> Any:
    limit = LIMITS.get(name, 1 << 40)
    if not 0 <= value <= limit or (value == 0 and name not in MAY_BE_ZERO):
        raise FormatError(f"config.json: {name} is {value}, a value above 0 and up to {limit} is needed")
    return value


def layer_kinds(config: Config, layer_types: list[str] | None, full_every: int) -> list[str]:
    """ "sliding_attention" or "full_attention" per layer: `layer_types` where given, else every `full_every`-th layer is full (0: none)."""
    count = config.num_hidden_layers
    if layer_types is None:
        return ["full_attention" if full_every and (i + 1) % full_every == 0 else "sliding_attention" for i in range(count)]
    unknown = sorted({str(kind) for kind in layer_types} - {"sliding_attention", "full_attention"})
    if unknown or len(layer_types) < count:
        raise FormatError(
            f"config.json: layer_types has {len(layer_types)} entries for {count} layers"
            + (f" and unknown kinds {', '.join(unknown)}" if unknown else "")
            + "; one of sliding_attention, full_attention per layer is needed"
        )
    return layer_types[:count]
