"""Engine overhead per decode step: a stub model whose step costs nothing, N greedy jobs with text, stop strings and results. Times are CPU
seconds of the engine's thread, so that other programs on the machine don't count; the native sampler is given apart.

    python benchmarks/engine_overhead.py [--jobs 32] [--steps 300] [--vocab 4096]

Prints the median and the 90th percentile in milliseconds, the model's own time taken off, and adds a record to benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch


class Nothing:
    """Logits from a table; no computation worth the name."""

    def __init__(self, vocab: int, max_tokens: int) -> None:
        self.vocab_size, self.max_tokens, self.device = vocab, max_tokens, torch.device("cpu")
        self.eos_token_ids, self.bos_token_id, self.blocks, self.seconds = [], 1, [], 0.0
        self.table = torch.randn(64, vocab)

    def embed(self, batch):
        return batch

    def head(self, x, batch):
        start = time.thread_time()
        out = self.table[: len(batch.ids) if batch.logits_at is None else len(batch.logits_at)].clone()
        self.seconds += time.thread_time() - start
        return out


class Pages:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def copy_page(self, src: int, dst: int) -> None:
        pass


class Words:
    """A tokenizer of made-up words."""

    def __init__(self, vocab: int) -> None:
        self.pieces = [f" word{i}".encode() for i in range(vocab)]
        self.special_ids, self.eos_id, self.bos_id = frozenset([0]), 0, 1


def measure(jobs: int, steps: int, vocab: int) -> dict[str, float]:
    from exl3 import ops
    from exl3.generate import ArgmaxSampler, Generator, Job

    model = Nothing(vocab, 4096)
    generator = Generator(model, Pages(256 * 4 * jobs), Words(vocab))
    generator.enqueue([Job([5, 6, i + 7], steps + 20, sampler=ArgmaxSampler(), stop_conditions=[0, "\nUser:"]) for i in range(jobs)])
    for _ in range(10):
        generator.iterate()
    sampler = 0.0

    def timed(*args, **options):
        nonlocal sampler
        start = time.thread_time()
        out = sample(*args, **options)
        sampler += time.thread_time() - start
        return out

    sample, ops.sample = ops.sample, timed
    engine, sampling = [], []
    for _ in range(steps):
        model.seconds = sampler = 0.0
        start = time.thread_time()
        results = generator.iterate()
        elapsed = time.thread_time() - start
        assert len(results) == jobs
        sampling.append(1e3 * sampler)
        engine.append(1e3 * (elapsed - model.seconds - sampler))
    ops.sample = sample
    return {
        "jobs": jobs, "engine_ms": statistics.median(engine), "engine_p90_ms": sorted(engine)[int(0.9 * len(engine))],
        "sampler_ms": statistics.median(sampling),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--vocab", type=int, default=4096)
    args = parser.parse_args()
    import os
    import warnings

    os.environ["EXL3_STEP"] = "eager"  # the stub is no native operation
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [measure(n, args.steps, args.vocab) for n in args.jobs]
    for r in rows:
        print(
            f"{r['jobs']:3d} jobs: engine {r['engine_ms']:.3f} ms (p90 {r['engine_p90_ms']:.3f}), native sampler {r['sampler_ms']:.3f} ms"
        )
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    record = {
        "name": "engine_overhead", "device": "cpu", "versions": {"torch": torch.__version__}, "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "rows": rows,
    }  # fmt: skip
    with open(here / "results" / "engine_overhead.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
