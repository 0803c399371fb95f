"""One group of matrices that share their input, from weights and statistics to the tensors of the file."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3 import codec
from exl3.codec.codebooks import MULTIPLIERS
from exl3.errors import NumericalError
from exl3.quantize.damping import for_feedback
from exl3.quantize.hessian import Hessian
from exl3.quantize.ldl import Factor, block_ldl, damped
from exl3.quantize.ldlq import Encode, Problem, Solution, ldlq
from exl3.quantize.refit import FP16_MAX, proxy_error, refit_scales, round_scales
from exl3.quantize.regularize import channel_scale, pad_matrix, padded, random_signs, regularize, restore
from exl3.quantize.report import TensorReport
from exl3.quantize.scales import global_scales
from exl3.quantize.twosided import ldlq_two_sided, output_factor

# (tiles, rate, seam window) -> (states, values)
EncodeAt = Callable[[Tensor, float, int], tuple[Tensor, Tensor]]
_QUICK_WINDOW = 32  # seam window of the scale search


@dataclass
class Settings:
    """What of the options concerns one group."""

    codebook: str = "mul1"
    damping: float = 0.025
    choose_damping: bool = False  # on tokens held back, among multiples of `damping`
    scaled_hessian: bool = True
    seam_window: int = 0
    search_scale: bool = False
    refit_rounds: int = 2
    seed: int = 0


@dataclass
class Member:
    """One matrix of a group: `weight` (out, in) as in Hugging Face files, or the corrected target in the same orientation."""

    key: str
    weight: Tensor
    rate: float
    bias: Tensor | None = None
    out_scales: bool = True
    channels: Tensor | None = None  # importance of the output channels; decides the output scales where given
    output: Tensor | None = None  # (out, out): how the loss couples the outputs; makes the feedback two-sided


@dataclass
class Quantized:
    """Tensors of one EXL3 matrix under their names in the file, and what happened on the way."""

    tensors: dict[str, Tensor]  # on the device
    report: TensorReport
    weight: Tensor  # (out, in) fp32 on the device, dequantized as the file will give it


@dataclass
class Group:
    """Matrices that share their input, and its statistics (None or unusable: no error feedback, refit with H = I)."""

    name: str  # of the input: its signs come from it
    members: list[Member]
    hessian: Hessian | None


@dataclass
class Work:
    """A matrix on its way."""

    member: Member
    matrix: Tensor  # (k, k), original basis
    calibrated: bool
    reached: bool  # by calibration tokens
    target: Tensor  # (k, n) fp32, padded
    signs: Tensor  # of the input
    rotated: Tensor | None  # (k, n) fp32, until it goes into the recursion
    suh: Tensor
    svh: Tensor
    output: Tensor | None = None  # (n, n), original basis
    factor: Factor | None = None  # without its matrix once the recursion has it
    scale: float = 1.0
    searched: bool = False
    states: Tensor | None = None
    values: Tensor | None = None
    errors: Tensor | None = None  # proxy error, weight error

    def problem(self) -> Problem:
        """What the recursion needs, given away: large matrices live no longer than needed."""
        assert self.rotated is not None
        right = None if self.output is None else output_factor(self.output, self.svh)
        problem = Problem(self.rotated, None if self.factor is None else self.factor.lower, right)
        self.rotated = None
        if self.factor is not None:
            self.factor = dataclasses.replace(self.factor, lower=torch.empty(0))
        return problem


def quantize_groups(
    groups: list[Group], encode: EncodeAt, settings: Settings, progress: Callable[[int], None] | None = None
) -> list[Quantized]:
    """Quantizes the matrices of all groups, on the device of the weights; results in the order given.

    Matrices of one rate run in step, so that an encoder call serves all of them; what a matrix becomes doesn't depend on the others.
    """
    started = time.monotonic()
    work = prepare(groups, encode, settings)
    for w, solution in zip(work, solve([(w.problem(), w.member.rate) for w in work], encode, settings, progress)):
        w.states, w.values = solution.states, solution.values
    return finish(work, settings, started)


def prepare(groups: list[Group], encode: EncodeAt, settings: Settings) -> list[Work]:
    """Matrices regularised, scaled and with their factors, ready for the recursion."""
    by_group = [_regularize(group, settings) for group in groups]
    work = [w for members in by_group for w in members]
    _check_ranges(work)
    for group, members in zip(groups, by_group):
        _factor(members, group.hessian, settings)
    for rate in dict.fromkeys(w.member.rate for w in work):
        _scale([w for w in work if w.member.rate == rate], encode, settings)
    return work


def solve(
    problems: list[tuple[Problem, float]], encode: EncodeAt, settings: Settings, progress: Callable[[int], None] | None = None
) -> list[Solution]:
    """The recursion for matrices with their rates, those of one rate and kind in step; solutions in the order given. Empties `problems`."""
    found: dict[int, Solution] = {}
    left = dict(enumerate(problems))
    problems.clear()
    for rate, two_sided in dict.fromkeys((r, p.right is not None) for p, r in left.values()):
        indices = [i for i, (p, r) in left.items() if (r, p.right is not None) == (rate, two_sided)]
        recursion = ldlq_two_sided if two_sided else ldlq
        solutions = recursion([left.pop(i)[0] for i in indices], _bound(encode, rate, settings.seam_window), progress)
        found |= zip(indices, solutions)
    return [found[i] for i in sorted(found)]


def finish(work: list[Work], settings: Settings, started: float) -> list[Quantized]:
    """Tensors and reports of solved matrices; `started`: time.monotonic() when work on them began."""
    results = [_finish(w, settings) for w in work]
    _report(work, results, time.monotonic() - started)
    return results


def _regularize(group: Group, settings: Settings) -> list[Work]:
    """Regularised matrices."""
    members, hessian = group.members, group.hessian
    calibrated = hessian is not None and hessian.usable
    k = padded(members[0].weight.shape[1])
    device = members[0].weight.device
    matrix = hessian.matrix(device) if calibrated and hessian is not None else torch.eye(k, device=device)
    signs = random_signs(f"{group.name}:in", k, settings.seed).to(device)
    work = []
    for m in members:
        target = pad_matrix(m.weight.float().T)
        out_signs = random_signs(f"{m.key}:out", target.shape[1], settings.seed).to(device)
        scale = None if m.channels is None else channel_scale(target, m.channels)
        reg = regularize(target, signs, out_signs, out_scales=m.out_scales, scale=scale)
        output = None if m.output is None else pad_matrix(m.output.to(device).float())
        reached = hessian is None or hessian.tokens > 0
        work.append(Work(m, matrix, calibrated, reached, target, signs, reg.rotated, reg.suh, reg.svh, output))
    return work


def _factor(work: list[Work], hessian: Hessian | None, settings: Settings) -> None:
    """Factors of the matrices of one group: one each where it sees the rows' scales, else one for all."""
    shared: Factor | None = None
    damping = settings.damping
    if hessian is not None and work[0].calibrated:
        damping = for_feedback(hessian, work[0].suh if settings.scaled_hessian else work[0].signs, damping)
    for w in work if work[0].calibrated else []:
        if settings.scaled_hessian:
            w.factor = block_ldl(w.matrix, damping, w.suh, name=w.member.key)
        else:
            w.factor = shared = shared or block_ldl(w.matrix, damping, w.signs, name=w.member.key)


def _scale(work: list[Work], encode: EncodeAt, settings: Settings) -> None:
    """Brings matrices of one rate to their size in codebook units."""
    rate = work[0].member.rate
    quick = _bound(encode, rate, _QUICK_WINDOW)
    rotated = [w.rotated for w in work if w.rotated is not None]
    scales = global_scales(rotated, settings.codebook, rate, quick, always_search=settings.search_scale)
    for w, (g, searched) in zip(work, scales):
        w.suh.div_(g)
        w.scale, w.searched = g, searched
        if w.rotated is not None:
            w.rotated.mul_(g)


def _bound(encode: EncodeAt, rate: float, seam_window: int) -> Encode:
    return lambda tiles: encode(tiles, rate, seam_window)


def _check_ranges(work: list[Work]) -> None:
    """NumericalError where a matrix is too large or too uneven for the file's fp16 scales."""
    largest = torch.stack([torch.maximum(w.suh.abs().max(), w.svh.abs().max()) for w in work]).tolist()
    for w, value in zip(work, largest):
        if not value < FP16_MAX / 4:  # also NaN; the refit moves scales a little
            raise NumericalError(
                f"{w.member.key}: weights need a channel scale of {value:.3g}, more than fp16 holds; rescale the source model"
            )


def _finish(w: Work, settings: Settings) -> Quantized:
    """Scales refitted, trellis packed; waits for nothing."""
    assert w.states is not None and w.values is not None
    used = 0.0 if w.factor is None else w.factor.damping
    if settings.refit_rounds:
        metric = damped(w.matrix, used) if w.calibrated else w.matrix
        suh16, svh16 = refit_scales(w.values, w.suh, w.svh, w.target, metric, w.output, rounds=settings.refit_rounds)
        del metric
    else:
        suh16, svh16 = round_scales(w.suh), round_scales(w.svh)
    dequantized = restore(w.values, suh16, svh16)
    error = dequantized - w.target
    lost = (error.square().sum() / w.target.square().sum().clamp_min(1e-30)).double()
    w.errors = torch.stack([proxy_error(error, w.target, w.matrix), lost])
    key, rate = w.member.key, w.member.rate
    tensors = {f"{key}.suh": suh16, f"{key}.svh": svh16, f"{key}.trellis": codec.pack(w.states, int(rate) if rate == int(rate) else rate)}
    if settings.codebook != "3inst":
        multiplier = MULTIPLIERS[settings.codebook]
        tensors[f"{key}.{settings.codebook}"] = torch.tensor(multiplier - (1 << 32) if multiplier >> 31 else multiplier, dtype=torch.int32)
    if w.member.bias is not None:
        bias = w.member.bias.float()
        tensors[f"{key}.bias"] = torch.nn.functional.pad(bias, (0, w.target.shape[1] - bias.shape[0])).half()
    report = TensorReport(
        key=key,
        bits=rate,
        shape=(w.member.weight.shape[1], w.member.weight.shape[0]),
        proxy_error=0.0,
        weight_error=0.0,
        scale=w.scale,
        scale_searched=w.searched,
        out_scales=w.member.out_scales,
        damping=used,
        retries=0 if w.factor is None else w.factor.retries,
        calibrated=w.calibrated,
        unreached=not w.reached,
        seconds=0.0,
    )
    n_in, n_out = report.shape
    w.states = w.values = None
    return Quantized(tensors, report, dequantized[:n_in, :n_out].T)


def _report(work: list[Work], results: list[Quantized], seconds: float) -> None:
    """What the device found out, fetched at once; time by size, for the matrices were worked on together."""
    total = sum(w.target.numel() for w in work)
    errors = torch.stack([w.errors for w in work if w.errors is not None]).tolist()
    for w, result, (proxy, weight) in zip(work, results, errors):
        result.report.proxy_error, result.report.weight_error = proxy, weight
        result.report.seconds = seconds * w.target.numel() / total
