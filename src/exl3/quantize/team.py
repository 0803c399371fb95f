"""The devices of a conversion. Each has a copy of the model, a part of the calibration rows and a thread; sums over rows are made in the
order of the shards and products in pieces of fixed width, so the result is the same for any number of devices of one kind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from exl3.errors import BackendError
from exl3.quantize.background import Reader
from exl3.quantize.ldlq import PIECE
from exl3.quantize.linear import EncodeAt
from exl3.quantize.streams import Shard, Streams

T = TypeVar("T")
_AHEAD = 2  # shards a device may be ahead of the sum


class Worker:
    """One device: `model` is its copy, `streams` its rows, `reader` fetches its blocks. `speed`: relative, in products and in searches."""

    def __init__(self, device: torch.device, model: Any, streams: Streams, reader: Reader) -> None:
        self.device, self.model, self.streams, self.reader = device, model, streams, reader
        self.speed = Speed(1.0, 1.0)
        self._pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Gives the worker a thread of its own; without one, it works in the caller's."""
        self._pool = ThreadPoolExecutor(1, f"exl3-{self.device}")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        if self._pool is not None:
            return self._pool.submit(self._run, work)
        done: Future[T] = Future()
        done.set_result(self._run(work))
        return done

    def _run(self, work: Callable[[], T]) -> T:
        try:
            with torch.no_grad(), torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                return work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as e:
            if not any(sign in str(e) for sign in ("CUDA error", "CUBLAS", "cusolver")):
                raise
            why = str(e).splitlines()[0]
            raise BackendError(f"{self.device} failed ({why}); the job can be resumed, without it if need be") from e

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True)
class Speed:
    """Relative to other devices."""

    products: float
    search: float


class Team:
    """Workers, the first of which leads: it keeps the sums. A context manager, which ends the threads."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        if len(workers) > 1:
            for w in workers:
                if w.device.type == "cuda":  # torch loads its linear algebra at first use, which threads must not do at once
                    torch.linalg.cholesky_ex(torch.eye(1, device=w.device))
                w.start()

    @property
    def lead(self) -> Worker:
        return self.workers[0]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: Any) -> None:
        for w in self.workers:
            w.stop()
            w.reader.close()

    def each(self, work: Callable[[Worker], T]) -> list[T]:
        """work(worker) on all at once."""
        return [f.result() for f in [w.submit(partial(work, w)) for w in self.workers]]

    def set_speeds(self, ratios: list[float] | None, encode: EncodeAt) -> None:
        """Shares of the work: as given, else measured."""
        if len(self.workers) == 1:
            return
        if ratios is not None:
            for w, ratio in zip(self.workers, ratios):
                w.speed = Speed(ratio, ratio)
            return
        for w, speed in zip(self.workers, self.each(lambda w: measure(w.device, encode))):
            w.speed = speed

    # shards

    def spread(self, shards: list[Shard]) -> None:
        """Deals the shards out, the first to the lead, neighbours to different devices so that none gets far ahead."""
        counts = [0] * len(self.workers)
        for number, shard in enumerate(shards):
            i = 0 if number == 0 else min(range(len(counts)), key=lambda i: (counts[i] + 1) / self.workers[i].speed.products)
            counts[i] += 1
            self.workers[i].streams.take(number, shard)

    def shards(self) -> list[Shard]:
        """All shards in order."""
        found = {number: shard for w in self.workers for number, shard in w.streams.shards.items()}
        return [found[number] for number in sorted(found)]

    def over_shards(self, work: Callable[[Worker, int], T]) -> Iterator[T]:
        """work(worker, shard) of every shard on its device; results in the order of the shards."""
        waiting = {w: deque(sorted(w.streams.shards)) for w in self.workers}
        running: dict[int, Future[T]] = {}
        owner = {number: w for w, numbers in waiting.items() for number in numbers}

        def go_on(w: Worker) -> None:
            if waiting[w]:
                number = waiting[w].popleft()
                running[number] = w.submit(partial(work, w, number))

        for w in self.workers:
            for _ in range(_AHEAD if len(self.workers) > 1 else 1):
                go_on(w)
        try:
            for number in sorted(owner):
                result = running.pop(number).result()
                yield result
                del result
                go_on(owner[number])
        finally:
            for future in running.values():
                future.cancel()


def deal(sizes: list[int], speeds: list[float]) -> list[int]:
    """Which worker gets each item: the largest first, each to the one that would be done with it first."""
    loads, owners = [0.0] * len(speeds), [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        best = min(range(len(speeds)), key=lambda w: ((loads[w] + sizes[item]) / speeds[w], w))
        owners[item] = best
        loads[best] += sizes[item]
    return owners


@dataclass(frozen=True)
class Part:
    """Columns start .. stop - 1 of a matrix, for a worker."""

    worker: int
    start: int
    stop: int


def share_columns(shapes: list[tuple[int, int]], owners: list[int], speeds: list[float]) -> list[list[Part]]:
    """The parts of each `(k, n)` matrix: pieces go from the worker that would be done last to the one that would be done first, as long as
    that helps."""
    pieces = [[owner] * -(-n // PIECE) for (_, n), owner in zip(shapes, owners)]
    loads = [0.0] * len(speeds)
    for (k, n), owner in zip(shapes, owners):
        loads[owner] += k * n
    for _ in range(sum(map(len, pieces))):
        times = [load / speed for load, speed in zip(loads, speeds)]
        giver, taker = times.index(max(times)), times.index(min(times))
        sizes = {i: k * min(n, PIECE) for i, (k, n) in enumerate(shapes) if giver in pieces[i] and len(pieces[i]) > 1}
        sizes = {i: s for i, s in sizes.items() if (loads[taker] + s) / speeds[taker] < 0.98 * times[giver]}
        if not sizes:
            break
        i = max(sizes, key=lambda i: (taker in pieces[i], sizes[i]))
        last = max(j for j, w in enumerate(pieces[i]) if w == giver)
        pieces[i][last] = taker
        loads[giver] -= sizes[i]
        loads[taker] += sizes[i]
    return [_runs(workers, n) for workers, (_, n) in zip(pieces, shapes)]


def _runs(workers: list[int], n: int) -> list[Part]:
    parts: list[Part] = []
    for j, w in enumerate(workers):
        stop = min((j + 1) * PIECE, n)
        if parts and parts[-1].worker == w:
            parts[-1] = Part(w, parts[-1].start, stop)
        else:
            parts.append(Part(w, j * PIECE, stop))
    return parts


def measure(device: torch.device, encode: EncodeAt) -> Speed:
    """How fast a device multiplies and searches; 1 each on the CPU, which all its workers share."""
    if device.type == "cpu":
        return Speed(1.0, 1.0)
    x = torch.randn(4096, 4096, device=device, dtype=torch.float16)
    tiles = torch.randn(512, 256, device=device)
    return Speed(1 / _seconds(lambda: x @ x, device), 1 / _seconds(lambda: encode(tiles, 4, 0), device))


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    work()
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(3):
        work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
