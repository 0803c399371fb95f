"""What each step of the converter buys: many conversions of one model on one device, in parallel processes, judged on held-out slices.

    python benchmarks/ablation.py MODEL_DIR [-d cuda:0 cuda:1] [--bits 2 2.5 3 4] [--seeds 0 1 2] [--jobs 8]
        [--variants incumbent default ...]

Prints, for each rate and variant, the mean over seeds of the mean KL(original || quantized) of every slice (prose, code, chat in the
model's own template, French; benchmarks/data), its spread and the ratio to the incumbent's preset; all goes to --out.
Seconds are those of a conversion that shares its device with others: --jobs processes take turns over the devices.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import queue
import subprocess
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data"
SLICES = ("prose", "code", "chat", "french")
ROW = 512

# name -> options of exl3.convert
VARIANTS: dict[str, dict[str, Any]] = {
    "incumbent": {"preset": "incumbent"},
    "fast": {"quality": "fast"},
    "default": {},
    "best": {"quality": "best"},
    "tune": {"tune": True},
    # each step of the default left out
    "no allocation": {"allocation": "place"},
    "no channel weighting": {"channel_weighting": False},
    "no recapture": {"recapture": False, "correction": 0.0},  # correction needs the order
    "no correction": {"correction": 0.0},
    "no scaled metric": {"scaled_hessian": False},
    # what is there and off
    "token weighting": {"token_weighting": True},
    "two-sided": {"two_sided": True},
    "self text": {"self_text": 0.25},
    "correction 1": {"correction": 1.0},
    "damping 0.01": {"damping": 0.01},
}


def slices(tokenizer: Any, rows: int) -> dict[str, Any]:
    """At most `rows` rows of 512 held-out tokens of each slice."""
    from exl3.evaluate import text_rows

    pairs = [json.loads(line) for line in (DATA / "heldout_chat.jsonl").read_text(encoding="utf-8").splitlines()]
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    texts = {
        "prose": (DATA / "heldout.txt").read_text(encoding="utf-8"),
        "code": (DATA / "heldout_code.txt").read_text(encoding="utf-8"),
        "chat": "".join(tokenizer.render_chat(t, add_generation_prompt=False) if tokenizer.has_chat_template else f"{t}" for t in turns),
        "french": (DATA / "heldout_french.txt").read_text(encoding="utf-8"),
    }
    found = {}
    for name in SLICES:
        ids = text_rows(tokenizer, texts[name], ROW, bos=tokenizer.demands_bos)
        count = min(rows, len(ids))
        found[name] = ids[[i * len(ids) // count for i in range(count)]]  # spread over the text
    return found


def convert(model: str, out: str, bits: float, seed: int, device: str, options: dict[str, Any]) -> dict[str, Any]:
    """One conversion; figures of its report."""
    from exl3.quantize.convert import convert as run

    start = time.monotonic()
    report = run(model, out, bits, devices=device, seed=seed, **options)
    return {"seconds": time.monotonic() - start, "bytes": report.bytes, "bpw": report.bits, "proxy_error": report.proxy_error}


def judge(directory: str, device: str, rows: dict[str, Any], original: Any) -> dict[str, Any]:
    """Mean KL and top-1 agreement of each slice with the original model."""
    import torch

    from exl3.evaluate.metrics import kl_divergence
    from exl3.models import load

    model = load(directory, device=device, max_tokens=ROW)
    result = {}
    with torch.inference_mode():
        for name, ids in rows.items():
            kl, same = [], 0
            for row in ids:
                p, q = original.logits(row[None])[0].log_softmax(-1), model.logits(row[None])[0]
                kl.append(kl_divergence(p, q))
                same += int((p.argmax(-1) == q.argmax(-1)).sum())
            result[name] = {"kl": float(torch.cat(kl).mean()), "top1": same / ids.numel()}
    return result


def worker(jobs: Any, results: Any, model: str, device: str, rows: int) -> None:
    """Takes (variant, options, bits, seed) from `jobs` until None comes."""
    import torch

    from exl3.files import Tokenizer
    from exl3.models import load

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = slices(Tokenizer.from_directory(model), rows)
    original = load(model, device=device, max_tokens=ROW)
    for variant, options, bits, seed in iter(jobs.get, None):
        record = {"variant": variant, "options": options, "bits": bits, "seed": seed}
        try:
            with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
                out = os.path.join(folder, "out")
                record |= convert(model, out, bits, seed, device, options)
                record["slices"] = judge(out, device, text, original)
        except Exception:
            record["error"] = traceback.format_exc()
        results.put(record)
    results.put(None)


def overall(record: dict[str, Any]) -> float:
    """Mean KL over slices."""
    return sum(s["kl"] for s in record["slices"].values()) / len(record["slices"])


def table(records: list[dict[str, Any]]) -> list[str]:
    """Markdown: one line for each rate and variant."""
    lines = [
        "| bits | variant | mean KL | spread | to incumbent | " + " | ".join(SLICES) + " | top-1 | s |",
        "|---" * (7 + len(SLICES)) + "|",
    ]
    good = [r for r in records if "slices" in r]
    for bits in sorted({r["bits"] for r in good}):
        at = [r for r in good if r["bits"] == bits]
        base = [overall(r) for r in at if r["variant"] == "incumbent"]
        for variant in dict.fromkeys(r["variant"] for r in at):
            own = [r for r in at if r["variant"] == variant]
            kl = [overall(r) for r in own]
            mean = sum(kl) / len(kl)
            ratio = f"{mean / (sum(base) / len(base)):.3f}" if base else "-"
            parts = [f"{sum(r['slices'][s]['kl'] for r in own) / len(own):.4f}" for s in SLICES]
            top1 = sum(s["top1"] for r in own for s in r["slices"].values()) / len(own) / len(SLICES)
            seconds = sum(r["seconds"] for r in own) / len(own)
            lines.append(
                f"| {bits:g} | {variant} | {mean:.4f} | {max(kl) - min(kl):.4f} ({len(kl)}) | {ratio} | {' | '.join(parts)} "
                f"| {100 * top1:.1f} % | {seconds:.0f} |"
            )
    return lines


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("model")
    ap.add_argument("-d", "--device", nargs="+", default=["cuda:0"])
    ap.add_argument("--bits", type=float, nargs="+", default=[2, 2.5, 3, 4])
    ap.add_argument("--seeds", type=int, nargs="+", default=[0])
    ap.add_argument("--jobs", type=int, default=8, help="conversions at a time")
    ap.add_argument("--variants", nargs="+", default=["incumbent", "default"], help=f"of {', '.join(VARIANTS)}; or NAME:JSON of options")
    ap.add_argument("--rows", type=int, default=24, help="rows of 512 held-out tokens a slice")
    ap.add_argument("--option", action="append", default=[], metavar="NAME=JSON", help="for all variants")
    ap.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "ablation.json"))
    args = ap.parse_args()
    common = {k: json.loads(v) for k, _, v in (o.partition("=") for o in args.option)}
    asked = [v.partition(":") for v in args.variants]
    unknown = [n for n, _, o in asked if not o and n not in VARIANTS]
    if unknown:
        ap.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}, or NAME:JSON of options")
    chosen = {n: json.loads(o) if o else VARIANTS[n] for n, _, o in asked}

    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    # seed by seed: a run that is cut short leaves whole comparisons
    work = [(n, common | o, b, s) for s in args.seeds for b in args.bits for n, o in chosen.items()]
    for item in [*work, *[None] * args.jobs]:
        jobs.put(item)
    places = [args.device[i % len(args.device)] for i in range(args.jobs)]
    processes = [context.Process(target=worker, args=(jobs, results, args.model, place, args.rows)) for place in places]
    for p in processes:
        p.start()
    records, left = [], len(processes)
    while left:
        try:
            record = results.get(timeout=10)
        except queue.Empty:
            if not any(p.is_alive() for p in processes):  # killed, for memory say: what they had in work is missing
                break
            continue
        if record is None:
            left -= 1
            continue
        records.append(record)
        what = f"KL {overall(record):.4f}  {record['seconds']:.0f} s" if "slices" in record else record["error"]
        print(f"{record['bits']:g} bits  {record['variant']}  seed {record['seed']}  {what}", flush=True)
        Path(args.out).write_text(json.dumps(head(args) | {"rows": records}, indent=1) + "\n", encoding="utf-8")
    order = list(chosen)
    records.sort(key=lambda r: (r["bits"], order.index(r["variant"]), r["seed"]))
    Path(args.out).write_text(json.dumps(head(args) | {"rows": records}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(records)))


def head(args: Any) -> dict[str, Any]:
    """What the figures were measured with."""
    import torch

    from exl3 import __version__

    device = torch.cuda.get_device_name(0) if args.device[0].startswith("cuda") else platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "name": "ablation",
        "model": Path(args.model).name,
        "device": f"{len(args.device)} x {device}, {args.jobs} conversions at a time",
        "versions": {"exl3": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "slices": f"{args.rows} rows of {ROW} tokens each: {', '.join(SLICES)}",
    }


if __name__ == "__main__":
    main()
