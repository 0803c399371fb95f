"""Qwen2: Llama with q, k, v biases (taken from the file) and an optional sliding window in the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.models.config import Config, layer_kinds
from exl3.models.llama import LlamaBlock, attention
from exl3.models.model import Model
from exl3.nn import Attention, Rotary


@dataclass(kw_only=True)
class Qwen2Config(Config):
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0: none."""
        if not self.use_sliding_window or not self.sliding_window:
            return 0
        if self.layer_types is None:
            return self.sliding_window if layer >= self.max_window_layers else 0
        return self.sliding_window if layer_kinds(self, self.layer_types, 0)[layer] == "sliding_attention" else 0


class Qwen2Block(LlamaBlock):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"], window=config.window(layer))


class Qwen2(Model):
    architectures = ("Qwen2ForCausalLM",)
    config_class = Qwen2Config
    block_class = Qwen2Block
