"""Gemma 3, text: Gemma 2 with RMSNorm over each head of q and k, five windowed layers for each full one, and a rope of its own
for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exl3.errors import UnsupportedError
from exl3.models.config import layer_kinds
from exl3.models.gemma2 import Gemma2, Gemma2Block, Gemma2Config
from exl3.models.llama import attention
from exl3.nn import Attention, Rotary, rope_parameters


@dataclass(kw_only=True)
class Gemma3Config(Gemma2Config):
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    use_bidirectional_attention: bool = False

    def kind(self, layer: int) -> str:
        return layer_kinds(self, self.layer_types, self.sliding_window_pattern)[layer]


class Gemma3Block(Gemma2Block):
    def make_attention(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> Attention:
        c = config
        scale, softcap = c.query_pre_attn_scalar**-0.5, c.attn_logit_softcapping or 0.0
        rotary = rotaries[c.kind(layer)]
        return attention(c, layer, rotary, window=c.window(layer), scale=scale, softcap=softcap, qk_norm="head", plus_one=True)


class Gemma3(Gemma2):
    architectures = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
    config_class = Gemma3Config
    block_class = Gemma3Block
    layouts = (
        ("model", "lm_head"),
        ("language_model.model", "language_model.lm_head"),
        ("model.language_model", "lm_head"),
        ("", "lm_head"),
    )
    other_parts = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")

    @classmethod
    def read_config(cls, config: dict[str, Any]) -> Any:
        text = config.get("text_config")
        made = super().read_config(config if text is None else {**text, "architectures": config.get("architectures")})
        if made.use_bidirectional_attention:
            raise UnsupportedError("config.json: use_bidirectional_attention (an embedding model) is not supported; use a causal Gemma 3")
        return made

    def make_rotaries(self) -> dict[str, Rotary]:
        raw, head_dim = self.config.raw, self.config.head_size
        local = {**raw, "rope_scaling": None, "rope_theta": raw.get("rope_local_base_freq")}  # scaling is for full layers only
        return {
            "full_attention": Rotary(rope_parameters(raw, "full_attention", theta=1e6), head_dim, name="full_attention"),
            "sliding_attention": Rotary(rope_parameters(local, "sliding_attention"), head_dim, name="sliding_attention"),
        }
