"""Input statistics of linear layers: H = sum_t w_t x_t x_t^T / sum_t w_t in fp32-grade arithmetic (quantizer description, section 4)."""

from __future__ import annotations

from copy import copy
from functools import cache

import torch
from torch import Tensor

from exl3.errors import NumericalError
from exl3.quantize.regularize import padded
from exl3.quantize.transfer import move

CHUNK = 512  # tokens in one product: tensor cores truncate as they add, 2e-6 over so many; chunks are added with rounding, in order
HOLD = 8  # of so many rows the last is held back


class Hessian:
    """Second moment of one input, and optionally its product with the same input in the original model and with what the residual stream
    lacks at that place.

    `matrix()` is (k, k) with k padded to 128; `cross()` is sum w x_q x_fp^T / sum w, the same shape; `missing()` sum w x_q (r_fp - r_q)^T /
    sum w, (k, hidden), None where the stream was not given. Nothing here but `check`, `usable`, `dead_channels` and `weight` waits for the
    device.
    """

    def __init__(self, name: str, features: int, device: torch.device | str, *, cross: bool = False, hold: int = 0) -> None:
        """`hold`: tokens in a row; one row in `HOLD`, or one chunk if those are longer, is counted apart as well, see `parts`. 0: none."""
        self.name, self.features, self.span = name, features, max(hold, CHUNK)
        self.held = Hessian(name, features, device, cross=cross) if hold else None
        self.sum = torch.zeros(features, features, device=device)
        self.cross_sum = torch.zeros(features, features, device=device) if cross else None
        self.missing_sum: Tensor | None = None
        self.weight_sum = torch.zeros((), dtype=torch.float64, device=device)  # of weighted tokens
        self.unweighted = 0
        self.tokens = 0
        self.peak = torch.zeros(features, device=device)

    def add(self, x: Tensor, x_original: Tensor | None = None, weights: Tensor | None = None, missing: Tensor | None = None) -> None:
        """x: (tokens, features), any float dtype; `weights` (tokens,): importance of each token, 1 without; `missing` (tokens, hidden):
        the original's residual stream less this one's."""
        if missing is not None and self.missing_sum is None:
            self.missing_sum = torch.zeros(self.features, missing.shape[1], device=self.sum.device)
        for start in range(0, x.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            if self.held is not None and (self.tokens + start) // self.span % HOLD == HOLD - 1:
                others = (None if t is None else t[part] for t in (x_original, weights, missing))
                self.held.add(x[part], *others)
            left = x[part] if weights is None else x[part].float() * weights[part].float().unsqueeze(1)
            _accumulate(self.sum, left, x[part])
            if self.cross_sum is not None:
                assert x_original is not None
                _accumulate(self.cross_sum, left, x_original[part])
            if self.missing_sum is not None and missing is not None:
                self.missing_sum.addmm_(left.float().T, missing[part].float())
        low, high = x.aminmax(dim=0)
        self.peak = torch.maximum(self.peak, torch.maximum(high, -low).float())
        if weights is None:
            self.unweighted += x.shape[0]
        else:
            self.weight_sum += weights.sum(dtype=torch.float64)
        self.tokens += x.shape[0]

    def merge(self, other: Hessian) -> None:
        """Adds the statistics of further tokens of the same input, gathered elsewhere."""
        other = other.on(self.sum.device)
        if self.held is not None and other.held is not None:
            self.held.merge(other.held)
        self.sum += other.sum
        if self.cross_sum is not None and other.cross_sum is not None:
            self.cross_sum += other.cross_sum
        if self.missing_sum is not None and other.missing_sum is not None:
            self.missing_sum += other.missing_sum
        self.weight_sum += other.weight_sum
        self.peak = torch.maximum(self.peak, other.peak)
        self.unweighted += other.unweighted
        self.tokens += other.tokens

    def on(self, device: torch.device) -> Hessian:
        """The same statistics on `device`: itself, if they are there."""
        if self.sum.device == device:
            return self
        other = copy(self)
        other.held = None if self.held is None else self.held.on(device)
        for name in ("sum", "cross_sum", "missing_sum", "weight_sum", "peak"):
            value = getattr(self, name)
            setattr(other, name, None if value is None else move(value, device))
        return other

    def parts(self) -> tuple[Hessian, Hessian] | None:
        """(the other tokens, those held back), where both say something."""
        if self.held is None or not self.held.usable or self.held.tokens >= self.tokens:
            return None
        rest = copy(self)
        rest.held = None
        for name in ("sum", "cross_sum", "missing_sum", "weight_sum", "unweighted", "tokens"):
            whole, part = getattr(self, name), getattr(self.held, name)
            setattr(rest, name, whole if whole is None or part is None else whole - part)
        return rest, self.held

    @property
    def weight(self) -> float:
        """Sum of the tokens' weights."""
        return self.unweighted + float(self.weight_sum)

    @property
    def finite(self) -> bool:
        """Whether all inputs were."""
        return bool(torch.isfinite(self.peak).all())

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

    def matrix(self, device: torch.device | None = None) -> Tensor:
        """(k, k) fp32, exactly symmetric, zero rows and columns for padding; on `device`, default where the statistics are."""
        m = self._padded(self.sum if device is None else self.sum.to(device))
        return (m + m.T) / 2

    def cross(self) -> Tensor:
        assert self.cross_sum is not None
        return self._padded(self.cross_sum)

    def missing(self) -> Tensor | None:
        if self.missing_sum is None:
            return None
        rows = torch.nn.functional.pad(self.missing_sum, (0, 0, 0, padded(self.features) - self.features))
        return rows / max(self.weight, 1e-30)

    @property
    def dead_channels(self) -> list[int]:
        """Inputs that were zero for every calibration token."""
        return torch.nonzero(self.peak == 0).flatten().tolist()

    @property
    def usable(self) -> bool:
        """False where calibration says nothing: no tokens, or all inputs (nearly) zero."""
        return self.tokens > 0 and float(self.sum.diagonal().mean()) / max(self.weight, 1e-30) > 1e-20


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left^T right in fp32. Products of half-precision inputs are exact in fp32: tensor cores may make them, one chunk long."""
    half = left.dtype in (torch.float16, torch.bfloat16) and left.dtype == right.dtype
    if half and total.device.type == "cuda" and _half_products():
        torch.addmm(total, left.T, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float().T, right.float())


@cache
def _half_products() -> bool:
    """Whether this torch multiplies half precision into fp32 sums (2.8 and later), in place."""
    try:
        x, total = torch.ones(16, 16, dtype=torch.float16, device="cuda"), torch.ones(16, 16, device="cuda")
        torch.addmm(total, x.T, x, out_dtype=torch.float32, out=total)
        return bool((total == 17).all())
    except (TypeError, RuntimeError):
        return False


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
