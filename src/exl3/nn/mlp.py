"""MLP: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.errors import UnsupportedError
from exl3.nn.linear import Linear, exl3_weights, project, project_out

# names as config.json spells them -> names of exl3.ops
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def activation(name: str) -> str:
    """The `exl3.ops` name of an activation as config.json spells it."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"config.json: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class MLP(nn.Module):
    """Feed-forward layer. Biases are used where the checkpoint holds them. A fused `gate_up_proj` of the source is split by rows
    gate | up."""

    dtype = torch.float32  # of the intermediate values; the model sets it

    def __init__(self, hidden_size: int, intermediate_size: int, act: str, *, gated: bool = True) -> None:
        super().__init__()
        self.activation = activation(act)
        self.gated = gated
        if gated:
            self.gate_proj = Linear(hidden_size, intermediate_size, fused=("gate_up_proj", 0))
        self.up_proj = Linear(hidden_size, intermediate_size, fused=("gate_up_proj", intermediate_size) if gated else None)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor, *, norm: Any = None, residual: Tensor | None = None) -> Tensor:
        """x `(tokens, hidden_size)`, normalised by `norm` on the way in; the result is added to `residual` where given (fp32)."""
        return project_out(self.inner(x, norm), self.down_proj, residual)

    def inner(self, x: Tensor, norm: Any) -> Tensor:
        """x -> `(tokens, intermediate_size)`, the input of down_proj."""
        if not self.gated:
            (up,) = project(x, (self.up_proj,), norm=norm, dtype=self.dtype)
            return ops.act_mul(up, None, self.activation, self.activation_params())
        pair = (self.gate_proj, self.up_proj)
        weights = exl3_weights(pair)
        if weights and (norm is None or norm.fusable):
            scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
            y: Tensor = ops.linear(x, weights, norm=scale, eps=eps, activation=self.activation, dtype=self.dtype)
            return y
        gate, up = project(x, pair, norm=norm, dtype=self.dtype)
        return ops.act_mul(gate, up, self.activation, self.activation_params())

    def activation_params(self) -> tuple[float, ...] | None:
        """Learned parameters of the activation (Apertus); None for the rest."""
        return None

    def quant_groups(self) -> list[list[Linear]]:
        """Linears the converter quantizes, in order of execution; members of one group share their input."""
        return [[self.gate_proj, self.up_proj] if self.gated else [self.up_proj], [self.down_proj]]
