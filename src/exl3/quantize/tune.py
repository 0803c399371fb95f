"""`--tune`: distillation of the scales. The trellis stays as it is; suh, svh, biases and norm weights are trained until the quantized
model's next-token distribution is as near to the original's as they can bring it, KL(original || quantized) on calibration rows.

W = diag(suh) H Q H diag(svh): with H Q H formed once, a training step scales one frozen matrix by two vectors. Every trained value
v is v0 (1 + d), d from 0, so that one learning rate fits all. Blocks are recomputed in the backward pass; memory holds both models, the
streams between blocks and one block's intermediates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exl3 import codec, ops
from exl3.cache import Batch
from exl3.errors import ArgumentError, NumericalError
from exl3.files import Checkpoint
from exl3.models.loading import locate
from exl3.models.registry import build
from exl3.nn import RMSNorm
from exl3.quantize.refit import FP16_MAX
from exl3.quantize.sensitivity import differentiable_attention

HEAD_LOGITS = 1 << 26  # logits held at once, several times over
LEAST_ROWS = 2
HELD_OUT = 16  # one row in so many is kept apart to judge by


@dataclass(frozen=True)
class TuneSettings:
    """`steps` of `tokens` each; the learning rate falls from `rate` to nothing along a half cosine, after a short rise."""

    steps: int = 48
    tokens: int = 8192
    rate: float = 1e-3
    seed: int = 0


@dataclass
class Tuned:
    """`tensors`: what replaces tensors of the file, by name. KL in nats per token on rows that training did not see; `losses`: of every
    step, before it."""

    tensors: dict[str, Tensor]
    before: float
    after: float
    losses: list[float]


def tune(
    source: Checkpoint, finished: Callable[[int], dict[str, Tensor]], ids: Tensor, device: torch.device, settings: TuneSettings,
    *, quantized: Checkpoint | None = None, embedding: dict[str, Tensor] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Tuned:  # fmt: skip
    """Trains the scales of a finished quantization. `finished(i)`: tensors of block i, the head last; ids: (rows, cols) calibration rows;
    `quantized`: where the norms and the embedding come from, else from the source; `embedding`: tensors of a ring-quantized one.

    Where the held-out rows say that nothing was won, `tensors` is empty. NumericalError where logits are not finite before the first step.
    """
    if len(ids) < LEAST_ROWS:
        raise ArgumentError(f"tune: {len(ids)} calibration rows; at least {LEAST_ROWS} are needed, one to judge by: give more --cal-rows")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    teacher = _load(source, device, dtype)
    student = _Student(_load(quantized or source, device, dtype), finished, device, dtype)
    if embedding is not None:
        trellis, signs = (next(t for name, t in embedding.items() if name.endswith(part)).to(device) for part in (".trellis", ".signs"))
        student.model.model.embed_tokens.set_rings(ops.RingTable(trellis, signs, student.model.config.hidden_size))
    rows = max(1, settings.tokens // ids.shape[1])
    held = max(1, len(ids) // HELD_OUT)
    judge, train = ids[:: len(ids) // held][:held], _without(ids, len(ids) // held, held)
    before = _judge(teacher, student, judge, rows, device)
    if not math.isfinite(before):
        raise NumericalError("tuning: logits of the original or of the quantized model hold NaN or Inf; `exl3 eval` tells which")
    optimizer = torch.optim.Adam(student.parameters(), lr=settings.rate, betas=(0.9, 0.98))
    order = _order(len(train), rows, settings.steps, settings.seed)
    losses = []
    for step, picked in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _schedule(step, settings.steps)
        optimizer.zero_grad()
        with differentiable_attention():
            losses.append(_step(teacher, student, Batch.whole(train[picked].to(device))))
        optimizer.step()
        if progress is not None:
            progress(step + 1, settings.steps)
    tensors = student.tensors()
    after = _judge(teacher, student, judge, rows, device)
    return Tuned(tensors if after < before else {}, before, after, losses)


def _without(ids: Tensor, stride: int, count: int) -> Tensor:
    keep = torch.ones(len(ids), dtype=torch.bool)
    keep[torch.arange(0, len(ids), stride)[:count]] = False
    return ids[keep]


def _order(count: int, rows: int, steps: int, seed: int) -> Iterable[Tensor]:
    """Row numbers of each step: shuffled passes over all rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(rows, count)
    queue = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(queue) < rows:
            queue = torch.cat([queue, torch.randperm(count, generator=generator)])
        yield queue[:rows]
        queue = queue[rows:]


def _schedule(step: int, steps: int) -> float:
    rise = max(1, steps // 20)
    return min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _load(source: Checkpoint, device: torch.device, dtype: torch.dtype) -> Any:
    """A model, dense matrices in `dtype`."""
    model = build(source.config)
    locate(model, source)
    model.place(device, dtype)
    model.load_modules(model.parts, source, device)
    for module in [m for block in model.blocks for group in block.quant_groups() for _, m in group] + [model.lm_head]:
        if module.weight is not None:
            module.set_dense(module.weight.data.to(dtype), module.bias)
    return model


class _Scaled(nn.Module):
    """y = x @ (diag(suh) frozen diag(svh)) + bias, in place of an `nn.Linear` of the model."""

    exl3 = None

    def __init__(self, key: str, tensors: dict[str, Tensor], codebook: str, linear: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.key, self.in_features, self.out_features = key, linear.in_features, linear.out_features
        suh, svh = tensors[f"{key}.suh"].to(device), tensors[f"{key}.svh"].to(device)
        frozen = codec.dequantize(tensors[f"{key}.trellis"].to(device), torch.ones_like(suh), torch.ones_like(svh), codebook)
        self.frozen = frozen[: self.in_features, : self.out_features].T.to(dtype).contiguous()
        self.suh, self.svh = suh.float(), svh.float()
        bias = tensors.get(f"{key}.bias")
        self.bias = None if bias is None else bias.to(device).float()
        self.din = nn.Parameter(torch.zeros_like(self.suh))
        self.dout = nn.Parameter(torch.zeros_like(self.svh))
        self.dbias = None if bias is None else nn.Parameter(torch.zeros(len(bias), device=device))
        self.bias_unit = 0.0 if self.bias is None else float(self.bias.square().mean().sqrt())

    def forward(self, x: Tensor, *, out: Tensor | None = None, accumulate: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        u = (self.suh * (1 + self.din))[: self.in_features]
        v = (self.svh * (1 + self.dout))[: self.out_features]
        if x.shape[0] * (self.in_features + self.out_features) < self.frozen.numel():  # what goes through is less than the matrix
            y = torch.nn.functional.linear((x * u).to(self.frozen.dtype), self.frozen) * v
        else:
            weight = (self.frozen * (v.unsqueeze(1) * u)).to(self.frozen.dtype)
            y = torch.nn.functional.linear(x.to(weight.dtype), weight)
        if self.bias is not None:
            y = y + self._bias()[: self.out_features]
        if out is None:
            return y.to(torch.float32 if dtype is None else dtype)
        return out.add_(y) if accumulate else out.copy_(y)

    def _bias(self) -> Tensor:
        assert self.bias is not None and self.dbias is not None
        return self.bias + self.bias_unit * self.dbias

    def tensors(self) -> dict[str, Tensor]:
        found = {f"{self.key}.suh": self.suh * (1 + self.din), f"{self.key}.svh": self.svh * (1 + self.dout)}
        if self.bias is not None:
            found[f"{self.key}.bias"] = self._bias()
        return {name: t.detach().clamp(-FP16_MAX, FP16_MAX).half().cpu() for name, t in found.items()}


class _Norm(nn.Module):
    """The trained factor of one norm."""

    def __init__(self, name: str, norm: RMSNorm) -> None:
        super().__init__()
        self.name, self.norm = name, [norm]
        assert norm.scale is not None
        self.base = norm.scale
        self.delta = nn.Parameter(torch.zeros_like(norm.scale))

    def apply_(self) -> None:
        self.norm[0].scale = self.base * (1 + self.delta)

    def tensors(self) -> dict[str, Tensor]:
        norm = self.norm[0]
        value = (self.base * (1 + self.delta)).detach() - (1.0 if norm.plus_one else 0.0)
        return {self.name: value.to(norm.weight.dtype).cpu()}


class _Student:
    """The quantized model with its scales as parameters."""

    def __init__(self, model: Any, finished: Callable[[int], dict[str, Tensor]], device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.linears: list[_Scaled] = []
        self.norms: list[list[_Norm]] = []
        for i, block in enumerate(model.blocks):
            pairs = [pair for group in block.quant_groups() for pair in group]
            self._replace(block, pairs, finished(i))
            self.norms.append(self._norms(f"{block.key}.", block))
        head = [(model.head_key, model.lm_head)]
        self._replace(model, head, finished(len(model.blocks)))
        self.norms.append(self._norms(f"{model.decoder_key}norm", model.model.norm))

    def _replace(self, root: nn.Module, pairs: list[tuple[str, Any]], tensors: dict[str, Tensor]) -> None:
        """Quantized matrices under `root` become `_Scaled`; what is stored dense stays."""
        places = {id(child): (parent, name) for parent in root.modules() for name, child in parent.named_children()}
        for key, linear in pairs:
            if f"{key}.trellis" not in tensors:
                continue
            codebook = next((c for c in ("mul1", "mcg") if f"{key}.{c}" in tensors), "3inst")
            scaled = _Scaled(key, tensors, codebook, linear, self.device, self.dtype)
            parent, name = places[id(linear)]
            setattr(parent, name, scaled)
            self.linears.append(scaled)

    @staticmethod
    def _norms(prefix: str, root: nn.Module) -> list[_Norm]:
        found = []
        for name, module in root.named_modules():
            if isinstance(module, RMSNorm):
                found.append(_Norm(f"{prefix}{name}.weight" if name else f"{prefix}.weight", module))
        return found

    def parameters(self) -> list[nn.Parameter]:
        modules: list[nn.Module] = [*self.linears, *(n for norms in self.norms for n in norms)]
        return [p for m in modules for p in m.parameters()]

    def ready(self, i: int) -> None:
        """Norms of block i (the head's last) as they are now."""
        for norm in self.norms[i]:
            norm.apply_()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for linear in self.linears:
            found |= linear.tensors()
        for norms in self.norms:
            for norm in norms:
                found |= norm.tensors()
        return found


def _walk(model: Any, batch: Batch) -> Tensor:
    x: Tensor = model.embed(batch)
    for block in model.blocks:
        x = block(x, batch)
    return x


def _parts(tokens: int, model: Any) -> list[slice]:
    """Tokens whose logits are made together."""
    step = max(1, HEAD_LOGITS // model.config.vocab_size)
    return [slice(start, start + step) for start in range(0, tokens, step)]


def _kl(teacher: Any, student: _Student, wanted: Tensor, x: Tensor) -> Tensor:
    """Sum over tokens of KL(original || quantized), both from their last streams."""
    with torch.no_grad():
        p = torch.log_softmax(teacher.head(wanted, _NO_BATCH), -1)
    q = torch.log_softmax(student.model.head(x, _NO_BATCH), -1)
    return (p.exp() * (p - q)).sum()


class _NoBatch:
    """What `Model.head` asks of a batch."""

    logits_at = None
    logits = None


_NO_BATCH: Any = _NoBatch()


def _step(teacher: Any, student: _Student, batch: Batch) -> float:
    """Adds the gradients of the mean KL of one batch; returns it."""
    model, n = student.model, len(student.model.blocks)
    with torch.no_grad():
        wanted = _walk(teacher, batch)
        x = model.embed(batch)
        stages = []
        for i, block in enumerate(model.blocks):
            student.ready(i)
            stages.append(x.clone())
            x = block(x, batch)
    total = 0.0
    gradient = torch.empty_like(x)
    for part in _parts(batch.tokens, model):
        with torch.enable_grad():
            student.ready(n)
            leaf = x[part].clone().requires_grad_()
            loss = _kl(teacher, student, wanted[part], leaf) / batch.tokens
            loss.backward()
        gradient[part] = leaf.grad  # type: ignore[assignment]
        total += float(loss.detach())
    for i in reversed(range(n)):
        with torch.enable_grad():
            student.ready(i)
            leaf = stages[i].requires_grad_()
            model.blocks[i](leaf.clone(), batch).backward(gradient)
        assert leaf.grad is not None
        gradient = leaf.grad
        stages[i] = torch.empty(0)
    return total


def _judge(teacher: Any, student: _Student, ids: Tensor, rows: int, device: torch.device) -> float:
    total = 0.0
    with torch.no_grad():
        for i in range(len(student.norms)):
            student.ready(i)
        for start in range(0, len(ids), rows):
            batch = Batch.whole(ids[start : start + rows].to(device))
            wanted, x = _walk(teacher, batch), _walk(student.model, batch)
            for part in _parts(batch.tokens, teacher):
                total += float(_kl(teacher, student, wanted[part], x[part]))
    return total / ids.numel()
