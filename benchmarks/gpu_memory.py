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
    model = exl3.load(path, device=device, max_tokens=tokens)
    torch.cuda.synchronize()
    weights = torch.cuda.memory_allocated(device) - held
    load_peak = torch.cuda.max_memory_allocated(device) - held
    cache = Cache(model, tokens, device, bits, bits)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.memory_allocated(device)
    with torch.inference_mode():
        chunk = np.arange(10, 10 + min(2048, tokens), dtype=np.int32) % model.vocab_size
        forward(model, packed_batch([(chunk, 0, list(range(-(-len(chunk) // 256))))], [len(chunk) - 1], cache, model.device))
        torch.cuda.synchronize()
        prefill = torch.cuda.max_memory_allocated(device) - start
        runner = StepRunner(model, cache, tokens // 256)
        for n in BUCKETS:
            runner.run([([5], 3, [0], r) for r in range(n)])
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated(device) - held
    taken = free - torch.cuda.mem_get_info(device)[0]
    spaces = {f"{k[0]}": v.numel() for k, v in ops.native._workspaces.buffers.items() if v.is_cuda}
    found = {
        "model": Path(path).name, "tokens": tokens, "cache_bits": bits, "plan_bytes": expected.total_bytes, "taken_bytes": taken,
        "allocated_peak_bytes": peak, "plan_weights": expected.weights_bytes, "weights": weights, "load_peak": load_peak,
        "plan_cache": expected.cache_bytes, "cache": cache.bytes, "plan_workspace": expected.workspace_bytes, "prefill": prefill,
        "workspaces": spaces, "off_percent": 100 * (expected.total_bytes - taken) / taken,
    }  # fmt: skip
    model.unload()
    return found


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
        print({k: round(v / 2**20, 1) if isinstance(v, int) and v > 1 << 20 else v for k, v in rows[-1].items()}, flush=True)
        torch.cuda.empty_cache()
    if options.json:
        record = {"name": "gpu_memory", "device": torch.cuda.get_device_name(options.device), "torch": torch.__version__, "results": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
