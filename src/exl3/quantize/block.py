"""One decoder block in a conversion: capture the inputs of its matrices, quantize them, carry the calibration rows to the next block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from exl3.cache import Batch
from exl3.nn import MLP, Linear
from exl3.ops import reference
from exl3.quantize.hessian import Hessian, check_activations
from exl3.quantize.linear import EncodeAt, Group, Member, Quantized, Settings, quantize_within_memory
from exl3.quantize.regularize import column_rms
from exl3.quantize.report import BlockReport

REFERENCE_TOKENS = 2048  # of the rows on which a block's error is measured
SENSITIVITY_TOKENS = 2048
OUT_SCALE_RATIO = 1.05  # above it, a gated MLP's columns with much energy are also the sensitive ones: leave their noise alone


@dataclass
class Policy:
    """How a block is treated."""

    settings: Settings
    out_scales: str = "auto"
    recapture: bool = True
    correction: float = 0.0
    token_weighting: bool = False


@dataclass
class BlockResult:
    tensors: dict[str, Tensor]
    reports: list[Any]
    block: BlockReport
    warnings: list[str] = field(default_factory=list)


class Streams:
    """The residual stream of all calibration rows, `(rows, cols, hidden)` fp32; optionally the original model's beside it.

    They stay on the device where `keep_bytes` allows, else in host memory.
    """

    def __init__(
        self, model: Any, quantized: Tensor, original: Tensor | None, device: torch.device, batch_tokens: int, keep_bytes: int = 0
    ) -> None:
        self.model, self.device = model, device
        size = sum(t.numel() * t.element_size() for t in (quantized, original) if t is not None)
        place = device if size <= keep_bytes else torch.device("cpu")
        self.quantized = quantized.to(place)
        self.original = None if original is None else original.to(place)
        self.rows_per_batch = max(1, batch_tokens // quantized.shape[1])
        self._batches: dict[int, Batch] = {}

    def batches(self, rows: int | None = None) -> Iterator[tuple[int, Batch, Tensor, Tensor | None]]:
        """(first row, batch, stream of the quantized prefix (tokens, hidden), the original's or None): copies on the device."""
        total = self.quantized.shape[0] if rows is None else min(rows, self.quantized.shape[0])
        for start in range(0, total, self.rows_per_batch):
            end = min(start + self.rows_per_batch, total)
            original = None if self.original is None else self._copy(self.original, start, end)
            yield start, self.batch(end - start), self._copy(self.quantized, start, end), original

    def _copy(self, stream: Tensor, start: int, end: int) -> Tensor:
        return stream[start:end].reshape(-1, stream.shape[2]).to(self.device, copy=True)

    def batch(self, rows: int) -> Batch:
        """A whole-sequence batch of that many rows with its rotary tables (positions only: ids are not looked at by blocks)."""
        if rows not in self._batches:
            self._batches[rows] = Batch.whole(torch.zeros(rows, self.quantized.shape[1], dtype=torch.int32, device=self.device))
            self.model.prepare(self._batches[rows])
        return self._batches[rows]


def dense_weight(linear: Linear) -> Tensor:
    """The dense weight `(out, in)` that a matrix holds while it is worked on."""
    assert linear.weight is not None
    return linear.weight.data


class _Captured(Exception):
    """Ends a forward pass once the wanted input was seen."""


@contextmanager
def _inputs(linear: Linear, sink: Callable[[Tensor], None], stop: bool) -> Iterator[None]:
    def hook(_: Any, args: tuple[Tensor, ...]) -> None:
        sink(args[0])
        if stop:
            raise _Captured

    handle = linear.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def capture(run: Callable[[Tensor, Batch], Any], linear: Linear, x: Tensor, batch: Batch) -> Tensor:
    """The input of `linear` when `run` processes x, `(tokens, in_features)`; the pass is cut short there."""
    seen: list[Tensor] = []
    with _inputs(linear, seen.append, stop=True):
        try:
            run(x, batch)
        except _Captured:
            pass
    return seen[0]


def quantize_block(
    block: Any, streams: Streams, rates: dict[str, float], policy: Policy, encode: EncodeAt, progress: Callable[[int], None] | None = None
) -> BlockResult:
    """Quantizes the matrices of `block` in order of execution, then moves both streams behind it. The block holds dense weights before
    and dequantized ones after."""
    started = time.monotonic()
    groups = block.quant_groups()
    linears = dict(pair for group in groups for pair in group)
    originals: dict[str, Tensor] = {}  # as stored, `(out, in)`
    plain: dict[str, tuple[Tensor, Tensor | None]] = {}  # as the original block computes with them
    for key, linear in linears.items():
        originals[key] = dense_weight(linear)
        plain[key] = (originals[key].to(streams.model.dtype), linear.bias)
    _set(linears, plain)
    reference_rows = max(1, min(streams.quantized.shape[0], REFERENCE_TOKENS // streams.quantized.shape[1]))
    wanted = [block(x, batch) for _, batch, x, _ in streams.batches(reference_rows)]
    result = BlockResult({}, [], BlockReport(block.key, 0.0, 0.0, 0.0))
    statistics = {} if policy.recapture else _capture_all(block, groups, streams, policy)
    gates = _gated(block)
    waiting: list[Group] = []  # with one capture for all, matrices of the whole block are worked on together
    for group in groups:
        name, first = group[0]
        captured = statistics.pop(name) if name in statistics else _capture_group(block, name, first, streams, policy, plain, linears)
        hessian, sample = captured
        if hessian.dead_channels:
            result.block.dead_channels[name] = hessian.dead_channels
        members = []
        for key, linear in group:
            if rates[key] == 16:
                continue
            bias = plain[key][1]
            use = _use_out_scales(linear, gates, sample, policy.out_scales)
            members.append(Member(key, _target(originals[key], hessian, policy), rates[key], None if bias is None else bias.data, use))
        if members:
            waiting.append(Group(name, members, hessian))
        if waiting and (policy.recapture or group is groups[-1]):
            for q in quantize_within_memory(waiting, encode, policy.settings, progress):
                result.tensors |= q.tensors
                result.reports.append(q.report)
                _install(linears[q.report.key], q, plain[q.report.key][1], streams.model.dtype)
            waiting = []
    for key in linears:
        if rates[key] == 16:
            result.tensors[f"{key}.weight"] = originals[key].half()
            bias = plain[key][1]
            if bias is not None:
                result.tensors[f"{key}.bias"] = bias.data.half()
    got = [block(x, batch) for _, batch, x, _ in streams.batches(reference_rows)]
    result.block.rfn, result.block.cosine_error = block_error(torch.cat(got), torch.cat(wanted))
    _advance(block, streams, plain, linears)
    result.block.seconds = time.monotonic() - started
    return result


def _capture_group(
    block: Any, name: str, first: Linear, streams: Streams, policy: Policy, plain: dict[str, Any], linears: dict[str, Linear]
) -> tuple[Hessian, Tensor]:
    """Statistics of one input, the earlier groups of the block as they are now."""
    hessian = Hessian(name, first.in_features, streams.device, cross=policy.correction > 0)
    sample: list[Tensor] = []
    for _, batch, x, original in streams.batches():
        seen = capture(block, first, x, batch)
        other = None
        if policy.correction > 0 and original is not None:
            with _weights(linears, plain):
                other = capture(block, first, original, batch)
        hessian.add(seen, other, token_weights(seen) if policy.token_weighting else None)
        if sum(len(s) for s in sample) < SENSITIVITY_TOKENS:
            sample.append(seen)
    _check(hessian, block, first, streams)
    return hessian, torch.cat(sample)[:SENSITIVITY_TOKENS]


def _check(hessian: Hessian, block: Any, linear: Linear, streams: Streams) -> None:
    """NumericalError where an input was not finite, with its place: found by a second pass."""
    if not hessian.finite:
        for row, batch, x, _ in streams.batches():
            seen = capture(block, linear, x, batch)
            check_activations(seen.view(batch.rows, -1, seen.shape[1]), block.key, hessian.name, row)
    hessian.check()


def _capture_all(block: Any, groups: list[list[tuple[str, Linear]]], streams: Streams, policy: Policy) -> dict[str, tuple[Hessian, Tensor]]:
    """Statistics of all inputs in one pass through the unquantized block."""
    found: dict[str, tuple[Hessian, list[Tensor]]] = {}
    handles = []
    for (name, linear), *_ in groups:
        found[name] = (Hessian(name, linear.in_features, streams.device), [])

        def note(_: Any, args: tuple[Tensor, ...], name: str = name) -> None:  # at once: x may be changed in place afterwards
            hessian, sample = found[name]
            hessian.add(args[0], weights=token_weights(args[0]) if policy.token_weighting else None)
            if not sample:
                sample.append(args[0][:SENSITIVITY_TOKENS].clone())

        handles.append(linear.register_forward_pre_hook(note))
    try:
        for _, batch, x, _ in streams.batches():
            block(x, batch)
    finally:
        for handle in handles:
            handle.remove()
    for (name, linear), *_ in groups:
        _check(found[name][0], block, linear, streams)
    return {name: (hessian, sample[0]) for name, (hessian, sample) in found.items()}


def token_weights(x: Tensor) -> Tensor:
    """1 for ordinary tokens, less for those whose energy is far above the median: attention sinks would dominate the statistics."""
    energy = x.float().square().sum(1)
    return (4 * energy.median() / energy.clamp_min(1e-30)).clamp(max=1.0)


@contextmanager
def _weights(linears: dict[str, Linear], weights: dict[str, Any]) -> Iterator[None]:
    """The block with other weights for a while."""
    kept = {key: (dense_weight(linear), linear.bias) for key, linear in linears.items()}
    try:
        _set(linears, weights)
        yield
    finally:
        _set(linears, kept)


def _set(linears: dict[str, Linear], weights: dict[str, Any]) -> None:
    for key, (weight, bias) in weights.items():
        linears[key].set_dense(weight, None if bias is None else bias.data)


def _install(linear: Linear, q: Quantized, bias: Tensor | None, dtype: torch.dtype) -> None:
    """Puts the dequantized matrix in place, as the file will give it."""
    weight = q.weight.to(dense_weight(linear).device, dtype).contiguous()
    linear.set_dense(weight, None if bias is None else bias.data.half().float())


def _target(weight: Tensor, hessian: Hessian, policy: Policy) -> Tensor:
    """The weight to approximate: the original, or what on the quantized prefix's inputs gives what the original gives on its own."""
    if policy.correction == 0 or not hessian.usable:
        return weight
    weight = weight.float()
    k = weight.shape[1]
    matrix = hessian.matrix()[:k, :k]
    drift = hessian.cross()[:k, :k] - matrix
    damping = policy.settings.damping * matrix.diagonal().mean()
    solved: Tensor = torch.linalg.solve(matrix + damping * torch.eye(k, device=matrix.device), drift @ weight.T)
    return weight + policy.correction * solved.T


def _gated(block: Any) -> dict[int, MLP]:
    return {id(part): m for m in block.modules() if isinstance(m, MLP) and m.gated for part in (m.gate_proj, m.up_proj)}


def _use_out_scales(linear: Linear, gates: dict[int, MLP], sample: Tensor, mode: str) -> bool:
    """Whether the columns' RMS goes into svh (quantizer description, section 5.2)."""
    if mode != "auto":
        return mode == "always"
    mlp = gates.get(id(linear))
    if mlp is None:
        return True
    sensitivity = _sensitivity(mlp, linear, sample)
    energy = column_rms(dense_weight(linear).float().T).square()
    return bool((sensitivity * energy).mean() <= OUT_SCALE_RATIO * sensitivity.mean() * energy.mean())


def _sensitivity(mlp: MLP, linear: Linear, x: Tensor) -> Tensor:
    """Mean square of d(act(g) u) / d(output of `linear`) per channel, times the squared norm of the channel's down projection row."""
    with torch.enable_grad():
        x = x.float()
        values = [x @ dense_weight(part).float().T + (0 if part.bias is None else part.bias.data) for part in (mlp.gate_proj, mlp.up_proj)]
        wanted = values[0 if linear is mlp.gate_proj else 1].requires_grad_()
        product = reference.act_mul(values[0], values[1], mlp.activation, mlp.activation_params())
        (slope,) = torch.autograd.grad(product.sum(), wanted)
    return slope.square().mean(0) * dense_weight(mlp.down_proj).float().square().sum(0)


def _advance(block: Any, streams: Streams, plain: dict[str, Any], linears: dict[str, Linear]) -> None:
    """Both streams through the block."""
    finite = []
    for row, batch, x, original in streams.batches():
        y = _move(block, x, batch, streams.quantized[row : row + batch.rows])
        finite.append(torch.isfinite(y).all())
        if original is not None and streams.original is not None:
            with _weights(linears, plain):
                _move(block, original, batch, streams.original[row : row + batch.rows])
    if not bool(torch.stack(finite).all()):
        for row in range(streams.quantized.shape[0]):
            check_activations(streams.quantized[row : row + 1], block.key, "the next block", row)


def _move(block: Any, x: Tensor, batch: Batch, out: Tensor) -> Tensor:
    y: Tensor = block(x, batch)
    out.copy_(y.view(out.shape))
    return y


def block_error(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(||got - wanted|| / ||wanted||, 1 - cosine) of two streams, token by token for the cosine."""
    got, wanted = got.float(), wanted.float()
    rfn = (got - wanted).norm() / wanted.norm().clamp_min(1e-30)
    cosine = 1 - torch.nn.functional.cosine_similarity(got, wanted, dim=-1).mean()
    return float(rfn), float(cosine)
