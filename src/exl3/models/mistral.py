"""Mistral: Llama with a sliding window in every layer (or none)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.models.config import Config
from exl3.models.llama import LlamaBlock, attention
from exl3.models.model import Model
from exl3.nn import Attention, Rotary


@dataclass(kw_only=True)
class MistralConfig(Config):
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


class MistralBlock(LlamaBlock):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"], window=config.sliding_window or 0)


class Mistral(Model):
    architectures = ("MistralForCausalLM",)
    config_class = MistralConfig
    block_class = MistralBlock
