"""OLMo 2: norms after attention and MLP instead of before, RMSNorm over all heads of q and k at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from exl3.models.config import Config
from exl3.models.llama import attention
from exl3.models.model import Block, Model
from exl3.nn import MLP, Attention, RMSNorm, Rotary


@dataclass(kw_only=True)
class Olmo2Config(Config):
    rms_norm_eps: float = 1e-5


class Olmo2Block(Block):
    """x += norm(attention(x)); x += norm(mlp(x))"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(layer)
        self.self_attn = self.make_attention(config, layer, rotaries)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        return attention(config, layer, rotaries["default"], qk_norm="whole")

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        self.post_attention_layernorm.add_(self.self_attn(x, batch), x)
        self.post_feedforward_layernorm.add_(self.mlp(x), x)
        return x


class Olmo2(Model):
    architectures = ("Olmo2ForCausalLM",)
    config_class = Olmo2Config
    block_class = Olmo2Block
