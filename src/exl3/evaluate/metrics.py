"""Numbers from two sets of logits over the same tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.errors import ArgumentError, NumericalError


@dataclass(frozen=True)
class Summary:
    """KL(reference || quantized) in nats over all positions, share of equal argmax, and both perplexities."""

    positions: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    top1: float
    perplexity_reference: float
    perplexity_quantized: float


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(softmax(reference) || softmax(other)) per position, in nats, float64.

    Both are logits `(positions, vocab)`; the softmax runs in float32, the sum over the vocabulary in float64.
    """
    if reference.shape != other.shape:
        raise ArgumentError(f"logits have shapes {tuple(reference.shape)} and {tuple(other.shape)}: not the same vocabulary")
    p = torch.log_softmax(reference.float(), -1)
    q = torch.log_softmax(other.float(), -1)
    return (p.exp() * (p - q)).sum(-1, dtype=torch.float64)


def _quantile(values: Tensor, share: float) -> float:
    """As torch.quantile, which takes no more than 2^24 values; linear between two neighbours."""
    ordered, place = values.sort().values, share * (values.numel() - 1)
    low = int(place)
    high = min(low + 1, values.numel() - 1)
    return float(ordered[low].lerp(ordered[high], place - low))


class Accumulator:
    """Collects rows of logits; `summary()` gives the figures over everything seen."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._agree = 0
        self._positions = 0
        self._nll = [0.0, 0.0]
        self._predicted = 0

    def add(self, reference: Tensor, quantized: Tensor, ids: Tensor) -> None:
        """One row: logits `(tokens, vocab)` of both models and the row's `(tokens,)` ids.

        Every position counts for the divergence; position i predicts ids[i + 1] for the perplexities.
        """
        for name, logits in (("reference", reference), ("quantized", quantized)):
            if not torch.isfinite(logits).all():
                bad = int((~torch.isfinite(logits)).any(-1).nonzero()[0])
                raise NumericalError(f"logits of the {name} model hold NaN or Inf, first at token {bad} of the row (id {int(ids[bad])})")
        self._kl.append(kl_divergence(reference, quantized).cpu())
        self._agree += int((reference.argmax(-1) == quantized.argmax(-1)).sum())
        self._positions += reference.shape[0]
        target = ids[1:].long().to(reference.device)
        for i, logits in enumerate((reference, quantized)):
            nll = torch.nn.functional.cross_entropy(logits[:-1].float(), target, reduction="none")
            self._nll[i] += float(nll.sum(dtype=torch.float64))
        self._predicted += target.numel()

    def summary(self) -> Summary:
        """Figures over all rows added so far."""
        if not self._positions:
            raise ArgumentError("no row was evaluated: the text is shorter than one row")
        kl = torch.cat(self._kl)
        n = max(self._predicted, 1)
        return Summary(
            positions=self._positions,
            kl_mean=float(kl.mean()),
            kl_median=float(kl.median()),
            kl_p99=_quantile(kl, 0.99),
            top1=self._agree / self._positions,
            perplexity_reference=math.exp(min(self._nll[0] / n, 700.0)),
            perplexity_quantized=math.exp(min(self._nll[1] / n, 700.0)),
        )
