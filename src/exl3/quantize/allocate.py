"""Which rate each tensor gets, half rates and fused groups included: by kind and place (quantizer description, section 8.1) or by
predicted loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from exl3.codec.rings import RATES
from exl3.errors import ArgumentError

_UNITS = 20000
INTEGER_RATES: tuple[float, ...] = tuple(r for r in RATES if r == int(r))


@dataclass(frozen=True)
class Spec:
    """One quantizable matrix of the model: names, sizes, and where it stands."""

    key: str
    in_features: int
    out_features: int
    in_padded: int
    out_padded: int
    layer: int  # -1: the head
    group: int  # members of one group share their input and get one rate
    attention: bool = False
    hq_bits: int = 0  # what -hq adds per step: declared by mixture-of-experts families only

    @property
    def weights(self) -> int:
        """Stored weights, padding included."""
        return self.in_padded * self.out_padded


def rates_for(codebook: str, half_rates: bool) -> tuple[float, ...]:
    return RATES if codebook == "mul1" and half_rates else INTEGER_RATES


def allocate(specs: Sequence[Spec], bits: float, *, codebook: str = "mul1", half_rates: bool = True, hq: int = 0) -> dict[str, float]:
    """-> rate of each key, mean over weights at most `bits` (before `hq` raises floors).

    Every group starts at the largest rate <= bits; then sweeps in order of priority (attention, then the ends of the layer stack inwards)
    promote a group one step where the whole group still fits, until a sweep changes nothing.
    """
    return allocate_budget(specs, int(bits * sum(s.weights for s in specs)), start=bits, codebook=codebook, half_rates=half_rates, hq=hq)


def allocate_budget(
    specs: Sequence[Spec], budget: int, *, start: float | None = None, codebook: str = "mul1", half_rates: bool = True, hq: int = 0
) -> dict[str, float]:
    """As `allocate`, with the budget in stored trellis bits; ArgumentError below the least rate."""
    if not specs:
        return {}
    total = sum(s.weights for s in specs)
    start = budget / total if start is None else start
    rates = rates_for(codebook, half_rates)
    if start < rates[0]:
        raise ArgumentError(
            f"{start:.3f} bits per weight for the decoder's matrices is less than the smallest rate, {rates[0]:g}; allow more bits"
        )
    base = max(r for r in rates if r <= start)
    groups: dict[int, list[Spec]] = {}
    for s in specs:
        groups.setdefault(s.group, []).append(s)
    layers = max(s.layer for s in specs)

    def order(group: int) -> tuple[int, int, int, int]:
        first = groups[group][0]
        priority = (2 + hq * first.hq_bits) if first.attention else 1
        return -priority, min(first.layer, layers - first.layer), first.layer, group

    level = {g: rates.index(base) for g in groups}
    spent = int(base * total)
    changed = True
    while changed:
        changed = False
        for g in sorted(groups, key=order):
            if level[g] + 1 == len(rates):
                continue
            cost = int((rates[level[g] + 1] - rates[level[g]]) * sum(s.weights for s in groups[g]))
            if spent + cost <= budget:
                spent += cost
                level[g] += 1
                changed = True
    result = {s.key: rates[level[g]] for g, members in groups.items() for s in members}
    if hq:
        for s in specs:
            if s.hq_bits:
                floor = min(base + hq * s.hq_bits, rates[-1])
                result[s.key] = max(result[s.key], max(r for r in rates if r <= floor))
    return result


def allocate_costs(
    specs: Sequence[Spec], budget: int, costs: dict[str, float], distortion: Callable[[float], float], *,
    codebook: str = "mul1", half_rates: bool = True, floor: float = 1,
) -> dict[str, float]:  # fmt: skip
    """Rates of least predicted loss sum(costs[key] * distortion(rate)) within `budget` stored trellis bits, one rate a group.

    Exact up to the granularity of the budget: dynamic programming over at most `_UNITS` units, rounded up, then single steps from what
    rounding left over. `floor`: least rate to use. ArgumentError below the least rate.
    """
    rates = [r for r in rates_for(codebook, half_rates) if r >= floor]
    groups: dict[int, list[Spec]] = {}
    for s in specs:
        groups.setdefault(s.group, []).append(s)
    sizes = [sum(s.weights for s in members) for members in groups.values()]
    if budget < rates[0] * sum(sizes):
        raise ArgumentError(
            f"{budget / sum(sizes):.3f} bits per weight for the decoder's matrices is less than the smallest rate, {rates[0]:g}; "
            "allow more bits"
        )
    loss = [[sum(costs[s.key] for s in members) * distortion(r) for r in rates] for members in groups.values()]
    chosen = solve([[r * size for r in rates] for size in sizes], loss, budget)
    return {s.key: rates[c] for members, c in zip(groups.values(), chosen) for s in members}


def solve(cost: Sequence[Sequence[float]], loss: Sequence[Sequence[float]], budget: float) -> list[int]:
    """One choice for each group (rows of `cost` and `loss`) so that the losses' sum is least and the costs' within `budget`.

    Dynamic programming over units of the budget: their common divisor where that is coarse enough, else a share, costs rounded up; then
    single exchanges with what rounding left over. The cheapest choices must fit.
    """
    costs, losses = np.array(cost, dtype=np.float64), np.array(loss, dtype=np.float64)
    above = costs - costs.min(1, keepdims=True)
    spare = budget - float(costs.min(1).sum())
    unit = float(np.gcd.reduce(above.astype(np.int64).ravel())) if (above == np.floor(above)).all() else 0.0
    if unit <= 0 or spare / unit > 2 * _UNITS:
        unit = max(spare / _UNITS, 1e-9)
    width = int(spare / unit) + 1
    need = np.ceil(above / unit - 1e-9).astype(np.int64)
    best = np.zeros(width)
    picked = np.zeros((len(costs), width), dtype=np.uint8)
    for g in range(len(costs)):
        total = np.full((costs.shape[1], width), np.inf)
        for c in range(costs.shape[1]):
            n = int(need[g, c])
            if n < width:
                total[c, n:] = best[: width - n] + losses[g, c]
        picked[g] = total.argmin(0)
        best = total.min(0)
    chosen, place = [0] * len(costs), width - 1
    for g in reversed(range(len(costs))):
        chosen[g] = int(picked[g, place])
        place -= int(need[g, chosen[g]])
    _fill(chosen, above, losses, spare)
    return chosen


def _fill(chosen: list[int], above: Any, losses: Any, spare: float) -> None:
    """Single exchanges that lower the loss within what is left, the most for its cost first."""
    rows = np.arange(len(chosen))
    while True:
        left = spare - above[rows, chosen].sum()
        extra = above - above[rows, chosen][:, None]
        gain = losses[rows, chosen][:, None] - losses
        worth = np.where((extra <= left) & (gain > 0), gain / np.maximum(extra, 1e-9), 0.0)
        g, c = np.unravel_index(int(worth.argmax()), worth.shape)
        if worth[g, c] <= 0:
            return
        chosen[g] = int(c)


def mean_bits(specs: Sequence[Spec], rates: dict[str, float], *, padded: bool = True) -> float:
    """Stored trellis bits per weight, counted over stored (padded) or over true weights; scales are left out. 16 counts as 16."""
    bits = sum(rates[s.key] * s.weights for s in specs)
    weights = sum(s.weights if padded else s.in_features * s.out_features for s in specs)
    return bits / weights if weights else 0.0
