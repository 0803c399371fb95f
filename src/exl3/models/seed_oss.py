"""Seed-OSS: Llama with biases at q, k, v (taken from the file)."""

from __future__ import annotations

from dataclasses import dataclass

from exl3.models.config import Config
from exl3.models.llama import LlamaBlock
from exl3.models.model import Model


@dataclass(kw_only=True)
class SeedOssConfig(Config):
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    max_position_embeddings: int = 524288


class SeedOss(Model):
    architectures = ("SeedOssForCausalLM",)
    config_class = SeedOssConfig
    block_class = LlamaBlock
