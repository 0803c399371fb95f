"""Speed and accuracy of the CPU kernels by themselves: trellis product, prefill, encoder; every rate, codebook and instruction tier.

    python benchmarks/cpu_kernels.py [--tiers avx2,avx512] [--quick] [--cores LIST] [--library FILE] [--build] [--json FILE]

Prints tables and writes one JSON object (name, device, versions, commit, date, rows) to benchmarks/results/. Times are the best of
several runs, per core on one thread and on two; --cores 0,1 pins the process, for steady numbers. --build compiles the library with
g++ first, for machines without CMake and pybind11.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # its OpenMP pool serves the kernels

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests/ops")]

import cpu_library as native  # noqa: E402

from exl3 import codec  # noqa: E402

RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
# relative squared error of unit Gaussian tiles at the best input RMS: mul1, long searches in double precision
GAUSSIAN = dict(zip(RATES, (0.2727, 0.1374, 0.0684, 0.0346, 0.01738, 0.00883, 0.00447, 0.00116, 0.000305, 0.0000815, 0.000021)))
INPUT_RMS = dict(zip(RATES, (1.12, 1.02, 1.0, 0.96, 0.95, 0.94, 0.92, 0.88, 0.83, 0.80, 0.75)))


def best_seconds(run: Callable[[], Any], seconds: float) -> float:
    """Shortest of several runs, after one to warm up."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return best


def product_rows(library: native.Library, seconds: float, quick: bool) -> list[dict[str, Any]]:
    """One row of activations: billions of weights a second and core, and the error against x @ dequant(W) in float64."""
    rows = []
    n_in, n_out = 2048, 1024
    x = np.random.default_rng(0).standard_normal((3, n_in)).astype(np.float32)
    x[1, 5] = 100
    cases = [(c, K, p) for c in ("mul1", "mcg", "3inst") for K in (RATES if c == "mul1" else (1, 2, 3, 4, 5, 6, 7, 8)) for p in (2, 1)]
    for codebook, K, planes in cases:
        if planes == 1 and (codebook != "mul1" or library.tier != "avx512"):
            continue  # bytes have a kernel of their own there only
        if quick and codebook != "mul1" and K not in (2, 4, 6):
            continue
        m = native.random_matrix(1, n_in, n_out, K, codebook)
        weight = library.weight(**m)
        exact = codec.dequantize(*(torch.from_numpy(m[k]) for k in ("trellis", "suh", "svh")), codebook).double().numpy()
        want = x.astype(np.float64) @ exact
        got = library.linear(x, [weight], planes=planes)[0]
        alone = library.linear(x[:1], [weight], planes=planes)[0]
        error = float(np.sqrt((((got - want) ** 2).sum(1) / (want**2).sum(1)).max()))
        assert error < (1e-3 if planes == 2 else 3e-2), (library.tier, codebook, K, planes, error)
        assert np.array_equal(alone[0], got[0]), "a row depends on its neighbours"
        call = library.linear_call(x[:1], [weight], planes=planes)
        speed = n_in * n_out / best_seconds(call, seconds) / 1e9
        rows.append({"op": "linear", "rows": 1, "tier": library.tier, "codebook": codebook, "K": K, "planes": planes, "threads": 1,
                     "gw_per_s": round(speed, 2), "relative_rms": error})  # fmt: skip
        print(f"  linear m=1  {codebook:5s} K={K:<3} planes {planes}: {speed:6.2f} Gw/s, relative RMS {error:.1e}", flush=True)
    return rows


def batch_rows(library: native.Library, seconds: float) -> list[dict[str, Any]]:
    """More rows, K = 4, mul1: multiply-adds a second as GFLOP/s."""
    rows = []
    n_in, n_out = 1536, 1536
    weight = library.weight(**native.random_matrix(1, n_in, n_out, 4, "mul1"))
    for threads in (1, 2):
        for m in (1, 2, 4, 8, 16, 64, 512):
            x = np.random.default_rng(0).standard_normal((m, n_in)).astype(np.float32)
            call = library.linear_call(x, [weight], threads=threads)
            flops = 2 * m * n_in * n_out / best_seconds(call, seconds) / 1e9
            rows.append({"op": "linear", "rows": m, "tier": library.tier, "codebook": "mul1", "K": 4, "planes": 2, "threads": threads,
                         "gflops": round(flops, 1)})  # fmt: skip
            print(f"  linear K=4 mul1, {m:3d} rows, {threads} threads: {flops:7.1f} GFLOP/s", flush=True)
    return rows


def model_rows(library: native.Library, seconds: float) -> list[dict[str, Any]]:
    """The products of SmolLM2-135M's 30 layers at 4 bits, fused as the model fuses them: tokens a second if nothing else took time."""
    rows = []
    hidden, kv, inner = 576, 192, 1536

    def weight(seed: int, n_in: int, n_out: int) -> native.WeightBlock:
        m = native.random_matrix(seed, -(-n_in // 128) * 128, -(-n_out // 128) * 128, 4, "mul1")
        return library.weight(**m, in_features=n_in, out_features=n_out)

    norm = np.ones(hidden, np.float32)
    calls = (
        ([weight(1, hidden, hidden), weight(2, hidden, kv), weight(3, hidden, kv)], {"norm": norm, "eps": 1e-5, "shared_suh": True}),
        ([weight(4, hidden, hidden)], {}),
        ([weight(5, hidden, inner), weight(6, hidden, inner)], {"norm": norm, "eps": 1e-5, "shared_suh": True, "activation": 1}),
        ([weight(7, inner, hidden)], {}),
    )
    for planes in (2, 1):
        for threads in (1, 2):
            for m in (1, 512):
                layer = []
                for weights, options in calls:
                    x = np.random.default_rng(0).standard_normal((m, weights[0].in_features)).astype(np.float32)
                    layer.append(library.linear_call(x, weights, planes=planes, threads=threads, **options))
                time_of_layer = best_seconds(lambda layer=layer: [call() for call in layer], 2 * seconds)
                speed = m / (30 * time_of_layer)
                rows.append({"op": "linear", "shapes": "SmolLM2-135M layers", "rows": m, "tier": library.tier, "codebook": "mul1", "K": 4,
                             "planes": planes, "threads": threads, "tokens_per_s": round(speed, 1)})  # fmt: skip
                print(f"  SmolLM2 layers, {m:3d} rows, {threads} threads, planes {planes}: {speed:7.1f} tokens/s", flush=True)
    return rows


def encoder_rows(library: native.Library, tiles: int, quick: bool, seen: dict[float, np.ndarray]) -> list[dict[str, Any]]:
    """Millions of weights a second and core, and the squared error relative to the table. All tiers must find the states `seen`."""
    rows = []
    for K in RATES:
        x = (np.random.default_rng(5).standard_normal((tiles, 256)) * INPUT_RMS[K]).astype(np.float32)
        library.encode(x[:2], K, "mul1")
        seconds = float("inf")
        for _ in range(1 if quick else 3):
            start = time.perf_counter()
            states, values = library.encode(x, K, "mul1")
            seconds = min(seconds, time.perf_counter() - start)
        assert np.array_equal(seen.setdefault(K, states[:2].copy()), states[:2]), f"tiers encode differently at K={K}"
        error = float(((values - x) ** 2).mean()) / INPUT_RMS[K] ** 2
        speed = tiles * 256 / seconds / 1e6
        rows.append({"op": "encode", "tier": library.tier, "codebook": "mul1", "K": K, "threads": 1, "mw_per_s": round(speed, 3),
                     "relative_mse": error, "of_table": round(error / GAUSSIAN[K], 4), "tiles": tiles})  # fmt: skip
        print(f"  encode K={K:<3}: {speed:.3f} Mw/s, relative MSE {error:.3e} ({error / GAUSSIAN[K]:.3f} of the table)", flush=True)
    return rows


def build(folder: Path) -> Path:
    """The library by g++ alone, its files in parallel."""
    simd = "-mavx2 -mfma -mf16c"
    wide = f"{simd} -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi"
    common = "-std=c++17 -O3 -DNDEBUG -fPIC -fvisibility=hidden -fopenmp-simd -DEXL3_HAVE_AVX2 -DEXL3_HAVE_ENCODE"
    common += f' -DEXL3_VERSION="benchmark" -I{ROOT}/cpp/include -I{ROOT}/cpp'
    small = "norm rotary cache attention activation embedding sample".split()
    jobs = []
    for file in sorted((ROOT / "cpp/cpu").glob("*.cpp")):
        tiers = [("base", ""), ("avx2", f"{simd} -mbmi2")] if file.stem in small else [("", "")]
        for tier, flags in tiers:
            own = wide if file.stem.endswith("_avx512") else simd if file.stem.endswith("_avx2") else ""
            out = folder / f"{file.stem}{tier}.o"
            define = f"-DEXL3_TIER={tier} -ffp-contract=off" if tier else ""
            jobs.append([*f"g++ {common} {own} {flags} {define}".split(), "-c", str(file), "-o", str(out)])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for job in pool.map(lambda j: subprocess.run(j, capture_output=True, text=True), jobs):
            if job.returncode:
                sys.exit(job.stderr)
    library = folder / "libexl3_cpu.so"
    subprocess.run(["g++", "-shared", "-o", str(library), *(j[-1] for j in jobs), "-ldl"], check=True)
    return library


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiers", default="scalar,avx2,avx512")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--library", type=Path)
    parser.add_argument("--cores", help="run on these, as 0,1")
    parser.add_argument("--build", action="store_true")
    parser.add_argument("--tiles", type=int, default=32, help="tiles an encoder row is measured with")
    parser.add_argument("--seconds", type=float, default=0.1, help="a product row is measured for")
    parser.add_argument("--json", type=Path, default=ROOT / f"benchmarks/results/cpu_kernels_{datetime.date.today():%Y%m%d}.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    seen: dict[float, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = build(folder) if options.build else options.library or native.find()
        if path is None:
            sys.exit("libexl3_cpu.so was not found: build the project, or pass --build or --library")
        if options.cores:
            os.sched_setaffinity(0, [int(c) for c in options.cores.split(",")])
            torch.set_num_threads(len(options.cores.split(",")))
        for tier in options.tiers.split(","):
            library = native.Library(path, tier, folder)
            if library.tier != tier:
                print(f"{tier}: not on this CPU")
                continue
            print(f"{tier}:")
            if tier != "scalar":
                rows += product_rows(library, options.seconds, options.quick)
                rows += batch_rows(library, options.seconds) + model_rows(library, options.seconds)
            rows += encoder_rows(library, options.tiles if tier != "scalar" else 2, options.quick, seen)
    result = {
        "name": "cpu_kernels",
        "device": processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
