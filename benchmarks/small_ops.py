"""The small operations of a decode step on the CPU (everything but the products), per token of a SmolLM2-135M-sized model, and what a
call costs from Python and from a recorded step. Times are CPU microseconds of the calling thread, on one thread, best of several runs.

    python benchmarks/small_ops.py [--contexts 64,512,2048] [--bits 16,8,4] [--json benchmarks/results/small_ops.jsonl]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from exl3 import __version__, ops
from exl3.cache import Batch, Cache

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 30, 9, 3, 64, 576, 1536, 49152
ROOT = Path(__file__).resolve().parents[1]


def microseconds(run: Callable[[], Any], repeats: int = 20, rounds: int = 7) -> float:
    run()
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(repeats):
            run()
        best = min(best, (time.thread_time() - start) / repeats)
    return best * 1e6


def recorded(step: Callable[[], Any]) -> ops.Tape:
    tape = ops.Tape()
    with torch.no_grad(), tape:
        step()
    return tape


def decode_rows(context: int, bits: int) -> dict[str, float]:
    """Microseconds per token of each operation over all layers, replayed."""
    config = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    cache = Cache(config, context, k_bits=bits, v_bits=bits)
    batch = Batch.packed([[1]], [context - 1], [list(range(cache.pages))], cache)
    q, k, v = torch.randn(1, HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM), torch.randn(1, KV_HEADS, HEAD_DIM)
    for layer in cache.layers:
        for place in layer.tensors:
            place.copy_(torch.randn(place.shape) if place.dtype == torch.float16 else torch.randint(-(2**31), 2**31 - 1, place.shape))
    x, w, gate = torch.randn(1, HIDDEN), torch.rand(HIDDEN), torch.randn(1, INNER)
    cos, sin = ops.rotary_table(batch.positions, torch.rand(HEAD_DIM // 2))
    per_layer = {
        "cache_append": lambda layer: layer.append(k, v, batch),
        "attention": lambda layer: layer.attend(q, batch, scale=0.125),
        "rms_norm": lambda layer: ops.rms_norm(x, w, 1e-5),
        "rotary": lambda layer: ops.rotary_(q, k, cos, sin, HEAD_DIM),
        "act_mul": lambda layer: ops.act_mul(gate, gate, "silu"),
    }
    return {name: microseconds(recorded(lambda f=f: [f(layer) for layer in cache.layers]).replay) for name, f in per_layer.items()}


def call_rows() -> dict[str, float]:
    """Microseconds of the sampler, and of one small call from Python and from a tape."""
    logits, x = torch.randn(1, VOCAB) * 3, torch.randn(1, HIDDEN)
    greedy = ops.pack_sample_params([ops.SampleParams(temperature=0)])
    sampled = ops.pack_sample_params([ops.SampleParams(0.8, top_k=50, top_p=0.9, min_p=0.05)])
    nucleus = ops.pack_sample_params([ops.SampleParams(0.8, top_p=0.9)])
    with torch.no_grad():
        rows = {f"sample {name}": microseconds(lambda p=p: ops.sample(logits, p)) for name, p in
                (("greedy", greedy), ("top-k, top-p, min-p", sampled), ("top-p", nucleus))}  # fmt: skip
        rows["add_ from Python"] = microseconds(lambda: ops.add_(x, x), 200)
        rows["add_ replayed"] = microseconds(recorded(lambda: [ops.add_(x, x) for _ in range(100)]).replay) / 100
        rows["rms_norm from Python"] = microseconds(lambda: ops.rms_norm(x, None, 1e-5), 200)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--contexts", default="64,512,2048")
    parser.add_argument("--bits", default="16,8,4")
    parser.add_argument("--json", default=str(ROOT / "benchmarks/results/small_ops.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for context in map(int, options.contexts.split(",")):
        for bits in map(int, options.bits.split(",")):
            row = {"context": context, "cache_bits": bits, **{k: round(v, 1) for k, v in decode_rows(context, bits).items()}}
            rows.append(row)
            print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    calls = {k: round(v, 2) for k, v in call_rows().items()}
    print("  ".join(f"{k} {v}" for k, v in calls.items()))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "name": "small_ops", "device": platform.processor() or platform.machine(), "tier": ops.backend("cpu").describe(0),
        "versions": {"exl3": __version__, "torch": torch.__version__}, "commit": commit,
        "date": datetime.date.today().isoformat(), "unit": "microseconds", "rows": [*rows, calls],
    }  # fmt: skip
    with open(options.json, "a", encoding="utf-8") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
