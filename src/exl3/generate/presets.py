"""Samplers by name, each a `CustomSampler` with its steps filled in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from exl3.generate.arguments import number
from exl3.generate.sampling import (
    NO_RANGE,
    SS_DRY,
    SS_XTC,
    CustomSampler,
    SS_AdaptiveP,
    SS_Argmax,
    SS_Base,
    SS_LogitBias,
    SS_MinP,
    SS_PresFreqP,
    SS_RepP,
    SS_Sample,
    SS_Temperature,
    SS_TopK,
    SS_TopP,
)


class ArgmaxSampler(CustomSampler):
    """Always the most likely token."""

    def __init__(self) -> None:
        super().__init__([SS_Argmax()])


GreedySampler = ArgmaxSampler


class DefaultSampler(CustomSampler):
    """min-p 0.08, then temperature 0.8."""

    def __init__(self) -> None:
        super().__init__([SS_MinP(0.08), SS_Temperature(0.8), SS_Sample()])


class CategoricalSampler(CustomSampler):
    """The model's own distribution at a temperature."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__([SS_Temperature(temperature), SS_Sample()] if number("temperature", temperature) > 0 else [SS_Argmax()])


GumbelSampler = CategoricalSampler


class TopKSampler(CustomSampler):
    """Top-k, then temperature."""

    def __init__(self, top_k: int, temperature: float = 1.0) -> None:
        temperature = number("temperature", temperature)
        super().__init__([SS_TopK(top_k), SS_Temperature(temperature), SS_Sample()] if temperature > 0 else [SS_Argmax()])


class TopPSampler(CustomSampler):
    """Top-p after temperature, or before it with `temperature_last`."""

    def __init__(self, top_p: float, temperature: float = 1.0, temperature_last: bool = False) -> None:
        if number("temperature", temperature) <= 0:
            super().__init__([SS_Argmax()])
        elif temperature_last:
            super().__init__([SS_TopP(top_p), SS_Temperature(temperature), SS_Sample()])
        else:
            super().__init__([SS_Temperature(temperature), SS_TopP(top_p), SS_Sample()])


class AdaptivePSampler(CustomSampler):
    """min-p, then adaptive-p."""

    def __init__(self, min_p: float = 0.08, target: float = 0.5, decay: float = 0.9) -> None:
        super().__init__([SS_MinP(min_p), SS_AdaptiveP(target, decay)])


class ComboSampler(CustomSampler):
    """Every step of the incumbent in its order: bias, repetition, presence/frequency, DRY, (temperature), min-p, top-k, top-p, (temperature
    last), then XTC where asked, then adaptive-p or a draw. A temperature of 0 is greedy after bias, bans and penalties."""

    def __init__(
        self,
        rep_p: float = 1.0,
        freq_p: float = 0.0,
        pres_p: float = 0.0,
        rep_sustain_range: int = NO_RANGE,
        rep_decay_range: int = 0,
        dry_multiplier: float = 0.0,
        dry_base: float = 1.75,
        dry_allowed_length: int = 2,
        dry_range: int = 0,
        dry_sequence_breakers: Iterable[int] | None = None,
        temperature: float = 1.0,
        min_p: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        temp_last: bool = False,
        adaptive_target: float = 1.0,
        adaptive_decay: float = 0.9,
        logit_bias: Mapping[int, float] | None = None,
        xtc_probability: float = 0.0,
        xtc_threshold: float = 0.1,
        tokenizer: Any = None,
    ) -> None:
        steps: list[SS_Base] = [
            SS_LogitBias(logit_bias or {}),
            SS_RepP(rep_p, rep_sustain_range, rep_decay_range),
            SS_PresFreqP(pres_p, freq_p, rep_sustain_range, rep_decay_range),
            SS_DRY(dry_multiplier, dry_base, dry_allowed_length, dry_range, dry_sequence_breakers, tokenizer),
        ]
        if number("temperature", temperature) <= 0:
            super().__init__([*steps, SS_Argmax()])
            return
        if not temp_last:
            steps.append(SS_Temperature(temperature))
        steps += [SS_MinP(min_p), SS_TopK(top_k), SS_TopP(top_p)]
        if temp_last:
            steps.append(SS_Temperature(temperature))
        steps += [SS_XTC(xtc_probability, xtc_threshold, None, tokenizer), SS_AdaptiveP(adaptive_target, adaptive_decay)]
        super().__init__(steps)
