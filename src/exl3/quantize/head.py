"""The head in a conversion: statistics of its input from all devices, the matrix itself on the lead's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from exl3.files import Checkpoint
from exl3.quantize.block import capture, corrected
from exl3.quantize.hessian import Hessian, check_activations
from exl3.quantize.linear import EncodeAt, Group, Member, Settings
from exl3.quantize.report import TensorReport
from exl3.quantize.team import Team, Worker
from exl3.quantize.together import Wanted, quantize_together


def quantize_head(
    team: Team,
    source: Checkpoint,
    bits: float,
    out_scales: bool,
    settings: Settings,
    encode: EncodeAt,
    progress: Callable[[int], None],
    *,
    correction: float = 0.0,
) -> tuple[dict[str, Tensor], TensorReport]:
    """Tensors of the head at `bits` and its report; the lead's model has it loaded. `correction`: see `block.corrected`."""
    lead = team.lead.model
    head, key = lead.lm_head, lead.head_key
    for w in team.workers[1:]:
        w.model.load_modules({f"{w.model.decoder_key}norm": w.model.model.norm}, source, w.device)
    total: Hessian | None = None
    for part in team.over_shards(
        lambda w, number: w.streams.within_memory(lambda: _shard(w, number, key, head.in_features, correction > 0, settings.choose_damping))
    ):
        if total is None:
            total = part.on(team.lead.device)
        else:
            total.merge(part)
    assert total is not None
    if not total.finite:
        for _ in team.over_shards(lambda w, number: _look(w, number, key)):
            pass
    total.check()

    def build(_: Worker, job: Wanted, keys: list[str], hessian: Hessian) -> Group:
        bias = None if head.bias is None else head.bias.data
        return Group(
            job.name,
            [Member(k, corrected(head.weight.data, hessian, correction, settings.damping), bits, bias, out_scales) for k in keys],
            hessian,
        )

    job = Wanted(key, [key], [(head.in_features, head.out_features)], total)
    [(_, q)] = quantize_together(team, [job], build, encode, settings, progress, lead=True)
    return q.tensors, q.report


def _input(w: Worker, x: Tensor, batch: Any) -> Tensor:
    return capture(w.model.head, w.model.lm_head, x, batch)


def _shard(w: Worker, number: int, key: str, features: int, cross: bool, hold: bool) -> Hessian:
    hessian = Hessian(key, features, w.device, cross=cross, hold=w.streams.shards[number].quantized.shape[1] if hold else 0)
    for _, batch, x, original in w.streams.batches(number):
        other = _input(w, original, batch) if cross and original is not None else None
        hessian.add(_input(w, x, batch), other)
    return hessian


def _look(w: Worker, number: int, key: str) -> None:
    """NumericalError with the place of an input that is not finite."""
    first = w.streams.shards[number].first_row
    for row, batch, x, _ in w.streams.batches(number):
        seen = _input(w, x, batch)
        check_activations(seen.view(batch.rows, -1, seen.shape[1]), "head", key, first + row)
