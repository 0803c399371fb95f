"""Drafting changes no token, and the suffix automaton finds what a brute-force search finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import ChainModel, HistoryModel, StubCache, run, tokens_of

from exl3.errors import ArgumentError
from exl3.generate.draft import Pace, SuffixAutomaton
from exl3.generate.generator import Generator
from exl3.generate.job import Job
from exl3.generate.presets import ArgmaxSampler, ComboSampler, DefaultSampler


@given(st.lists(st.integers(0, 2), max_size=60))
@settings(max_examples=200, deadline=None)
def test_suffix_automaton_by_brute_force(tokens):
    automaton = SuffixAutomaton()
    for n, t in enumerate(tokens, 1):
        automaton.extend(t)
        seen = tokens[:n]
        want = max((k for k in range(n) if any(seen[i : i + k] == seen[n - k :] for i in range(n - k))), default=0)
        length, end = automaton.match()
        assert length == want
        if length:
            assert seen[end + 1 - length : end + 1] == seen[n - length :] and end < n - 1
            assert automaton.draft(5, 1) == seen[end + 1 : end + 6]
            assert automaton.draft(5, length + 1) == []


class Repeating(HistoryModel):
    """Follows a cycle most of the time, so that drafts are often right and sometimes wrong."""

    def logits_of(self, history):
        x = super().logits_of(history)
        if len(history) % 13:
            x[(history[-1] * 7 + 3) % 11 + 20] += 12
        return x


class Close(Repeating):
    """A draft model that mostly agrees."""

    def logits_of(self, history):
        return Repeating.logits_of(self, history) + np.float32(0.4) * HistoryModel(salt=9).logits_of(history)


def drafted(kind, **options):
    model, cache = Repeating(), StubCache(8192)
    if kind == "ngram":
        return model, Generator(model, cache, ngram_match_min=2, num_draft_tokens=4, **options)
    if kind == "model":
        return model, Generator(model, cache, draft_model=Close(), draft_cache=StubCache(8192), num_draft_tokens=4, **options)
    return model, Generator(model, cache, **options)


SAMPLERS = {
    "greedy": ArgmaxSampler,
    "default": DefaultSampler,
    "history": lambda: ComboSampler(temperature=0.7, rep_p=1.1, freq_p=0.1),
    "adaptive": lambda: ComboSampler(adaptive_target=0.5, min_p=0.02),
}


@pytest.mark.parametrize("kind", ["ngram", "model"])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("dynamic", [True, False])
def test_tokens_are_the_same_with_and_without(kind, sampler, dynamic):
    def tokens(kind):
        _, generator = drafted(kind, dynamic_draft_tokens=dynamic)
        jobs = [Job([5, 6 + i] * (i + 1), 120 + i, sampler=SAMPLERS[sampler](), seed=i) for i in range(4)]
        jobs.append(Job([9] * 300, 30, sampler=SAMPLERS[sampler](), seed=3, return_probs=True))
        results = run(generator, *jobs)
        return [tokens_of(results[j]) for j in jobs], [results[j][-1] for j in jobs], generator

    plain, _, _ = tokens("none")
    with_draft, last, generator = tokens(kind)
    assert with_draft == plain
    assert sum(r.get("accepted_draft_tokens", 0) for r in last) > 20
    assert any(r.get("rejected_draft_tokens", 0) for r in last)
    assert generator.pagetable.referenced == 0
    assert max(generator.model.passes) <= 1216


def test_drafts_save_steps():
    _, generator = drafted("ngram")
    job = Job([5, 6], 200, sampler=ArgmaxSampler())
    run(generator, job)
    assert generator.runner.steps < 170
    assert job.draft_stats["accepted"] == job.accepted_draft_tokens > 35


def test_end_inside_a_draft():
    for stop in range(20, 31):
        results = []
        for kind in ("none", "ngram", "model"):
            _, generator = drafted(kind)
            job = Job([5, 6], 200, sampler=ArgmaxSampler(), stop_conditions=[stop], min_new_tokens=40)
            r = run(generator, job)[job]
            results.append((tokens_of(r), r[-1]["new_tokens"], r[-1]["eos_reason"]))
        assert results[0] == results[1] == results[2]


def test_useless_drafts_are_given_up():
    pace = Pace(6, True)
    lengths = []
    for _ in range(60):
        n = pace.next()
        lengths.append(n)
        if n:
            pace.verified(n, 0)
    assert lengths[0] == 6 and 0 in lengths and max(lengths[10:]) == 1
    eager = Pace(6, True)
    eager.length = 1.0
    for _ in range(6):
        eager.verified(eager.next(), eager.next())
    assert eager.next() == 6


def test_drafts_stay_right_when_pages_move():
    """A draft model equal to the model is never wrong, also after requeues and shared pages: both caches follow the same page table."""
    model = HistoryModel(vocab=60)
    generator = Generator(model, StubCache(4096), draft_model=HistoryModel(vocab=60), draft_cache=StubCache(4096), max_chunk_size=256)
    shared = list(range(2, 50)) * 12
    jobs = [Job([*shared, i], 150, sampler=ArgmaxSampler(), stop_conditions=[], max_rq_tokens=40) for i in range(2, 7)]
    results = run(generator, *jobs)
    for job in jobs:
        assert tokens_of(results[job]) == model.greedy(job.prompt, 150)
        assert job.rejected_draft_tokens == 0 and job.accepted_draft_tokens > 60 and job.is_requeued


@pytest.mark.parametrize("where", ["propose", "prefill", "copy_page"])
def test_a_failing_drafter_is_switched_off(where, monkeypatch):
    plain, _ = drafted("none")
    _, generator = drafted("model")

    def fail(*args):
        raise RuntimeError("out of room")

    monkeypatch.setattr(generator.drafter, where, fail)
    prompts = [[5, 6] * 200, [5, 6] * 150 + [7]]
    with pytest.warns(RuntimeWarning, match="drafting is switched off: out of room"):
        got = []
        for p in prompts:
            job = Job(p, 20, sampler=ArgmaxSampler())
            got.append(tokens_of(run(generator, job)[job]))
    assert got == [plain.greedy(p, 20) for p in prompts]


def test_other_vocabulary_is_refused():
    model = ChainModel({})
    with pytest.raises(ArgumentError, match="vocabulary"):
        Generator(model, StubCache(512), draft_model=ChainModel({}, vocab=100), draft_cache=StubCache(512))
    with pytest.raises(ArgumentError, match="draft_cache"):
        Generator(model, StubCache(1024), draft_model=ChainModel({}), draft_cache=StubCache(512))
