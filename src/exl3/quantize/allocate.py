"""Which rate each tensor gets: the budget allocator (quantizer description, section 8.1), half rates and fused groups included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exl3.codec.rings import RATES
from exl3.errors import ArgumentError

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


def mean_bits(specs: Sequence[Spec], rates: dict[str, float], *, padded: bool = True) -> float:
    """Stored trellis bits per weight, counted over stored (padded) or over true weights; scales are left out. 16 counts as 16."""
    bits = sum(rates[s.key] * s.weights for s in specs)
    weights = sum(s.weights if padded else s.in_features * s.out_features for s in specs)
    return bits / weights if weights else 0.0
