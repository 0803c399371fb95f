"""One face for a decode step: the same small buffers every time, recorded once per number of tokens and replayed.

Recorders: "tape" (native calls repeated by one C++ call; the CPU, and wherever EXL3_GRAPHS=0), "graph" (torch.cuda.CUDAGraph), "eager" (the
Python runs each time; EXL3_STEP=eager, and where a step can't be recorded). Prefill is never recorded. A model on several devices has
one segment, and so one recording, for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl3 import ops
from exl3.cache import Batch
from exl3.errors import ArgumentError, BackendError
from exl3.generate.segments import BUCKETS, MAX_TOKENS, Indices, Recording, Segment, recorder
from exl3.models.stages import stages_of, walk

__all__ = ["BUCKETS", "MAX_TOKENS", "StepRunner", "bucket", "device_failed", "forward", "packed_batch", "recorder"]

Row = tuple[Sequence[int], int, Sequence[int], Any]  # new ids, position of the first, pages, owner


def bucket(tokens: int) -> int:
    """The smallest recorded size that holds `tokens`."""
    for size in BUCKETS:
        if tokens <= size:
            return size
    raise ArgumentError(f"a decode step takes at most {MAX_TOKENS} tokens, got {tokens}")


def device_failed(error: Exception) -> bool:
    """Whether the device itself failed, so that nothing on it can go on; out of memory is not such a fault."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    text = str(error)
    signs = ("CUDA error", "HIP error", "device-side assert", "cuBLAS", "CUBLAS")
    return isinstance(error, BackendError) or (isinstance(error, RuntimeError) and any(s in text for s in signs))


def forward(model: Any, batch: Batch, head: bool = True) -> Tensor | None:
    """embed, blocks, head. Without `head` the pass only fills the cache."""
    out = walk(model, batch, head)
    return out if head else None


def packed_batch(
    rows: Sequence[tuple[np.ndarray, int, Sequence[int]]], logits_at: Sequence[int], cache: Any, device: torch.device
) -> Batch:
    """A step that is not recorded. rows: (new ids, their first position, pages); logits_at: packed indices."""
    sizes = [len(ids) for ids, _, _ in rows]
    ends = np.cumsum(sizes)
    width = max(len(p) for _, _, p in rows)
    table = np.zeros((len(rows), width), np.int32)
    for r, (_, _, pages) in enumerate(rows):
        table[r, : len(pages)] = pages

    def put(x: Any) -> Tensor:
        return ops.put(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)), device)

    return Batch(
        ids=put(np.concatenate([ids for ids, _, _ in rows])),
        positions=put(np.concatenate([np.arange(start, start + n) for (_, start, _), n in zip(rows, sizes)])),
        token_row=put(np.repeat(np.arange(len(rows)), sizes)),
        row_start=put(np.concatenate([[0], ends])),
        lengths=put([start + n for (_, start, _), n in zip(rows, sizes)]),
        block_table=put(table),
        logits_at=put(list(logits_at)),
        cache=cache,
        runs=[(start, n) for (_, start, _), n in zip(rows, sizes)],
    )


@dataclass
class _Ahead:
    """A step that runs on the card already, each of its rows a token further than the step before."""

    logits: Tensor
    at: dict[Any, tuple[int, int, int, int]]  # owner -> (row, token id, its position, pages)


class StepRunner:
    """Decode steps of one model over one cache. `width`: pages a row may have at most.

    `run(rows)` takes (ids, first position, pages, owner) per row, at most 64 tokens in all, and returns logits `(tokens, vocab)` fp32,
    valid until the next run or fetch. `owner` is any hashable: a row of the block table is rewritten only when its owner or number of
    pages changes.

    `fetch(ids, rows, logits)` brings tokens drawn from `logits` to the host. Where those are the last run's, on a card, it first starts the
    step that follows if every row goes on with its token, so that the card works while the host looks at the tokens; a `run` that asks
    for rows of that step finds its logits there, any other is computed anew. `ahead = False` turns that off. What such a step leaves in
    the cache lies beyond every row's end, and later work on the same stream overwrites it.
    """

    def __init__(self, model: Any, cache: Any, width: int, mode: str | None = None) -> None:
        self.model, self.cache = model, cache
        stages = stages_of(model)
        self.device = stages[0].device
        self._cards = all(stage.device.type == "cuda" for stage in stages)
        self._indices = Indices(width, any(stage.device.type == "cuda" for stage in stages))
        self.segments, at = [], 0
        for stage in stages:
            blocks = (at, at + len(stage.blocks))
            self.segments.append(Segment(model, stage, cache, self._indices, mode or recorder(stage.device), blocks))
            at = blocks[1]
        self._revision: Any = None
        self._last: list[Row] | None = None  # rows of the last run where each had one token
        self._logits: Tensor | None = None  # and what it returned
        self._pending: _Ahead | None = None
        self._drawn: Any = None  # pinned buffer and event of `fetch`
        self.ahead = True
        self.steps = 0

    @property
    def mode(self) -> str:
        """How steps run on the first device: tape, graph or eager."""
        return self.segments[0].mode

    @property
    def recorded(self) -> dict[int, Recording]:
        """Recordings of the first device by number of tokens."""
        return self.segments[0].recorded

    def reset(self) -> None:
        """Drops all recordings: weights, adapters or cache have changed."""
        self._pending = None
        for segment in self.segments:
            segment.recorded.clear()

    def run(self, rows: Sequence[Row]) -> Tensor:
        """See the class."""
        revision = (getattr(self.model, "revision", 0), id(self.cache))
        if revision != self._revision:
            self.reset()
            self._revision = revision
        self.steps += 1
        pending, self._pending = self._pending, None
        self._last = list(rows) if self._cards and all(len(row[0]) == 1 for row in rows) else None
        self._logits = None if pending is None or self._last is None else self._found(pending, rows)
        if self._logits is None:
            self._logits = self._launch(rows)
        return self._logits

    def _launch(self, rows: Sequence[Row], ids: Tensor | None = None) -> Tensor:
        """Starts a step; `ids`: its token ids where they are on the card only."""
        tokens = sum(len(row[0]) for row in rows)
        size = bucket(tokens)
        for segment in self.segments:
            segment.wait()
        changed = self._indices.fill(rows, size)
        x: Tensor | None = None
        for segment in self.segments:
            segment.send(len(rows), changed)
            if ids is not None:
                ops.copy_(segment.ids[:tokens], ids)
        for segment in self.segments:
            x = segment.run(size, x)
        assert x is not None
        return x[:tokens]

    def fetch(self, ids: Tensor, rows: Sequence[int], logits: Tensor) -> list[int]:
        """`ids` int32 `(n,)`, drawn one from each of the `rows` of `logits`, on the host; see the class."""
        last = self._last if logits is self._logits else None  # a prefill pass has logits of its own
        if not self.ahead or last is None or list(rows) != list(range(len(last))) or not self._may_go_ahead(last):
            drawn: list[int] = ids.tolist()
            return drawn
        arrived = self._bring(ids)
        following = [((0,), first + 1, pages, owner) for _, first, pages, owner in last]
        further = self._launch(following, ids)
        drawn = arrived()
        places = {owner: (r, drawn[r], first, len(pages)) for r, (_, first, pages, owner) in enumerate(following)}
        self._pending = _Ahead(further, places)
        return drawn

    def _bring(self, ids: Tensor) -> Callable[[], list[int]]:
        """Starts a copy to the host; the result waits for it, and for nothing queued later."""
        if ids.device.type != "cuda":
            there: list[int] = ids.tolist()
            return lambda: there
        if self._drawn is None:
            self._drawn = torch.zeros(MAX_TOKENS, dtype=torch.int32, pin_memory=True), torch.cuda.Event()
        host, event = self._drawn
        host[: len(ids)].copy_(ids, non_blocking=True)
        event.record(torch.cuda.current_stream(ids.device))

        def arrived() -> list[int]:
            event.synchronize()
            values: list[int] = host[: len(ids)].tolist()
            return values

        return arrived

    def _may_go_ahead(self, rows: Sequence[Row]) -> bool:
        """Whether the next step is recorded and every row's pages hold one more token."""
        size = bucket(len(rows))
        if any(segment.mode == "eager" or size not in segment.recorded for segment in self.segments):
            return False
        return all(first + 1 < 256 * len(pages) for _, first, pages, _ in rows)

    def _found(self, pending: _Ahead, rows: Sequence[Row]) -> Tensor | None:
        """The logits of `rows` where the pending step has them all."""
        at = []
        for ids, first, pages, owner in rows:
            place = pending.at.get(owner)
            if place is None or place[1:] != (ids[0], first, len(pages)):
                return None
            at.append(place[0])
        if at == list(range(len(at))):
            return pending.logits[: len(at)]
        return pending.logits.index_select(0, ops.put(torch.tensor(at), pending.logits.device))
