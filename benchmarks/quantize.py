"""Convert a model at several rates and measure each result against the original: time, peak memory, size, KL divergence.

    python benchmarks/quantize.py MODEL_DIR [--bits 2 2.5 3 4] [--rows 24] [-d cpu] [--option name=value ...]

Each conversion is a process of its own. Prints a table and adds one record to benchmarks/results/quantize.jsonl. Options of
`exl3.convert` can be varied for ablations: `--option recapture=false --option damping=0.01`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "benchmarks" / "data" / "heldout.txt"


def value(text: str) -> Any:
    """The value of name=value: JSON where it is, else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def convert(model: str, out: str, bits: float, options: dict[str, Any]) -> dict[str, Any]:
    """One conversion in a child process: its report's figures, seconds, peak resident MiB."""
    code = (
        "import json,resource,sys\nimport exl3\n"
        "a=json.loads(sys.argv[1])\nr=exl3.convert(a['model'],a['out'],a['bits'],**a['options'])\n"
        "print(json.dumps({'proxy_error':r.proxy_error,'bytes':r.bytes,'total_bits':r.total_bits,'calibration':r.calibration,"
        "'peak_mib':resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/1024}))"
    )
    arguments = json.dumps({"model": model, "out": out, "bits": bits, "options": options})
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, arguments], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"bits": bits, "seconds": time.monotonic() - start, **figures}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("--bits", type=float, nargs="+", default=[2, 2.5, 3, 4])
    ap.add_argument("--rows", type=int, default=24, help="rows of 512 held-out tokens")
    ap.add_argument("-d", "--device", default="cpu")
    ap.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    ap.add_argument("--text", default=str(TEXT))
    args = ap.parse_args()
    options = {"devices": args.device} | {k: value(v) for k, _, v in (o.partition("=") for o in args.option)}

    import torch

    from exl3 import __version__
    from exl3.evaluate import compare

    rows = []
    for bits in args.bits:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "out")
            row = convert(args.model, out, bits, options)
            c = compare(args.model, out, args.text, rows=args.rows, row_len=512, device=args.device)
            row |= {"kl": c.as_dict()["kl"], "top1": c.as_dict()["top1"], "perplexity": c.as_dict()["perplexity"]}
        rows.append(row)
        print(
            f"{bits:5g} bits  KL {row['kl']['mean']:.4f}  median {row['kl']['median']:.4f}  top-1 {100 * row['top1']:.1f} %  "
            f"perplexity {row['perplexity']['quantized']:.2f} ({row['perplexity']['reference']:.2f})  {row['seconds']:.0f} s  "
            f"{row['peak_mib']:.0f} MiB  {row['bytes'] / 2**20:.1f} MiB on disk",
            flush=True,
        )
    device = torch.cuda.get_device_name(0) if args.device.startswith("cuda") else f"{platform.machine()}, {torch.get_num_threads()} threads"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "name": "quantize",
        "model": Path(args.model).name,
        "options": options,
        "device": device,
        "versions": {"exl3": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    with open(results / "quantize.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
