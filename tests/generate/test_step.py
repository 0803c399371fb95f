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
    assert set(recorded._recorded) == {3, 4} and recorded.mode == "tape"
    for x, y in zip(a.layers, b.layers):
        for s, t in zip(x.tensors, y.tensors):
            assert torch.equal(s, t)  # padding tokens wrote nothing


@torch.inference_mode()
def test_recordings_are_dropped_when_weights_change(model, native):
    runner = StepRunner(model, Cache(model, 512, "cpu"), 2, "tape")
    row = [([5], 0, [0, 1], "a")]
    before = runner.run(row).clone()
    model.revision = getattr(model, "revision", 0) + 1
    first = next(iter(runner._recorded.values()))
    assert torch.equal(runner.run(row), before) and next(iter(runner._recorded.values())) is not first
    runner.reset()
    assert not runner._recorded


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
