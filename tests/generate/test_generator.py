"""Jobs through the engine, over a model that reads its history back from the cache."""

import time

import numpy as np
import pytest
import torch
from stubs import ChainModel, HistoryModel, StubCache, ToyTokenizer, run, text_of, tokens_of

from exl3.errors import ArgumentError, Exl3Error, NumericalError
from exl3.generate.generator import Generator
from exl3.generate.job import Job
from exl3.generate.presets import ArgmaxSampler, ComboSampler, DefaultSampler
from exl3.generate.sampling import NoTokenLeftError


def make(tokens=4096, model=None, **options):
    model = model or HistoryModel()
    return model, Generator(model, StubCache(tokens), None, **options)


def greedy(prompt, n, **options):
    return Job(prompt, n, sampler=ArgmaxSampler(), **options)


def prompt(seed, n):
    return np.random.default_rng(seed).integers(2, 290, n).tolist()


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 700])
@pytest.mark.parametrize("chunk", [2048, 100])
def test_greedy_is_what_the_model_says(length, chunk):
    model, generator = make(max_chunk_size=chunk)
    p = prompt(length, length)
    job = greedy(p, 40)
    results = run(generator, job)[job]
    assert tokens_of(results) == model.greedy(p, 40)
    last = results[-1]
    assert last["eos"] and last["eos_reason"] == "max_new_tokens" and last["new_tokens"] == 40 and last["prompt_tokens"] == length
    assert generator.pagetable.referenced == 0


def test_many_jobs_at_once_equal_solo():
    model, generator = make(16384)
    jobs = [greedy(prompt(i, 5 + 37 * i), 20 + i) for i in range(24)]
    results = run(generator, *jobs)
    for job in jobs:
        assert tokens_of(results[job]) == model.greedy(job.prompt, job.max_new_tokens)
    assert max(model.passes[-5:]) <= 64


def test_more_than_64_jobs_decode_in_groups():
    model, generator = make(100 * 256)
    jobs = [greedy(prompt(i, 3), 5) for i in range(100)]
    results = run(generator, *jobs)
    assert all(tokens_of(results[j]) == model.greedy(j.prompt, 5) for j in jobs)


def test_sampled_tokens_do_not_depend_on_the_batch_or_global_generators():
    def sampled(others):
        torch.manual_seed(others)
        _, generator = make(16384)
        jobs = [Job(prompt(0, 30), 25, sampler=DefaultSampler(), seed=7)]
        jobs += [Job(prompt(i, 9), 30, sampler=DefaultSampler(), seed=i) for i in range(1, others)]
        state = torch.get_rng_state()
        out = tokens_of(run(generator, *jobs)[jobs[0]])
        assert torch.equal(state, torch.get_rng_state())
        return out

    assert sampled(1) == sampled(9)


def test_shared_prefix_is_not_computed_again():
    model, generator = make()
    shared = prompt(1, 600)
    a = greedy([*shared, 5], 10)
    run(generator, a)
    model.passes.clear()
    b = greedy([*shared, 6, 7], 10)
    results = run(generator, b)[b]
    assert tokens_of(results) == model.greedy(b.prompt, 10)
    assert results[-1]["cached_pages"] == 2
    assert results[-1]["cached_tokens"] == 600  # two full pages and, by copy, the common 88 of the third
    assert sum(model.passes) == 2 + 9
    assert generator.cache.copied == 1


def test_same_prompt_at_the_same_time_is_computed_once():
    model, generator = make(16384, max_chunk_size=256)
    shared = prompt(1, 1024)
    jobs = [greedy([*shared, i], 4) for i in range(2, 8)]
    results = run(generator, *jobs)
    for job in jobs:
        assert tokens_of(results[job]) == model.greedy(job.prompt, 4)
    assert sum(model.passes) < 2 * 1024
    assert generator.pagetable.referenced == 0


def test_eviction_under_pressure_keeps_answers_right():
    model, generator = make(1024)
    for i in range(30):
        job = greedy(prompt(i % 7, 100 + 90 * (i % 5)), 30)
        assert tokens_of(run(generator, job)[job]) == model.greedy(job.prompt, 30)
    assert generator.pagetable.referenced == 0


# case C18: cache full, no tokens, empty prompts


@pytest.mark.parametrize(("length", "new", "fits"), [(1000, 24, True), (1000, 25, False), (1025, 1, False)])
def test_too_large_is_refused_at_once_and_others_go_on(length, new, fits):
    model, generator = make(1024)
    job = greedy(prompt(0, length), new)
    if fits:
        assert len(tokens_of(run(generator, job)[job])) == new
    else:
        with pytest.raises((ArgumentError, AssertionError), match=r"cannot be enqueued|context") as caught:
            generator.enqueue(job)
        assert any(c.isdigit() for c in str(caught.value))
    after = greedy([5, 6], 3)
    assert tokens_of(run(generator, after)[after]) == model.greedy([5, 6], 3)


def test_too_large_names_pages_as_frontends_expect():
    _, generator = make(65536, model=HistoryModel(max_tokens=1 << 20))
    with pytest.raises(AssertionError, match=r"258 pages \(only 256 available\) and cannot be enqueued"):
        generator.enqueue(greedy(prompt(0, 65000), 800))


def test_clamp_lowers_the_limit_and_says_so():
    _, generator = make(1024)
    job = greedy(prompt(0, 1000), 500, clamp=True)
    last = run(generator, job)[job][-1]
    assert last["new_tokens"] == 24 and last["clamped"]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("draft", [0, 2])
def test_exact_counts(n, draft):
    model, generator = make(ngram_match_min=draft)
    p = [4, 5, 6, 4, 5, 6, 4, 5]
    job = greedy(p, n)
    results = run(generator, job)[job]
    assert tokens_of(results) == model.greedy(p, n) and results[-1]["new_tokens"] == n


def test_no_new_tokens_scores_the_prompt():
    model, generator = make()
    p = prompt(3, 600)
    job = Job(p, 0)
    last = run(generator, job)[job][-1]
    assert last["new_tokens"] == 0 and last["eos_reason"] == "max_new_tokens" and "token_ids" not in last
    want = []
    for i in range(1, 600):
        x = model.logits_of(np.array(p[:i])).astype(np.float64)
        want.append(x[p[i]] - np.log(np.exp(x - x.max()).sum()) - x.max())
    np.testing.assert_allclose(last["prompt_logprobs"][0].numpy(), want, atol=1e-4)


def test_scores_and_tokens_together():
    model, generator = make()
    p = prompt(3, 300)
    run(generator, greedy(p, 2))  # cached now, and yet scored in full
    job = greedy(p, 5, return_prompt_probs=True)
    results = run(generator, job)[job]
    assert tokens_of(results) == model.greedy(p, 5) and results[-1]["prompt_logprobs"].shape == (1, 299)


def test_unset_limit_takes_the_room_there_is():
    _, generator = make(512)
    job = greedy(prompt(0, 500), None)
    assert run(generator, job)[job][-1]["new_tokens"] == 12


def test_empty_prompt_takes_bos_or_refuses():
    model, generator = make()
    job = greedy([], 3)
    assert tokens_of(run(generator, job)[job]) == model.greedy([1], 3)
    model = HistoryModel()
    model.bos_token_id = None
    _, generator = make(model=model)
    with pytest.raises(ArgumentError, match="BOS"):
        generator.enqueue(greedy(torch.zeros(1, 0, dtype=torch.long), 3))


@pytest.mark.parametrize("bad", [[1, 300], [-1, 2], [[1, 2], [3, 4]], [0.5]])
def test_bad_prompts(bad):
    _, generator = make()
    with pytest.raises(ArgumentError, match="input_ids"):
        generator.enqueue(greedy(bad, 3))


@pytest.mark.parametrize("options", [{"max_new_tokens": -1}, {"min_new_tokens": -2}, {"no_such": 1}, {"embeddings": [1]}])
def test_bad_arguments(options):
    with pytest.raises((ArgumentError, NotImplementedError)):
        Job([1], **options)


def test_two_jobs_that_do_not_fit_together_queue():
    model, generator = make(1024)
    a, b = greedy(prompt(1, 600), 50), greedy(prompt(2, 600), 50)
    results = run(generator, a, b)
    for j in (a, b):
        assert tokens_of(results[j]) == model.greedy(j.prompt, 50)


def test_a_large_job_is_overtaken_at_most_max_skips_times():
    _, generator = make(2048)
    first = greedy(prompt(0, 10), 300)  # holds two pages, so the large one has to wait
    large = greedy(prompt(1, 1700), 100, max_skips=2)
    small = [greedy(prompt(i, 10), 100) for i in range(2, 12)]
    generator.enqueue([first, large, *small])
    order = []
    while generator.num_remaining_jobs():
        order += [r["job"] for r in generator.iterate() if r["stage"] == "started"]
    assert order.index(large) == 3


def test_cancel_at_any_moment_gives_all_pages_back():
    for when in range(12):
        model, generator = make(4096, max_chunk_size=128)
        jobs = [greedy(prompt(i, 300), 8) for i in range(3)]
        generator.enqueue(jobs)
        results = {j: [] for j in jobs}
        for step in range(200):
            if step == when:
                generator.cancel(jobs[1])
                generator.cancel(jobs[1])
            for r in generator.iterate():
                results[r["job"]].append(r)
            if not generator.num_remaining_jobs():
                break
        for j in (jobs[0], jobs[2]):
            assert tokens_of(results[j]) == model.greedy(j.prompt, 8)
        assert generator.pagetable.referenced == 0 and generator.num_remaining_jobs() == 0
        generator.cancel(jobs[0])  # long finished


def test_prefill_in_chunks_does_not_stall_decoding():
    _, generator = make(16384, max_chunk_size=256, shared_chunk_size=64, prefill_cooldown=2)
    short = greedy(prompt(0, 5), 60)
    generator.enqueue(short)
    generator.iterate()
    generator.enqueue(greedy(prompt(1, 1500), 5))
    gap = longest = 0
    while not short.is_finished:
        got = any(r["job"] is short and "token_ids" in r for r in generator.iterate())
        gap = 0 if got else gap + 1
        longest = max(longest, gap)
    assert longest == 0
    assert max(p for p in generator.model.passes[1:] if p > 1) <= 64


def test_requeue_continues_where_it_was():
    model, generator = make(2048)
    p = prompt(0, 300)
    job = greedy(p, 700, max_rq_tokens=256)
    other = greedy(prompt(1, 900), 20)
    results = run(generator, job, other)
    assert tokens_of(results[job]) == model.greedy(p, 700)
    assert results[job][-1]["new_tokens"] == 700 and results[job][-1]["prompt_tokens"] == 300
    assert sum(bool(r.get("requeue")) for r in results[job]) == 2 and job.is_requeued
    assert [r["stage"] for r in results[job]].count("started") == 1


# errors belong to one job


def test_failing_pass_ends_one_job_only():
    def fail(ids):
        if 299 in ids:
            raise RuntimeError("bad token")

    model, generator = make(model=HistoryModel(fail=fail))
    good, bad = greedy([5, 6, 7], 6), greedy([5, 299, 7], 6)
    results = run(generator, good, bad)
    assert tokens_of(results[good]) == model.greedy(good.prompt, 6)
    assert results[bad][-1]["stage"] == "error" and "bad token" in str(results[bad][-1]["error"]) and results[bad][-1]["eos"]
    assert generator.pagetable.referenced == 0


def test_failing_decode_ends_one_job_only():
    model = HistoryModel()
    a, b = [5, 6, 7], [5, 6, 8]
    second = model.greedy(b, 2)[1]
    assert second not in model.greedy(a, 10)

    def fail(ids):
        if second in ids:
            raise RuntimeError("bad token")

    model.fail = fail
    _, generator = make(model=model)
    good, bad = greedy(a, 10), greedy(b, 10)
    results = run(generator, good, bad)
    assert len(tokens_of(results[good])) == 10 and results[bad][-1]["stage"] == "error"
    assert generator.pagetable.referenced == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("sampler", [ArgmaxSampler, DefaultSampler, lambda: ComboSampler(xtc_probability=0.5)])
def test_bad_logits_end_one_job_by_name(value, sampler):
    class Bad(HistoryModel):
        def logits_of(self, history):
            x = super().logits_of(history)
            if history[0] == 9:
                x[:] = value
            return x

    _, generator = make(model=Bad())
    good, bad = Job([8, 3], 5, sampler=sampler(), seed=1), Job([9, 3], 5, sampler=sampler(), seed=1)
    results = run(generator, good, bad)
    assert len(tokens_of(results[good])) == 5
    error = results[bad][-1]["error"]
    assert isinstance(error, NumericalError) and "logits" in str(error)


def test_device_fault_ends_all_and_closes():
    def fail(ids):
        if 299 in ids:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _, generator = make(model=HistoryModel(fail=fail))
    jobs = [greedy([5, 6], 50), greedy([299], 5)]
    results = run(generator, jobs[0], jobs[1])
    assert all(results[j][-1]["stage"] == "error" for j in jobs)
    with pytest.raises(RuntimeError):
        generator.enqueue(greedy([1], 1))
    assert not generator.check_health()


def test_failing_sampler_call_is_tried_one_by_one(monkeypatch):
    from exl3 import ops

    sample = ops.sample

    def failing(logits, params, history=None, history_len=None, **options):
        if bool((logits[:, 0] == 77).any()):
            raise RuntimeError("no room")
        return sample(logits, params, history, history_len, **options)

    class Marked(HistoryModel):
        def logits_of(self, history):
            x = super().logits_of(history)
            x[0] = 77 if history[0] == 9 and len(history) > 4 else x[0]
            return x

    monkeypatch.setattr(ops, "sample", failing)
    model, generator = make(model=Marked())
    good, bad = greedy([8, 3], 6), greedy([9, 3], 6)
    results = run(generator, good, bad)
    assert tokens_of(results[good]) == model.greedy([8, 3], 6)
    assert "no room" in str(results[bad][-1]["error"]) and len(tokens_of(results[bad])) == 3

    def fault(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(generator.drawer, "draw", fault)
    job = greedy([8, 3], 6)
    assert run(generator, job)[job][-1]["stage"] == "error" and generator.closed is not None
    assert generator.pagetable.referenced == 0


def test_health_decodes_also_when_busy():
    model, generator = make(1024)
    assert generator.check_health()
    job = greedy(prompt(0, 900), 100)
    generator.enqueue(job)
    assert generator.check_health()
    while generator.num_remaining_jobs():
        generator.iterate()
    assert generator.pagetable.referenced == 0 and len(model.passes) > 100


def test_newer_generator_takes_the_cache():
    model = HistoryModel()
    cache = StubCache(1024)
    old = Generator(model, cache)
    new = Generator(model, cache)
    with pytest.raises(RuntimeError, match="same cache"):
        old.iterate()
    assert new.check_health()


# case C13: end tokens


def test_all_end_tokens_are_the_default():
    model = ChainModel({10: 20, 11: 30, 12: 40})
    model.eos_token_ids = [2, 20, 30, 40]
    _, generator = make(model=model)
    for start, end in ((10, 20), (11, 30), (12, 40)):
        job = greedy([start], 50)
        last = run(generator, job)[job][-1]
        assert last["eos_reason"] == "stop_token" and last["eos_triggering_token_id"] == end and last["new_tokens"] == 1
        free = greedy([start], 50, stop_conditions=[])
        assert run(generator, free)[free][-1]["new_tokens"] == 50
        own = greedy([start], 50, stop_conditions=[None, end + 5])
        assert run(generator, own)[own][-1]["eos_triggering_token_id"] == end + 5


def test_min_new_tokens_masks_only_end_tokens():
    model = ChainModel({10: 20})
    _, generator = make(model=model)
    job = greedy([10], 50, stop_conditions=[20, 30], min_new_tokens=4)
    results = run(generator, job)[job]
    assert results[-1]["new_tokens"] >= 5 and results[-1]["eos_reason"] == "stop_token"
    assert 20 not in tokens_of(results)[:4]


# case C16: stop strings that span tokens


def fox(stops, n=50, pieces=("The", " br", "own f", "ox ju", "mps", " over"), **options):
    tokenizer = ToyTokenizer([f"<{i}>" for i in range(100)] + list(pieces))
    model = ChainModel({5: 100}, vocab=100 + len(pieces))
    generator = Generator(model, StubCache(1024), tokenizer)
    job = greedy([5], n, stop_conditions=list(stops), **options)
    results = run(generator, job)[job]
    return text_of(results), results[-1]


def test_stop_string_over_token_borders():
    text, last = fox(["own fox"])
    assert text == last["full_completion"] == "The br"
    assert last["eos_reason"] == "stop_string" and last["eos_triggering_string"] == "own fox" and last["new_tokens"] == 4


def test_stop_string_on_the_last_allowed_token():
    text, last = fox(["own fox"], 4)
    assert text == "The br" and last["eos_reason"] == "stop_string"
    text, last = fox(["own fox"], 3)
    assert text == "The brown f" and last["eos_reason"] == "max_new_tokens"


def test_unfinished_stop_is_released():
    text, last = fox(["fox jumps overt"], 6)
    assert text == "The brown fox jumps over" and last["eos_reason"] == "max_new_tokens"


def test_stop_in_the_prompt_only_does_not_count():
    text, _ = fox(["<5>", ""], 3)
    assert text == "The brown f"


def test_held_tokens_are_reported():
    _, last = fox(["own fox"])
    assert last["held"]["token_ids"].tolist() == [[102, 103]] and last["held"]["text"] == "own fox ju"


def test_banned_string_is_rewound():
    pieces = ["a", " bad", " word", " good", " end"]
    tokenizer = ToyTokenizer([f"<{i}>" for i in range(100)] + pieces)
    model = ChainModel({5: 100, 100: 101, 101: 102, 102: 104}, vocab=105)
    model.table[100, 103] = 5.0  # the second choice after "a"
    generator = Generator(model, StubCache(1024), tokenizer)
    job = greedy([5], 4, banned_strings=["Bad Word"], stop_conditions=[])
    results = run(generator, job)[job]
    assert text_of(results).startswith("a good end")
    assert results[-1]["new_tokens"] == 4
    gone = [r for r in results if "suppressed_text" in r]
    assert gone[0]["suppressed_text"] == " bad word" and gone[0]["suppressed_tokens"].tolist() == [[101, 102]]
    free = greedy([5], 3, stop_conditions=[])
    assert text_of(run(generator, free)[free]) == "a bad word"


def test_banned_strings_leave_no_trace_in_a_stateful_sampler():
    pieces = [chr(97 + i) for i in range(20)]
    model = HistoryModel(vocab=20)
    generator = Generator(model, StubCache(1024), ToyTokenizer(pieces))
    sampler = ComboSampler(adaptive_target=0.3, adaptive_decay=0.9)
    job = Job([5], 40, sampler=sampler, seed=2, banned_strings=["ab", "cc", "f", "ki"], stop_conditions=[])
    results = run(generator, job)[job]
    text = text_of(results)
    assert not any(b in text for b in ("ab", "cc", "f", "ki")) and any("suppressed_text" in r for r in results)
    total, weight = 0.3 / 0.1, 1 / 0.1  # what adaptive-p keeps, from the tokens that stayed
    for at in range(1, job.n):
        x = torch.from_numpy(model.logits_of(job.ids[:at]))
        x[list(job.blocked.get(at, ()))] = -torch.inf
        p = float(x.double().softmax(0)[job.ids[at]])
        total, weight = p + 0.9 * total, 1 + 0.9 * weight
    (kept,) = job.memory.values()
    np.testing.assert_allclose(kept, (total, weight), rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(seed):
    """Case C16 through the engine: one text in random pieces, the same answer."""
    rng = np.random.default_rng(seed)
    text = "The brown fox jumps over 👩‍👩‍👧 and\n\nleaves"
    for stops, want in (
        (["own fox"], "The br"),
        (["fox jumps under"], text),
        (["\n", "\n\n"], text.split("\n")[0]),
        (["👩‍👧"], text[: text.index("👩‍👧")]),
    ):
        data = text.encode()
        cuts = sorted(rng.choice(np.arange(1, len(data)), rng.integers(1, len(data) - 1), replace=False).tolist())
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
        generator = Generator(
            ChainModel({5: 100}, vocab=100 + len(pieces)), StubCache(1024), ToyTokenizer([b"<%d>" % i for i in range(100)] + pieces)
        )
        job = greedy([5], len(pieces), stop_conditions=stops)
        results = run(generator, job)[job]
        assert text_of(results) == want == results[-1]["full_completion"]
        assert results[-1]["eos_reason"] == ("max_new_tokens" if want == text else "stop_string")


def test_token_healing():
    pieces = ["http", "http://", "s", "x", "https"]
    tokenizer = ToyTokenizer([f"<{i}>" for i in range(100)] + pieces)
    model = ChainModel({5: 101, 101: 103}, vocab=105)
    generator = Generator(model, StubCache(1024), tokenizer)
    job = greedy([5, 100], 2, token_healing=True, stop_conditions=[])
    results = run(generator, job)[job]
    assert text_of(results) == "://x" and tokens_of(results) == [101, 103]


def test_loop_is_detected():
    model = ChainModel({10: 11, 11: 12, 12: 10})
    _, generator = make(model=model)
    job = greedy([10], 500, stop_on_loop=(60, 4))
    last = run(generator, job)[job][-1]
    assert last["eos_reason"] == "loop_detected" and last["new_tokens"] == 60


def test_probabilities_are_of_the_raw_logits():
    model, generator = make()
    job = greedy([7, 8], 6, return_probs=True, return_top_tokens=3, return_logits=True)
    results = run(generator, job)[job]
    past = [7, 8]
    for r in (r for r in results if "token_ids" in r):
        raw = torch.from_numpy(model.logits_of(np.array(past)))
        p = raw.softmax(0)
        assert torch.equal(r["logits"][0, 0], raw)
        assert abs(float(r["token_probs"][0, 0]) - float(p.max())) < 1e-6
        assert r["top_k_tokens"][0, 0].tolist() == p.topk(3).indices.tolist()
        past.append(int(r["token_ids"][0, 0]))


def test_output_can_be_forced():
    model, generator = make()
    job = greedy([7, 8], 6)
    generator.enqueue(job)
    got = []
    while not job.is_finished:
        for r in generator.iterate():
            got += r["token_ids"][0].tolist() if "token_ids" in r else []
        if len(got) == 2:
            job.constrain_output_now(torch.tensor([[100, 101]]))
    first = model.greedy([7, 8], 2)
    assert got == [*first, 100, 101, *model.greedy([7, 8, *first, 100, 101], 2)]


def test_generate_texts():
    tokenizer = ToyTokenizer([f"<{i}>" for i in range(100)])
    generator = Generator(ChainModel({}, vocab=100), StubCache(1024), tokenizer)
    assert generator.generate("<5>", max_new_tokens=2, sampler=ArgmaxSampler()) == "<5><6><7>"
    assert generator.generate(["<5>", "<8>"], max_new_tokens=1, completion_only=True, sampler=ArgmaxSampler()) == ["<6>", "<9>"]


def test_unsupported_arguments_are_refused_by_name():
    with pytest.raises(NotImplementedError, match="disk_cache_dir"):
        make(disk_cache_dir="/tmp/x")
    with pytest.raises(ArgumentError, match="no_such"):
        make(no_such=1)
    make(recurrent_cache_size=1 << 30, enable_defrag=False)


def test_closed_generator_refuses():
    _, generator = make()
    generator.enqueue(greedy([5], 5))
    generator.close()
    generator.close()
    assert generator.pagetable.referenced == 0
    with pytest.raises(RuntimeError, match="closed"):
        generator.iterate()


JUNK = [
    True,
    2.5,
    float("nan"),
    "x",
    b"a",
    [],
    [1],
    {"a": 1},
    object(),
    torch.zeros(0),
    torch.tensor([[1, 2]]),
    np.array(["a"]),
    len,
    -(2**70),
]
WHOLE = ("max_new_tokens", "min_new_tokens", "max_skips", "return_top_tokens", "max_rq_tokens")
FLAGS = ("decode_special_tokens", "return_logits", "return_probs", "token_healing", "return_prompt_probs", "clamp")
LISTS = ("stop_conditions", "filters", "banned_strings", "embeddings")


@pytest.mark.parametrize("name", [*WHOLE, *FLAGS, *LISTS, "seed", "sampler", "stop_on_loop", "input_ids"])
def test_junk_is_refused_when_the_job_is_made(name):
    """Whatever is passed: taken, or an error of exl3 from the constructor or `enqueue`; never one in the middle of a step."""
    generator = Generator(HistoryModel(), StubCache(2048))
    refused = 0
    for value in JUNK:
        good = Job([5, 6], 3, sampler=ArgmaxSampler())
        generator.enqueue(good)
        options = {"input_ids": [5, 6], "max_new_tokens": 3, "sampler": ArgmaxSampler(), name: value}
        try:
            generator.enqueue(Job(**options))
        except (Exl3Error, NotImplementedError):
            refused += 1
        while generator.num_remaining_jobs():
            for r in generator.iterate():
                assert r["stage"] != "error", (name, value, r)
        assert good.new_tokens == 3 and generator.pagetable.referenced == 0
    assert refused >= 5


def test_health_is_not_given_by_tokens_that_fail():
    class Broken(HistoryModel):
        def logits_of(self, history):
            return np.full(self.vocab_size, np.nan, np.float32)

    _, generator = make(model=Broken())
    start = time.monotonic()
    assert not generator.check_health(60) and generator.tokens_out == 0
    assert time.monotonic() - start < 30


def test_device_fault_in_a_draw_closes_the_engine(monkeypatch):
    """Where tokens are waited for, faults of all that was queued come to light."""
    from exl3 import ops

    def fault(*args, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(ops, "sample", fault)
    _, generator = make()
    jobs = [greedy([5, 6], 5), greedy([7], 5, return_probs=True)]
    results = run(generator, *jobs)
    assert all(results[j][-1]["stage"] == "error" for j in jobs) and generator.closed is not None
    assert generator.pagetable.referenced == 0


@pytest.mark.parametrize("restrict", [True, False])
def test_a_bad_row_that_was_written_over_keeps_its_reason(restrict):
    """On cards the next step may be in the logits by the time the host sees that no token was found."""
    _, generator = make()
    job = Job([5, 6], 5, sampler=ComboSampler(logit_bias={7: 1.0}) if restrict else None)
    generator.enqueue(job)

    def overwrite(ids, rows, logits):
        logits.zero_()
        return ids.tolist()

    generator.drawer.fetch = overwrite
    logits = torch.full((1, generator.vocab_size), -float("inf") if restrict else float("nan"))
    (found,) = generator.drawer.draw(logits, [(job, 0, 0)])
    assert type(found) is (NoTokenLeftError if restrict else NumericalError)


def test_healing_takes_one_token_back_also_where_enqueue_is_tried_again():
    tokenizer = ToyTokenizer([bytes([i]) for i in range(256)])
    job = greedy([65, 66, 67, 68], 600, token_healing=True)
    small, large = (Generator(HistoryModel(vocab=256), StubCache(n), tokenizer) for n in (256, 1024))
    with pytest.raises(Exl3Error):
        small.enqueue(job)
    large.enqueue(job)
    assert job.prompt.tolist() == [65, 66, 67] and job.healing == b"D"
