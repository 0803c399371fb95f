"""Mixing finished quantizations of one model: measure what each group of tensors would gain from another's version, then choose.

`measure` puts one group at a time of a candidate into the base and follows it to the logits; `choose` finds the cheapest loss within a
budget from the measured differences, taken as additive; `write_mix` writes the mixture, without quantizing anything again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.cache import Batch
from exl3.errors import ArgumentError, FormatError, NumericalError, UnsupportedError
from exl3.evaluate.metrics import kl_divergence
from exl3.files import Checkpoint, ShardWriter
from exl3.files.config import check_target, copy_companions, tensor_storage, write_config, write_quantization_config
from exl3.files.shards import make_output, write_json
from exl3.models import load, memory
from exl3.models.loading import locate
from exl3.models.registry import build
from exl3.nn import Linear
from exl3.quantize.allocate import solve
from exl3.quantize.compile import plain_tensors
from exl3.quantize.plan import check_memory

LEVELS = (0, 1, 2, 3)
HEAD_TOKENS = 2048
_FIELDS = ("reference", "quants", "level", "tokens", "base_kl")


@dataclass
class MixGroup:
    """Tensors that are exchanged together. `bits` of their values, `kl` of the model with this group from each quant (nats per token; the
    base's own first)."""

    keys: list[str]
    bits: list[int]
    kl: list[float]


@dataclass
class Measurement:
    """What `exl3 measure` writes: quants[0] is the base into which the others' groups were put."""

    reference: str
    quants: list[str]
    level: int
    tokens: int
    base_kl: float
    groups: list[MixGroup] = field(default_factory=list)

    def write(self, path: str | Path) -> None:
        write_json(Path(path), asdict(self))

    @classmethod
    def read(cls, path: str | Path) -> Measurement:
        """FormatError where the file isn't one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            groups = [MixGroup(list(g["keys"]), [int(b) for b in g["bits"]], [float(k) for k in g["kl"]]) for g in data["groups"]]
            made = cls(groups=groups, **{name: data[name] for name in _FIELDS})
            made.base_kl = float(made.base_kl)
            if not (isinstance(made.quants, list) and all(isinstance(name, str) for name in [made.reference, *made.quants])):
                raise TypeError("reference and quants must name directories")
            keys = [key for g in groups for key in g.keys]
            if not all(g.keys for g in groups) or not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
                raise ValueError("its groups must name matrices, each one once")
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as e:
            raise FormatError(f"{path}: not a measurement of `exl3 measure` ({type(e).__name__}: {e})") from None
        if not all(math.isfinite(k) for g in groups for k in [*g.kl, made.base_kl]):
            raise FormatError(f"{path}: holds figures that are not finite; measure again")
        if any(len(g.bits) != len(made.quants) or len(g.kl) != len(made.quants) for g in groups) or not groups:
            raise FormatError(f"{path}: its groups do not fit its {len(made.quants)} quants; measure again")
        return made


def groups_of(block: Any, level: int) -> list[list[tuple[str, Linear]]]:
    """Groups of a block's matrices: 0 the block, 1 attention and MLP apart, 2 what shares an input, 3 single matrices."""
    fused: list[list[tuple[str, Linear]]] = block.quant_groups()
    everything = [pair for group in fused for pair in group]
    if level == 0:
        return [everything]
    if level == 1:
        halves = [[p for p in everything if ("attn" in p[0]) == attention] for attention in (True, False)]
        return [h for h in halves if h]
    return fused if level == 2 else [[pair] for pair in everything]


def measure(
    reference: str | Path, quants: Sequence[str | Path], ids: Tensor, *, level: int = 2, device: str | None = None,
    memory_gb: float = 4.0, progress: Callable[[int, int], None] | None = None,
) -> Measurement:  # fmt: skip
    """KL(reference || base with one group exchanged) for every group and quant.

    quants: at least two directories, the base (fewest bits) first; ids: (rows, tokens). memory_gb: for the streams of candidates that
    travel together.
    """
    if not (math.isfinite(memory_gb) and memory_gb >= 0):
        raise ArgumentError(f"memory is {memory_gb:g} GB; a finite size is needed")
    if len(quants) < 2:
        raise ArgumentError(f"{len(quants)} quantized directory; at least two are needed to mix")
    if level not in LEVELS:
        raise ArgumentError(f"level is {level}; use 0 (blocks), 1 (attention and MLP), 2 (what shares an input) or 3 (single matrices)")
    if len({Path(q).resolve() for q in quants}) < len(quants):
        raise ArgumentError("a quantized directory is named twice; at least two different ones are needed to mix")
    sources = [_open(q) for q in quants]
    if Checkpoint.open(reference).is_exl3:
        raise ArgumentError(f"{reference}: is an EXL3 model; give the unquantized one as the reference")
    original, base = load(reference, device=device), load(quants[0], device=device)
    if original.split or base.split:
        raise UnsupportedError(f"device {device}: parts of a model are measured on one device; name one that holds both models")
    if not _same(original, base):
        raise ArgumentError(f"{quants[0]}: is another model than {reference}; give the original it was made from")
    others = [_shell(s, base, q) for s, q in zip(sources[1:], quants[1:])]
    _check_codebooks((s, key) for s in sources for block in base.blocks for pairs in groups_of(block, 0) for key, _ in pairs)
    need = {
        "streams in front of every block": 4 * ids.numel() * base.config.hidden_size * (len(base.blocks) + 4),
        "one block's work": memory.workspace_bytes(base, ids.numel()),
    }
    check_memory(need, base.device, "Use fewer rows, or shorter ones", "the measurement")
    _check_ids(ids, base)
    batch = Batch.whole(ids.to(base.device).int())
    with torch.inference_mode():
        wanted = original.embed(batch)
        for block in original.blocks:
            wanted = block(wanted, batch)
        original.model.layers = torch.nn.ModuleList()
        batch.tables.clear()
        streams = [base.embed(batch)]  # of the base, in front of each block
        for block in base.blocks:
            streams.append(block(streams[-1].clone(), batch))
        score = lambda x: _divergence(original, base, wanted, x, batch)  # noqa: E731
        found = Measurement(str(reference), [str(q) for q in quants], level, ids.numel(), score(streams[-1]))
        limit = max(1, int(memory_gb * 2**30 / (4 * streams[0].numel())))
        work = list(_candidates(base, sources, level, found))
        for done in range(0, len(work), limit):
            _follow(work[done : done + limit], base, others, sources, streams, batch, score, found)
            if progress is not None:
                progress(min(done + limit, len(work)), len(work))
    return found


def _open(directory: str | Path) -> Checkpoint:
    checkpoint = Checkpoint.open(directory)
    if not checkpoint.is_exl3:
        raise ArgumentError(f"{directory}: is not an EXL3 model; give finished quantizations")
    return checkpoint


def _measured(directory: str) -> Checkpoint:
    """One of a measurement's quants."""
    if not Path(directory).is_dir():
        raise ArgumentError(f"{directory}: was measured and is not there; go where `exl3 measure` ran, or measure again")
    return _open(directory)


def _shell(source: Checkpoint, base: Any, directory: str | Path) -> Any:
    """An empty model of another quant, to load single blocks into; ArgumentError unless it is the same model."""
    model = build(source.config)
    locate(model, source)
    if not _same(model, base):
        raise ArgumentError(f"{directory}: is another model than {base.path}; give quantizations of one model")
    model.place(base.device, base.dtype)
    return model


def _same(a: Any, b: Any) -> bool:
    """Whether two models, loaded or not, have one shape: streams and logits can be compared."""
    kinds = [(type(m), len(m.blocks), m.config.hidden_size, m.config.vocab_size) for m in (a, b)]
    return kinds[0] == kinds[1]


def _check_codebooks(matrices: Iterable[tuple[Checkpoint, str]]) -> None:
    books = {source.linear(key).codebook for source, key in matrices} - {None}
    if len(books) > 1:
        raise UnsupportedError(
            f"the quants use different codebooks ({', '.join(sorted(str(b) for b in books))}); mix quants of one codebook"
        )


def _check_ids(ids: Tensor, model: Any) -> None:
    """ArgumentError for ids outside the vocabulary, for which the embedding would give zeros."""
    wrong = ids[(ids < 0) | (ids >= model.vocab_size)]
    if len(wrong):
        raise ArgumentError(f"ids: {int(wrong[0])} is outside the vocabulary of {model.vocab_size}; is the tokenizer another's?")


def _candidates(base: Any, sources: list[Checkpoint], level: int, found: Measurement) -> Iterator[tuple[int, int, int]]:
    """(block, group number, quant) of everything to measure; the groups are entered in `found`."""
    for i, block in enumerate(base.blocks):
        for pairs in groups_of(block, level):
            keys = [key for key, _ in pairs]
            bits = [sum(_bits(s, key) for key in keys) for s in sources]
            found.groups.append(MixGroup(keys, bits, [found.base_kl] * len(sources)))
            for q in range(1, len(sources)):
                if any(_differs(sources[0], sources[q], key) for key in keys):
                    yield i, len(found.groups) - 1, q


def _bits(source: Checkpoint, key: str) -> int:
    """Bits of a matrix's values, scales left out as everywhere where bits per weight are spoken of."""
    files = source.linear(key)
    return round(files.bits * files.in_padded * files.out_padded)


def _differs(a: Checkpoint, b: Checkpoint, key: str) -> bool:
    """Whether two quants hold another version of a matrix."""
    names = sorted(a.linear(key).covers)
    if names != sorted(b.linear(key).covers) or any(a.tensors[n].shape != b.tensors[n].shape for n in names):
        return True
    left, right = a.read(names), b.read(names)
    return any(not torch.equal(_bytes_of(left[n]), _bytes_of(right[n])) for n in names)


def _bytes_of(t: Tensor) -> Tensor:
    return t.reshape(-1).view(torch.uint8)  # a codebook's multiplier is a scalar


def _follow(
    work: list[tuple[int, int, int]], base: Any, others: list[Any], sources: list[Checkpoint], streams: list[Tensor], batch: Batch,
    score: Callable[[Tensor], float], found: Measurement,
) -> None:  # fmt: skip
    """Takes candidates, ordered by block, to the logits together."""
    moving: list[tuple[int, int, Tensor]] = []
    for i in range(work[0][0], len(base.blocks)):
        block = base.blocks[i]
        moving = [(g, q, block(x, batch)) for g, q, x in moving]
        for q in sorted({q for b, _, q in work if b == i}):
            other = others[q - 1].load_block(i, sources[q], base.device)
            theirs = dict(pair for group in other.quant_groups() for pair in group)
            ours = dict(pair for group in block.quant_groups() for pair in group)
            for _, g, _ in [w for w in work if w[0] == i and w[2] == q]:
                kept = {key: _exchange(ours[key], _held(theirs[key])) for key in found.groups[g].keys}
                moving.append((g, q, block(streams[i].clone(), batch)))
                for key, state in kept.items():
                    _exchange(ours[key], state)
            others[q - 1].unload_block(i)
    for g, q, x in moving:
        found.groups[g].kl[q] = score(x)


def _held(linear: Linear) -> tuple[Any, Any, Any]:
    return linear.exl3, linear.weight, linear.bias


def _exchange(linear: Linear, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Puts another matrix in place; returns what was there."""
    before = _held(linear)
    linear.exl3, linear.weight, linear.bias = state
    return before


def _divergence(original: Any, base: Any, wanted: Tensor, x: Tensor, batch: Batch) -> float:
    """Mean KL of the logits of two last streams."""
    total = 0.0
    for start in range(0, len(x), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        total += float(kl_divergence(original.head(wanted[part].clone(), batch), base.head(x[part].clone(), batch)).sum())
    if not math.isfinite(total):
        raise NumericalError(f"logits of {original.path}, or of {base.path} with exchanged parts, hold NaN or Inf; `exl3 eval` tells which")
    return total / len(x)


def choose(found: Measurement, bits: float) -> list[int]:
    """Number of the quant each group is taken from: least sum of measured KL within `bits` per weight of the mixed matrices.

    ArgumentError below what the cheapest versions need.
    """
    if not math.isfinite(bits):
        raise ArgumentError(f"bits is {bits:g}; a finite number is needed")
    base = _measured(found.quants[0])
    weights = [_weights(base, g.keys) for g in found.groups]
    cost = [[float(b) for b in g.bits] for g in found.groups]
    loss = [[k - found.base_kl for k in g.kl] for g in found.groups]
    budget = bits * sum(weights)
    least = sum(min(row) for row in cost)
    if budget < least:
        raise ArgumentError(
            f"{bits:g} bits per weight: the cheapest mixture has {least / sum(weights):.3f}; allow more or add a smaller quant"
        )
    return solve(cost, loss, budget)


def _weights(source: Checkpoint, keys: Iterable[str]) -> int:
    """Stored weights of matrices, padding included."""
    return sum(source.linear(key).in_padded * source.linear(key).out_padded for key in keys)


def _check_unchanged(found: Measurement, sources: list[Checkpoint]) -> None:
    """ArgumentError where the quants are not those that were measured."""
    for group in found.groups:
        for source, bits in zip(sources, group.bits):
            if sum(_bits(source, key) for key in group.keys) != bits:
                raise ArgumentError(f"{source.path}: {group.keys[0]} has other bits than when it was measured; measure again")


def write_mix(found: Measurement, chosen: Sequence[int], output: str | Path, *, shard_size: float = 8192) -> Checkpoint:
    """Writes the mixture: matrices as chosen, all else from the base."""
    output = Path(output)
    if output.resolve() in {Path(q).resolve() for q in [*found.quants, found.reference]}:
        raise ArgumentError(f"output {output}: is one of the measured directories; choose another")
    check_target(output, "output")
    sources = [_measured(q) for q in found.quants]
    base = sources[0]
    origin = {key: q for group, q in zip(found.groups, chosen) for key in group.keys}
    model = build(base.config)
    locate(model, base)
    _check_codebooks([(base, key) for key in origin] + [(sources[q], key) for key, q in origin.items()])
    _check_unchanged(found, sources)
    make_output(output)
    written: set[str] = set()
    with ShardWriter(output, shard_size) as out:
        for block in model.blocks:
            tensors = base.read(plain_tensors(model, block.key, block, base))
            for group in block.quant_groups():
                for key, _ in group:
                    q = origin.get(key, 0)
                    tensors |= sources[q].read(sorted(sources[q].linear(key).covers))
            written |= set(tensors) | {n for group in block.quant_groups() for key, _ in group for n in base.linear(key).covers}
            out.add(tensors)
        rest = sorted(set(base.tensors) - written)
        out.add(base.read(rest))
        out.settle()
    copy_companions(base.path, output)
    quantization = dict(base.config["quantization_config"])
    quantization.pop("calibration", None)  # the parts may have seen several
    total = sum(_bits(sources[q], key) for key, q in origin.items())
    quantization["bits"] = round(total / _weights(base, origin), 2)
    config = {k: v for k, v in base.config.items() if k != "quantization_config"}
    write_config(output, config, quantization, has_head=base.has_linear(model.head_key))
    result = Checkpoint.open(output)
    write_quantization_config(output, quantization, tensor_storage(result.tensors, result.multipliers()))
    locate(build(result.config), result)
    return result
