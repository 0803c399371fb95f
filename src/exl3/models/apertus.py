"""Apertus: Llama with RMSNorm over each head of q and k, and an MLP without a gate and xIELU with learned slopes (arXiv 2411.13010)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import softplus

from exl3.models.config import Config
from exl3.models.llama import attention
from exl3.models.model import Block, Model
from exl3.nn import MLP, RMSNorm, Rotary, rope_parameters

# the rope of a config that says nothing about it
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(kw_only=True)
class ApertusConfig(Config):
    rms_norm_eps: float = 1e-5
    hidden_act: str = "xielu"
    max_position_embeddings: int = 65536


class XIELU(nn.Module):
    """Holds the parameters of xIELU as numbers: alpha_p, alpha_n (the slopes after softplus), beta, eps."""

    tensor_names: ClassVar[tuple[str, ...]] = ("alpha_p", "alpha_n")
    optional_names: ClassVar[tuple[str, ...]] = ("beta", "eps")

    def __init__(self) -> None:
        super().__init__()
        self.params: tuple[float, ...] | None = None

    def set(self, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor | None = None, eps: Tensor | None = None) -> None:
        """Take the tensors of the checkpoint; alphas are stored before softplus, and beta is added to the negative one."""
        b = 0.5 if beta is None else float(beta)
        p, n = float(softplus(alpha_p.double())), b + float(softplus(alpha_n.double()))
        self.params = (p, n, b, -1e-6 if eps is None else float(eps))

    def unload(self) -> None:
        self.params = None


class ApertusMLP(MLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.intermediate_size, config.hidden_act, gated=False)
        self.act_fn = XIELU() if self.activation == "xielu" else None

    def activation_params(self) -> tuple[float, ...] | None:
        return None if self.act_fn is None else self.act_fn.params


class ApertusBlock(Block):
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(self, config: Any, layer: int, rotaries: dict[str, Rotary]) -> None:
        super().__init__(layer)
        self.self_attn = attention(config, layer, rotaries["default"], qk_norm="head")
        self.mlp = ApertusMLP(config)
        self.attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        self.self_attn(x, batch, norm=self.attention_layernorm, residual=x)
        self.mlp(x, norm=self.feedforward_layernorm, residual=x)
        return x


class Apertus(Model):
    architectures = ("ApertusForCausalLM",)
    config_class = ApertusConfig
    block_class = ApertusBlock

    def make_rotaries(self) -> dict[str, Rotary]:
        raw = self.config.raw
        if not raw.get("rope_parameters") and "rope_scaling" not in raw and "rope_theta" not in raw:
            raw = {**raw, "rope_parameters": ROPE}
        return {"default": Rotary(rope_parameters(raw, theta=12e6), self.config.head_size)}
