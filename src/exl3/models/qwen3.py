"""Qwen3: Qwen2 without biases, with RMSNorm over each head of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.models.llama import LlamaBlock, attention
from exl3.models.model import Model
from exl3.models.qwen2 import Qwen2Config
from exl3.nn import Attention, Rotary


@dataclass(kw_only=True)
class Qwen3Config(Qwen2Config):
    head_dim: int | None = 128


class Qwen3Block(LlamaBlock):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"], window=config.window(layer), qk_norm="head")


class Qwen3(Model):
    architectures = ("Qwen3ForCausalLM",)
    config_class = Qwen3Config
    block_class = Qwen3Block
