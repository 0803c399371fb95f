"""The engine on a card: recorded steps equal eager ones bit for bit, jobs together equal jobs alone, fused draws equal stepwise ones."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import exl3
from exl3 import ops
from exl3.cache import Cache
from exl3.errors import BackendError
from exl3.generate import ArgmaxSampler, ComboSampler, Generator, Job
from exl3.generate.drawing import Drawer
from exl3.generate.step import StepRunner, forward, packed_batch

pytestmark = pytest.mark.gpu
sys.path.append(str(Path(__file__).parents[1] / "models"))
import plain_llama  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        ops.backend("cuda")
    except BackendError as error:
        pytest.skip(str(error))
    config = {**plain_llama.CONFIG, "head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
    path = plain_llama.write(tmp_path_factory.mktemp("m"), config, plain_llama.random_weights(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exl3.load(path, device="cuda")


def tokens(model, n, seed=0):
    return np.random.default_rng(seed).integers(3, model.vocab_size, n).astype(np.int32)


@torch.inference_mode()
@pytest.mark.parametrize("mode", ["graph", "tape"])
@pytest.mark.parametrize("bits", [(16, 16), (8, 5)])
def test_replay_equals_eager_bit_for_bit(model, mode, bits):
    rng = np.random.default_rng(1)
    a, b = Cache(model, 2048, model.device, *bits), Cache(model, 2048, model.device, *bits)
    for cache in (a, b):
        for page in range(8):
            forward(model, packed_batch([(tokens(model, 200, page), 0, [page])], [], cache, model.device), head=False)
    recorded, eager = StepRunner(model, a, 2, mode), StepRunner(model, b, 2, "eager")
    for step in range(4):
        for shape in ([1], [1, 1, 1], [3, 1], [2, 1, 1], [5]):
            pages = rng.permutation(8)
            rows = []
            for i, n in enumerate(shape):
                ids = tokens(model, n, int(rng.integers(1000))).tolist()
                rows.append((ids, int(rng.integers(0, 200)), [int(p) for p in pages[2 * i : 2 * i + 2]], (step, len(shape), i)))
            assert torch.equal(recorded.run(rows), eager.run(rows))
    assert recorded.mode == mode and set(recorded.recorded) == {1, 3, 4, 6}
    for x, y in zip(a.layers, b.layers):
        for s, t in zip(x.tensors, y.tensors):
            assert torch.equal(s, t)


@pytest.mark.parametrize("options", [{}, {"ngram_match_min": 2}])
def test_jobs_together_equal_jobs_alone(model, options):
    def run(prompts):
        generator = Generator(model, Cache(model, 16384, model.device), **options)
        jobs = [Job(p, 40, sampler=ArgmaxSampler(), stop_conditions=[]) for p in prompts]
        got = {j: [] for j in jobs}
        generator.enqueue(jobs)
        while generator.num_remaining_jobs():
            for r in generator.iterate():
                assert r["stage"] != "error", r["error"]
                got[r["job"]] += r["token_ids"][0].tolist() if "token_ids" in r else []
        assert generator.pagetable.referenced == 0
        return [got[j] for j in jobs]

    prompts = [tokens(model, 5 + 61 * i, i) for i in range(12)]
    together = run(prompts)
    for prompt, got in zip(prompts, together):
        logits = model.logits([prompt.tolist() + got])[0, len(prompt) - 1 : -1].float()
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(got, device=logits.device)[:, None])[:, 0]
        assert float(gap.max()) < 0.2  # fp16 between operations and in the cache: only near-ties may fall otherwise


def test_fused_and_step_by_step_draw_the_same(model):
    logits = torch.randn(32, 5000, generator=torch.Generator().manual_seed(1)).cuda() * 3
    for options in (
        {},
        {"temperature": 0.0},
        {"top_k": 20, "top_p": 0.9},
        {"rep_p": 1.2, "freq_p": 0.2},
        {"min_p": 0.05, "temperature": 1.5},
    ):
        drawn = []
        for fused in (True, False):
            drawer, rows = Drawer(5000), []
            drawer.fused = fused
            for i in range(32):
                job = Job([5, 9, 5, 100], 5, sampler=ComboSampler(**options), seed=i)
                job.ids, job.n = np.array([5, 9, 5, 100, 0, 0], np.int32), 4
                rows.append((job, i, 0))
            drawn.append([d[0] for d in drawer.draw(logits.clone(), rows)])
        assert sum(a != b for a, b in zip(*drawn)) <= 1  # sums in another order may move one draw across a border
