"""The engine under asyncio."""

import asyncio

import pytest
from stubs import HistoryModel, StubCache, text_of, tokens_of

from exl3.errors import ArgumentError
from exl3.generate.aio import AsyncGenerator, AsyncJob
from exl3.generate.presets import ArgmaxSampler


def job(generator, prompt, n, **options):
    return AsyncJob(generator, prompt, n, sampler=ArgmaxSampler(), **options)


async def collect(job):
    return [r async for r in job]


def test_jobs_run_together_and_the_loop_stays_free():
    async def main():
        model = HistoryModel()
        generator = AsyncGenerator(model, StubCache(8192))
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        clock = asyncio.create_task(tick())
        jobs = [job(generator, [5, i], 30) for i in range(6)]
        results = await asyncio.gather(*map(collect, jobs))
        for j, r in zip(jobs, results):
            assert tokens_of(r) == model.greedy(j.job.prompt, 30) and r[-1]["eos"] and text_of(r) == ""
            assert j.queue.empty()
        clock.cancel()
        assert ticks > 5 and await generator.check_health() and not generator.jobs
        await generator.close()
        await generator.close()
        assert not await generator.check_health()

    asyncio.run(main())


def test_cancel_and_errors_touch_one_job():
    async def main():
        def fail(ids):
            if 299 in ids:
                raise RuntimeError("bad token")

        model = HistoryModel(fail=fail)
        generator = AsyncGenerator(model, StubCache(8192))
        good, gone, bad = job(generator, [5], 60), job(generator, [6], 2000), job(generator, [299], 5)
        with pytest.raises(RuntimeError, match="bad token"):
            await collect(bad)
        await asyncio.sleep(0.01)
        await gone.cancel()
        await gone.cancel()
        assert gone.cancelled and not any(r["eos"] for r in await collect(gone))
        assert tokens_of(await collect(good)) == model.greedy([5], 60)
        with pytest.raises(AssertionError, match="cannot be enqueued"):
            job(generator, [5] * 3000, 6000)
        with pytest.raises(ArgumentError):
            job(generator, [400], 5)
        assert generator.generator.pagetable.referenced == 0
        await generator.close()

    asyncio.run(main())


def test_engine_fault_reaches_all_and_stays():
    async def main():
        def fail(ids):
            if 299 in ids:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

        generator = AsyncGenerator(HistoryModel(fail=fail), StubCache(8192))
        jobs = [job(generator, [5], 3000), job(generator, [299], 5)]
        for j in jobs:
            with pytest.raises(RuntimeError, match="CUDA error"):
                await collect(j)
        await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="CUDA error"):
            job(generator, [5], 5)
        assert not await generator.check_health()
        await generator.close()

    asyncio.run(main())
