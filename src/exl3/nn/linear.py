"""Linear: one matrix, dense or EXL3, and the two ways a block uses it: a group that shares its input, an output added to the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.errors import ArgumentError


class Linear(nn.Module):
    """y = x @ W + b with true sizes `(rows, in_features)` -> `(rows, out_features)`.

    Holds either a dense `weight` `(out_features, in_features)` with an optional fp32 `bias`, or an EXL3 matrix `exl3`
    (an `ops.Weight`, which carries its own bias). Built empty on the meta device; `set_dense` or `set_exl3` fills it.
    `fused` names a tensor of the source that holds this matrix among others: (its name beside this one's, first row).
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, fused: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.fused = fused
        self.exl3: ops.Weight | None = None
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        self.unload()

    def extra_repr(self) -> str:
        kind = f"EXL3 K={self.exl3.K}" if self.exl3 is not None else "dense" if self.loaded else "empty"
        return f"{self.in_features}, {self.out_features}, {kind}"

    @property
    def loaded(self) -> bool:
        return self.exl3 is not None or (self.weight is not None and not self.weight.is_meta)

    def set_dense(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hold `weight` `(out_features, in_features)` in its own dtype; `bias` `(out_features,)` is kept as fp32."""
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise ArgumentError(f"dense weight has shape {tuple(weight.shape)}, this Linear needs {(self.out_features, self.in_features)}")
        self.exl3 = None
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.float(), requires_grad=False)

    def set_exl3(self, weight: ops.Weight) -> None:
        """Hold an EXL3 matrix; the dense weight and bias, if any, are dropped (the bias lives in `weight`)."""
        if (weight.in_features, weight.out_features) != (self.in_features, self.out_features):
            raise ArgumentError(
                f"EXL3 weight is {weight.in_features} x {weight.out_features}, this Linear needs {self.in_features} x {self.out_features}"
            )
        self.exl3 = weight
        self.weight = None
        self.bias = None

    def unload(self) -> None:
        """Back to an empty matrix on the meta device."""
        self.exl3 = None
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, device="meta"), requires_grad=False)
        self.bias = None

    def forward(self, x: Tensor, *, out: Tensor | None = None, accumulate: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """x `(rows, in_features)` -> `(rows, out_features)` of `dtype`; `accumulate` adds into fp32 `out`."""
        if self.exl3 is not None:
            y: Tensor = ops.linear(x, self.exl3, out=out, accumulate=accumulate, dtype=dtype)
            return y
        assert self.weight is not None
        return ops.dense(x, self.weight, self.bias, out=out, accumulate=accumulate, dtype=dtype)


def hooked(module: nn.Module) -> bool:
    """Whether calling `module` runs hooks, so that a fused call would bypass them."""
    return bool(module._forward_pre_hooks or module._forward_hooks)


def exl3_weights(linears: Sequence[Linear]) -> tuple[ops.Weight, ...]:
    """The weights of `linears` if one `ops.linear` call may stand for all of them, else none."""
    weights = tuple([linear.exl3 for linear in linears if linear.exl3 is not None and not hooked(linear)])
    return weights if len(weights) == len(linears) else ()


def project(
    x: Tensor,
    linears: Sequence[Linear],
    *,
    norm: Any = None,
    dtype: torch.dtype,
    norm_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Every one of `linears` applied to norm(x), `(rows, in_features)` each, results of `dtype`; `out`: where that of a single one goes.

    One native call with one input rotation and the RMSNorm inside where all are EXL3; one by one, through their hooks,
    otherwise; then norm(x) is rounded to `norm_dtype` (default: `dtype`) in between.
    """
    weights = exl3_weights(linears)
    if weights and (norm is None or norm.fusable):
        scale, eps = (None, 0.0) if norm is None else (norm.scale, norm.eps)
        into = None if out is None else (out,)
        results: tuple[Tensor, ...] = ops.linear(x, weights, norm=scale, eps=eps, out=into, dtype=dtype)
        return results
    if norm is not None:
        x = norm(x, dtype=norm_dtype or dtype)
    return tuple(linear(x, out=out, dtype=dtype) for linear in linears)


def project_out(x: Tensor, linear: Linear, residual: Tensor | None) -> Tensor:
    """linear(x) in fp32: added in place to `residual` where given (and that returned), else a new tensor."""
    if residual is None:
        y: Tensor = linear(x, dtype=torch.float32)
        return y
    if linear._forward_hooks:  # an output hook is to see the product, not the stream
        ops.add_(residual, linear(x, dtype=torch.float32))
    else:
        linear(x, out=residual, accumulate=True)
    return residual
