"""The runtime on a card: the rules of recorded steps, several devices, memory that comes back."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import exl3
from exl3 import ops
from exl3.cache import Cache
from exl3.errors import BackendError, ResourceError
from exl3.generate import ArgmaxSampler, Generator, Job, segments
from exl3.generate.step import StepRunner, forward, packed_batch
from exl3.models import memory
from exl3.ops import SampleParams, native, pack_sample_params

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """An EXL3 model of two layers, 4 bits, heads of 64."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    try:
        ops.backend("cuda")
    except BackendError as error:
        pytest.skip(str(error))
    path = tmp_path_factory.mktemp("m")
    subprocess.run([sys.executable, ROOT / "benchmarks/make_model.py", "tiny", path, "--layers", "4"], check=True, capture_output=True)
    return path


def load(path, device="cuda:0", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return exl3.load(path, device=device, max_tokens=8192, **options)


@pytest.fixture(scope="module")
def model(directory):
    return load(directory)


def kl(p, q):
    p, q = (torch.log_softmax(x.double().cpu(), -1) for x in (p, q))
    return float((p.exp() * (p - q)).sum(-1).mean())


def kernels(step):
    """(name, grid, block) of what `step` launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    path = Path(f"/tmp/exl3-trace-{id(seen)}.json")
    seen.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    path.unlink()
    return [(e["name"], tuple(e["args"]["grid"]), tuple(e["args"]["block"])) for e in sorted(events, key=lambda e: e["ts"])]


def rows_at(length, n=3):
    return [([7 + r], length - 1, list(range(16 * r, 16 * r + 16)), r) for r in range(n)]


@torch.inference_mode()
def test_rule_1_sampling_parameters_are_read_from_the_device():
    logits = torch.randn(4, 3000, device="cuda")
    params = [SampleParams(temperature=0.0), SampleParams(seed=1), SampleParams(top_k=3, seed=2), SampleParams(top_p=0.5, seed=3)]
    held = pack_sample_params(params, "cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        ops.sample(logits, held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, _ = ops.sample(logits, held)
    seen = set()
    for step in range(6):
        changed = [SampleParams(temperature=1.0 + step, seed=9 * step + i, counter=step, top_k=50 * i) for i in range(4)]
        pack_sample_params(changed, out=held)
        graph.replay()
        assert torch.equal(ids, ops.sample(logits, held)[0])
        seen.add(tuple(ids.tolist()))
    assert len(seen) > 3


@torch.inference_mode()
@pytest.mark.parametrize("bits", [16, 4])
def test_rule_2_grids_follow_sizes_never_lengths(model, bits):
    launched = []
    for recorded_at in (1, 300, 4000):
        runner = StepRunner(model, Cache(model, 16 * 256 * 3, model.device, bits, bits), 16)
        runner.run(rows_at(recorded_at))
        launched += [kernels(partial(runner.run, rows_at(length))) for length in (recorded_at, 4097 - recorded_at)]
    assert len(launched[0]) > 20 and all(other == launched[0] for other in launched[1:])


@torch.inference_mode()
def test_rule_3_no_allocation_no_wait_counters_at_zero(model):
    runner = StepRunner(model, Cache(model, 16 * 256 * 3, model.device), 16)
    runner.run(rows_at(9))
    torch.cuda.synchronize()
    alone = "PYTEST_XDIST_WORKER" not in os.environ  # free memory is the whole card's

    def taken():
        return torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0] if alone else 0

    before = taken()
    start, end = torch.cuda.Event(), torch.cuda.Event()
    for step in range(30):
        runner.run(rows_at(10 + step))
    assert taken() == before
    torch.cuda._sleep(200_000_000)  # about 0.1 s: a step that waited for the device would return after it
    start.record()
    runner._launch(rows_at(50))
    end.record()
    assert not start.query() and not end.query()
    torch.cuda.synchronize()
    for space in native.workspaces(model.device):
        assert not bool(space[:65536].any())


@torch.inference_mode()
def test_rule_3_launches_go_to_the_stream_of_the_call(model):
    batch = packed_batch([(np.arange(5, 9, dtype=np.int32), 0, [0])], [3], Cache(model, 256, model.device), model.device)
    expected = forward(model, batch).clone()
    torch.cuda.synchronize()
    side, busy = torch.cuda.Stream(), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second on the current stream
    busy.record()
    with torch.cuda.stream(side):
        batch.tables.clear()
        got = forward(model, batch)
    side.synchronize()
    assert not busy.query(), "something waited for another stream"
    assert torch.equal(got, expected)
    torch.cuda.synchronize()


@torch.inference_mode()
def test_rule_5_one_pool_a_device_and_results_outside_it(model):
    runner = StepRunner(model, Cache(model, 16 * 256 * 3, model.device), 16)
    first = runner.run(rows_at(5, 1)).clone()
    for n in (2, 3):
        runner.run(rows_at(5, n))
    graphs = [held.step for held in runner.recorded.values()]
    assert len(graphs) == 3 and {g.pool() for g in graphs} == {segments._pools[model.device.index][0]}
    assert torch.equal(runner.run(rows_at(5, 1)), first)
    model.revision = getattr(model, "revision", 0) + 1
    assert torch.equal(runner.run(rows_at(5, 1)), first)
    assert set(runner.recorded) == {1} and runner.recorded[1].step not in graphs


@torch.inference_mode()
def test_graph_tape_and_eager_agree_bit_for_bit(model):
    """Rule 6 on EXL3 weights, the settings' recorders included."""
    runners = [StepRunner(model, Cache(model, 16 * 256 * 3, model.device), 16, mode) for mode in ("graph", "tape", "eager")]
    for step in range(5):
        outs = [runner.run(rows_at(3 + 41 * step, 1 + step % 3)).clone() for runner in runners]
        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2])


def generate(model, prompts, n=30, ahead=True):
    generator = Generator(model, Cache(model, 8192, model.device))
    if not ahead:
        generator.drawer.fetch = lambda ids, *_: ids.tolist()
    jobs = [Job(p, n, sampler=ArgmaxSampler(), stop_conditions=[]) for p in prompts]
    got = {j: [] for j in jobs}
    generator.enqueue(jobs)
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            assert r["stage"] != "error", r
            got[r["job"]] += r["token_ids"][0].tolist() if "token_ids" in r else []
    assert generator.pagetable.referenced == 0
    return [got[j] for j in jobs]


def prompts_of(model, sizes):
    return [np.random.default_rng(n).integers(3, model.vocab_size, n).astype(np.int32) for n in sizes]


def test_going_ahead_changes_no_text(model):
    prompts = prompts_of(model, (3, 250, 40, 17, 300))
    assert generate(model, prompts) == generate(model, prompts, ahead=False)


def check_split(one, several, devices):
    assert [stage.device for stage in several.stages] == [torch.device(d) for d in devices]
    ids = prompts_of(one, (200,))[0]
    assert kl(one.logits(ids), several.logits(ids)) < 1e-4
    with torch.inference_mode():
        a, b = (StepRunner(m, Cache(m, 2048, m.device), 8) for m in (one, several))
        for step in range(5):
            rows = [([5 + r + step], step, [r], r) for r in range(3)]
            assert kl(a.run(rows), b.run(rows)) < 1e-4
        assert [s.mode for s in b.segments] == ["graph" if d.startswith("cuda") else "tape" for d in devices]
        eager = StepRunner(several, Cache(several, 2048, several.device), 8, "eager")
        again = StepRunner(several, Cache(several, 2048, several.device), 8)
        for step in range(5):
            rows = [([5 + r + step], step, [r], r) for r in range(3)]
            assert torch.equal(again.run(rows).clone(), eager.run(rows)), step
    prompts = prompts_of(one, (3, 250, 40))
    for prompt, text in zip(prompts, generate(several, prompts)):
        logits = one.logits([prompt.tolist() + text])[0, len(prompt) - 1 : -1].float().cpu()
        assert float((logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]).max()) < 0.2


def test_layers_on_the_cpu_too(directory, model):
    check_split(model, load(directory, "cuda:0,cpu", split=[2, 2]), ["cuda:0", "cpu"])
    check_split(model, load(directory, ["cpu", "cuda:0"], split=[1, 3]), ["cpu", "cuda:0"])


def test_two_segments_on_one_card(directory, model):
    several = load(directory, "cuda:0,cuda:0", split=[1, 3])
    check_split(model, several, ["cuda:0", "cuda:0"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("through_host", ["", "1"])
def test_two_cards(directory, model, monkeypatch, through_host):
    monkeypatch.setenv("EXLLAMA_NO_P2P_COPY", through_host)
    several = load(directory, "cuda:0,cuda:1", split=[2, 2])
    check_split(model, several, ["cuda:0", "cuda:1"])
    assert [str(layer.k.device) for layer in Cache(several, 256, several.device).layers] == ["cuda:0"] * 2 + ["cuda:1"] * 2


def used():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]


def test_load_generate_unload_twenty_times(directory):
    seen = []
    for _ in range(20):
        loaded = load(directory)
        generate(loaded, prompts_of(loaded, (5, 300)), 8)
        loaded.unload()
        del loaded
        seen.append(used())
    allocated, free = zip(*seen[1:])
    assert max(allocated) - min(allocated) < 1 << 20, allocated
    if "PYTEST_XDIST_WORKER" not in os.environ:  # free memory is the whole card's
        assert free[0] - free[-1] < 8 << 20, free


def test_out_of_memory_while_loading_gives_everything_back(directory, monkeypatch):
    before = used()[0]
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 20)) / total)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1 << 40)  # the check ahead believes there is room
    taken = []
    for size in (1 << 20, 1 << 16, 1 << 12, 512):  # whatever the allocator still has
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    del taken[-16:]  # the first small tensors find room
    try:
        with pytest.raises(ResourceError, match=r"ran out .* given back.* the largest are .*(lm_head|layers\.\d\.mlp\.\w+_proj) \d+ MiB"):
            load(directory)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        taken.clear()
    assert used()[0] == before


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_taken(model):
    before = torch.cuda.memory_allocated()
    with pytest.raises(ResourceError, match=r"cache: 1\d+ tokens at 16 bits need \d+\.\d\d GiB on cuda:0, \d+\.\d\d GiB are free"):
        Cache(model, 1 << 40, model.device)
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(ResourceError, match=r"tokens of context needs \d+ MiB on cuda:0 .*\d+ MiB are free"):
        exl3.load(model.path, device="cuda:0", max_tokens=1 << 40)
