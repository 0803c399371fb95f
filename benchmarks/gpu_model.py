"""A whole model on a card, through `exl3.load` and `Generator`: load time and memory, decode, the engine's share of a step, many jobs
together, prefill.

    python benchmarks/make_model.py 8B DIR --device cuda
    python benchmarks/gpu_model.py DIR [--device cuda] [--what load,step,engine,jobs,prefill] [--json FILE]

step     the recorded step alone, replayed without looking at its result: rows x context, fp16 and 4-bit cache
engine   one greedy job, context 0: tokens/s, and what the engine adds to the recorded step
jobs     32 jobs of 512 + 256 tokens, generated tokens/s over all
prefill  512 and 2048 tokens in one pass, with the head's row of logits
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
STEPS = ((1, 1, 16), (1, 32768, 16), (1, 32768, 4), (8, 1, 16), (8, 32768, 16), (8, 32768, 4), (32, 640, 16))  # rows, context, cache bits


class Bench:
    def __init__(self, path: str, device: str) -> None:
        import exl3
        from exl3 import ops

        torch.zeros(1, device=device)  # the context is not the model's load
        ops.self_test(device)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.model = exl3.load(path, device=device)
        torch.cuda.synchronize()
        self.load_seconds = time.perf_counter() - start
        self.device = self.model.device
        self.random = torch.Generator().manual_seed(0)

    def ids(self, n: int) -> list[int]:
        return torch.randint(10, self.model.vocab_size - 10, (n,), generator=self.random).tolist()

    def load(self) -> list[Row]:
        weights = torch.cuda.memory_allocated(self.device)
        return [{"what": "load", "seconds": self.load_seconds, "bytes": weights, "GB/s": weights / self.load_seconds / 1e9}]

    def cache(self, tokens: int, bits: int = 16) -> Any:
        from exl3.cache import Cache

        return Cache(self.model, tokens, self.device, bits, bits)

    def repeated_step(self, rows: int, context: int, bits: int) -> tuple[Any, Callable[[], Any]]:
        """A runner and a call that steps `rows` sequences of `context` tokens once."""
        from exl3.generate.step import StepRunner

        pages = -(-context // 256)
        runner = StepRunner(self.model, self.cache(rows * pages * 256, bits), pages)
        given = [(self.ids(1), context - 1, list(range(r * pages, (r + 1) * pages)), r) for r in range(rows)]
        return runner, lambda: runner.run(given)

    def step_seconds(self, rows: int, context: int, bits: int, steps: int = 60) -> float:
        runner, once = self.repeated_step(rows, context, bits)
        with torch.inference_mode():
            for _ in range(5):
                once()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(steps):
                once()
            torch.cuda.synchronize()
        assert runner.mode == "graph"
        return (time.perf_counter() - start) / steps

    def step(self) -> list[Row]:
        found = []
        for rows, context, bits in STEPS:
            seconds = self.step_seconds(rows, context, bits)
            found.append(
                {"what": "step", "rows": rows, "context": context, "cache_bits": bits, "ms": 1e3 * seconds, "tokens/s": rows / seconds}
            )
            torch.cuda.empty_cache()
        return found

    def run(self, generator: Any, prompts: list[list[int]], new: int) -> float:
        """Seconds until all jobs are done."""
        from exl3.generate import ArgmaxSampler, Job

        start = time.perf_counter()
        generator.enqueue([Job(p, new, sampler=ArgmaxSampler(), stop_conditions=[]) for p in prompts])
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                assert result["stage"] != "error", result
        return time.perf_counter() - start

    def engine(self) -> list[Row]:
        from exl3.generate import ArgmaxSampler, Generator, Job

        generator = Generator(self.model, self.cache(4096))
        self.run(generator, [self.ids(4)], 16)
        times = []
        generator.enqueue(Job(self.ids(2), 300, sampler=ArgmaxSampler(), stop_conditions=[]))
        while generator.num_remaining_jobs():
            start = time.perf_counter()
            generator.iterate()
            times.append(time.perf_counter() - start)
        whole = statistics.median(times[5:])
        step = self.step_seconds(1, 256, 16)
        return [
            {"what": "engine", "jobs": 1, "context": 0, "tokens/s": 1 / whole, "ms": 1e3 * whole, "step_ms": 1e3 * step,
             "overhead_percent": 100 * (whole - step) / whole}
        ]  # fmt: skip

    def jobs(self, count: int = 32, prompt: int = 512, new: int = 256) -> list[Row]:
        from exl3.generate import Generator

        generator = Generator(self.model, self.cache(count * (prompt + new + 256)), max_batch_size=count)
        self.run(generator, [self.ids(40) for _ in range(count)], 8)
        seconds = self.run(generator, [self.ids(prompt) for _ in range(count)], new)
        return [{"what": "jobs", "jobs": count, "prompt": prompt, "new": new, "seconds": seconds, "tokens/s": count * new / seconds}]

    def prefill(self) -> list[Row]:
        from exl3.generate.step import forward, packed_batch

        cache = self.cache(4096)
        found = []
        for tokens in (512, 2048):
            times = []
            for _ in range(5):
                import numpy as np

                rows = [(np.array(self.ids(tokens), np.int32), 0, list(range(16)))]
                start = time.perf_counter()
                with torch.inference_mode():
                    forward(self.model, packed_batch(rows, [tokens - 1], cache, self.device))
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            found.append({"what": "prefill", "tokens": tokens, "ms": 1e3 * min(times), "tokens/s": tokens / min(times)})
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--what", default="load,step,engine,jobs,prefill")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a GPU")
    warnings.simplefilter("ignore")
    from exl3 import ops

    bench = Bench(options.model, options.device)
    rows: list[Row] = []
    for what in options.what.split(","):
        measure: Callable[[], list[Row]] = getattr(bench, what)
        for row in measure():
            rows.append({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
            print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    if options.json:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
        library = ops.backend(options.device)
        record = {
            "name": "gpu_model", "device": library.describe(bench.device.index), "build": library.build, "torch": torch.__version__,
            "commit": commit, "date": datetime.date.today().isoformat(), "model": Path(options.model).name, "results": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
