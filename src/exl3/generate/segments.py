"""The part of a decode step that runs on one device: its index buffers, recorded once per number of tokens and replayed."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl3 import ops, settings
from exl3.cache import Batch
from exl3.errors import ArgumentError, BackendError
from exl3.models.stages import Stage, run_stage
from exl3.ops import native

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_TOKENS = BUCKETS[-1]

_pools: dict[int, tuple[Any, weakref.WeakSet[Any]]] = {}  # device index -> memory pool that all its graphs share, those that live
_streams: dict[int, Any] = {}  # device index -> the stream steps are recorded on: memory belongs to streams


def recorder(device: torch.device) -> str:
    """Which recorder serves `device`: EXL3_STEP if set, else graph on CUDA unless EXL3_GRAPHS=0, tape elsewhere."""
    chosen = settings.get("EXL3_STEP")
    if chosen is not None and not (chosen == "graph" and device.type != "cuda"):
        return str(chosen)
    if device.type != "cuda":
        return "tape"
    return "graph" if settings.get("EXL3_GRAPHS", backend="rocm" if torch.version.hip else "cuda") else "tape"


class Indices:
    """The index arrays of a step of up to 64 tokens in host memory, pinned where a card reads them. `ids`, `positions`, `token_row`,
    `row_start`, `lengths` and `table` are numpy views."""

    def __init__(self, width: int, pinned: bool) -> None:
        n = MAX_TOKENS
        self.small = torch.zeros(5 * n + 1, dtype=torch.int32, pin_memory=pinned)
        self.block_table = torch.zeros(n, width, dtype=torch.int32, pin_memory=pinned)
        view: np.ndarray = self.small.numpy()
        self.ids, self.positions, self.token_row = view[:n], view[n : 2 * n], view[2 * n : 3 * n]
        self.row_start, self.lengths = view[3 * n : 4 * n + 1], view[4 * n + 1 :]
        self.table: np.ndarray = self.block_table.numpy()
        self._owners: list[Any] = [None] * n

    def fill(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int], Any]], size: int) -> bool:
        """Write `rows`, padded to `size` tokens; whether the block table changed."""
        ids: list[int] = []
        positions: list[int] = []
        token_row: list[int] = []
        starts = [0]
        lengths: list[int] = []
        changed = False
        for r, (row, first, pages, owner) in enumerate(rows):
            n = len(row)
            ids += row
            positions += range(first, first + n)
            token_row += [r] * n
            starts.append(len(ids))
            lengths.append(first + n)
            key = (owner, len(pages))
            if self._owners[r] != key:
                self.table[r, : len(pages)] = pages
                self._owners[r] = key
                changed = True
        tokens, count = len(ids), len(lengths)
        pad = size - tokens
        self.ids[:size] = ids + [0] * pad
        self.positions[:size] = positions + [0] * pad
        self.token_row[:size] = token_row + [-1] * pad
        self.row_start[: size + 1] = starts + [tokens] * (size - count)
        self.lengths[:size] = lengths + [0] * (size - count)
        return changed


@contextlib.contextmanager
def _capture(graph: Any, index: int, side: Any) -> Iterator[None]:
    """Records on `side`, a stream of device `index`, into `graph`; other threads (filters, the server) may call CUDA meanwhile.

    torch.cuda.graph also collects garbage and empties the allocator's cache, some 40 ms while jobs wait. That is left out where the
    pool is in use; one whose last graph has gone is only known to the allocator again after it."""
    if index not in _pools:
        _pools[index] = torch.cuda.graph_pool_handle(), weakref.WeakSet()
    pool, alive = _pools[index]
    if not alive:
        with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
            yield
    else:
        torch.cuda.synchronize()
        collects = gc.isenabled()
        gc.disable()  # nothing is to free device memory in the middle
        try:
            with torch.cuda.stream(side):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    yield
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
    alive.add(graph)


@dataclass
class Recording:
    """A recorded step of one size: `step.replay()` leaves its result in `out`. `keep`: what it needs alive."""

    step: Any
    batch: Batch
    out: Tensor
    keep: Any = None


class Segment:
    """One stage's part of the steps of `model` over `cache`. `first`, `last`: number of its first and last block, for messages."""

    def __init__(self, model: Any, stage: Stage, cache: Any, indices: Indices, mode: str, blocks: tuple[int, int]) -> None:
        self.model, self.stage, self.cache, self.mode = model, stage, cache, mode
        self.device = stage.device
        self.on_gpu = self.device.type == "cuda"
        self.indices = indices
        self._small = indices.small.to(self.device) if self.on_gpu else indices.small
        self._table = indices.block_table.to(self.device) if self.on_gpu else indices.block_table
        self._stream: Tensor | None = None  # residual stream from the segment before
        self._out: Tensor | None = None  # what graphs leave: logits or the stream
        self._what = "" if stage.first and stage.last else f", layers {blocks[0]} to {blocks[1] - 1}"
        self.recorded: dict[int, Recording] = {}
        self._copied: Any = None  # event: the pinned buffers may be written again

    @property
    def ids(self) -> Tensor:
        """Token ids of the step, int32 `(64,)` on the device."""
        return self._small[:MAX_TOKENS]

    def wait(self) -> None:
        """Until the host's index arrays have been read."""
        if self._copied is not None:
            self._copied.synchronize()

    def send(self, rows: int, table_changed: bool) -> None:
        """Copy the index arrays to the device."""
        if not self.on_gpu:
            return
        self._small.copy_(self.indices.small, non_blocking=True)
        if table_changed:
            self._table[:rows].copy_(self.indices.block_table[:rows], non_blocking=True)
        self._copied = self._copied or torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self.device))

    def run(self, size: int, x: Tensor | None) -> Tensor:
        """One step of `size` tokens: logits, or the residual stream for the next segment; valid until the next run. x: the stream of the
        segment before, on its device."""
        if x is not None:
            if self._stream is None:
                self._stream = torch.empty(MAX_TOKENS, x.shape[1], dtype=x.dtype, device=self.device)
            ops.copy_(self._stream[:size], x)
        held = self.recorded.get(size)
        if held is None:
            held = self._record(size)
            if held is None:
                return self._forward(self._batch(size))
        else:
            held.step.replay()
        return held.out

    def _forward(self, batch: Batch) -> Tensor:
        x = None if self.stage.first else self._stream
        if x is not None:
            x = x[: batch.tokens]
        out: Tensor = run_stage(self.model, self.stage, x, batch)
        return out

    def _batch(self, size: int) -> Batch:
        n, s = MAX_TOKENS, self._small
        return Batch(
            ids=s[:size], positions=s[n : n + size], token_row=s[2 * n : 2 * n + size], row_start=s[3 * n : 3 * n + size + 1],
            lengths=s[4 * n + 1 : 4 * n + 1 + size], block_table=self._table[:size], logits_at=None, cache=self.cache,
        )  # fmt: skip

    def _record(self, size: int) -> Recording | None:
        """Records the step of `size` tokens, having run it once; None where it can't be recorded."""
        if self.mode == "eager":
            return None
        start = time.perf_counter()
        try:
            held = self._record_graph(size) if self.mode == "graph" else self._record_tape(size)
        except (ArgumentError, BackendError, ImportError) as error:
            self._trace(size, f"declined, it runs from Python: {error}")
            if settings.get("EXL3_STEP") is not None:
                raise
            warnings.warn(f"decode steps run from Python, slower: {error}", RuntimeWarning, stacklevel=4)
            self.mode = "eager"
            return None
        calls = f" of {len(held.step)} native calls" if self.mode == "tape" else ""
        self._trace(size, f"built as a {self.mode}{calls} in {1e3 * (time.perf_counter() - start):.0f} ms")
        self.recorded[size] = held
        return held

    def _trace(self, size: int, text: str) -> None:
        if settings.get("EXL3_BC_ATTN_TRACE"):
            print(f"exl3: step of {size} tokens on {self.device}{self._what}: {text}", file=sys.stderr)

    def _record_tape(self, size: int) -> Recording:
        batch = self._batch(size)
        tape = ops.Tape(self.device)
        with tape:
            out = self._forward(batch)
        return Recording(tape, batch, out)

    def _record_graph(self, size: int) -> Recording:
        batch = self._batch(size)
        with torch.cuda.device(self.device):
            index = torch.cuda.current_device()
            side = _streams.setdefault(index, torch.cuda.Stream())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # once as it is: lazy allocations and library handles belong outside the capture
                stream = None if self._stream is None else self._stream.clone()
                warm = self._forward(batch)
                if self._out is None:  # outside the pool, so that it survives the next graph's replay
                    self._out = warm.new_empty(MAX_TOKENS, warm.shape[1])
                if self._stream is not None and stream is not None:  # blocks work in place
                    self._stream.copy_(stream)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            batch.tables.clear()
            out = self._out[:size]
            batch.logits = out if self.stage.last else None
            with _capture(graph, index, side):
                made = self._forward(batch)
                if made.data_ptr() != out.data_ptr():
                    out.copy_(made)
            graph.replay()
        # the kernels' workspaces are replaced when they grow: this graph goes on with those it was recorded with
        return Recording(graph, batch, out, native.workspaces(self.device))
