"""ERNIE 4.5, dense: Llama with interleaved rotation."""

from __future__ import annotations

from dataclasses import dataclass

from exl3.models.config import Config
from exl3.models.llama import LlamaBlock
from exl3.models.model import Model
from exl3.nn import Rotary, rope_parameters


@dataclass(kw_only=True)
class Ernie45Config(Config):
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True


class Ernie45(Model):
    architectures = ("Ernie4_5ForCausalLM",)
    config_class = Ernie45Config
    block_class = LlamaBlock

    def make_rotaries(self) -> dict[str, Rotary]:
        return {"default": Rotary(rope_parameters(self.config.raw, theta=5e5), self.config.head_size, interleaved=True)}
