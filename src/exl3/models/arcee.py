"""Arcee (AFM): Llama with an MLP without a gate and squared ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.models.config import Config
from exl3.models.llama import LlamaBlock
from exl3.models.model import Model
from exl3.nn import MLP


@dataclass(kw_only=True)
class ArceeConfig(Config):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "relu2"
    max_position_embeddings: int = 4096


class ArceeBlock(LlamaBlock):
    def make_mlp(self, config: Any) -> MLP:
        return MLP(config.hidden_size, config.intermediate_size, config.hidden_act, gated=False)


class Arcee(Model):
    architectures = ("ArceeForCausalLM",)
    config_class = ArceeConfig
    block_class = ArceeBlock
