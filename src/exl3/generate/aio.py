"""`AsyncGenerator` and `AsyncJob`: the engine under asyncio. Steps run on a thread of their own, so the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exl3.generate.generator import Generator
from exl3.generate.job import Job

_END = object()


class AsyncGenerator:
    """Takes `Generator`'s arguments; must be made inside a running event loop. `generator` is the engine itself.

    An error of the engine ends all present jobs and refuses later ones; an error of one job is raised to that job alone.
    """

    generator_class: type[Generator] = Generator

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.generator = self.generator_class(*args, **kwargs)
        self.jobs: dict[Job, AsyncJob] = {}
        self.error: BaseException | None = None
        self.condition = asyncio.Condition()
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exl3-engine")
        self._probes = ThreadPoolExecutor(4, thread_name_prefix="exl3-health")  # not asyncio's threads: work of others may fill those
        self._closing = False
        self.iteration_task = asyncio.create_task(self._run())

    def enqueue(self, job: AsyncJob) -> None:
        """Adds a job; raises at once for what can never run."""
        if self.error is not None:
            raise self.error
        self.generator.enqueue(job.job)
        self.jobs[job.job] = job
        self._wake.set()

    async def cancel(self, job: AsyncJob) -> None:
        """Ends a job; its iteration stops without a further result."""
        self.generator.cancel(job.job)
        if self.jobs.pop(job.job, None) is not None:
            job.queue.put_nowait(_END)
        self._wake.set()

    async def close(self) -> None:
        """Ends all jobs and the engine's thread. The model may be unloaded already."""
        self._closing = True
        self._wake.set()
        await asyncio.gather(self.iteration_task, return_exceptions=True)
        self.generator.close()
        for job in list(self.jobs.values()):
            job.queue.put_nowait(_END)
        self.jobs.clear()
        self._thread.shutdown(wait=True)
        self._probes.shutdown(wait=False)

    async def check_health(self, timeout: float = 30.0) -> bool:
        """Whether the engine decodes a token within `timeout` seconds, busy or idle; see `Generator.check_health`."""
        if self.error is not None or self._closing:
            return False
        self._wake.set()
        probe = self._loop.run_in_executor(self._probes, self.generator.check_health, timeout, False)
        while not probe.done():
            self._wake.set()
            await asyncio.wait({probe}, timeout=0.02)
        return probe.result()

    async def _run(self) -> None:
        """Steps as long as there is work, sleeps when there is none."""
        try:
            while not self._closing:
                if not self.generator.num_remaining_jobs():
                    self._wake.clear()
                    if not self.generator.num_remaining_jobs():
                        await self._wake.wait()
                    continue
                results = await self._loop.run_in_executor(self._thread, self.generator.iterate)
                self._hand_out(results)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail_all(error)
        if self.generator.closed is not None and self.error is None and not self._closing:
            self._fail_all(self.generator.closed)

    def _hand_out(self, results: Sequence[dict[str, Any]]) -> None:
        for result in results:
            job = self.jobs.get(result["job"])
            if job is None:
                continue
            if result["stage"] == "error":
                job.queue.put_nowait(result["error"])
            else:
                job.queue.put_nowait(result)
            if result["eos"]:
                del self.jobs[result["job"]]
                if result["stage"] != "error":
                    job.queue.put_nowait(_END)

    def _fail_all(self, error: BaseException) -> None:
        self.error = error
        for job in list(self.jobs.values()):
            job.queue.put_nowait(error)
        self.jobs.clear()


class AsyncJob:
    """A job that is enqueued as it is made: `AsyncJob(generator, *Job's arguments)`; then `async for result in job`."""

    job_class: type[Job] = Job

    def __init__(self, generator: AsyncGenerator, *args: Any, **kwargs: Any) -> None:
        self.generator = generator
        self.job = self.job_class(*args, **kwargs)
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled = False
        generator.enqueue(self)

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        while True:
            result = await self.queue.get()
            if result is _END:
                return
            if isinstance(result, BaseException):
                raise result
            yield result

    async def cancel(self) -> None:
        """Ends the job wherever it stands."""
        if not self.cancelled:
            self.cancelled = True
            await self.generator.cancel(self)

    def set_sampler(self, sampler: Any) -> None:
        """As `Job.set_sampler`."""
        self.job.set_sampler(sampler)

    def set_filters(self, filters: Any) -> None:
        """As `Job.set_filters`."""
        self.job.set_filters(filters)

    def set_banned_strings(self, banned_strings: Any) -> None:
        """As `Job.set_banned_strings`."""
        self.job.set_banned_strings(banned_strings)

    def constrain_output_now(self, tokens: Any) -> None:
        """As `Job.constrain_output_now`."""
        self.job.constrain_output_now(tokens)
