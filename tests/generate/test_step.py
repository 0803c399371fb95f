"""Recorded steps of real (tiny) models: a replay with other contents equals the eager step bit for bit (rule 6)."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import exl3
from exl3 import ops
from exl3.cache import Cache
from exl3.errors import ArgumentError, BackendError
from exl3.generate.generator import Generator
from exl3.generate.job import Job
from exl3.generate.presets import ArgmaxSampler
from exl3.generate.step import BUCKETS, StepRunner, bucket, forward, packed_batch, recorder

MODELS = Path(__file__).parents[1] / "data" / "models"
NAMES = sorted(p.name for p in MODELS.iterdir() if p.is_dir())
sys.path.append(str(Path(__file__).parents[1] / "models"))
import plain_llama  # noqa: E402


@pytest.fixture
def native():
    try:
        ops.backend("cpu")
    except BackendError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=[*NAMES, "wide"])
def model(request, tmp_path_factory):
    path = MODELS / request.param
    if request.param == "wide":  # heads wide enough for a quantized cache
        config = {**plain_llama.CONFIG, "head_dim": 32, "hidden_size": 64}
        path = plain_llama.write(tmp_path_factory.mktemp("wide"), config, plain_llama.random_weights(config))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these directories have no tokenizer
        loaded = exl3.load(path, device="cpu")
    yield loaded
    torch.set_num_threads(threads)


def tokens(model, n, seed=0):
    return np.random.default_rng(seed).integers(3, model.vocab_size, n).astype(np.int32)


def test_buckets():
    assert [bucket(n) for n in (1, 2, 5, 9, 33, 64)] == [1, 2, 6, 12, 48, 64] and len(BUCKETS) == 12
    with pytest.raises(ArgumentError):
        bucket(65)


def test_recorder_follows_the_settings(monkeypatch):
    monkeypatch.delenv("EXL3_STEP")
    assert recorder(torch.device("cpu")) == "tape" and recorder(torch.device("cuda")) == "graph"
    monkeypatch.setenv("EXL3_GRAPHS", "0")
    assert recorder(torch.device("cuda")) == "tape"
    monkeypatch.setenv("EXL3_STEP", "eager")
    assert recorder(torch.device("cuda")) == "eager"
    monkeypatch.setenv("EXL3_STEP", "sometimes")
    with pytest.raises(ArgumentError, match="EXL3_STEP"):
        recorder(torch.device("cpu"))


def plans(model, rng):
    """Three steps of one size with other rows, positions, lengths and pages."""
    for shape in ([1, 1, 1], [3, 1], [2, 1, 1]):
        rows, pages = [], rng.permutation(8)
        for i, n in enumerate(shape):
            start = int(rng.integers(0, 200))
            rows.append((tokens(model, n, int(rng.integers(1000))), start, [int(p) for p in pages[2 * i : 2 * i + 2]]))
        yield rows


@torch.inference_mode()
def test_replay_equals_eager_bit_for_bit(model, native):
    rng = np.random.default_rng(1)
    a, b = Cache(model, 2048, "cpu"), Cache(model, 2048, "cpu")
    for cache in (a, b):
        for page in range(8):  # something to look back at
            forward(model, packed_batch([(tokens(model, 200, page), 0, [page])], [], cache, model.device), head=False)
    recorded, eager = StepRunner(model, a, 2, "tape"), StepRunner(model, b, 2, "eager")
    for step in range(6):
        for serial, rows in enumerate(plans(model, rng)):
            given = [(ids.tolist(), start, pages, (step, serial, i)) for i, (ids, start, pages) in enumerate(rows)]
            assert torch.equal(recorded.run(given), eager.run(given))
    assert set(recorded.recorded) == {3, 4} and recorded.mode == "tape"
    for x, y in zip(a.layers, b.layers):
        for s, t in zip(x.tensors, y.tensors):
            assert torch.equal(s, t)  # padding tokens wrote nothing


@torch.inference_mode()
def test_recordings_are_dropped_when_weights_change(model, native):
    runner = StepRunner(model, Cache(model, 512, "cpu"), 2, "tape")
    row = [([5], 0, [0, 1], "a")]
    before = runner.run(row).clone()
    model.revision = getattr(model, "revision", 0) + 1
    first = next(iter(runner.recorded.values()))
    assert torch.equal(runner.run(row), before) and next(iter(runner.recorded.values())) is not first
    runner.reset()
    assert not runner.recorded


@torch.inference_mode()
@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 5)])
@pytest.mark.parametrize("mode", ["tape", "eager"])
def test_engine_over_real_models(model, bits, mode, monkeypatch):
    """Greedy text past the window and the first page is the arg max of whole-sequence logits; quantized caches run too."""
    if mode == "tape":
        try:
            ops.backend("cpu")
        except BackendError as error:
            pytest.skip(str(error))
    monkeypatch.setenv("EXL3_STEP", mode)
    if bits != (16, 16) and model.cache_shapes[0][1] % 32:
        pytest.skip("this head size has no quantized cache")
    generator = Generator(model, Cache(model, 2048, "cpu", *bits))
    jobs = [Job(tokens(model, n, n), 12, sampler=ArgmaxSampler(), stop_conditions=[]) for n in (1, 40, 250)]
    generator.enqueue(jobs)
    got = {j: [] for j in jobs}
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            assert r["stage"] != "error", r
            got[r["job"]] += r["token_ids"][0].tolist() if "token_ids" in r else []
    assert generator.pagetable.referenced == 0 and generator.runner.mode == mode
    for job in jobs:
        assert len(got[job]) == 12
        changes_rope = "longrope" in str(model.config.raw)  # whole passes use other tables than the first steps did
        if bits == (16, 16) and not changes_rope:
            whole = model.logits([job.prompt.tolist() + got[job]])[0, len(job.prompt) - 1 : -1]
            gap = whole.max(-1).values - whole.gather(1, torch.tensor(got[job])[:, None])[:, 0]
            assert float(gap.max()) < 0.05  # the cache is fp16: only near-ties may fall otherwise


@torch.inference_mode()
def test_every_pair_of_cache_bits_runs_long_prompts(tmp_path):
    """Case C18: a long prefill and a few tokens over every pair of bits, and a normal request right after."""
    config = {**plain_llama.CONFIG, "head_dim": 32, "hidden_size": 64}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = exl3.load(plain_llama.write(tmp_path / "m", config, plain_llama.random_weights(config)), device="cpu")
    for k in (2, 3, 4, 5, 6, 7, 8, 16):
        for v in (2, 3, 4, 5, 6, 7, 8, 16):
            generator = Generator(model, Cache(model, 512, "cpu", k, v))
            for n in (300, 5):
                job = Job(tokens(model, n), 2, sampler=ArgmaxSampler(), stop_conditions=[])
                generator.enqueue(job)
                results = []
                while generator.num_remaining_jobs():
                    results += generator.iterate()
                assert results[-1]["eos_reason"] == "max_new_tokens" and results[-1]["new_tokens"] == 2, (k, v)


# ------------------------------------------------------------------------------------------------ several segments, and going ahead


def split_model(tmp_path, counts, layers=4, **changes):
    config = {**plain_llama.CONFIG, "head_dim": 32, "hidden_size": 64, "num_hidden_layers": layers, **changes}
    path = plain_llama.write(tmp_path / "m", config, plain_llama.random_weights(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = exl3.load(path, device="cpu")
        several = exl3.load(path, device=",".join(["cpu"] * len(counts)), split=counts)
    return one, several


def greedy(generator, prompts, n):
    jobs = [Job(p, n, sampler=ArgmaxSampler(), stop_conditions=[]) for p in prompts]
    got = {j: [] for j in jobs}
    generator.enqueue(jobs)
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            assert r["stage"] != "error", r
            got[r["job"]] += r["token_ids"][0].tolist() if "token_ids" in r else []
    assert generator.pagetable.referenced == 0
    return [got[j] for j in jobs]


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["tape", "eager"])
@pytest.mark.parametrize("counts", [[1, 3], [2, 1, 1]])
def test_segments_equal_the_whole_bit_for_bit(tmp_path, native, mode, counts):
    one, several = split_model(tmp_path, counts)
    assert [len(stage.blocks) for stage in several.stages] == counts
    assert several.cache_devices == [torch.device("cpu")] * 4 and one.cache_devices is None
    ids = tokens(one, 30)
    assert torch.equal(one.logits(ids), several.logits(ids))
    a, b = StepRunner(one, Cache(one, 512, "cpu"), 1, "tape"), StepRunner(several, Cache(several, 512, "cpu"), 1, mode)
    assert [s.device.type for s in b.segments] == ["cpu"] * len(counts)
    for step in range(4):
        rows = [([int(t)], 3 * step + i, [i], i) for i, t in enumerate(tokens(one, 2, step))]
        assert torch.equal(a.run(rows), b.run(rows))
    if mode == "tape":
        assert all(set(s.recorded) == {2} for s in b.segments)


def test_a_split_engine_writes_the_same_text(tmp_path, native, monkeypatch):
    monkeypatch.delenv("EXL3_STEP")
    one, several = split_model(tmp_path, [3, 1])
    prompts = [tokens(one, n, n) for n in (3, 40, 300)]
    texts = [greedy(Generator(m, Cache(m, 2048, m.device)), prompts, 10) for m in (one, several)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("split", [[1], [2, 3], [0, 4], [4, 0], [1.5, 2.5], [2, 1, 1]])
def test_impossible_splits_are_named(tmp_path, split):
    config = {**plain_llama.CONFIG, "num_hidden_layers": 4}
    path = plain_llama.write(tmp_path, config, plain_llama.random_weights(config))
    with pytest.raises(ArgumentError, match="split"):
        exl3.load(path, device="cpu,cpu", split=split)


def test_the_trace_says_what_was_built_and_what_was_declined(tmp_path, native, monkeypatch, capfd):
    monkeypatch.setenv("EXL3_BC_ATTN_TRACE", "1")
    monkeypatch.delenv("EXL3_STEP")
    one, several = split_model(tmp_path, [1, 3])
    for model in (one, several):
        runner = StepRunner(model, Cache(model, 256, "cpu"), 1)
        runner.run([([5], 0, [0], "a"), ([6], 0, [0], "b")])
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("exl3: ")]
    assert len(said) == 3 and said[0].startswith("exl3: step of 2 tokens on cpu: built as a tape of ")
    assert [line.split(":")[1] for line in said[1:]] == [
        " step of 2 tokens on cpu, layers 0 to 0", " step of 2 tokens on cpu, layers 1 to 3",
    ]  # fmt: skip
    one.blocks[0].self_attn.register_forward_pre_hook(lambda module, args: (args[0].mul_(1.0), *args[1:]))
    with pytest.warns(RuntimeWarning, match="decode steps run from Python"):
        StepRunner(one, Cache(one, 256, "cpu"), 1).run([([5], 0, [0], "a")])
    assert "declined, it runs from Python: aten.mul_" in capfd.readouterr().err


class Counting:
    """How often a runner launched and how often a step was there already."""

    def __init__(self, runner):
        self.launched = self.found = 0
        launch, found = runner._launch, runner._found

        def counted_launch(*args):
            self.launched += 1
            return launch(*args)

        def counted_found(*args):
            out = found(*args)
            self.found += out is not None
            return out

        runner._launch, runner._found = counted_launch, counted_found
        runner._cards = True  # the CPU gains nothing by it, but does it right


def test_going_ahead_changes_nothing(tmp_path, native, monkeypatch):
    """Jobs of different lengths that end, join and share a step: the same text, and most steps are there before they are asked for."""
    monkeypatch.delenv("EXL3_STEP")
    one, _ = split_model(tmp_path, [2, 2])
    prompts = [tokens(one, n, n) for n in (3, 40, 251, 7)]

    def run(ahead):
        generator = Generator(one, Cache(one, 4096, "cpu"), max_batch_size=3)
        counts = Counting(generator.runner) if ahead else None
        jobs = [Job(p, 10 + 9 * i, sampler=ArgmaxSampler(), stop_conditions=[]) for i, p in enumerate(prompts)]
        got = {j: [] for j in jobs}
        generator.enqueue(jobs)
        while generator.num_remaining_jobs():
            for r in generator.iterate():
                assert r["stage"] != "error", r
                got[r["job"]] += r["token_ids"][0].tolist() if "token_ids" in r else []
        return [got[j] for j in jobs], generator, counts

    plain, _, _ = run(False)
    text, generator, counts = run(True)
    assert text == plain and generator.pagetable.referenced == 0
    assert counts.found >= 30 and counts.launched <= generator.runner.steps + 12


@torch.inference_mode()
def test_a_step_ahead_is_used_for_its_very_rows_alone(tmp_path, native):
    one, _ = split_model(tmp_path, [2, 2])
    cache = Cache(one, 1024, "cpu")
    runner, plain = StepRunner(one, cache, 1, "tape"), StepRunner(one, Cache(one, 1024, "cpu"), 1, "eager")
    counts = Counting(runner)

    def rows(step, last, names="abc"):
        return [([last[n]], step, ["abc".index(n)], n) for n in names]

    last = dict(zip("abc", (5, 6, 7)))
    for step in range(2):
        logits = runner.run(rows(step, last))
        assert torch.equal(logits, plain.run(rows(step, last)))
        drawn = runner.fetch(logits.argmax(-1).int(), range(3), logits)
        last = dict(zip("abc", drawn))
    assert counts.found == 1 and counts.launched == 3
    # some rows of it, in another order
    logits = runner.run(rows(2, last, "ca"))
    assert torch.equal(logits, plain.run(rows(2, last, "ca"))) and counts.found == 2
    runner.fetch(logits.argmax(-1).int(), range(2), logits)
    # another token, another place, another owner: computed anew
    for wrong in ([([9], 3, [2], "c")], [([last["c"]], 2, [2], "c")], [([1], 3, [2], "d")], [([1, 2], 3, [2], "c")]):
        found = counts.found
        assert torch.equal(runner.run(wrong), plain.run(wrong)) and counts.found == found
    # nor past the end of a row's pages, nor where not every row drew, nor when told not to
    launched = counts.launched
    logits = runner.run([([4], 255, [2], "c")])
    assert runner.fetch(torch.tensor([3], dtype=torch.int32), [0], logits) == [3]
    logits = runner.run(rows(4, last))
    assert runner.fetch(torch.tensor([3, 1], dtype=torch.int32), [0, 2], logits) == [3, 1]
    assert runner.fetch(torch.tensor([3, 1, 2], dtype=torch.int32), [0, 1, 2], logits.clone()) == [3, 1, 2]  # of another pass
    runner.ahead = False
    assert runner.fetch(torch.tensor([3, 1, 2], dtype=torch.int32), [0, 1, 2], logits) == [3, 1, 2]
    assert counts.launched == launched + 2


def test_going_ahead_never_writes_into_pages_that_have_changed_hands(tmp_path, native, monkeypatch):
    """A prefill pass draws from logits of its own: no step of rows that may be gone follows from them."""
    monkeypatch.delenv("EXL3_STEP")
    one, _ = split_model(tmp_path, [2, 2])
    texts = []
    for ahead in (False, True):
        generator = Generator(one, Cache(one, 512, "cpu"))
        if ahead:
            Counting(generator.runner)
        got = []
        for prompt in (tokens(one, 3, 1), tokens(one, 300, 2)):  # the second takes the first one's page over
            generator.enqueue(Job(prompt, 12, sampler=ArgmaxSampler(), stop_conditions=[]))
            while generator.num_remaining_jobs():
                got += [i for r in generator.iterate() if "token_ids" in r for i in r["token_ids"][0].tolist()]
        texts.append(got)
    assert texts[0] == texts[1]


def test_no_step_goes_ahead_of_more_rows_than_one_run_takes(tmp_path, native, monkeypatch):
    """The next run would be for other rows: every such step would be thrown away."""
    monkeypatch.delenv("EXL3_STEP")
    one, _ = split_model(tmp_path, [2, 2])
    generator = Generator(one, Cache(one, 256 * 66, "cpu"))
    counts = Counting(generator.runner)
    generator.enqueue([Job([5 + i, 6], 5, sampler=ArgmaxSampler(), stop_conditions=[]) for i in range(66)])
    while generator.num_remaining_jobs():
        assert all(r["stage"] != "error" for r in generator.iterate())
    assert counts.launched == generator.runner.steps > 4 and counts.found == 0
