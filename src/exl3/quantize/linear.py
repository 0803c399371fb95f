"""One group of matrices that share their input, from weights and statistics to the tensors of the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3 import codec
from exl3.codec.codebooks import MULTIPLIERS
from exl3.errors import NumericalError
from exl3.quantize.hessian import Hessian
from exl3.quantize.ldl import Factor, block_ldl, damped
from exl3.quantize.ldlq import Encode, Problem, ldlq
from exl3.quantize.refit import FP16_MAX, proxy_error, refit_scales, round_scales
from exl3.quantize.regularize import Regularized, padded, random_signs, regularize, restore
from exl3.quantize.report import TensorReport
from exl3.quantize.scales import global_scale

# (tiles, rate, seam window) -> (states, values)
EncodeAt = Callable[[Tensor, float, int], tuple[Tensor, Tensor]]
_QUICK_WINDOW = 32  # seam window of the scale search


@dataclass
class Settings:
    """What of the options concerns one group."""

    codebook: str = "mul1"
    damping: float = 0.025
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


@dataclass
class Quantized:
    """Tensors of one EXL3 matrix under their names in the file, and what happened on the way."""

    tensors: dict[str, Tensor]
    report: TensorReport
    values: Tensor  # (k, n) decoded trellis values, rotated basis, on the device


def quantize_group(
    members: list[Member], hessian: Hessian | None, encode: EncodeAt, settings: Settings, progress: Callable[[int], None] | None = None
) -> list[Quantized]:
    """Quantizes matrices that share the input `hessian` describes (None or unusable: no error feedback, refit with H = I).

    Members of one rate run in step, so that an encoder call serves all of them.
    """
    started = time.monotonic()
    calibrated = hessian is not None and hessian.usable
    k = padded(members[0].weight.shape[1])
    device = members[0].weight.device
    matrix = hessian.matrix().to(device) if calibrated and hessian is not None else torch.eye(k, device=device)
    shared_factor: Factor | None = None
    signs = random_signs(f"{members[0].key}:in", k, settings.seed).to(device)
    work: list[_Work] = []
    for m in members:
        target = _pad(m.weight.float().T)
        out_signs = random_signs(f"{m.key}:out", target.shape[1], settings.seed).to(device)
        reg = regularize(target, signs, out_signs, out_scales=m.out_scales)
        _check_range(reg, m.key)
        factor = None
        if calibrated and settings.scaled_hessian:
            factor = block_ldl(matrix, settings.damping, reg.suh, name=m.key)
        elif calibrated:
            shared_factor = shared_factor or block_ldl(matrix, settings.damping, signs, name=m.key)
            factor = shared_factor
        quick = _bound(encode, m.rate, _QUICK_WINDOW)
        g, searched = global_scale(reg.rotated, settings.codebook, m.rate, quick, always_search=settings.search_scale)
        reg.rotated.mul_(g)
        reg.suh.div_(g)
        work.append(_Work(m, target, reg, factor, g, searched))

    for rate in dict.fromkeys(w.member.rate for w in work):
        same = [w for w in work if w.member.rate == rate]
        problems = [Problem(w.reg.rotated, None if w.factor is None else w.factor.lower) for w in same]
        call = _bound(encode, rate, settings.seam_window)
        for w, solution in zip(same, ldlq(problems, call, progress)):
            w.states, w.values = solution.states, solution.values
    results = [_finish(w, matrix, calibrated, settings) for w in work]
    seconds, share = time.monotonic() - started, sum(w.target.numel() for w in work)
    for w, result in zip(work, results):
        result.report.seconds = seconds * w.target.numel() / share  # they were worked on together
    return results


def _bound(encode: EncodeAt, rate: float, seam_window: int) -> Encode:
    return lambda tiles: encode(tiles, rate, seam_window)


def _check_range(reg: Regularized, key: str) -> None:
    """NumericalError where the matrix is too large or too uneven for the file's fp16 scales."""
    largest = max(float(reg.suh.abs().max()), float(reg.svh.abs().max()))
    if not largest < FP16_MAX / 4:  # also NaN; the refit moves scales a little
        raise NumericalError(f"{key}: weights need a channel scale of {largest:.3g}, more than fp16 holds; rescale the source model")


@dataclass
class _Work:
    member: Member
    target: Tensor  # (k, n) fp32, padded
    reg: Regularized
    factor: Factor | None
    scale: float
    searched: bool
    states: Tensor | None = None
    values: Tensor | None = None


def _finish(w: _Work, matrix: Tensor, calibrated: bool, settings: Settings) -> Quantized:
    assert w.states is not None and w.values is not None
    used = 0.0 if w.factor is None else w.factor.damping
    metric = damped(matrix, used) if calibrated else matrix
    suh, svh = w.reg.suh, w.reg.svh
    if settings.refit_rounds:
        suh16, svh16 = refit_scales(w.values, suh, svh, w.target, metric, rounds=settings.refit_rounds)
    else:
        suh16, svh16 = round_scales(suh), round_scales(svh)
    error = restore(w.values, suh16, svh16).sub_(w.target)
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
        proxy_error=proxy_error(error, w.target, matrix),
        weight_error=float(error.square().sum() / w.target.square().sum().clamp_min(1e-30)),
        scale=w.scale,
        scale_searched=w.searched,
        out_scales=w.member.out_scales,
        damping=used,
        retries=0 if w.factor is None else w.factor.retries,
        calibrated=calibrated,
        seconds=0.0,
    )
    return Quantized({name: t.cpu().contiguous() for name, t in tensors.items()}, report, w.values)


def _pad(w: Tensor) -> Tensor:
    k, n = w.shape
    return torch.nn.functional.pad(w, (0, padded(n) - n, 0, padded(k) - k)).contiguous()
