"""Llama, and the plain pre-norm block that most families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exl3.models.config import Config
from exl3.models.model import Block, Model
from exl3.nn import MLP, Attention, RMSNorm, Rotary


@dataclass(kw_only=True)
class LlamaConfig(Config):
    pass


def attention(config: Config, layer: int, rotary: Rotary | None, **options: Any) -> Attention:
    """An `Attention` of the config's sizes."""
    c = config
    return Attention(layer, c.hidden_size, c.num_attention_heads, c.kv_heads, c.head_size, rotary, eps=c.rms_norm_eps, **options)


class LlamaBlock(Block):
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(layer)
        self.self_attn = self.make_attention(config, layer, rotaries)
        self.mlp = self.make_mlp(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"])

    def make_mlp(self, config: Any) -> MLP:
        return MLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        self.self_attn(x, batch, norm=self.input_layernorm, residual=x)
        self.mlp(x, norm=self.post_attention_layernorm, residual=x)
        return x


class Llama(Model):
    architectures = ("LlamaForCausalLM",)
    config_class = LlamaConfig
    block_class = LlamaBlock
