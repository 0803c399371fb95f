"""Cohere 2 (Command R7B, Command A): one LayerNorm feeds attention and MLP side by side; windowed layers are rotated, full ones are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exl3.models.config import Config, layer_kinds
from exl3.models.llama import attention
from exl3.models.model import Block, Model
from exl3.nn import MLP, LayerNorm, Linear, Rotary, rope_parameters


@dataclass(kw_only=True)
class Cohere2Config(Config):
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    sliding_window: int | None = 4096
    sliding_window_pattern: int = 4
    layer_types: list[str] | None = None

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0: none."""
        kind = layer_kinds(self, self.layer_types, self.sliding_window_pattern)[layer]
        return (self.sliding_window or 0) if kind == "sliding_attention" else 0


class Cohere2Block(Block):
    """h = norm(x); x += attention(h) + mlp(h)"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(layer)
        window = config.window(layer)
        self.self_attn = attention(config, layer, rotaries["default"] if window else None, window=window)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.input_layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        h = self.input_layernorm(x, dtype=self.self_attn.dtype)
        self.self_attn(h, batch, residual=x)
        self.mlp(h, residual=x)
        return x

    def linear_groups(self) -> list[list[Linear]]:
        (qkv, o), (gate_up, down) = self.self_attn.quant_groups(), self.mlp.quant_groups()
        return [qkv + gate_up, o, down]


class Cohere2(Model):
    architectures = ("Cohere2ForCausalLM",)
    config_class = Cohere2Config
    block_class = Cohere2Block

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.logit_scale = self.config.logit_scale

    def make_norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_size, self.config.layer_norm_eps)

    def make_rotaries(self) -> dict[str, Rotary]:
        return {"default": Rotary(rope_parameters(self.config.raw), self.config.head_size, interleaved=True)}
