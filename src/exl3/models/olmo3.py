"""OLMo 3: OLMo 2 with three windowed layers for each full one; rope scaling (YaRN) in the full ones only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.models.config import layer_kinds
from exl3.models.llama import attention
from exl3.models.model import Model
from exl3.models.olmo2 import Olmo2Block, Olmo2Config
from exl3.nn import Attention, Rotary, rope_parameters


@dataclass(kw_only=True)
class Olmo3Config(Olmo2Config):
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None

    def kind(self, layer: int) -> str:
        return layer_kinds(self, self.layer_types, 4)[layer]


class Olmo3Block(Olmo2Block):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        kind = config.kind(layer)
        window = (config.sliding_window or 0) if kind == "sliding_attention" else 0
        return attention(config, layer, rotaries[kind], window=window, qk_norm="whole")


class Olmo3(Model):
    architectures = ("Olmo3ForCausalLM",)
    config_class = Olmo3Config
    block_class = Olmo3Block

    def make_rotaries(self) -> dict[str, Rotary]:
        raw, head_dim = self.config.raw, self.config.head_size
        local = {**raw, "rope_scaling": None}
        return {
            "full_attention": Rotary(rope_parameters(raw, "full_attention", theta=5e5), head_dim, name="full_attention"),
            "sliding_attention": Rotary(rope_parameters(local, "sliding_attention", theta=5e5), head_dim, name="sliding_attention"),
        }
