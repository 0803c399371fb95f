"""The calibration rows on their way through the model, cut into shards that devices take turns with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from exl3.cache import Batch
from exl3.quantize.transfer import move

T = TypeVar("T")
SHARDS = 16  # at most; their number and sizes follow from the rows alone, so that sums over them don't depend on the devices


def shard_rows(rows: int, rows_per_batch: int) -> list[tuple[int, int]]:
    """(first row, last row + 1) of each shard, whole batches."""
    batches = -(-rows // rows_per_batch)
    step = -(-batches // SHARDS) * rows_per_batch
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


@dataclass
class Shard:
    """Residual streams `(rows, cols, hidden)` fp32 of some rows: behind the quantized prefix and, if wanted, behind the original one."""

    first_row: int
    quantized: Tensor
    original: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.quantized, self.original) if t is not None)

    def put(self, device: torch.device, *, pinned: bool = False) -> None:
        """Moves the streams to `device`; `pinned`: to host memory that a card can reach by itself, if there is enough."""
        for name in ("quantized", "original"):
            t = getattr(self, name)
            if t is not None:
                t = move(t, device)
                if pinned:
                    with suppress(RuntimeError):
                        t = t.pin_memory()
                setattr(self, name, t)


class Streams:
    """The shards of one device; they lie there where there is room (`keep_bytes`), else in host memory."""

    def __init__(self, model: Any, device: torch.device, rows_per_batch: int, keep_bytes: int = 0) -> None:
        self.model, self.device = model, device
        self.rows_per_batch, self.keep_bytes = rows_per_batch, keep_bytes
        self.shards: dict[int, Shard] = {}
        self._batches: dict[tuple[int, int], Batch] = {}

    def take(self, number: int, shard: Shard) -> None:
        """Takes over a shard."""
        used = sum(s.nbytes for s in self.shards.values() if s.quantized.device == self.device)
        if used + shard.nbytes <= self.keep_bytes or self.device.type == "cpu":
            shard.put(self.device)
        else:
            shard.put(torch.device("cpu"), pinned=True)
        self.shards[number] = shard

    def give(self, number: int) -> Shard:
        """Hands a shard over."""
        return self.shards.pop(number)

    def batches(self, number: int, *, first: int = 0, rows: int | None = None) -> Iterator[tuple[int, Batch, Tensor, Tensor | None]]:
        """(row of the shard, batch, stream of the quantized prefix (tokens, hidden), the original's or None): copies on the device.
        `first`, `rows`: only those rows of the shard."""
        shard = self.shards[number]
        total = shard.quantized.shape[0] if rows is None else min(first + rows, shard.quantized.shape[0])
        for start in range(first, total, self.rows_per_batch):
            end = min(start + self.rows_per_batch, total)
            original = None if shard.original is None else self._copy(shard.original, start, end)
            yield start, self._batch(end - start, shard.quantized.shape[1]), self._copy(shard.quantized, start, end), original

    def within_memory(self, work: Callable[[], T]) -> T:
        """work(), again with smaller batches, then with the streams in host memory, if the device runs out of memory."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                here = [s for s in self.shards.values() if s.quantized.device == self.device]
                if self.rows_per_batch == 1 and (self.device.type == "cpu" or not here):
                    raise
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if self.rows_per_batch > 1:
                self.rows_per_batch = (self.rows_per_batch + 1) // 2
            else:
                self.keep_bytes = 0
                for shard in here:
                    shard.put(torch.device("cpu"), pinned=True)

    def _copy(self, stream: Tensor, start: int, end: int) -> Tensor:
        return stream[start:end].reshape(-1, stream.shape[2]).to(self.device, copy=True, non_blocking=True)

    def _batch(self, rows: int, cols: int) -> Batch:
        """A whole-sequence batch of that many rows with its rotary tables (positions only: ids are not looked at by blocks)."""
        key = rows, cols
        if key not in self._batches:
            self._batches[key] = Batch.whole(torch.zeros(rows, cols, dtype=torch.int32, device=self.device))
            self.model.prepare(self._batches[key])
        return self._batches[key]
