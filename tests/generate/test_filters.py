"""Filters: masks reach their own job only, errors too, rewinds are undone, grammars hold."""

import json
import threading

import numpy as np
import pytest
import torch
from stubs import HistoryModel, StubCache, ToyTokenizer, run, text_of, tokens_of

from exl3.errors import ArgumentError
from exl3.generate.filters import Filter, LLGuidanceFilter
from exl3.generate.generator import Generator
from exl3.generate.job import Job
from exl3.generate.presets import ArgmaxSampler, DefaultSampler


class Script(Filter):
    """Allows exactly one id per step."""

    def __init__(self, ids, tokenizer=None, form="bool", **options):
        super().__init__(tokenizer, **options)
        self.script, self.form, self.threads = ids, form, set()

    def reset(self):
        self.at = 0

    def accept_token(self, token):
        assert token == self.script[self.at]
        self.at += 1

    def get_next_logit_mask(self):
        self.threads.add(threading.current_thread().name)
        if self.at >= len(self.script):
            return None
        allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
        allowed[self.script[self.at]] = True
        if self.form == "bool":
            return allowed
        if self.form == "dense":
            return torch.where(allowed, 0.0, -torch.inf).to(self.logits_dtype)
        return torch.from_numpy(np.packbits(allowed.numpy(), bitorder="little").view(np.int32).copy())

    def is_completed(self):
        return self.at >= len(self.script)

    def rollback_tokens(self, count):
        self.at -= count


@pytest.mark.parametrize("form", ["bool", "dense", "bits"])
@pytest.mark.parametrize("draft", [0, 1])
def test_constrained_and_free_jobs_share_a_batch(form, draft):
    model = HistoryModel()
    generator = Generator(model, StubCache(8192), ngram_match_min=draft)
    script = [7, 8, 9, 7, 8, 9, 7, 8, 9, 11]
    f = Script(script, form=form, eos_after_completed=True)
    held, free = Job([5, 6], 50, sampler=DefaultSampler(), filters=[f]), Job([5, 6], 12, sampler=ArgmaxSampler())
    results = run(generator, held, free)
    assert tokens_of(results[held]) == script and results[held][-1]["eos_reason"] == "end_filter"
    assert tokens_of(results[free]) == model.greedy([5, 6], 12)
    assert any(t.startswith("exl3-filter") for t in f.threads)


@pytest.mark.parametrize("draft", [0, 1])
def test_a_late_mask_costs_its_own_job_only(draft):
    class Slow(Script):
        go = threading.Event()

        def get_next_logit_mask(self):
            if self.at in (0, 3, 7):
                assert self.go.wait(30)
                self.go.clear()
            return super().get_next_logit_mask()

    model = HistoryModel()
    generator = Generator(model, StubCache(8192), ngram_match_min=draft)
    script = [7, 8, 9, 7, 8, 9, 7, 8, 9, 11]
    held = Job([5, 6], 50, sampler=DefaultSampler(), filters=[Slow(script, eos_after_completed=True)])
    generator.enqueue(held)
    results = []
    for reached in (0, 3, 7):
        while held.new_tokens < reached:
            results += [r for r in generator.iterate() if r["job"] is held]
        free = Job([5, 6], 12, sampler=ArgmaxSampler())
        generator.enqueue(free)
        got = []
        while not free.is_finished:
            got += generator.iterate()
        results += [r for r in got if r["job"] is held]
        assert tokens_of([r for r in got if r["job"] is free]) == model.greedy([5, 6], 12)
        assert held.new_tokens == reached and generator.check_health(5)
        Slow.go.set()
    while generator.num_remaining_jobs():
        results += generator.iterate()
    assert tokens_of(results) == script and results[-1]["eos_reason"] == "end_filter" and generator.pagetable.referenced == 0


def test_trigger_token_wakes_the_filter():
    model = HistoryModel()
    generator = Generator(model, StubCache(8192))
    own = model.greedy([5, 6], 4)
    job = Job([5, 6], 20, sampler=ArgmaxSampler(), filters=[Script([100, 101], trigger_token=own[3], eos_after_completed=True)])
    assert tokens_of(run(generator, job)[job]) == [*own, 100, 101]


@pytest.mark.parametrize("where", ["reset", "accept_token", "get_next_logit_mask"])
def test_a_filter_that_raises_ends_its_own_job(where):
    class Broken(Script):
        pass

    def broken(self, *args):
        raise ValueError("broken filter")

    setattr(Broken, where, broken)
    model = HistoryModel()
    generator = Generator(model, StubCache(8192))
    bad, good = Job([5, 6], 10, sampler=ArgmaxSampler(), filters=[Broken([7] * 9)]), Job([5, 6], 10, sampler=ArgmaxSampler())
    if where == "reset":
        with pytest.raises(ValueError, match="broken"):
            generator.enqueue(bad)
        results = run(generator, good)
    else:
        results = run(generator, bad, good)
        assert "broken filter" in str(results[bad][-1]["error"])
    assert tokens_of(results[good]) == model.greedy([5, 6], 10)
    assert generator.pagetable.referenced == 0


def test_rewind_takes_the_filter_back():
    tokenizer = ToyTokenizer(["<0>", "a", " bad", " word", " good"])
    model = HistoryModel(vocab=5)
    generator = Generator(model, StubCache(1024), tokenizer)

    class Choice(Script):
        """ " bad word" or " good"."""

        def get_next_logit_mask(self):
            allowed = torch.zeros(self.vocab_size, dtype=torch.bool)
            allowed[[1] if self.at == 0 else [2, 4] if self.at == 1 else [3]] = True
            return allowed

        def accept_token(self, token):
            self.at += 1

    for seed in range(6):
        f = Choice([1, 2])
        job = Job([1], 2, sampler=DefaultSampler(), seed=seed, filters=[f], banned_strings=["bad word"], stop_conditions=[])
        results = run(generator, job)[job]
        assert text_of(results) in ("a good", "a bad") and f.at == 2


# grammars


def ascii_tokenizer():
    pieces = [bytes([i]) for i in range(128)] + [b'{"', b'":', b"true", b"12", "é".encode(), b"</s>"]
    return ToyTokenizer(pieces, special=[133], eos_id=133)


def constrained(n=80, seeds=range(3), **grammar):
    pytest.importorskip("llguidance")
    tokenizer = ascii_tokenizer()
    model = HistoryModel(vocab=len(tokenizer.pieces))
    model.eos_token_ids = [133]
    generator = Generator(model, StubCache(8192), tokenizer)
    jobs = [
        Job([5, 6], n, sampler=DefaultSampler(), seed=i, filters=[LLGuidanceFilter(tokenizer, eos_after_completed=True, **grammar)])
        for i in seeds
    ]
    free = Job([5, 6], 12, sampler=ArgmaxSampler())
    results = run(generator, *jobs, free)
    assert tokens_of(results[free]) == model.greedy([5, 6], 12)[: len(tokens_of(results[free]))]
    return [(text_of(results[j]), results[j][-1]["eos_reason"]) for j in jobs]


def test_json_schema():
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 12]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        for text, reason in constrained(400, json_schema=given):
            if reason == "max_new_tokens":
                continue  # white space without end is valid JSON too
            value = json.loads(text)
            assert isinstance(value["ok"], bool) and value["n"] in (1, 12) and reason in ("end_filter", "stop_token")


def test_regex_and_grammars():
    import re

    for text, reason in constrained(regex="[ab]{3}-[0-9]{4}"):
        assert re.fullmatch("[ab]{3}-[0-9]{4}", text) and reason in ("end_filter", "stop_token")
    for text, _ in constrained(lark_grammar='start: "x" "y"* "z!"', n=300):
        assert re.match("xy*", text)
    for text, _ in constrained(gbnf_grammar='root ::= "yes" | "no"'):
        assert text in ("yes", "no")


@pytest.mark.parametrize(
    "bad", [{}, {"regex": "a", "json_schema": {}}, {"regex": "(("}, {"json_schema": "{"}, {"lark_grammar": "start: nothing_here"}]
)
def test_bad_grammars_are_named(bad):
    pytest.importorskip("llguidance")
    with pytest.raises(ArgumentError, match=next(iter(bad), "exactly one")):
        LLGuidanceFilter(ascii_tokenizer(), **bad)


def test_a_hopeless_grammar_is_given_up_soon():
    pytest.importorskip("llguidance")
    import time

    tokenizer = ascii_tokenizer()
    job = Job([5, 6], 5, filters=[LLGuidanceFilter(tokenizer, regex="(a{1000}){1000}")])
    generator = Generator(HistoryModel(), StubCache(2048), tokenizer)
    start = time.process_time()
    try:
        generator.enqueue(job)
        results = run(generator)[job]
        assert isinstance(results[-1]["error"], ArgumentError)
    except ArgumentError:
        pass
    assert time.process_time() - start < 5
    assert tokens_of(run(generator, Job([5, 6], 3, sampler=ArgmaxSampler())).popitem()[1])


class OnTheSpot(Filter):
    """Allows all; after `count` tokens it does `then`."""

    def __init__(self, count, then):
        super().__init__(None)
        self.left, self.then = count, then

    def reset(self):
        pass

    def accept_token(self, token):
        self.left -= 1
        if self.left == 0 and self.then == "cancel":
            self.generator.cancel(self.job)

    def get_next_logit_mask(self):
        if self.left == 0 and self.then == "raise":
            raise ValueError("no mask")

    def is_completed(self):
        return False

    def use_background_worker(self):
        return False


@pytest.mark.parametrize("then", ["raise", "cancel"])
def test_what_a_filter_does_on_the_engines_own_thread_is_its_jobs_affair(then):
    """A mask that fails between two steps, a cancel in the middle of one (just where a page is full)."""
    model = HistoryModel()
    generator = Generator(model, StubCache(4096))
    held = Job(list(range(2, 256)), 20, sampler=ArgmaxSampler(), filters=[OnTheSpot(3, then)])
    other = Job([7, 8], 20, sampler=ArgmaxSampler())
    results = run(generator, held, other)
    assert tokens_of(results[other]) == model.greedy([7, 8], 20) and generator.pagetable.referenced == 0
    assert tokens_of(results[held]) == model.greedy(list(range(2, 256)), 3)
    if then == "raise":
        assert isinstance(results[held][-1]["error"], ValueError)


def test_a_filter_of_a_running_job_is_refused_by_name():
    generator = Generator(HistoryModel(), StubCache(8192))
    f = Script([7, 8, 9, 11])
    first = Job([5, 6], 4, sampler=ArgmaxSampler(), filters=[f])
    generator.enqueue(first)
    with pytest.raises(ArgumentError, match=rf"this Script belongs to job {first.serial_number}, which still runs"):
        generator.enqueue(Job([5, 6], 4, sampler=ArgmaxSampler(), filters=[f]))
    other = Job([5, 6], 4, sampler=ArgmaxSampler(), filters=[Script([3, 4, 5, 6])])
    with pytest.raises(ArgumentError, match="belongs to job"):
        other.set_filters([f])
    g = Script([1])
    with pytest.raises(ArgumentError, match="listed twice"):
        generator.enqueue(Job([5], 4, filters=[g, g]))
    results = run(generator, other)
    assert tokens_of(results[first]) == [7, 8, 9, 11] and tokens_of(results[other]) == [3, 4, 5, 6]
    again = Job([5, 6], 4, sampler=ArgmaxSampler(), filters=[f])  # the first has ended
    assert tokens_of(run(generator, again)[again]) == [7, 8, 9, 11]


def test_filters_of_a_job_that_was_refused_are_free():
    class Broken(Script):
        def reset(self):
            raise RuntimeError("broken")

    generator = Generator(HistoryModel(), StubCache(8192))
    f = Script([7, 8])
    with pytest.raises(RuntimeError, match="broken"):
        generator.enqueue(Job([5], 2, filters=[f, Broken([1])]))
    job = Job([5], 2, sampler=ArgmaxSampler(), filters=[f])
    assert tokens_of(run(generator, job)[job]) == [7, 8]
