"""One decoder block in a conversion: capture the inputs of its matrices, quantize them, carry the calibration rows to the next block."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exl3.cache import Batch
from exl3.models import memory
from exl3.nn import MLP, Attention, Linear
from exl3.nn.linear import project_out
from exl3.ops import reference
from exl3.quantize.damping import for_correction, wanted_change
from exl3.quantize.hessian import Hessian, check_activations
from exl3.quantize.ldl import damped
from exl3.quantize.linear import EncodeAt, Group, Member, Settings
from exl3.quantize.regularize import column_rms
from exl3.quantize.report import BlockReport
from exl3.quantize.team import Team, Worker
from exl3.quantize.together import Build, Wanted, quantize_together
from exl3.quantize.transfer import move

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
    importance: dict[str, Tensor] = field(default_factory=dict)  # of the block's outputs: KEY.channels, KEY.output


@dataclass
class BlockResult:
    tensors: dict[str, Tensor]
    reports: list[Any]
    block: BlockReport


def dense_weight(linear: Linear) -> Tensor:
    """The dense weight `(out, in)` that a matrix holds while it is worked on."""
    assert linear.weight is not None
    return linear.weight.data


class _Captured(Exception):
    """Ends a forward pass once the wanted input was seen."""


@contextmanager
def _inputs(linear: Linear, sink: Callable[[Tensor, Tensor | None], None]) -> Iterator[None]:
    """Tells `sink` the input of `linear` and the residual stream `(tokens, hidden)` that its output is added to as it is; None where it is
    not."""

    def hook(_: Any, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        sink(args[0], options.get("out") if options.get("accumulate") else None)

    handle = linear.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def capture(run: Callable[[Tensor, Batch], Any], linear: Linear, x: Tensor, batch: Batch) -> Tensor:
    """The input of `linear` when `run` processes x, `(tokens, in_features)`; the pass is cut short there."""
    seen: list[Tensor] = []
    _watch(run, [linear], x, batch, lambda _, y, stream: seen.append(y))
    return seen[0]


@dataclass
class _Shown:
    """What the original block gives for some rows: its output, and for each group's first matrix the input and the residual stream that
    the matrix's output goes straight into."""

    output: Tensor
    inputs: dict[str, tuple[Tensor, Tensor | None]]


class _Copy:
    """A worker's copy of the block in work."""

    def __init__(self, worker: Worker, block: Any, dtype: torch.dtype) -> None:
        self.worker, self.block = worker, block
        self.linears = dict(pair for group in block.quant_groups() for pair in group)
        self.originals = {key: dense_weight(linear) for key, linear in self.linears.items()}  # as stored, `(out, in)`
        self.plain: dict[str, tuple[Tensor, Tensor | None]] = {}  # as the original block computes with them
        self.installed: set[str] = set()  # matrices that are quantized by now
        self.shown: dict[tuple[int, int, int], _Shown] = {}  # by shard, first row and rows
        self.inner: dict[tuple[int, int, int], dict[str, Tensor]] = {}  # inputs of `ends`, when all that leads there is quantized
        parts = [(m, m.o_proj if isinstance(m, Attention) else m.down_proj) for m in block.modules() if isinstance(m, (Attention, MLP))]
        keys = {id(linear): key for key, linear in self.linears.items()}
        self.ends = {keys[id(linear)]: (m, linear) for m, linear in parts if id(linear) in keys}  # matrices that attention and MLP end with
        self.keeps = self._has_room_to_keep()
        self.compute_in(dtype)

    def compute_in(self, dtype: torch.dtype) -> None:
        """dtype of the values between operations and of the weights."""
        self.dtype = dtype
        self.shown.clear()
        self.inner.clear()
        self.block.set_dtype(dtype)
        self.plain = {key: (self.originals[key].to(dtype), linear.bias) for key, linear in self.linears.items()}
        done = {key: (dense_weight(self.linears[key]).to(dtype), self.linears[key].bias) for key in self.installed}
        _set(self.linears, self.plain | done)

    def _has_room_to_keep(self) -> bool:
        """Whether `shown` and `inner` of all rows may be kept: on a CPU, where a pass is dear, in a quarter of what is free."""
        device = self.worker.device
        if device.type != "cpu":
            return False
        tokens = sum(s.quantized[..., 0].numel() for s in self.worker.streams.shards.values())
        hidden = self.worker.model.config.hidden_size
        width = sum(group[0][1].in_features + hidden for group in self.block.quant_groups()) + hidden
        width += sum(linear.in_features for _, linear in self.ends.values())
        return 4 * tokens * width < (memory.available_bytes(device) - memory.reserve_bytes(device)) // 4

    def bias(self, key: str) -> Tensor | None:
        bias = self.plain[key][1]
        return None if bias is None else bias.data

    def install(self, key: str, weight: Tensor) -> None:
        """Puts a dequantized matrix in place, `(out, in)`, as the file will give it."""
        bias = self.bias(key)
        self.installed.add(key)
        self.linears[key].set_dense(move(weight, self.worker.device), None if bias is None else bias.half().float())


def quantize_block(
    index: int,
    team: Team,
    rates: dict[str, float],
    policy: Policy,
    encode: EncodeAt,
    progress: Callable[[int], None] | None = None,
    *,
    ahead: int | None = None,
) -> BlockResult:
    """Quantizes the matrices of block `index` in order of execution, then moves the streams behind it. Meanwhile block `ahead` is read."""
    started = time.monotonic()
    copies = dict(zip(team.workers, team.each(lambda w: _Copy(w, w.reader.take(index), w.model.dtype))))
    if ahead is not None:
        for w in team.workers:
            w.reader.ahead(ahead)
    lead = copies[team.lead]
    groups = lead.block.quant_groups()
    result = BlockResult({}, [], BlockReport(lead.block.key, 0.0, 0.0, 0.0))
    wanted = team.lead.submit(lambda: _reference(lead)).result()
    if not bool(torch.isfinite(wanted).all()) and _widen(team, copies, result.block):
        wanted = team.lead.submit(lambda: _reference(lead)).result()
    # with one capture for all, matrices of the whole block are worked on together
    for stage in [[group] for group in groups] if policy.recapture else [groups]:
        captured = _statistics(team, copies, [group[0] for group in stage], policy, result.block)
        jobs = []
        for group, (hessian, sample) in zip(stage, captured):
            name = group[0][0]
            if hessian.tokens and hessian.dead_channels:
                result.block.dead_channels[name] = hessian.dead_channels
            keys = [key for key, _ in group if rates[key] != 16]
            use = {
                key: _has_channels(key, policy) or _use_out_scales(lead.linears[key], _gated(lead.block), sample, policy.out_scales)
                for key in keys
            }
            if keys:
                shapes = [(lead.linears[k].in_features, lead.linears[k].out_features) for k in keys]
                jobs.append(_Job(name, keys, shapes, hessian, any(f"{k}.output" in policy.importance for k in keys), use))
        del captured
        build = _builder(copies, rates, policy)
        for worker, q in quantize_together(team, jobs, build, encode, policy.settings, progress) if jobs else []:
            result.tensors |= q.tensors
            result.reports.append(q.report)
            weight = move(q.weight, worker.device).to(lead.dtype).contiguous()
            for c in copies.values():
                c.install(q.report.key, weight)
    for key in lead.linears:
        if rates[key] == 16:
            result.tensors[f"{key}.weight"] = lead.originals[key].half()
            bias = lead.bias(key)
            if bias is not None:
                result.tensors[f"{key}.bias"] = bias.half()
    got = team.lead.submit(lambda: _reference(lead)).result()
    result.block.rfn, result.block.cosine_error = block_error(got, wanted)
    _advance(team, copies, result.block)
    result.block.seconds = time.monotonic() - started
    return result


@dataclass
class _Job(Wanted):
    out_scales: dict[str, bool] = field(default_factory=dict)


def _has_channels(key: str, policy: Policy) -> bool:
    return policy.out_scales == "auto" and f"{key}.channels" in policy.importance


def _builder(copies: dict[Worker, _Copy], rates: dict[str, float], policy: Policy) -> Build:
    def build(worker: Worker, job: Wanted, keys: list[str], hessian: Hessian) -> Group:
        assert isinstance(job, _Job)
        c = copies[worker]
        members = []
        for key in keys:
            target = corrected(c.originals[key], hessian, policy.correction, policy.settings.damping)
            channels = policy.importance.get(f"{key}.channels") if _has_channels(key, policy) else None
            output = policy.importance.get(f"{key}.output")
            members.append(Member(key, target, rates[key], c.bias(key), job.out_scales[key], channels, output))
        return Group(job.name, members, hessian)

    return build


def _reference(c: _Copy) -> Tensor:
    """The block's output for the first rows."""
    streams = c.worker.streams
    rows = max(1, REFERENCE_TOKENS // streams.shards[0].quantized.shape[1])
    return torch.cat([c.block(x, batch) for _, batch, x, _ in streams.batches(0, rows=rows)])


def _statistics(
    team: Team, copies: dict[Worker, _Copy], inputs: list[tuple[str, Linear]], policy: Policy, report: BlockReport
) -> list[tuple[Hessian, Tensor]]:
    """Statistics of inputs in one pass through the block as it is now, and a sample of each, on the lead's device. Where half precision
    overflows, the block is computed in fp32 from then on; NumericalError with the place where that doesn't help."""
    total = _capture(team, copies, inputs, policy)
    if not all(h.finite for h, _ in total) and _widen(team, copies, report):
        total = _capture(team, copies, inputs, policy)
    for hessian, _ in total:
        if not hessian.finite:
            _name_the_place(team, copies, hessian.name)
        hessian.check()
    return total


def _widen(team: Team, copies: dict[Worker, _Copy], report: BlockReport) -> bool:
    """Computes the block in fp32 henceforth; False if it was before."""
    if copies[team.lead].dtype == torch.float32:
        return False
    report.wide = True
    team.each(lambda w: copies[w].compute_in(torch.float32))
    return True


def _capture(team: Team, copies: dict[Worker, _Copy], inputs: list[tuple[str, Linear]], policy: Policy) -> list[tuple[Hessian, Tensor]]:
    total: list[tuple[Hessian, Tensor]] = []
    for part in team.over_shards(lambda w, number: w.streams.within_memory(lambda: _capture_shard(copies[w], number, inputs, policy))):
        if not total:
            total = [(h.on(team.lead.device), sample) for h, sample in part]
        else:
            for (h, _), (more, _) in zip(total, part):
                h.merge(more)
        del part
    return total


def _capture_shard(c: _Copy, number: int, inputs: list[tuple[str, Linear]], policy: Policy) -> list[tuple[Hessian, Tensor]]:
    cross = policy.correction > 0
    hold = c.worker.streams.shards[number].quantized.shape[1] if policy.settings.choose_damping else 0
    found = [Hessian(name, linear.in_features, c.worker.device, cross=cross, hold=hold) for name, linear in inputs]
    samples: dict[int, Tensor] = {}
    linears = [c.linears[name] for name, _ in inputs]
    keep = cross and policy.recapture and c.keeps
    for row, batch, x, original in c.worker.streams.batches(number):
        others: dict[int, tuple[Tensor, Tensor | None]] = {}
        place = number, row, batch.rows
        if original is not None and keep:
            shown = _shown(c, place, original, batch)
            others = {i: shown.inputs[name] for i, (name, _) in enumerate(inputs) if name in shown.inputs}
        elif cross and original is not None:
            with _weights(c.linears, c.plain):
                _watch(c.block, linears, original, batch, partial(_remember, others))

        def note(
            i: int, seen: Tensor, stream: Tensor | None, others: dict[int, tuple[Tensor, Tensor | None]] = others, place: Any = place
        ) -> None:
            other, wanted = others.get(i, (None, None))
            missing = None if stream is None or wanted is None else wanted - stream
            found[i].add(seen, other, token_weights(seen) if policy.token_weighting else None, missing)
            if keep and inputs[i][0] in c.ends:
                c.inner.setdefault(place, {})[inputs[i][0]] = seen.clone()
            if i not in samples:
                samples[i] = seen[:SENSITIVITY_TOKENS].clone()

        with _from_inner(c, place):
            _watch(c.block, linears, x, batch, note)
    return [(h, samples[i] if i in samples else _no_sample(h)) for i, h in enumerate(found)]


def _shown(c: _Copy, place: tuple[int, int, int], original: Tensor, batch: Batch) -> _Shown:
    """One whole pass of the original block for all groups, made when the first asks."""
    if place not in c.shown:
        inputs: dict[str, tuple[Tensor, Tensor | None]] = {}

        def take(name: str, seen: Tensor, stream: Tensor | None) -> None:
            inputs[name] = seen.clone(), None if stream is None else stream.clone()

        with _weights(c.linears, c.plain), ExitStack() as stack:
            for (name, linear), *_ in c.block.quant_groups():
                stack.enter_context(_inputs(linear, partial(take, name)))
            c.shown[place] = _Shown(c.block(original, batch), inputs)
    return c.shown[place]


@contextmanager
def _from_inner(c: _Copy, place: tuple[int, int, int]) -> Iterator[None]:
    """Attention and MLPs whose last input is known for these rows begin there."""

    def short(linear: Linear, y: Tensor) -> Callable[..., Tensor]:
        return lambda x, batch=None, *, norm=None, residual=None: project_out(y, linear, residual)

    known = [(c.ends[key], y) for key, y in c.inner.get(place, {}).items()]
    for (part, linear), y in known:
        part.__dict__["forward"] = short(linear, y)
    try:
        yield
    finally:
        for (part, _), _ in known:
            del part.__dict__["forward"]


def _no_sample(hessian: Hessian) -> Tensor:
    return hessian.peak.new_empty(0, hessian.features)


def _remember(store: dict[int, tuple[Tensor, Tensor | None]], i: int, seen: Tensor, stream: Tensor | None) -> None:
    store[i] = seen.clone(), None if stream is None else stream.clone()


def _watch(run: Any, linears: list[Linear], x: Tensor, batch: Batch, sink: Callable[[int, Tensor, Tensor | None], None]) -> None:
    """Shows `sink` the input of each of `linears`, which stand in order of execution, and the residual stream its output goes straight
    into, if any, as `run` processes x: at the moment of use, for both may change in place afterwards. The pass ends with the last; what no
    token is sent to is not shown."""

    def take(i: int, seen: Tensor, stream: Tensor | None) -> None:
        sink(i, seen, stream)
        if i == len(linears) - 1:
            raise _Captured

    with suppress(_Captured), ExitStack() as stack:
        for i, linear in enumerate(linears):
            stack.enter_context(_inputs(linear, partial(take, i)))
        run(x, batch)


def _name_the_place(team: Team, copies: dict[Worker, _Copy], name: str) -> None:
    """NumericalError with the place of a value that is not finite in an input; found by a second pass."""

    def look(w: Worker, number: int) -> None:
        c = copies[w]
        first = w.streams.shards[number].first_row
        for row, batch, x, _ in w.streams.batches(number):
            seen = capture(c.block, c.linears[name], x, batch)
            check_activations(seen.view(batch.rows, -1, seen.shape[1]), c.block.key, name, first + row)

    for _ in team.over_shards(look):
        pass


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


def corrected(weight: Tensor, hessian: Hessian, share: float, damping: float) -> Tensor:
    """The weight `(out, in)` to approximate: least squares on the quantized prefix's inputs, towards what the original gives on its own;
    where the output goes straight into the residual stream, towards what that lacks as well. `share` of the way, from the original."""
    if share == 0 or not hessian.usable:
        return weight
    weight = weight.float()
    k = weight.shape[1]
    damping = for_correction(hessian, weight, share, damping)
    factor, info = torch.linalg.cholesky_ex(damped(hessian.matrix()[:k, :k], damping))
    change = torch.cholesky_solve(wanted_change(hessian, weight), factor).T
    return torch.where((info == 0) & torch.isfinite(change).all(), weight + share * change, weight)


def _gated(block: Any) -> dict[int, MLP]:
    return {id(part): m for m in block.modules() if isinstance(m, MLP) and m.gated for part in (m.gate_proj, m.up_proj)}


def _use_out_scales(linear: Linear, gates: dict[int, MLP], sample: Tensor, mode: str) -> bool:
    """Whether the columns' RMS goes into svh (quantizer description, section 5.2)."""
    if mode != "auto":
        return mode == "always"
    mlp = gates.get(id(linear))
    if mlp is None or not len(sample):
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


def _advance(team: Team, copies: dict[Worker, _Copy], report: BlockReport) -> None:
    """The streams through the block; rows whose result is not finite in half precision once more in fp32."""
    spans = {number: [(0, shard.quantized.shape[0])] for w in team.workers for number, shard in w.streams.shards.items()}
    left = _advance_spans(team, copies, spans)
    if any(left.values()) and _widen(team, copies, report):
        left = _advance_spans(team, copies, left)
    for number, shard in enumerate(team.shards()):
        for first, rows in left[number]:
            y = _moved(team, copies, number, first, rows)
            check_activations(y, copies[team.lead].block.key, "the next block", shard.first_row + first)


def _advance_spans(team: Team, copies: dict[Worker, _Copy], spans: dict[int, list[tuple[int, int]]]) -> dict[int, list[tuple[int, int]]]:
    """Moves rows (first, count) of each shard; those that stayed where they were because something was not finite."""
    results = team.over_shards(lambda w, number: _advance_shard(copies[w], number, spans[number]))
    return {number: [span for span, finite in result if not bool(finite)] for number, result in enumerate(results)}


def _advance_shard(c: _Copy, number: int, spans: list[tuple[int, int]]) -> list[tuple[tuple[int, int], Tensor]]:
    shard, streams = c.worker.streams.shards[number], c.worker.streams
    results: list[tuple[tuple[int, int], Tensor]] = []

    def go_on(first: int, end: int) -> None:
        done = max([first, *(row + rows for (row, rows), _ in results if first <= row < end)])
        for row, batch, x, original in streams.batches(number, first=done, rows=end - done):
            with _from_inner(c, (number, row, batch.rows)):
                y = c.block(x, batch)
            c.inner.pop((number, row, batch.rows), None)
            finite = torch.isfinite(y).all()
            if original is not None and shard.original is not None:
                shown = c.shown.pop((number, row, batch.rows), None)
                if shown is None:
                    with _weights(c.linears, c.plain):
                        z = c.block(original, batch)
                else:
                    z = shown.output
                finite = finite & torch.isfinite(z).all()
                _write(shard.original[row : row + batch.rows], z, finite)
            _write(shard.quantized[row : row + batch.rows], y, finite)
            results.append(((row, batch.rows), finite))

    for first, rows in spans:
        streams.within_memory(partial(go_on, first, first + rows))
    return results


def _write(stream: Tensor, y: Tensor, finite: Tensor) -> None:
    """Replaces rows of a stream if all is finite."""
    y = y.view(stream.shape)
    if stream.device == y.device:
        torch.where(finite, y, stream, out=stream)
    elif bool(finite):
        stream.copy_(y, non_blocking=True)


def _moved(team: Team, copies: dict[Worker, _Copy], number: int, first: int, rows: int) -> Tensor:
    """The block's output `(rows, cols, hidden)` for rows of a shard."""
    worker = next(w for w in team.workers if number in w.streams.shards)

    def work() -> Tensor:
        batches = worker.streams.batches(number, first=first, rows=rows)
        return torch.cat([copies[worker].block(x, batch).view(batch.rows, -1, x.shape[1]) for _, batch, x, _ in batches])

    return worker.submit(work).result()


def block_error(got: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(||got - wanted|| / ||wanted||, 1 - cosine) of two streams, token by token for the cosine."""
    got, wanted = got.float(), wanted.float()
    rfn = (got - wanted).norm() / wanted.norm().clamp_min(1e-30)
    cosine = 1 - torch.nn.functional.cosine_similarity(got, wanted, dim=-1).mean()
    return float(rfn), float(cosine)
