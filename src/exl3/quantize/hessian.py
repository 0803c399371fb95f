"""Input statistics of linear layers: H = sum_t w_t x_t x_t^T / sum_t w_t in fp32-grade arithmetic (quantizer description, section 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.errors import NumericalError
from exl3.quantize.regularize import padded

CHUNK = 2048  # tokens in one product; the sums of chunks are added in order, so the result doesn't depend on how many devices worked


class Hessian:
    """Second moment of one input, and optionally its product with the same input in the original model.

    `matrix()` is (k, k) with k padded to 128; `cross()` is sum w x_q x_fp^T / sum w, the same shape.
    """

    def __init__(self, name: str, features: int, device: torch.device | str, *, cross: bool = False) -> None:
        self.name, self.features = name, features
        self.sum = torch.zeros(features, features, device=device)
        self.cross_sum = torch.zeros(features, features, device=device) if cross else None
        self.weight = 0.0
        self.tokens = 0
        self.peak = torch.zeros(features, device=device)

    def add(self, x: Tensor, x_original: Tensor | None = None, weights: Tensor | None = None) -> None:
        """x: (tokens, features), any float dtype; `weights` (tokens,): importance of each token, 1 without."""
        for start in range(0, x.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            self._add(
                x[part].float(),
                None if x_original is None else x_original[part].float(),
                None if weights is None else weights[part].float(),
            )

    def _add(self, x: Tensor, x_original: Tensor | None, weights: Tensor | None) -> None:
        scaled = x if weights is None else x * weights.unsqueeze(1)
        self.sum.addmm_(scaled.T, x)
        if self.cross_sum is not None:
            assert x_original is not None
            self.cross_sum.addmm_(scaled.T, x_original)
        self.peak = torch.maximum(self.peak, x.abs().amax(0))
        self.weight += x.shape[0] if weights is None else float(weights.sum())
        self.tokens += x.shape[0]

    def check(self) -> None:
        """NumericalError where the sum overflowed or holds NaN."""
        if not bool(torch.isfinite(self.sum.diagonal()).all()):
            channel = int((~torch.isfinite(self.sum.diagonal())).nonzero()[0])
            raise NumericalError(
                f"{self.name}: the input statistics of channel {channel} are not finite; the activations overflow or hold NaN"
            )

    def _padded(self, matrix: Tensor) -> Tensor:
        extra = padded(self.features) - self.features
        return torch.nn.functional.pad(matrix / max(self.weight, 1e-30), (0, extra, 0, extra))

    def matrix(self) -> Tensor:
        """(k, k) fp32, exactly symmetric, zero rows and columns for padding."""
        m = self._padded(self.sum)
        return (m + m.T) / 2

    def cross(self) -> Tensor:
        assert self.cross_sum is not None
        return self._padded(self.cross_sum)

    @property
    def dead_channels(self) -> list[int]:
        """Inputs that were zero for every calibration token."""
        return torch.nonzero(self.peak == 0).flatten().tolist()

    @property
    def usable(self) -> bool:
        """False where calibration says nothing: no tokens, or all inputs (nearly) zero."""
        return self.tokens > 0 and float(self.sum.diagonal().mean()) / max(self.weight, 1e-30) > 1e-20


def check_activations(x: Tensor, layer: str, tensor: str, first_row: int = 0) -> None:
    """NumericalError naming layer, tensor, row and first value if `x` (rows, tokens, features) or (tokens, features) isn't finite."""
    if bool(torch.isfinite(x).all()):
        return
    bad = (~torch.isfinite(x)).nonzero()[0].tolist()
    value = float(x[tuple(bad)])
    if x.dim() == 3:
        place = f"calibration row {first_row + bad[0]}, token {bad[1]}, channel {bad[2]}"
    else:
        place = f"token {first_row + bad[0]}, channel {bad[1]}"
    raise NumericalError(f"layer {layer}, input of {tensor}: {value} at {place}; the activations overflow or the source files are damaged")


def check_weights(w: Tensor, name: str) -> None:
    """NumericalError naming tensor, row, column and value if the weight `(out, in)` isn't finite."""
    if bool(torch.isfinite(w).all()):
        return
    row, column = (~torch.isfinite(w)).nonzero()[0].tolist()
    raise NumericalError(
        f"{name}.weight: {float(w[row, column])} in row {row}, column {column}; the source file is damaged, download it again"
    )
