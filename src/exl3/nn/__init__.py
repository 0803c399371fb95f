"""Networks in parts: plain `torch.nn.Module`s built on `exl3.ops`. Reading order: linear, norm, embedding, rotary, attention, mlp."""

from exl3.nn.attention import Attention
from exl3.nn.embedding import Embedding
from exl3.nn.linear import Linear, hooked, project, project_out
from exl3.nn.mlp import MLP
from exl3.nn.norm import LayerNorm, RMSNorm
from exl3.nn.rotary import Rotary, rope_parameters

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "Rotary",
    "hooked",
    "project",
    "project_out",
    "rope_parameters",
]
