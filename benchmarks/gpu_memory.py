"""`exl3 plan` against what a load, a full prefill chunk and recorded steps really take on a card.

    python benchmarks/gpu_memory.py DIR [DIR ...] [--device cuda:0] [--tokens 8192] [--json FILE]

Measured: device memory taken between the load and the end, libraries and context apart: torch's reserved bytes at their peak.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch


def measure(path: str, device: str, tokens: int, bits: int) -> dict[str, Any]:
    import numpy as np

    import exl3
    from exl3 import ops
    from exl3.cache import Cache
    from exl3.generate.step import BUCKETS, StepRunner, forward, packed_batch
    from exl3.parallel import plan

    ops.self_test(device)
    torch.cuda.empty_cache()
    expected = plan(path, device, tokens, bits, bits)
    free, held = torch.cuda.mem_get_info(device)[0], torch.cuda.memory_allocated(device)
    stages: dict[str, dict[str, int]] = {}

    def note(stage: str) -> None:
        torch.cuda.synchronize()
        stages[stage] = {
            "taken": free - torch.cuda.mem_get_info(device)[0],
            "allocated": torch.cuda.memory_allocated(device) - held,
            "peak": torch.cuda.max_memory_allocated(device) - held,
        }
        torch.cuda.reset_peak_memory_stats(device)

    torch.cuda.reset_peak_memory_stats(device)
    model = exl3.load(path, device=device, max_tokens=tokens)
    note("load")
    cache = Cache(model, tokens, device, bits, bits)
    note("cache")
    with torch.inference_mode():
        chunk = np.arange(10, 10 + min(2048, tokens), dtype=np.int32) % model.vocab_size
        forward(model, packed_batch([(chunk, 0, list(range(-(-len(chunk) // 256))))], [len(chunk) - 1], cache, model.device))
        note("prefill")
        runner = StepRunner(model, cache, tokens // 256)
        for n in BUCKETS:
            runner.run([([5], 3, [0], r) for r in range(n)])
        note("steps")
    taken = stages["steps"]["taken"]
    found = {
        "model": Path(path).name, "tokens": tokens, "cache_bits": bits, "plan_bytes": expected.total_bytes, "taken_bytes": taken,
        "off_percent": 100 * (expected.total_bytes - taken) / taken, "plan_weights": expected.weights_bytes,
        "plan_cache": expected.cache_bytes, "plan_workspace": expected.workspace_bytes, "stages": stages,
    }  # fmt: skip
    model.unload()
    return found


def in_mib(x: Any) -> Any:
    """Bytes as MiB, for people."""
    if isinstance(x, dict):
        return {k: in_mib(v) for k, v in x.items()}
    return round(x / 2**20, 1) if isinstance(x, int) and x > 1 << 19 else x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for path in options.models:
        rows.append(measure(path, options.device, options.tokens, options.bits))
        print(in_mib(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if options.json:
        record = {"name": "gpu_memory", "device": torch.cuda.get_device_name(options.device), "torch": torch.__version__, "results": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
