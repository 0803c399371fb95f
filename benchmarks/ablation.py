"""What each step of the converter buys: many conversions of one model on one device, in parallel processes, judged on held-out slices.

    python benchmarks/ablation.py MODEL_DIR [-d cuda:0 cuda:1] [--bits 2 2.5 3 4] [--seeds 0 1 2] [--jobs 8]
        [--variants incumbent default ...]

Variants with "tune" (true, or a mapping of `steps`, `tokens`, `rate`, `cal_rows`) tune what the same options without it made: one
conversion serves all of them. With --keep finished conversions stay and a later run takes them from there. --out is written after every
result.

Prints, for each rate and variant, the mean over seeds of the mean KL(original || quantized) of every slice (prose, code, chat in the
model's own template, French; benchmarks/data), its spread and the ratio to the incumbent's preset; all goes to --out.
Seconds are those of a conversion that shares its device with others: --jobs processes take turns over the devices.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import queue
import shutil
import subprocess
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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
    "tune": {"tune": True},  # or {"tune": {"steps": 96, "rate": 0.002}}
    # each step of the default left out
    "no allocation": {"allocation": "place"},
    "no channel weighting": {"channel_weighting": False},
    "no recapture": {"recapture": False, "correction": 0.0},  # correction needs the order
    "no correction": {"correction": 0.0},
    "no scaled metric": {"scaled_hessian": False},
    "one-sided": {"two_sided": False},
    # what is there and off
    "token weighting": {"token_weighting": True},
    "self text": {"self_text": 0.25},
    "correction 1": {"correction": 1.0},
    "damping 0.005": {"damping": 0.005},
    "chosen damping": {"choose_damping": True},
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


def convert(model: str, folder: Path, bits: float, seed: int, device: str, options: dict[str, Any]) -> dict[str, Any]:
    """One conversion into folder/out; figures of its report. What is there already is taken."""
    from exl3.quantize.convert import convert as run

    kept = folder / "record.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))
    start = time.monotonic()
    report = run(model, folder / "out", bits, devices=device, seed=seed, **options)
    shutil.rmtree(folder / "out.work", ignore_errors=True)
    record = {"seconds": time.monotonic() - start, "bytes": report.bytes, "bpw": report.bits, "proxy_error": report.proxy_error}
    kept.write_text(json.dumps(record), encoding="utf-8")
    return record


def retune(model: str, folder: Path, seed: int, device: str, asked: Any) -> dict[str, Any]:
    """Tunes folder/out into a folder that the caller removes."""
    from exl3.quantize.retune import tune_directory
    from exl3.quantize.tune import TuneSettings

    out = folder / f"tuned-{os.getpid()}"
    given = dict(asked) if isinstance(asked, dict) else {}
    rows = given.pop("cal_rows", None)
    settings = TuneSettings(seed=seed, **given)
    start = time.monotonic()
    tuned = tune_directory(folder / "out", model, out, settings=settings, cal_rows=rows, device=device)
    seconds = time.monotonic() - start
    size = max(1, len(tuned.losses) // 8)
    losses = [sum(part) / len(part) for part in (tuned.losses[i : i + size] for i in range(0, len(tuned.losses), size))]
    figures = {"before": tuned.before, "after": tuned.after, "losses": losses, "seconds": seconds}
    return {"directory": str(out if tuned.tensors else folder / "out")} | figures


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


@dataclass
class Item:
    """One thing to do: a conversion, or with `tune` the tuning of one. `folder`: of the conversion."""

    variant: str | None  # None: only tuned variants want it
    options: dict[str, Any]
    bits: float
    seed: int
    folder: Path
    keep: bool = True


def worker(jobs: Any, results: Any, model: str, device: str, rows: int) -> None:
    """Takes items from `jobs` until None comes; gives (its pid, item, None) when it takes one, first with no item when it is ready, and the
    record when done."""
    import torch

    from exl3.files import Tokenizer
    from exl3.models import load

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text = slices(Tokenizer.from_directory(model), rows)
    original = load(model, device=device, max_tokens=ROW)
    results.put((os.getpid(), None, None))
    for item in iter(jobs.get, None):
        results.put((os.getpid(), item, None))
        record = {"variant": item.variant, "options": item.options, "bits": item.bits, "seed": item.seed}
        plain = {k: v for k, v in item.options.items() if k != "tune"}
        try:
            item.folder.mkdir(parents=True, exist_ok=True)
            record |= convert(model, item.folder, item.bits, item.seed, device, plain)
            if item.options.get("tune"):
                record["tune"] = retune(model, item.folder, item.seed, device, item.options["tune"])
                record["seconds"] += record["tune"]["seconds"]
                out = record["tune"].pop("directory")
                record["slices"] = judge(out, device, text, original)
                shutil.rmtree(item.folder / f"tuned-{os.getpid()}", ignore_errors=True)
            elif item.variant is not None:
                record["slices"] = judge(str(item.folder / "out"), device, text, original)
        except Exception:
            record["error"] = traceback.format_exc()
        if not item.keep:
            shutil.rmtree(item.folder, ignore_errors=True)
        results.put((os.getpid(), item, record))


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
    ap.add_argument("--keep", metavar="FOLDER", help="where finished conversions stay for a later run")
    ap.add_argument("--out", default=str(ROOT / "benchmarks" / "results" / "ablation.json"))
    args = ap.parse_args()
    if not (Path(args.model) / "config.json").is_file() or not (Path(args.model) / "tokenizer.json").is_file():
        ap.error(f"{args.model}: no model directory with config.json and tokenizer.json")
    common = {k: json.loads(v) for k, _, v in (o.partition("=") for o in args.option)}
    asked = [v.partition(":") for v in args.variants]
    unknown = [n for n, _, o in asked if not o and n not in VARIANTS]
    if unknown:
        ap.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}, or NAME:JSON of options")
    chosen = {n: json.loads(o) if o else VARIANTS[n] for n, _, o in asked}

    # seed by seed: a run that is cut short leaves whole comparisons
    work = [(n, common | o, b, s) for s in args.seeds for b in args.bits for n, o in chosen.items()]
    records: list[dict[str, Any]] = []

    def take(record: dict[str, Any]) -> None:
        records.append(record)
        what = f"KL {overall(record):.4f}  {record['seconds']:.0f} s" if "slices" in record else record["error"]
        tuned = "  judged {before:.4f} to {after:.4f}".format(**record["tune"]) if "tune" in record else ""
        print(f"{record['bits']:g} bits  {record['variant']}  seed {record['seed']}  {what}{tuned}", flush=True)
        Path(args.out).write_text(json.dumps(head(args) | {"rows": records}, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        spread(work, args, Path(args.keep or folder), take)
    order = list(chosen)
    records.sort(key=lambda r: (r["bits"], order.index(r["variant"]), r["seed"]))
    Path(args.out).write_text(json.dumps(head(args) | {"rows": records}, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(records)))


def plan(
    model: str, work: list[tuple[str, dict[str, Any], float, int]], folder: Path, keep: bool
) -> tuple[list[Item], dict[Path, list[Item]]]:
    """Conversions, and what is to be tuned when one is there, by its folder."""
    firsts: dict[Path, Item] = {}
    later: dict[Path, list[Item]] = {}
    for variant, options, bits, seed in work:
        plain = {k: v for k, v in options.items() if k != "tune"}
        name = hashlib.sha256(json.dumps([os.path.abspath(model), plain, bits, seed], sort_keys=True).encode()).hexdigest()[:16]
        place = folder / name
        if options.get("tune"):
            later.setdefault(place, []).append(Item(variant, options, bits, seed, place))
            firsts.setdefault(place, Item(None, plain, bits, seed, place))
        elif place in firsts and firsts[place].variant is None:
            firsts[place].variant = variant
        else:
            firsts[place] = Item(variant, options, bits, seed, place)
    for place, first in firsts.items():
        first.keep = keep or place in later
    return list(firsts.values()), later


def spread(work: list[tuple[str, dict[str, Any], float, int]], args: Any, folder: Path, take: Callable[[dict[str, Any]], None]) -> None:
    """Does all of `work` in --jobs processes; `take` is given each record as it comes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["exl3.models", "exl3.quantize.retune", "exl3.evaluate.metrics"])
    jobs, results = context.Queue(), context.Queue()
    waiting, later = plan(args.model, work, folder, bool(args.keep))
    places = [args.device[i % len(args.device)] for i in range(args.jobs)]
    processes = [context.Process(target=worker, args=(jobs, results, args.model, place, args.rows)) for place in places]
    for p in processes:
        p.start()
    free, busy = 0, {}
    while waiting or busy or free < sum(p.is_alive() for p in processes):
        try:
            pid, item, record = results.get(timeout=5)
        except queue.Empty:
            for p in processes:  # one that was killed, for memory say, takes its item with it
                if not p.is_alive():
                    busy.pop(p.pid, None)
            if not any(p.is_alive() for p in processes):
                break
            continue
        if record is None and item is not None:
            busy[pid] = item
            continue
        free += 1
        if record is not None:
            busy.pop(pid)
            if record["variant"] is not None or "error" in record:
                take(record)
            if "error" not in record and not item.options.get("tune"):
                waiting[:0] = later.get(item.folder, [])  # first: whole comparisons
        while waiting and free:
            jobs.put(waiting.pop(0))
            free -= 1
    for _ in processes:
        jobs.put(None)
    for p in processes:
        p.join(timeout=30)


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
