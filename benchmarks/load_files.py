"""Opening and reading weight files: many small tensors (a mixture of experts) and few large ones, against the safetensors library.

    python benchmarks/load_files.py [--layers 48 --experts 128] [--model DIR]

Files are written to a temporary directory and read from the page cache, so this measures the loader, in CPU seconds, and not the
disk. Prints a table and adds one record to benchmarks/results/load_files.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import torch

from exl3.files import Checkpoint

ROOT = Path(__file__).parents[1]


def write_experts(directory: Path, layers: int, experts: int) -> int:
    """EXL3 experts with shrunk matrices (128 x 128), unaligned as EXL3 writers lay them out. Returns the number of tensors."""
    header: dict[str, Any] = {}
    at = 0
    for layer in range(layers):
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                key = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                for suffix, dtype, shape, size in (
                    ("suh", "F16", [128], 256),
                    ("svh", "F16", [128], 256),
                    ("trellis", "I16", [8, 8, 64], 8192),
                    ("mul1", "I32", [], 4),
                ):
                    header[f"{key}.{suffix}"] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
                    at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (1 - len(text) % 2)
    with open(directory / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.write(bytes(at))
    (directory / "config.json").write_text("{}")
    return len(header)


def best(work: Callable[[], Any], times: int = 3) -> float:
    """CPU seconds, the least of a few runs, each in a process of its own: memory that an earlier run has touched is cheaper."""

    def once(pipe: Any) -> None:
        start = time.process_time()
        result = work()
        pipe.send(time.process_time() - start)
        del result

    context = multiprocessing.get_context("fork")
    seconds = []
    for _ in range(times):
        receiver, sender = context.Pipe(False)
        child = context.Process(target=once, args=(sender,))
        child.start()
        seconds.append(receiver.recv())
        child.join()
    return min(seconds)


def library(directory: Path) -> dict[str, torch.Tensor]:
    """The library's way to tensors of one's own: a call and a copy for each."""
    result = {}
    for path in directory.glob("*.safetensors"):
        with safetensors.safe_open(path, "pt") as f:
            result.update({name: f.get_tensor(name).clone() for name in f.keys()})
    return result


def measure(name: str, directory: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(directory)
    linears = {key: checkpoint.linear(key) for key in checkpoint.exl3_keys()}
    row = {
        "case": name,
        "tensors": len(checkpoint.tensors),
        "mib": checkpoint.nbytes >> 20,
        "open_cpu_s": best(lambda: Checkpoint.open(directory)),
        "read_cpu_s": best(lambda: checkpoint.read(checkpoint.tensors)),
        "load_linears_cpu_s": best(lambda: checkpoint.load_linears(linears)) if linears else None,
        "library_cpu_s": best(lambda: library(directory)),
    }
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--model", type=Path, help="a model directory to read as well")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        write_experts(Path(directory), args.layers, args.experts)
        rows.append(measure("experts", Path(directory)))
    if args.model:
        rows.append(measure(args.model.name, args.model))
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {"name": "load_files", "device": "cpu", "versions": {"torch": torch.__version__, "safetensors": safetensors.__version__}}
    record |= {"commit": commit, "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "rows": rows}
    with open(ROOT / "benchmarks" / "results" / "load_files.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
