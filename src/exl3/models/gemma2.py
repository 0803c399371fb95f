"""Gemma 2: norms before and after each part with weights 1 + w, scaled embedding, softcapped scores and logits, every other
layer windowed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from exl3.models.config import Config, layer_kinds
from exl3.models.llama import attention
from exl3.models.model import Block, Model
from exl3.nn import MLP, Attention, Embedding, RMSNorm, Rotary


@dataclass(kw_only=True)
class Gemma2Config(Config):
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    vocab_size: int = 256000
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256.0
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def kind(self, layer: int) -> str:
        return layer_kinds(self, self.layer_types, 2)[layer]

    def window(self, layer: int) -> int:
        """Sliding window of `layer` in tokens, 0: none."""
        return (self.sliding_window or 0) if self.kind(layer) == "sliding_attention" else 0


class Gemma2Block(Block):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(layer)
        c = config
        self.self_attn = self.make_attention(c, layer, rotaries)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, c.hidden_activation)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, plus_one=True)

    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        c = config
        scale, softcap = c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping or 0.0
        return attention(c, layer, rotaries["default"], window=c.window(layer), scale=scale, softcap=softcap)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        self.post_attention_layernorm.add_(self.self_attn(x, batch, norm=self.input_layernorm), x)
        self.post_feedforward_layernorm.add_(self.mlp(x, norm=self.pre_feedforward_layernorm), x)
        return x


class Gemma2(Model):
    architectures: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)
    config_class = Gemma2Config
    block_class: ClassVar[Any] = Gemma2Block
    gpu_dtype = torch.bfloat16

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.logit_softcap = self.config.final_logit_softcapping or 0.0

    def make_embedding(self) -> Embedding:
        return Embedding(self.config.vocab_size, self.config.hidden_size, scale=math.sqrt(self.config.hidden_size))

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, plus_one=True)
