"""EXAONE 4: norms after attention and MLP, RMSNorm over each head of q and k; where layers are windowed, only those are rotated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.errors import FormatError
from exl3.models.config import Config, layer_kinds
from exl3.models.llama import attention
from exl3.models.model import Model
from exl3.models.olmo2 import Olmo2Block
from exl3.nn import Attention, Rotary


@dataclass(kw_only=True)
class Exaone4Config(Config):
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    sliding_window_pattern: str | int | None = 4
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0: none."""
        if not self.sliding_window:
            return 0
        return self.sliding_window if self._kinds()[layer] == "sliding_attention" else 0

    def _kinds(self) -> list[str]:
        pattern = self.sliding_window_pattern
        if self.layer_types is not None or not isinstance(pattern, str):
            return layer_kinds(self, self.layer_types, pattern or 0)  # type: ignore[arg-type]
        if not pattern or set(pattern) - set("LG"):
            raise FormatError(f"config.json: sliding_window_pattern is {pattern!r}, letters L and G are needed")
        count = self.num_hidden_layers  # the last layer is full whatever the pattern says
        return ["sliding_attention" if pattern[i % len(pattern)] == "L" and i < count - 1 else "full_attention" for i in range(count)]


class Exaone4Block(Olmo2Block):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        window = config.window(layer)
        rotary = rotaries["default"] if window or not config.sliding_window else None
        return attention(config, layer, rotary, window=window, qk_norm="head")


class Exaone4(Model):
    architectures = ("Exaone4ForCausalLM",)
    config_class = Exaone4Config
    block_class = Exaone4Block
