"""What a conversion will do, from headers alone: which matrices, which rates, how many bytes of disk and memory."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exl3.codec.embedding import EMBEDDING_DIM
from exl3.errors import ArgumentError, ResourceError
from exl3.files import Checkpoint, check_disk
from exl3.models import memory
from exl3.quantize.allocate import Spec, allocate, allocate_budget, allocate_costs, mean_bits
from exl3.quantize.options import ConvertOptions
from exl3.quantize.recipe import Recipe, read_recipe
from exl3.quantize.regularize import padded
from exl3.quantize.sensitivity import Sensitivity, affordable, distortion
from exl3.quantize.tune import HEAD_LOGITS, TuneSettings

RING_RATES = (8, 7, 6, 5, 4)  # for the token embedding, where --total-bits needs it
_MIB = 1 << 20


@dataclass
class Plan:
    """Rates of everything that is quantized."""

    specs: list[Spec]  # of the decoder
    head: Spec
    rates: dict[str, float]  # by key, head included
    embed_bits: int
    total_weights: int  # of the source model
    small_bits: int  # stored bits of everything that is neither matrix nor embedding
    embed_shape: tuple[int, int]  # rows, hidden size
    budget: int | None = None  # trellis bits for the decoder's matrices; None: a recipe fixes the rates

    @property
    def head_bits(self) -> float:
        return self.rates[self.head.key]

    @property
    def bits(self) -> float:
        """Mean over the decoder's matrices, stored weights."""
        return mean_bits(self.specs, self.rates)

    @property
    def ring_weights(self) -> int:
        """Values to encode for a ring-quantized embedding, padding included."""
        return self.embed_shape[0] * -(-self.embed_shape[1] // EMBEDDING_DIM) * EMBEDDING_DIM

    def spend(self, found: dict[str, Sensitivity], options: ConvertOptions) -> None:
        """Rates of least predicted loss within the budget; what -hq promises stays a floor."""
        assert self.budget is not None
        costs = {key: s.cost for key, s in found.items()}
        half = options.half_rates != "never"
        measured = allocate_costs(
            self.specs, self.budget, costs, lambda rate: distortion(options.codebook, rate), codebook=options.codebook, half_rates=half
        )
        floors = {s.key: self.rates[s.key] if options.hq and s.hq_bits else 0 for s in self.specs}
        self.rates |= {key: max(rate, floors[key]) for key, rate in measured.items()}

    def stored_bits(self) -> int:
        """Bits of the result, scales and all."""
        linears = sum(_stored(s, self.rates[s.key]) for s in [*self.specs, self.head])
        return linears + self.small_bits + _embedding_bits(self.embed_shape, self.embed_bits)


def _stored(spec: Spec, rate: float) -> int:
    if rate == 16:
        return 16 * spec.in_features * spec.out_features
    return int(rate * spec.weights) + 16 * (spec.in_padded + spec.out_padded) + 32


def _embedding_bits(shape: tuple[int, int], bits: int) -> int:
    rows, hidden = shape
    if bits == 16:
        return 16 * rows * hidden
    groups = -(-hidden // EMBEDDING_DIM)
    return 16 * groups * (rows * (1 + 16 * bits) + EMBEDDING_DIM)


def specs_of(model: Any) -> tuple[list[Spec], Spec]:
    """(matrices of the decoder in order of execution, the head) of a model, loaded or not."""
    specs: list[Spec] = []
    group_number = 0
    for block in model.blocks:
        for group in block.quant_groups():
            for key, linear in group:
                attention = "attn" in key or "attention" in key
                hq = int(getattr(linear, "hq_bits", 0))
                specs.append(_spec(key, linear.in_features, linear.out_features, block.layer, group_number, attention, hq))
            group_number += 1
    head = _spec(model.head_key, model.lm_head.in_features, model.lm_head.out_features, -1, -1, False, 0)
    return specs, head


def _spec(key: str, n_in: int, n_out: int, layer: int, group: int, attention: bool, hq: int) -> Spec:
    return Spec(key, n_in, n_out, padded(n_in), padded(n_out), layer, group, attention, hq)


def make_plan(model: Any, source: Checkpoint, options: ConvertOptions, used: set[str]) -> Plan:
    """Rates for all matrices; `used`: names of the source tensors that belong to the model. ArgumentError where the target can't be met."""
    specs, head = specs_of(model)
    recipe = read_recipe(options.recipe) if options.recipe else None
    head_bits = options.head_bits if options.head_bits is not None else (recipe.head_bits if recipe and recipe.head_bits else 6)
    embed_bits = options.embed_bits if options.embed_bits is not None else (recipe.embed_bits if recipe and recipe.embed_bits else 16)
    half = options.half_rates != "never"
    embedding = source.embedding(model.embed_key)
    matrices = {f"{s.key}.weight" for s in [*specs, head]}
    small = [source.tensors[n] for n in used if n not in matrices and n not in embedding.names and len(source.tensors[n].shape) < 2]
    widened = sum(16 * (s.out_padded - s.out_features) for s in [*specs, head] if f"{s.key}.bias" in used)  # biases are padded, too
    total = sum(source.tensors[n].numel for n in used)
    plan = Plan(
        specs,
        head,
        {head.key: head_bits},
        int(embed_bits),
        total,
        sum(8 * t.nbytes for t in small) + widened,
        (embedding.rows, embedding.hidden),
    )
    if recipe is not None:
        plan.rates |= _from_recipe(recipe, specs, options)
    elif options.total_bits is not None:
        _meet_total(plan, options, half)
    else:
        assert options.bits is not None
        plan.budget = int(options.bits * sum(s.weights for s in specs))
        plan.rates |= allocate(specs, options.bits, codebook=options.codebook, half_rates=half, hq=options.hq)
    return plan


def _from_recipe(recipe: Recipe, specs: list[Spec], options: ConvertOptions) -> dict[str, float]:
    rates = recipe.rates(specs, options.codebook)
    try:
        ConvertOptions(codebook=options.codebook, head_bits=recipe.head_bits).head_rates_ok()
        ConvertOptions(embed_bits=recipe.embed_bits).embed_rates_ok()  # type: ignore[arg-type]
    except ArgumentError as e:
        raise ArgumentError(f"{recipe.place}: {e}") from None
    return rates


def _meet_total(plan: Plan, options: ConvertOptions, half: bool) -> None:
    """Rates so that all that is stored takes at most total_bits per source weight; a table that starves the decoder is ring-quantized."""
    assert options.total_bits is not None
    allowed = int(options.total_bits * plan.total_weights)
    weights = sum(s.weights for s in plan.specs)
    scales = sum(_stored(s, 0) for s in plan.specs)

    def budget(embed_bits: int) -> int:
        return allowed - plan.small_bits - scales - _stored(plan.head, plan.head_bits) - _embedding_bits(plan.embed_shape, embed_bits)

    choices = [plan.embed_bits, *(r for r in RING_RATES if r < plan.embed_bits)]
    good = [e for e in choices if budget(e) >= 0.9 * options.total_bits * weights]
    plan.embed_bits = good[0] if good else choices[-1]
    plan.budget = budget(plan.embed_bits)
    try:
        plan.rates |= allocate_budget(plan.specs, plan.budget, codebook=options.codebook, half_rates=half, hq=options.hq)
    except ArgumentError:
        least = math.ceil(100 * (weights - budget(plan.embed_bits) + allowed) / plan.total_weights) / 100  # what is told will do
        raise ArgumentError(
            f"total_bits {options.total_bits:g} cannot be met with {plan.head_bits:g} bits for the head and {plan.embed_bits} for the "
            f"embedding: the least is {least:.2f}; allow more, or fewer head_bits"
        ) from None


def check_resources(
    plan: Plan, model: Any, options: ConvertOptions, devices: list[torch.device], work: Path, output: Path, *, resuming: bool = False
) -> None:
    """ResourceError before the first layer when disk or memory will not do."""
    assert options.cal_rows is not None and options.cal_cols is not None
    streams = 4 * options.cal_rows * options.cal_cols * model.config.hidden_size * (2 if options.correction else 1)
    result = plan.stored_bits() // 8
    on_work = result + 2 * streams if not resuming else streams
    if _same_disk(work, output):
        check_disk(output, result + on_work, "the conversion (work folder and result)")
    else:
        check_disk(work, on_work, "the work folder")
        check_disk(output, result, "the result")
    working = {"weights and working copies": working_bytes(plan, model, devices[0])}
    kept = 0  # of the reverse pass that measures sensitivity
    if options.wants_sensitivity and not resuming:
        tokens = affordable(options.sensitivity_tokens(devices[0].type), model, devices[0])
        kept = 4 * tokens * (len(model.blocks) + 2) * model.config.hidden_size
    host = {"calibration streams": max(streams, kept)}  # one after the other
    check_memory(host | working if devices[0].type == "cpu" else host, torch.device("cpu"))
    for device in devices if devices[0].type != "cpu" else []:  # what exceeds it goes into host memory
        check_memory({"a block and its statistics": least_bytes(plan)}, device)
    if options.tune:
        need = {"tuning, original and quantized model": tuning_bytes(plan.total_weights, model, devices[0], options.cal_cols)}
        check_memory(need, devices[0], "Leave --tune out")


def working_bytes(plan: Plan, model: Any, device: torch.device) -> int:
    """Peak bytes beside the streams: a block as stored and in fp32, the next one, copies of the largest group, its Hessian; the head
    likewise."""
    groups: dict[int, int] = {}
    for s in plan.specs:
        groups[s.group] = groups.get(s.group, 0) + s.weights
    layers = max((s.layer for s in plan.specs), default=0) + 1
    block = 12 * sum(s.weights for s in plan.specs) // layers
    largest = max([*groups.values(), plan.head.weights])
    k = max(s.in_padded for s in [*plan.specs, plan.head])
    embedding = 4 * plan.embed_shape[0] * plan.embed_shape[1] if device.type == "cpu" else 0
    return block + 7 * 4 * largest + 6 * 4 * k * k + embedding + memory.workspace_bytes(model)


def least_bytes(plan: Plan) -> int:
    """Bytes without which a card cannot take part: a block as stored and in half precision, the largest Hessian and its parts."""
    layers = max((s.layer for s in plan.specs), default=0) + 1
    k = max(s.in_padded for s in [*plan.specs, plan.head])
    return 6 * sum(s.weights for s in plan.specs) // layers + 3 * 4 * k * k


def tuning_bytes(weights: int, model: Any, device: torch.device, cols: int) -> int:
    """Bytes that --tune takes when all else is done: both models dense, one step's streams in front of every block, a few of its logits."""
    tokens = max(TuneSettings.tokens, cols)
    streams = 4 * tokens * (len(model.blocks) + 4) * model.config.hidden_size
    return 2 * (4 if device.type == "cpu" else 2) * weights + streams + 32 * min(HEAD_LOGITS, tokens * model.config.vocab_size)


def stream_room(plan: Plan, model: Any, device: torch.device) -> int:
    """Bytes of calibration streams that may stay on `device` beside the work; 0 on the CPU, where they are anyway."""
    if device.type == "cpu":
        return 0
    return memory.available_bytes(device) - memory.reserve_bytes(device) - 2 * working_bytes(plan, model, device)


def check_memory(
    parts: dict[str, int], device: torch.device, advice: str = "Use fewer --cal-rows or --cal-cols", what: str = "the conversion"
) -> None:
    have, reserve = memory.available_bytes(device), memory.reserve_bytes(device)
    need = sum(parts.values())
    if need > have - reserve:
        listed = ", ".join(f"{name} {size / _MIB:.0f}" for name, size in parts.items())
        raise ResourceError(
            f"{what} needs {need / _MIB:.0f} MiB of memory on {device} ({listed}); {have / _MIB:.0f} MiB are free, of which "
            f"{reserve / _MIB:.0f} stay in reserve. {advice}" + (", or a smaller EXL3_HOST_MEM_RESERVE_MB" if device.type == "cpu" else "")
        )


def _same_disk(a: Path, b: Path) -> bool:
    def existing(path: Path) -> Path:
        path = path.absolute()
        while not path.exists():
            path = path.parent
        return path

    return os.stat(existing(a)).st_dev == os.stat(existing(b)).st_dev
