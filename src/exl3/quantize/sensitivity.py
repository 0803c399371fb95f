"""How much each matrix's rounding error will cost, from one reverse pass of the original model over a few calibration rows.

For labels drawn from the model itself, KL(original || perturbed) of a row is to second order half the mean square of <G, E>, G the
gradient of the row's log likelihood with respect to a matrix and E the matrix's error. LDLQ leaves E = diag(suh) L^-T N H diag(svh) with
N white, of the codebook's distortion D(K), so

    KL(K) = D(K) / 2 * tr(diag(svh) S diag(svh)),    S = mean over rows of Z^T Z, Z = L^-1 H diag(suh) G.

The diagonal of S says which output channels matter, the trace which rate the matrix deserves, all of S how errors in one output can make up
for those in another (twosided). Blocks are visited last to first, one in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from exl3.cache import Batch
from exl3.errors import ResourceError
from exl3.files import Checkpoint
from exl3.nn import Linear
from exl3.quantize.hessian import Hessian
from exl3.quantize.ldl import block_ldl
from exl3.quantize.regularize import HADAMARD, channel_scale, pad_matrix, random_signs, regularize, rotate_rows
from exl3.quantize.twosided import output_factor, output_metric

# mean squared error of unit Gaussian tiles at their best scale (quantizer description 7.4)
_MUL1: dict[float, float] = {
    1: 0.2727, 1.5: 0.1374, 2: 0.0684, 2.5: 0.0346, 3: 0.01738, 3.5: 0.00883, 4: 0.00447, 5: 0.00116, 6: 0.000305, 7: 0.0000815, 8: 0.000021
}  # fmt: skip
_GAUSS_PAIR: dict[float, float] = {1: 0.2671, 2: 0.0687, 3: 0.01766, 4: 0.00464, 5: 0.001235, 6: 0.000328, 7: 0.0000865, 8: 0.000023}


OUTPUT_LIMIT = 16384  # outputs; wider matrices keep one-sided feedback
WORTH = 0.97  # share of the predicted loss that two-sided feedback may leave to be used
_SHELF_BYTES = {"cpu": 1 << 30, "gpu": 16 << 30}  # at most, for the streams between blocks; a GPU's may wait in host memory
HEAD_TOKENS = 512  # tokens whose logits are held at once
_WORK = 1 << 26  # values of per-row gradients held at once


class NotFinite(Exception):
    """Activations or gradients overflow, or weights are damaged: nothing can be measured."""


def distortion(codebook: str, rate: float) -> float:
    """Mean squared error of a unit Gaussian source at `rate` bits per weight; 16 counts as exact."""
    if rate == 16:
        return 0.0
    return (_MUL1 if codebook == "mul1" else _GAUSS_PAIR)[rate]


@dataclass
class Sensitivity:
    """Of one matrix. `cost`: predicted KL in nats per token and unit of distortion; `channels`: fp32 (out_features,), the diagonal of S, of
    mean 1; `output`: S at that size, fp16, where two-sided feedback pays on rows that its factor has not seen."""

    cost: float
    channels: Tensor
    output: Tensor | None = None


def measure(
    model: Any, source: Checkpoint, ids: Tensor, device: torch.device, *, damping: float = 0.025, seed: int = 0, outputs: bool = False,
    batch_tokens: int = 8192, finished: Callable[[int, dict[str, Sensitivity]], None] | None = None,
) -> dict[str, Sensitivity]:  # fmt: skip
    """Sensitivity of every matrix of the decoder. model: placed on `device`, empty; ids: (rows, tokens) int32; `outputs`: with S.

    `finished(block number, its part)` is told as the work goes on; with it, S is left out of the result. Batches get smaller where the
    device's memory ends; ResourceError where a single row is too much. Raises NotFinite.
    """
    rows = min(len(ids), max(1, batch_tokens // ids.shape[1]))
    while True:
        try:
            return _measure_in(rows, model, source, ids, device, damping, seed, outputs, finished)
        except torch.OutOfMemoryError as e:
            why = str(e).splitlines()[0]
        model.unload()
        model.place(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if rows == 1:
            raise ResourceError(
                f"measuring sensitivity: not enough memory on {device}, even for one row of {ids.shape[1]} tokens ({why}); free it of "
                "other work, or do without (--allocation place --no-channel-weighting)"
            )
        rows = (rows + 1) // 2


def _measure_in(
    rows: int, model: Any, source: Checkpoint, ids: Tensor, device: torch.device, damping: float, seed: int, outputs: bool,
    finished: Callable[[int, dict[str, Sensitivity]], None] | None,
) -> dict[str, Sensitivity]:  # fmt: skip
    """`measure` in batches of `rows`."""
    batches = [Batch.whole(ids[i : i + rows].to(device)) for i in range(0, len(ids), rows)]
    dtype = model.dtype
    _compute_in(model, torch.float32 if device.type == "cpu" else torch.bfloat16)  # gradients outgrow fp16 on both ends
    fast = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # an estimate over few rows: ten bits of a product do
    try:
        with differentiable_attention():
            return _measure(model, source, batches, device, damping, seed, ids.shape, outputs, finished)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = fast
        _compute_in(model, dtype)


def differentiable_attention() -> AbstractContextManager[None]:
    """Attention by torch's own kernels: cuDNN's backward pass fails without a name where memory is short, which theirs tell."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _compute_in(model: Any, dtype: torch.dtype) -> None:
    model.dtype = dtype
    for block in model.blocks:
        block.set_dtype(dtype)


def _measure(
    model: Any, source: Checkpoint, batches: list[Batch], device: torch.device, damping: float, seed: int, shape: Any,
    outputs: bool, finished: Callable[[int, dict[str, Sensitivity]], None] | None,
) -> dict[str, Sensitivity]:  # fmt: skip
    with torch.no_grad():
        shelf = _shelf(device, 4 * (len(model.blocks) + 2) * shape[0] * shape[1] * model.config.hidden_size)
        stages = _forward(model, source, batches, device, shelf)
        gradients = _head_gradients(model, source, batches, stages.pop(), device, seed)
    found: dict[str, Sensitivity] = {}
    for i in reversed(range(len(model.blocks))):
        block = model.load_block(i, source, device)
        part = _block(block, model, batches, stages.pop(), gradients, damping, shape, outputs)
        model.unload_block(i)
        if finished is not None:
            finished(i, part)
            part = {key: replace(s, output=None) for key, s in part.items()}
        found |= part
    return {key: found[key] for key in sorted(found)}


def _shelf(device: torch.device, size: int) -> torch.device:
    """Where the streams of all blocks wait: beside the model where that takes no more than a quarter of what is free."""
    return device if device.type != "cuda" or size < torch.cuda.mem_get_info(device)[0] // 4 else torch.device("cpu")


def _forward(model: Any, source: Checkpoint, batches: list[Batch], device: torch.device, shelf: torch.device) -> list[list[Tensor]]:
    """The stream in front of every block and behind the last, by block and batch."""
    model.load_embed(source, device)
    streams = [model.embed(b).float() for b in batches]
    model.model.embed_tokens.unload()
    stages = [[x.to(shelf, copy=True) for x in streams]]
    for i in range(len(model.blocks)):
        block = model.load_block(i, source, device)
        _compute_dtype(block, model.dtype)
        streams = [block(x, b) for x, b in zip(streams, batches)]
        model.unload_block(i)
        if not all(bool(torch.isfinite(x).all()) for x in streams):
            raise NotFinite
        stages.append([x.to(shelf, copy=True) for x in streams])
    return stages


def _compute_dtype(block: Any, dtype: torch.dtype) -> None:
    """Dense matrices in the dtype of the activations, so that products run in it."""
    for group in block.quant_groups():
        for _, linear in group:
            linear.set_dense(linear.weight.data.to(dtype), linear.bias)


def _head_gradients(
    model: Any, source: Checkpoint, batches: list[Batch], streams: list[Tensor], device: torch.device, seed: int
) -> list[Tensor]:
    """Gradient of the log likelihood of labels drawn from the model itself, with respect to the last stream."""
    model.load_head(source, device, model.dtype)
    generator = torch.Generator(device).manual_seed(seed)
    gradients = []
    for x, batch in zip(streams, batches):
        x = x.to(device).detach()
        gradient = torch.empty_like(x)
        for start in range(0, len(x), HEAD_TOKENS):
            part = slice(start, start + HEAD_TOKENS)
            with torch.enable_grad():
                leaf = x[part].clone().requires_grad_()
                logits = model.head(leaf, batch)
                noise = torch.empty_like(logits).exponential_(generator=generator).log_()
                labels = noise.neg_().add_(logits.detach()).argmax(1)  # Gumbel's trick: a draw from softmax(logits)
                torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
            assert leaf.grad is not None
            gradient[part] = leaf.grad
        gradients.append(gradient)
    model.model.norm.unload()
    model.lm_head.unload()
    return gradients


def _block(
    block: Any,
    model: Any,
    batches: list[Batch],
    streams: list[Tensor],
    gradients: list[Tensor],
    damping: float,
    shape: Any,
    outputs: bool,
) -> dict[str, Sensitivity]:
    """Sensitivity of one block's matrices; `gradients` is moved in front of the block."""
    _compute_dtype(block, model.dtype)
    groups = block.quant_groups()
    device = model.device
    statistics = {group[0][0]: Hessian(group[0][0], group[0][1].in_features, device) for group in groups}
    with torch.no_grad():
        for x, batch in zip(streams, batches):
            with _watch([g[0] for g in groups], lambda name, seen: statistics[name].add(seen)):
                block(x.to(device, copy=True), batch)
    shapes: dict[str, _Shape] = {}
    for group in groups:
        for name, linear in group:
            shapes[name] = _Shape(name, linear, statistics[group[0][0]], damping, outputs)
    statistics.clear()
    for i, (x, batch) in enumerate(zip(streams, batches)):
        gradients[i] = _reverse(block, groups, shapes, x.to(device), batch, gradients[i])
    return {name: s.result(shape[0], shape[1]) for name, s in shapes.items()}


def _reverse(
    block: Any, groups: list[list[tuple[str, Linear]]], shapes: dict[str, _Shape], x: Tensor, batch: Batch, gradient: Tensor
) -> Tensor:
    """Gradient in front of the block of one batch; each matrix's part is noted on the way."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    members = [m for group in groups for m in group]
    with torch.enable_grad(), _watch(members, lambda name, seen: inputs.__setitem__(name, seen.detach().clone())):
        leaf = x.requires_grad_()
        with _watch_outputs(members, outputs):
            out = block(leaf.clone(), batch)
        reached = [name for name, _ in members if name in outputs]
        grads = torch.autograd.grad(out, [leaf, *(outputs[name] for name in reached)], gradient)
    for name, g in zip(reached, grads[1:]):
        shapes[name].add(inputs[name].float().unflatten(0, (batch.rows, -1)), g.float().unflatten(0, (batch.rows, -1)))
    return grads[0]


class _watch:
    """Calls sink(name, input) for each of `linears` while open."""

    def __init__(self, linears: list[tuple[str, Linear]], sink: Callable[[str, Tensor], None]) -> None:
        self.linears, self.sink = linears, sink

    def __enter__(self) -> None:
        self.handles = [
            linear.register_forward_pre_hook(lambda _, args, name=name: self.sink(name, args[0])) for name, linear in self.linears
        ]

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()


class _watch_outputs(_watch):
    """Puts each linear's output into `outputs` while open; what goes on is a copy, so that nothing changes it in place."""

    def __init__(self, linears: list[tuple[str, Linear]], outputs: dict[str, Tensor]) -> None:
        super().__init__(linears, lambda name, seen: None)
        self.outputs = outputs

    def __enter__(self) -> None:
        def note(_: Any, args: Any, y: Tensor, name: str) -> Tensor:
            self.outputs[name] = y
            return y.clone()

        self.handles = [linear.register_forward_hook(lambda m, a, y, name=name: note(m, a, y, name)) for name, linear in self.linears]


class _Shape:
    """The shape of one matrix's error, and the gradients seen through it."""

    def __init__(self, name: str, linear: Linear, hessian: Hessian, damping: float, output: bool) -> None:
        assert linear.weight is not None
        self.weight = pad_matrix(linear.weight.data.float().T)
        self.n = linear.out_features
        k, n = self.weight.shape
        self.signs = [random_signs(f"{name}:{side}", size).to(self.weight.device) for side, size in (("in", k), ("out", n))]
        self.suh = regularize(self.weight, *self.signs).suh
        through = rotate_rows(torch.diag(self.suh))
        if hessian.usable:
            lower = block_ldl(hessian.matrix(), damping, self.suh, name=name).lower
            through = torch.linalg.solve_triangular(lower, through, upper=False, unitriangular=True)
        self.through = through[:, : linear.in_features].T.contiguous()  # L^-1 H diag(suh), transposed: Z = (x through)^T g for each row
        size = (2, self.n, self.n) if output and self.n <= OUTPUT_LIMIT else (2, self.n)
        self.sum = torch.zeros(size, device=self.weight.device)  # of two halves of the rows, that one may judge the other
        self.rows = 0

    def add(self, x: Tensor, g: Tensor) -> None:
        """Inputs (rows, tokens, k) and output gradients (rows, tokens, n)."""
        step = max(1, _WORK // (len(self.suh) * self.n))
        x = x @ self.through
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            seen = torch.bmm(x[part].transpose(1, 2), g[part])
            for half in range(2):
                z = seen[(self.rows + half) % 2 :: 2]
                if self.sum.dim() == 3:
                    z = z.flatten(0, 1)
                    self.sum[half] += z.T @ z
                else:
                    self.sum[half] += torch.linalg.vector_norm(z, dim=(0, 1)).square()
            self.rows += len(seen)

    def result(self, rows: int, cols: int) -> Sensitivity:
        halves = self.sum * (2 / rows)
        diagonals = halves.diagonal(dim1=1, dim2=2) if halves.dim() == 3 else halves
        s = diagonals.mean(0)
        size = s.mean().clamp_min(1e-30)
        reg = regularize(self.weight, *self.signs, scale=channel_scale(self.weight, s / size))
        loss = float((s * reg.svh[: self.n].square()).sum())
        alike = float((s * reg.svh[: self.n].square())[self.n // HADAMARD * HADAMARD :].sum()) * (_copies(self.n % HADAMARD) - 1)
        output = None
        if halves.dim() == 3:
            first, second = (pad_matrix(half) for half in halves)
            ratio = 0.5 * sum(_ratio(a, b, reg.svh) for a, b in ((first, second), (second, first)))
            if ratio < WORTH:
                output = (halves.mean(0) / size).half().cpu()
                loss, alike = loss * ratio, 0.0
        if not math.isfinite(loss):
            raise NotFinite
        grown = float(reg.suh.square().mean() / self.suh.square().mean())  # S was seen through the first suh
        return Sensitivity(0.5 * grown * (loss + alike) / cols, (s / size).cpu(), output)


def _copies(columns: int) -> int:
    """How often each rotated column comes in a block with so many columns that are not padding: such copies are rounded alike, and their
    errors add up instead of averaging out."""
    return HADAMARD >> (columns - 1).bit_length() if columns else 1


def _ratio(known: Tensor, unknown: Tensor, svh: Tensor) -> float:
    """What feedback by the factor of `known` leaves of the loss that `unknown` measures."""
    metric = output_metric(unknown, svh)
    factor = output_factor(known, svh)
    left = torch.linalg.solve_triangular(factor, metric, upper=False, unitriangular=True)
    return float((torch.linalg.solve_triangular(factor, left.T, upper=False, unitriangular=True)).trace() / metric.trace().clamp_min(1e-30))


def affordable(tokens: int, model: Any, device: torch.device) -> int:
    """`tokens`, or as many as the streams of all blocks may take room for; the same for every machine of a kind."""
    size = 4 * (len(model.blocks) + 2) * model.config.hidden_size
    return max(1024, min(tokens, _SHELF_BYTES["cpu" if device.type == "cpu" else "gpu"] // size))


def rows_for(ids: Tensor, tokens: int, cols: int = 512) -> Tensor:
    """At most `tokens` of the calibration ids, evenly spread over its rows, as rows of at most `cols`. Where all rows begin with the same
    id, BOS, so do these."""
    cols = min(cols, ids.shape[1])
    whole = ids[:, : ids.shape[1] // cols * cols].reshape(-1, cols)
    count = max(1, min(len(whole), tokens // cols))
    picked = whole[torch.arange(count) * len(whole) // count]
    if len(ids) > 1 and bool((ids[:, 0] == ids[0, 0]).all()):
        picked[:, 0] = ids[0, 0]
    return picked
