"""One face for a decode step: the same small buffers every time, recorded once per number of tokens and replayed.

Recorders: "tape" (native calls repeated by one C++ call; the CPU, and wherever EXL3_GRAPHS=0), "graph" (torch.cuda.CUDAGraph), "eager" (the
Python runs each time; EXL3_STEP=eager, and where a step can't be recorded). Prefill is never recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl3 import settings
from exl3.cache import Batch
from exl3.errors import ArgumentError, BackendError
from exl3.ops import native

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_TOKENS = BUCKETS[-1]

_pools: dict[int, Any] = {}  # device index -> memory pool that all graphs of the device share


def bucket(tokens: int) -> int:
    """The smallest recorded size that holds `tokens`."""
    for size in BUCKETS:
        if tokens <= size:
            return size
    raise ArgumentError(f"a decode step takes at most {MAX_TOKENS} tokens, got {tokens}")


def recorder(device: torch.device) -> str:
    """Which recorder serves `device`: EXL3_STEP if set, else graph on CUDA unless EXL3_GRAPHS=0, tape elsewhere."""
    chosen = settings.get("EXL3_STEP")
    if chosen is not None:
        return str(chosen)
    if device.type != "cuda":
        return "tape"
    return "graph" if settings.get("EXL3_GRAPHS", backend="rocm" if torch.version.hip else "cuda") else "tape"


def forward(model: Any, batch: Batch, head: bool = True) -> Tensor | None:
    """embed, blocks, head. Without `head` the pass only fills the cache."""
    x = model.embed(batch)
    for block in model.blocks:
        x = block(x, batch)
    return model.head(x, batch) if head else None


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
        return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)).to(device)

    return Batch(
        ids=put(np.concatenate([ids for ids, _, _ in rows])),
        positions=put(np.concatenate([np.arange(start, start + n) for (_, start, _), n in zip(rows, sizes)])),
        token_row=put(np.repeat(np.arange(len(rows)), sizes)),
        row_start=put(np.concatenate([[0], ends])),
        lengths=put([start + n for (_, start, _), n in zip(rows, sizes)]),
        block_table=put(table),
        logits_at=put(list(logits_at)),
        cache=cache,
    )


class StepRunner:
    """Decode steps of one model over one cache. `width`: pages a row may have at most.

    `run(rows)` takes (ids, first position, pages, owner) per row, at most 64 tokens in all, and returns logits `(tokens, vocab)` fp32,
    valid until the next run. `owner` is any hashable: a row of the block table is rewritten only when its owner or number of pages changes.
    """

    def __init__(self, model: Any, cache: Any, width: int, mode: str | None = None) -> None:
        self.model, self.cache = model, cache
        self.device = torch.device(model.device)
        self.mode = mode or recorder(self.device)
        n = MAX_TOKENS
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros(5 * n + 1, dtype=torch.int32, pin_memory=on_gpu)
        self._host_table = torch.zeros(n, width, dtype=torch.int32, pin_memory=on_gpu)
        self._small = self._host.to(self.device) if on_gpu else self._host
        self._table = self._host_table.to(self.device) if on_gpu else self._host_table
        view = self._host.numpy()
        self._ids, self._positions, self._token_row = view[:n], view[n : 2 * n], view[2 * n : 3 * n]
        self._row_start, self._lengths = view[3 * n : 4 * n + 1], view[4 * n + 1 :]
        self._np_table = self._host_table.numpy()
        self._owners: list[Any] = [None] * n
        self._copied: Any = None  # event: the pinned buffers may be written again
        self._recorded: dict[int, tuple[Any, Batch, Tensor]] = {}
        self._revision: Any = None
        self.steps = 0

    def reset(self) -> None:
        """Drops all recordings: weights, adapters or cache have changed."""
        self._recorded.clear()

    def run(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int], Any]]) -> Tensor:
        """See the class."""
        revision = (getattr(self.model, "revision", 0), id(self.cache))
        if revision != self._revision:
            self.reset()
            self._revision = revision
        tokens, size = self._fill(rows)
        self.steps += 1
        held = self._recorded.get(size)
        if held is None:
            held = self._record(size)
            if held is None:
                logits = forward(self.model, self._batch(size))
                assert logits is not None
                return logits[:tokens]
        else:
            recording = held[0][0] if isinstance(held[0], tuple) else held[0]
            recording.replay()
        return held[2][:tokens]

    def _fill(self, rows: Sequence[tuple[Sequence[int], int, Sequence[int], Any]]) -> tuple[int, int]:
        """Writes the rows into the buffers; (tokens, size of the step)."""
        ids: list[int] = []
        positions: list[int] = []
        token_row: list[int] = []
        starts = [0]
        lengths: list[int] = []
        if self._copied is not None:
            self._copied.synchronize()
        dirty = False
        for r, (row, first, pages, owner) in enumerate(rows):
            n = len(row)
            ids += row
            positions += range(first, first + n)
            token_row += [r] * n
            starts.append(len(ids))
            lengths.append(first + n)
            key = (owner, len(pages))
            if self._owners[r] != key:
                self._np_table[r, : len(pages)] = pages
                self._owners[r] = key
                dirty = True
        tokens, count = len(ids), len(lengths)
        size = bucket(tokens)
        pad = size - tokens
        self._ids[:size] = ids + [0] * pad
        self._positions[:size] = positions + [0] * pad
        self._token_row[:size] = token_row + [-1] * pad
        self._row_start[: size + 1] = starts + [tokens] * (size - count)
        self._lengths[:size] = lengths + [0] * (size - count)
        if self.device.type == "cuda":
            self._small.copy_(self._host, non_blocking=True)
            if dirty:
                self._table[:count].copy_(self._host_table[:count], non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self.device))
        return tokens, size

    def _batch(self, size: int) -> Batch:
        n, s = MAX_TOKENS, self._small
        return Batch(
            ids=s[:size], positions=s[n : n + size], token_row=s[2 * n : 2 * n + size], row_start=s[3 * n : 3 * n + size + 1],
            lengths=s[4 * n + 1 : 4 * n + 1 + size], block_table=self._table[:size], logits_at=None, cache=self.cache,
        )  # fmt: skip

    def _record(self, size: int) -> tuple[Any, Batch, Tensor] | None:
        """Records the step of `size` tokens, having run it once; None where it can't be recorded."""
        if self.mode == "eager":
            return None
        batch = self._batch(size)
        try:
            held = self._record_graph(batch) if self.mode == "graph" else self._record_tape(batch)
        except (ArgumentError, BackendError, ImportError) as error:
            if settings.get("EXL3_STEP") is not None:
                raise
            warnings.warn(f"decode steps run from Python, slower: {error}", RuntimeWarning, stacklevel=3)
            self.mode = "eager"
            return None
        self._recorded[size] = held
        return held

    def _record_tape(self, batch: Batch) -> tuple[Any, Batch, Tensor]:
        from exl3 import ops

        tape = ops.Tape(self.device)
        with tape:
            logits = forward(self.model, batch)
        assert logits is not None
        return tape, batch, logits

    def _record_graph(self, batch: Batch) -> tuple[Any, Batch, Tensor]:
        with torch.cuda.device(self.device):
            index = torch.cuda.current_device()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                warm = forward(self.model, batch)  # lazy allocations and library handles belong outside the capture
                assert warm is not None
                logits = torch.empty_like(warm)  # outside the pool, so that it survives the next graph's replay
            torch.cuda.current_stream().wait_stream(side)
            if index not in _pools:
                _pools[index] = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            batch.tables.clear()
            # other threads (filters, the server) may call CUDA meanwhile
            with torch.cuda.graph(graph, pool=_pools[index], capture_error_mode="thread_local"):
                made = forward(self.model, batch)
                assert made is not None
                logits.copy_(made)
            graph.replay()
        # the kernels' workspaces are replaced when they grow: this graph goes on with those it was recorded with
        return (graph, native.workspaces(self.device)), batch, logits
