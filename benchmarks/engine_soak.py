"""Soak: many random jobs with random cancels, joins, grammars, stop strings and drafts, on a tiny random model or a real one.

    python benchmarks/engine_soak.py [--model DIR] [--jobs 1000] [--tokens 4096] [--seed 0]

Held at the end: every greedy result equals its solo run (or the first difference has a logit gap below the tolerance), no page is lost,
memory is flat. Adds a record to benchmarks/results and exits 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def tiny_model() -> str:
    """A directory with a random tiny Llama and a byte-level tokenizer, from the tests."""
    sys.path.append(str(HERE.parent / "tests" / "integrations"))
    import tiny

    return str(tiny.write(Path(tempfile.mkdtemp())))


def rss() -> float:
    """Resident bytes now (Linux), in MiB."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Soak:
    """One run over one engine."""

    def __init__(self, model: Any, tokens: int, seed: int) -> None:
        from exl3.cache import Cache
        from exl3.generate import Generator

        self.model, self.rng = model, random.Random(seed)
        self.generator = Generator(model, Cache(model, tokens, model.device), ngram_match_min=3, max_chunk_size=256, max_batch_size=16)
        self.vocab = min(model.vocab_size, len(model.tokenizer))
        self.shared = [self.words(self.rng.randint(50, 600)) for _ in range(6)]
        self.greedy: dict[Any, list[int]] = {}
        self.ended: dict[str, int] = {}
        self.cancelled = 0

    def words(self, n: int) -> list[int]:
        """n ordinary ids."""
        return [self.rng.randrange(3, min(self.vocab, 250)) for _ in range(n)]

    def job(self) -> Any:
        """A random job; most share a prefix with others."""
        from exl3.generate import ArgmaxSampler, ComboSampler, Job, LLGuidanceFilter

        rng = self.rng
        prompt = rng.choice(self.shared) + self.words(rng.randint(1, 60)) if rng.random() < 0.7 else self.words(rng.randint(1, 900))
        n = rng.choice([1, 2, 5, 20, 60, 150])
        kind = rng.random()
        options: dict[str, Any] = {"stop_conditions": []}
        if kind < 0.5:
            options["sampler"] = ArgmaxSampler()
            if rng.random() < 0.3:
                options["max_rq_tokens"] = 32
            if rng.random() < 0.2:
                options["stop_conditions"] = ["qz", "a"]
        else:
            options["sampler"] = ComboSampler(temperature=1.0, top_p=0.95, rep_p=1.05, min_p=0.01)
            options["seed"] = rng.randrange(1 << 40)
            if kind > 0.9:
                options["filters"] = [LLGuidanceFilter(self.model.tokenizer, eos_after_completed=True, regex="[a-z]{3,40}[0-9]+x")]
            elif kind > 0.8:
                options["banned_strings"] = ["e", "th"]
            elif kind > 0.7:
                options["stop_conditions"] = ["qz", "a", "the"]
            elif kind > 0.65:
                options.update(stop_on_loop=(40, 4), return_top_tokens=3, return_probs=True)
        job = Job(prompt, n, **options)
        if kind < 0.5 and not options["stop_conditions"]:
            self.greedy[job] = []
        return job

    def run(self, count: int, cancel: float = 0.15) -> None:
        """`count` jobs to their end, some of them cancelled on the way."""
        made = 0
        live: set[Any] = set()
        while made < count or self.generator.num_remaining_jobs():
            while made < count and self.generator.num_remaining_jobs() < 24 and self.rng.random() < 0.7:
                job = self.job()
                self.generator.enqueue(job)
                live.add(job)
                made += 1
            for r in self.generator.iterate():
                job = r["job"]
                if job in self.greedy and "token_ids" in r:
                    self.greedy[job] += r["token_ids"][0].tolist()
                if r["eos"]:
                    live.discard(job)
                    reason = r.get("eos_reason", "error")
                    self.ended[reason] = self.ended.get(reason, 0) + 1
                    if reason == "error":
                        print("error:", r["error"])
            if live and self.rng.random() < cancel / 10:
                job = self.rng.choice(sorted(live, key=lambda j: j.serial_number))
                self.generator.cancel(job)
                live.discard(job)
                self.greedy.pop(job, None)
                self.cancelled += 1

    def check(self, most: int, gap: float) -> tuple[int, int, float]:
        """(greedy results checked, different ones, largest logit gap at a first difference)."""
        import torch

        jobs = [j for j in self.greedy if self.greedy[j]]
        self.rng.shuffle(jobs)
        different, worst = 0, 0.0
        for job in jobs[:most]:
            got = self.greedy[job]
            ids = [*job.prompt.tolist(), *got]
            rows = self.model.logits([ids])[0, len(job.prompt) - 1 : -1]
            best = rows.max(-1).values
            gaps = best - rows.gather(1, torch.tensor(got, device=rows.device)[:, None])[:, 0]
            if float(gaps.max()) > 0:
                different += 1
                worst = max(worst, float(gaps[gaps > 0][0]))
        return min(most, len(jobs)), different, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="default: a random tiny one")
    parser.add_argument("--device", default=None)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4096, help="cache size")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", type=int, default=200, help="greedy results to compare with whole-sequence logits")
    parser.add_argument("--gap", type=float, default=0.1, help="logit gap that still counts as a tie (the cache is fp16)")
    args = parser.parse_args()
    import torch

    import exl3

    warnings.simplefilter("ignore")
    model = exl3.load(
        args.model or tiny_model(),
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        max_tokens=min(2048, args.tokens),
    )
    soak = Soak(model, args.tokens, args.seed)
    soak.run(max(50, args.jobs // 10))  # warm: recordings, pools
    gc.collect()
    before, start = rss(), time.perf_counter()
    soak.greedy.clear()
    soak.run(args.jobs)
    seconds = time.perf_counter() - start
    gc.collect()
    grown = rss() - before
    checked, different, worst = soak.check(args.check, args.gap)
    table = soak.generator.pagetable
    lost = table.referenced
    row = {
        "jobs": args.jobs, "seconds": round(seconds, 1), "tokens": soak.generator.tokens_out, "ended": soak.ended,
        "cancelled": soak.cancelled,
        "pages_lost": lost, "rss_grown_mib": round(grown, 1), "hit_rate": round(soak.generator.get_cache_stats()["hit_rate"], 3),
        "greedy_checked": checked, "greedy_different": different, "largest_gap": round(worst, 4), "recorder": soak.generator.runner.mode,
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE).stdout.strip()
    record = {
        "name": "engine_soak", "device": str(model.device), "versions": {"torch": torch.__version__}, "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "rows": [row],
    }  # fmt: skip
    with open(HERE / "results" / "engine_soak.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")
    failed = [
        n
        for n, bad in (("pages lost", lost), ("errors", soak.ended.get("error")), ("memory", grown > 100), ("gap", worst > args.gap))
        if bad
    ]
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
