"""The engine on a real model: tokens/s of one job and of many together, and time to first token with and without a cached prefix.

    python benchmarks/engine_throughput.py MODEL [--device cuda] [--jobs 8] [--prompt 64] [--new 64] [--prefix 512]

Prints a table and adds a record to benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any


def run(generator: Any, jobs: list[Any], clock: Any = time.perf_counter) -> tuple[float, float]:
    """(seconds until all are done, seconds until the first token of the first job)."""
    start = clock()
    generator.enqueue(jobs)
    first = 0.0
    while generator.num_remaining_jobs():
        for r in generator.iterate():
            assert r["stage"] != "error", r
            if not first and r["job"] is jobs[0] and (r["eos"] or "token_ids" in r):
                first = clock() - start
    return clock() - start, first


def measure(model: Any, jobs: int, prompt: int, new: int, prefix: int, clock: Any) -> dict[str, Any]:
    from exl3.cache import Cache
    from exl3.generate import ArgmaxSampler, Generator, Job

    rng = random.Random(0)
    room = max(jobs * (-(-(prompt + new) // 256) + 1), 2 * (-(-(prefix + 40) // 256) + 2)) * 256
    generator = Generator(model, Cache(model, room, model.device), max_batch_size=jobs)

    def words(n: int) -> list[int]:
        return [rng.randrange(10, min(model.vocab_size, 30000) - 10) for _ in range(n)]

    def job(ids: list[int], n: int) -> Any:
        return Job(ids, n, sampler=ArgmaxSampler(), stop_conditions=[])

    run(generator, [job(words(prompt), 8) for _ in range(jobs)])  # recordings
    run(generator, [job(words(prompt), 8)])
    alone, _ = run(generator, [job(words(prompt), new)], clock)
    together, _ = run(generator, [job(words(prompt), new) for _ in range(jobs)], clock)
    cold, warm = [], []
    for _ in range(3):
        shared = words(prefix)
        cold.append(run(generator, [job([*shared, *words(8)], 1)], clock)[1])
        warm.append(run(generator, [job([*shared, *words(8)], 1)], clock)[1])
    one, all_ = new / alone, jobs * new / together
    return {
        "jobs": jobs, "prompt": prompt, "new": new, "one_tokens_per_second": one, "together_tokens_per_second": all_, "ratio": all_ / one,
        "prefix": prefix, "first_token_cold_ms": 1e3 * statistics.median(cold), "first_token_cached_ms": 1e3 * statistics.median(warm),
        "recorder": generator.runner.mode, "clock": clock.__name__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default=None)
    parser.add_argument("--jobs", type=int, nargs="*", default=[8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of CPU time of all threads: other programs don't count")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    import torch

    import exl3

    warnings.simplefilter("ignore")
    model = exl3.load(args.model, device=args.device, max_tokens=max(args.prefix + 64, args.prompt + args.new) + 256)
    rows = [measure(model, n, args.prompt, args.new, args.prefix, clock) for n in args.jobs]
    for r in rows:
        print(
            f"{r['jobs']} jobs of {r['prompt']}+{r['new']}: one {r['one_tokens_per_second']:.1f} tokens/s, together "
            f"{r['together_tokens_per_second']:.1f} ({r['ratio']:.2f} x); first token after {r['prefix']} tokens: "
            f"{r['first_token_cold_ms']:.0f} ms, cached {r['first_token_cached_ms']:.0f} ms ({r['recorder']})"
        )
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    record = {
        "name": "engine_throughput", "device": str(model.device), "versions": {"torch": torch.__version__}, "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "model": Path(args.model).name, "rows": rows,
    }  # fmt: skip
    with open(here / "results" / "engine_throughput.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
