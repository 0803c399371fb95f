"""Where a decode step's time goes, kernel by kernel, and where that of many jobs goes, pass by pass.

    python benchmarks/gpu_profile.py DIR [--steps 1:1:16,8:32768:4] [--jobs 32:512:256] [--sampler 1,32]

steps    rows:context:cache bits; each kernel's share of a replayed graph: from the end of the one before to its own, so that overlaps
         count once (kernels start early and wait for those before)
jobs     count:prompt:new; seconds of iterations with and without a prefill pass, and of the draws in between
sampler  rows; microseconds of one draw over 128256 columns
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import replay
from gpu_model import Bench

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "top_k top_p min_p": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "min_p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "top_p": 0.9},
}


def kernels(call: Any, repeats: int) -> list[dict[str, Any]]:
    """Kernels and copies of `repeats` calls in order of time: name, ts and dur in microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])


def short(event: dict[str, Any]) -> str:
    name = re.sub(r"^void |\(.*|exl3::|at::native::", "", event["name"])
    grid = event.get("args", {}).get("grid")
    return f"{name[:60]} {'x'.join(map(str, grid))}" if grid else name[:60]


def step(bench: Bench, rows: int, context: int, bits: int, repeats: int = 4) -> None:
    alone = 1e6 * bench.step_seconds(rows, context, bits, steps=40)
    once = bench.repeated_step(rows, context, bits)[1]
    with torch.inference_mode():
        for _ in range(10):
            once()
        torch.cuda.synchronize()
        events = kernels(once, repeats)
    share: dict[str, list[float]] = collections.defaultdict(list)
    own: dict[str, list[float]] = collections.defaultdict(list)
    ends = 0.0
    for event in sorted(events, key=lambda e: e["ts"] + e["dur"]):
        name, end = short(event), event["ts"] + event["dur"]
        own[name].append(event["dur"])
        share[name].append(end - max(ends, event["ts"]) if end - ends > 1e4 else end - ends)
        ends = end
    total = sum(map(sum, share.values())) / repeats
    print(f"step of {rows} x {context}, {bits} bits: {alone:.0f} us alone, {total:.0f} us profiled, {len(events) / repeats:.0f} launches")
    for name, spans in sorted(share.items(), key=lambda item: -sum(item[1])):
        mean = sum(own[name]) / len(spans)
        print(f"  {sum(spans) / repeats:8.1f} us  {len(spans) / repeats:6.1f} x {sum(spans) / len(spans):7.2f} (own {mean:7.2f})  {name}")


def jobs(bench: Bench, count: int, prompt: int, new: int) -> None:
    from exl3.generate import ArgmaxSampler, Generator, Job

    def make(n: int, tokens: int, sampler: Any) -> list[Any]:
        return [Job(bench.ids(n), tokens, sampler=sampler, stop_conditions=[]) for _ in range(count)]

    generator = Generator(bench.model, bench.cache(count * (prompt + new + 256)), max_batch_size=count)
    inner = generator._prefill_pass
    passes: list[tuple[float, int, int]] = []

    def prefill_pass(work: Any) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = inner(work)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        passes.append((time.perf_counter() - start, launched - start, sum(n for _, n in work)))  # type: ignore[arg-type]
        return made

    for tokens, timed in ((8, False), (new, False), (new, True)):  # the first warms up
        generator._prefill_pass = prefill_pass if timed else inner  # type: ignore[method-assign]
        generator.enqueue(make(prompt, tokens, ArgmaxSampler()))
        spans: dict[str, list[float]] = collections.defaultdict(list)
        begin = time.perf_counter()
        while generator.num_remaining_jobs():
            before, start = len(passes), time.perf_counter()
            waiting = sum(j.n - j.cached != 1 for j in generator.active_jobs) or generator.num_pending_jobs()
            for result in generator.iterate():
                assert result["stage"] != "error", result
            ready = len(generator.active_jobs)
            kind = "prefill" if len(passes) > before or (not timed and waiting) else f"decode of about {-(-ready // 8) * 8}"
            spans[kind].append(time.perf_counter() - start)
        whole = time.perf_counter() - begin
        note = ", passes timed" if timed else ""
        print(f"{count} jobs of {prompt} + {tokens}{note}: {whole:.2f} s, {count * tokens / whole:.0f} tokens/s")
        for kind, times in sorted(spans.items()):
            print(f"  {kind}: {len(times)} iterations, {sum(times):.3f} s, median {1e3 * sorted(times)[len(times) // 2]:.2f} ms")
    for seconds, launched, size in passes[:12]:
        print(f"  pass of {size} tokens: {1e3 * seconds:.1f} ms, of which Python {1e3 * launched:.1f}")


def sampler(rows: int, vocab: int = 128256) -> None:
    from exl3 import ops

    random = torch.Generator("cuda").manual_seed(0)
    logits = {
        "normal": 2.5 * torch.randn(rows, vocab, generator=random, device="cuda"),
        "equal": torch.zeros(rows, vocab, device="cuda"),
    }
    history = torch.randint(0, vocab, (rows, 1024), dtype=torch.int32, device="cuda")
    for kind, x in logits.items():
        for name, options in SAMPLERS.items():
            params = ops.pack_sample_params([ops.SampleParams(seed=r, **options) for r in range(rows)], "cuda")
            past = history if name == "penalties" else None
            lengths = torch.full((rows,), 1024, dtype=torch.int32, device="cuda")

            def call(params: Any = params, past: Any = past, x: Any = x, lengths: Any = lengths) -> Any:
                return ops.sample(x, params, past, lengths if past is not None else None, probs=False)

            print(f"sampler {rows} x {vocab} {kind} {name}: {replay([call] * 4):.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", default="1:1:16,1:32768:16,1:32768:4,8:1:16,8:32768:16,32:640:16")
    parser.add_argument("--jobs", default="32:512:256")
    parser.add_argument("--sampler", default="1,32")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    bench = Bench(options.model, options.device)
    for case in filter(None, options.steps.split(",")):
        step(bench, *map(int, case.split(":")))
        torch.cuda.empty_cache()
    for rows in filter(None, options.sampler.split(",")):
        sampler(int(rows))
    if options.jobs:
        jobs(bench, *map(int, options.jobs.split(":")))


if __name__ == "__main__":
    main()
