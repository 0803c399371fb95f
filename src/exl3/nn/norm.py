"""RMSNorm, and LayerNorm without bias as Cohere uses it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exl3 import ops


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w over the last dimension; with `plus_one` the factor is 1 + w (Gemma).

    `weight` is kept as in the file, `scale` is its fp32 copy with the 1 folded in. `size` is the length normalised.
    """

    scale: Tensor | None
    subtract_mean = False
    tensor_names = ("weight",)  # read from the checkpoint by these names, handed to `set`
    fusable = True  # `ops.linear` can do it on its way in

    def __init__(self, size: int, eps: float, *, plus_one: bool = False) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.plus_one = plus_one
        self.register_buffer("scale", None, persistent=False)
        self.unload()

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}" + (", plus_one" if self.plus_one else "")

    def set(self, weight: Tensor) -> None:
        """Hold `weight` `(size,)` as it is and as fp32 scale."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = weight.float() + 1.0 if self.plus_one else weight.float()

    def unload(self) -> None:
        self.weight = nn.Parameter(torch.empty(self.size, device="meta"), requires_grad=False)
        self.scale = None

    def forward(self, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """x `(rows, size)` -> the same shape in `dtype`."""
        return ops.rms_norm(x, self.scale, self.eps, subtract_mean=self.subtract_mean, dtype=dtype)

    def add_(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual += norm(x), in place; `residual` `(rows, size)` fp32."""
        ops.rms_norm(x, self.scale, self.eps, subtract_mean=self.subtract_mean, out=residual, accumulate=True)
        return residual


class LayerNorm(RMSNorm):
    """y = (x - mean) / sqrt(var + eps) * w, no bias (Cohere)."""

    subtract_mean = True
    fusable = False
