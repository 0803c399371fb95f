"""Phi-3 and Phi-4: Llama with fused qkv_proj and gate_up_proj in the source, longrope, partial rotation, optional sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from exl3.models.config import Config
from exl3.models.mistral import MistralBlock
from exl3.models.model import Model
from exl3.nn import Rotary, rope_parameters


@dataclass(kw_only=True)
class Phi3Config(Config):
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    sliding_window: int | None = None


class Phi3(Model):
    architectures = ("Phi3ForCausalLM",)
    config_class = Phi3Config
    block_class = MistralBlock

    def make_rotaries(self) -> dict[str, Rotary]:
        settings = rope_parameters(self.config.raw)
        if settings["rope_type"] == "yarn":  # what the first files called longrope
            settings["rope_type"] = "longrope"
        return {"default": Rotary(settings, self.config.head_size)}
