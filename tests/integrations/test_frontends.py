"""What TabbyAPI's backend and text-generation-webui's loaders rely on beyond names: found by running them on the stand-in."""

import asyncio
import importlib.util
import re

import pytest
import torch

from exl3.integrations import exllamav3 as shim

needs_llguidance = pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="llguidance is an optional extra")
EOS = 257


@pytest.fixture(autouse=True)
def installed():
    shim.install()
    yield
    shim.uninstall()


@pytest.fixture
def parts(model_dir):
    from exllamav3 import Cache, Config, Model, Tokenizer

    config = Config.from_directory(model_dir)
    model = Model.from_config(config)
    cache = Cache(model, max_num_tokens=2048, max_batch_size=4, max_history=0)
    model.load(device="cpu")
    return model, cache, Tokenizer.from_config(config)


def options(tokenizer, **more):
    from exllamav3 import CategoricalSampler

    ids = tokenizer.encode("Hello there", add_bos=True)
    return {"input_ids": [ids], "sampler": CategoricalSampler(), "stop_conditions": [], "decode_special_tokens": True, **more}


async def drain(job, on=None):
    text, last = "", None
    async for last in job:
        text += last.get("text", "")
        if on is not None:
            on(text)
    return text, last


@needs_llguidance
@pytest.mark.parametrize("armed", [False, True])
def test_content_filter_begins_after_a_block(parts, armed):
    """A constraint that sleeps until a forced end tag, or is put on the running job from the event loop."""
    from exllamav3 import AsyncGenerator, AsyncJob, CustomSampler, LLGuidanceFilter, SS_BanTokens, SS_Sample, SS_Temperature

    model, cache, tokenizer = parts
    tag = tokenizer.single_id("<|im_end|>")

    async def main():
        generator = AsyncGenerator(model=model, cache=cache, tokenizer=tokenizer)
        for i in range(12):
            grammar = LLGuidanceFilter(tokenizer, eos_after_completed=True, regex="(red|green)!", trigger_token=tag if armed else None)
            job = AsyncJob(
                generator,
                **options(
                    tokenizer, max_new_tokens=300, seed=i, banned_strings=["zz"], filters=[grammar] if armed else [],
                    sampler=CustomSampler([SS_BanTokens([tag]), SS_Sample()]),
                ),
            )  # fmt: skip
            done = []

            def on(text, job=job, grammar=grammar, done=done, start=3 + i):
                if len(text) < start or done:
                    return
                done.append(1)
                job.set_sampler(CustomSampler([SS_BanTokens([tag]), SS_Temperature(0.5), SS_Sample()]))
                job.set_banned_strings(["yy"])
                if armed:
                    job.constrain_output_now(torch.tensor([[tag]]))
                else:
                    job.set_filters([grammar])

            text, last = await drain(job, on)
            assert last["eos_reason"] == "end_filter" and re.search("(red|green)!$", text), (i, text)
            if armed:
                assert re.search(r"<\|im_end\|>(red|green)!$", text) and not job.job.filters_suspended
        assert generator.generator.pagetable.referenced == 0
        await generator.close()

    asyncio.run(main())


@needs_llguidance
def test_forced_output_against_a_constraint_suspends_it(parts):
    from exllamav3 import Generator, Job, LLGuidanceFilter

    model, cache, tokenizer = parts
    generator = Generator(model, cache, tokenizer)
    job = Job(**options(tokenizer, max_new_tokens=30, filters=[LLGuidanceFilter(tokenizer, regex="[0-9]{40}")]))
    generator.enqueue(job)
    text = ""
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            assert r["stage"] != "error", r
            text += r.get("text", "")
            if len(text) == 5 and not job.filters_suspended:
                job.constrain_output_now("abc")
    assert re.match("[0-9]{5,6}abc", text) and job.filters_suspended and job.new_tokens == 30
    with pytest.raises(ValueError, match="outside the vocabulary"):
        job.constrain_output_now([5000])


@needs_llguidance
def test_a_filter_around_a_filter(parts):
    """Masks of the inner filter are tensors; the outer one narrows them."""
    from exllamav3 import Filter, Generator, LLGuidanceFilter

    model, cache, tokenizer = parts

    class NoSevens(Filter):
        def __init__(self, inner):
            super().__init__(inner.tokenizer, inner.trigger_token, inner.prefix_str, inner.eos_after_completed)
            self.inner = inner
            seven = tokenizer.single_id("7")
            self.words = torch.zeros((tokenizer.actual_vocab_size + 31) // 32, dtype=torch.int32)
            self.words[seven >> 5] |= 1 << (seven & 31)

        def attach(self, job):
            super().attach(job)
            self.inner.attach(job)

        def feed(self, token):
            return self.inner.feed(token)

        def reset(self):
            self.inner.reset()

        def is_completed(self):
            return self.inner.is_completed()

        def accept_token(self, token):
            self.inner.accept_token(token)

        def get_next_logit_mask(self):
            mask = self.inner.get_next_logit_mask()
            assert mask.dtype == torch.int32
            return mask & ~self.words[: mask.shape[-1]].to(mask.dtype)

    generator = Generator(model, cache, tokenizer)
    inner = LLGuidanceFilter(tokenizer, eos_after_completed=True, regex="[67]{8}")
    assert generator.generate("x", max_new_tokens=20, filters=[NoSevens(inner)], completion_only=True) == "6" * 8


def test_a_failed_engine_is_closed_and_made_anew(parts):
    from exllamav3 import AsyncGenerator, AsyncJob, GreedySampler

    model, cache, tokenizer = parts

    async def main():
        generator = AsyncGenerator(model=model, cache=cache, tokenizer=tokenizer)
        job = options(tokenizer, max_new_tokens=8, sampler=GreedySampler())
        right = await drain(AsyncJob(generator, **job))
        generator.generator._step = lambda results: 1 / 0
        first, second = AsyncJob(generator, **job), AsyncJob(generator, **job)
        for one in (first, second):
            with pytest.raises(ZeroDivisionError):
                await drain(one)
        assert isinstance(generator.error, ZeroDivisionError)
        with pytest.raises(ZeroDivisionError):
            AsyncJob(generator, **job)
        await generator.close()
        fresh = AsyncGenerator(model=model, cache=cache, tokenizer=tokenizer)
        assert (await drain(AsyncJob(fresh, **job)))[0] == right[0] and fresh.error is None
        model.unload()
        await fresh.close()  # after the model is gone

    asyncio.run(main())


def test_what_never_fits_is_told_where_results_are_awaited(parts):
    from exllamav3 import AsyncGenerator, AsyncJob

    model, cache, tokenizer = parts

    async def main():
        generator = AsyncGenerator(model=model, cache=cache, tokenizer=tokenizer)
        job = AsyncJob(generator, **options(tokenizer, max_new_tokens=9999))
        with pytest.raises(AssertionError, match=r"\d+ pages.*cannot be enqueued"):
            await drain(job)
        await job.cancel()
        grows = AsyncJob(generator, **options(tokenizer, max_new_tokens=9999, max_rq_tokens=512))  # fits at first
        with pytest.raises(AssertionError, match="cannot be enqueued"):
            await drain(grows)
        assert grows.job.new_tokens > 1000 and not generator.jobs
        await generator.close()

    asyncio.run(main())


def test_no_text_is_lost_on_a_reader_that_stops_at_eos(parts):
    """text-generation-webui doesn't look at the text of the last result."""
    from exllamav3 import Generator, GreedySampler, Job

    model, cache, tokenizer = parts
    generator = Generator(model, cache, tokenizer)
    wave = tokenizer.encode("ok \U0001f44b")[0].tolist()
    job = Job(**options(tokenizer, max_new_tokens=50, stop_conditions=[EOS]))
    job.constrain_output_now([*wave, EOS])
    generator.enqueue(job)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    text = "".join(r.get("text", "") for r in results if not r["eos"])
    assert text == "ok \U0001f44b" == results[-1]["full_completion"]

    from exllamav3 import Cache, Config, Model

    draft = Model.from_config(Config.from_directory(model.config.directory))
    draft_cache = Cache(draft, max_num_tokens=2048)
    draft.load(device="cpu")
    drafted = Generator(model=model, cache=cache, tokenizer=tokenizer, draft_model=draft, draft_cache=draft_cache, num_draft_tokens=4)
    for limit in range(5, 14):
        job = Job(**options(tokenizer, max_new_tokens=limit, sampler=GreedySampler()))
        drafted.enqueue(job)
        last = None
        while drafted.num_remaining_jobs():
            for r in drafted.iterate():
                last = r
        assert last["eos"] and last.get("token_ids", torch.zeros(1, 1)).shape == (1, 1) and last["new_tokens"] == limit


def test_warmup_reports_progress(parts):
    model, cache, _ = parts
    seen = []
    assert model.warmup(cache=cache, max_chunk_size=256, max_batch_size=4, max_q_len=8, callback=lambda a, b: seen.append((a, b))) == []
    assert seen[0] == (0, seen[0][1]) and seen[-1][0] == seen[-1][1]


def test_a_step_written_for_exllamav3s_own_state_is_refused_by_name(parts):
    from exllamav3 import CustomSampler, Generator, Job, SS_Base, SS_Sample

    class Foreign(SS_Base):
        def run(self, state):
            state.logits = state.in_logits.clone()

    generator = Generator(*parts)
    job = Job(torch.tensor([[5]]), 3, sampler=CustomSampler([Foreign(), SS_Sample()]))
    generator.enqueue(job)
    results = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    last = results[-1]
    assert last["stage"] == "error" and "in_logits" in str(last["error"]) and "not supported" in str(last["error"])
