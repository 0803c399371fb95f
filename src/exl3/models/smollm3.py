"""SmolLM3: Llama in which every fourth layer has no position embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.errors import FormatError
from exl3.models.config import Config, layer_kinds
from exl3.models.llama import LlamaBlock, attention
from exl3.models.model import Model
from exl3.nn import Attention, Rotary, rope_parameters


@dataclass(kw_only=True)
class SmolLM3Config(Config):
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    no_rope_layers: list[int] | None = None  # 1: the layer is rotated, 0: it is not
    no_rope_layer_interval: int = 4
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    def rotated(self, layer: int) -> bool:
        if self.no_rope_layers is None:
            return (layer + 1) % self.no_rope_layer_interval != 0
        if len(self.no_rope_layers) < self.num_hidden_layers:
            raise FormatError(f"config.json: no_rope_layers has {len(self.no_rope_layers)} entries for {self.num_hidden_layers} layers")
        return bool(self.no_rope_layers[layer])

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0: none."""
        if not self.use_sliding_window or not self.sliding_window:
            return 0
        if self.layer_types is None:
            return 0 if self.rotated(layer) else self.sliding_window
        return self.sliding_window if layer_kinds(self, self.layer_types, 0)[layer] == "sliding_attention" else 0


class SmolLM3Block(LlamaBlock):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"] if config.rotated(layer) else None, window=config.window(layer))


class SmolLM3(Model):
    architectures = ("SmolLM3ForCausalLM",)
    config_class = SmolLM3Config
    block_class = SmolLM3Block

    def make_rotaries(self) -> dict[str, Rotary]:
        return {"default": Rotary(rope_parameters(self.config.raw, theta=2e6), self.config.head_size)}
