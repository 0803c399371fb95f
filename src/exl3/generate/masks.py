"""Masks of filters for the next token: asked for as soon as a token is there, computed on worker threads while the model runs.

A mask that is late costs its own job time, not the others: the job sits out steps until the mask is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from exl3.generate.job import Job

_PATIENCE = 0.02  # seconds a step waits for late masks
_IDLE = 0.2  # the same when nothing else can be done
_WORKERS = 4


class Masks:
    """The worker threads; `job.masks` holds a mask or a future of one for each filter of a job."""

    def __init__(self) -> None:
        self._workers: ThreadPoolExecutor | None = None

    def request(self, job: Job) -> None:
        """Starts the work for the job's next token, if it has not begun."""
        if not job.filters or job.masks:
            return
        if self._workers is None:
            self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="exl3-filter")
        job.masks = [self._workers.submit(f.mask) if f.use_background_worker() else _now(f) for f in job.filters]

    def late(self, jobs: Iterable[Job]) -> set[Job]:
        """Those of `jobs` whose masks are still being computed after a short wait; they are marked as `lagging`."""
        waiting = [j for j in jobs if j.filters and _pending(j)]
        if not waiting:
            return set()
        wait([f for j in waiting for f in _pending(j)], _PATIENCE)
        late = {j for j in waiting if _pending(j)}
        for job in late:
            job.lagging = True
        return late

    def present(self, jobs: Sequence[Job]) -> list[Job]:
        """`jobs` without those that lag behind and still wait for a mask."""
        found = []
        for job in jobs:
            if job.lagging:
                if _pending(job):
                    continue
                job.lagging = False
            found.append(job)
        return found

    def idle(self, jobs: Iterable[Job]) -> None:
        """Waits a while for any mask of `jobs`."""
        wait([f for j in jobs for f in _pending(j)], _IDLE, "FIRST_COMPLETED")

    def close(self) -> None:
        """Takes no more work."""
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)


def _now(f: Any) -> Any:
    """The mask, or a future that raises what `mask` did when the job draws: the others go on."""
    try:
        return f.mask()
    except Exception as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _pending(job: Job) -> list[Future[Any]]:
    return [m for m in job.masks if isinstance(m, Future) and not m.done()]
