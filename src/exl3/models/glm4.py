"""GLM-4 (0414): norms before and after each part, interleaved rotation of half of each head, fused gate_up_proj in the source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl3.models.config import Config
from exl3.models.llama import LlamaBlock
from exl3.models.model import Model
from exl3.nn import RMSNorm, Rotary, rope_parameters


@dataclass(kw_only=True)
class Glm4Config(Config):
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1.5625e-7
    max_position_embeddings: int = 131072


class Glm4Block(LlamaBlock):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(config, layer, rotaries)
        self.post_self_attn_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        self.post_self_attn_layernorm.add_(self.self_attn(x, batch, norm=self.input_layernorm), x)
        self.post_mlp_layernorm.add_(self.mlp(x, norm=self.post_attention_layernorm), x)
        return x


class Glm4(Model):
    architectures = ("Glm4ForCausalLM",)
    config_class = Glm4Config
    block_class = Glm4Block
    gpu_dtype = torch.bfloat16

    def make_rotaries(self) -> dict[str, Rotary]:
        return {"default": Rotary(rope_parameters(self.config.raw, partial=0.5), self.config.head_size, interleaved=True)}
