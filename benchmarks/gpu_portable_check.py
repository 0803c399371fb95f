"""Runs the AMD backend's kernels on an NVIDIA card: the real libexl3_rocm (host side) on a HIP runtime made of nvcc's build of the source.

    python benchmarks/gpu_portable_check.py --build DIR [--nvcc nvcc] [--arch 90]   compiles; needs no card
    python benchmarks/gpu_portable_check.py --run DIR [--model EXL3_MODEL] [--json FILE]    needs a card; nothing is compiled

Checks every rate and codebook at 1 to 100 rows in both matrix layouts and without, groups, activations, attention of few and many tokens
over fp16 and quantized caches, the encoder, repeats (bit for bit), the start-up self-test, and with --model a prefill and decode steps
against libexl3_cuda (plain torch where that is not there). Prints one line a check; exit status 1 where one fails. It says nothing about
speed on an AMD card.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "src")]
LAYOUTS = (11, 12, 0)
RATES = [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [(c, k) for c in ("mcg", "3inst") for k in range(1, 9)]


def build(folder: Path, nvcc: str, arch: str, jobs: int) -> None:
    """Compiles the library's host side and one runtime for each layout."""
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'rocm'}"]
    (folder / "empty.hipfb").write_bytes(b"CCOB\2\0\1\0\x20" + bytes(23))
    sources = [str(p) for p in sorted((ROOT / "rocm").glob("*.cpp"))]
    fatbin = f'-DEXL3_FATBIN="{folder / "empty.hipfb"}"'
    common = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", *includes, fatbin]
    subprocess.run([*common, *sources, "-ldl", "-o", str(folder / "libexl3_rocm.so")], check=True)
    source = str(ROOT / "tests" / "emulator" / "cuda_hip.cu")
    flags = ["-std=c++17", "-O3", f"-arch=sm_{arch}", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC"]

    def compile_part(part: int, layout: int) -> Path:
        out = folder / f"part{part}_{layout}.o"
        subprocess.run([nvcc, *flags, f"-DGPU_WMMA={layout}", f"-DPART={part}", *includes, "-c", source, "-o", str(out)], check=True)
        print("compiled", out, flush=True)
        return out

    with ThreadPoolExecutor(jobs) as pool:
        shared = [pool.submit(compile_part, part, 11) for part in (1, 2, 3)]  # nothing in them depends on the layout
        own = {layout: [pool.submit(compile_part, part, layout) for part in (4, 0)] for layout in LAYOUTS}
        for layout in LAYOUTS:
            parts = [str(f.result()) for f in [*shared, *own[layout]]]
            out = str(folder / f"hip{layout}.so")
            subprocess.run([nvcc, f"-arch=sm_{arch}", "-shared", "-cudart", "static", *parts, "-o", out], check=True)


def check_layout(folder: Path, layout: int, model: str | None) -> bool:
    """All checks of one layout; runs in a process of its own, as the runtime is looked up once."""
    os.environ["EXL3_HIP_LIB"] = str(folder / f"hip{layout}.so")
    import torch
    from harness import MULTIPLIERS, Library, exact_weight, random_weight, relative
    from test_portable import make_batch, make_cache

    from exl3 import codec, ops
    from exl3.ops import native, reference

    lib = Library(folder / "libexl3_rocm.so", "cuda")
    text = lib.table.describe(0)
    print(text.decode() if text else lib.table.last_error().decode())
    results: dict[str, Any] = {}

    def check(name: str, limit: float, run: Callable[[], float]) -> None:
        try:
            worst = run()
        except Exception as e:  # a failed check is a result
            worst, name = float("nan"), f"{name} ({e})"
        good = worst < limit
        results[name] = [worst, good]
        print(f"{'ok  ' if good else 'FAIL'} layout {layout} {name}: {worst:.2e}", flush=True)

    def product(codebook: str, K: float) -> float:
        w = random_weight(1000, 700, K, codebook, "cuda", bias=True)
        worst, inner = 0.0, exact_weight(w, "cuda")
        for rows in (1, 2, 3, 5, 8, 16, 17, 40, 100):
            x = torch.randn(rows, 1000, device="cuda").half()
            y = lib.linear(x, [w], dtype=torch.float32)[0]
            exact = x.double() @ inner + w["bias"].double()
            worst = max(worst, relative(y, exact))
            for _ in range(3):
                if not torch.equal(y, lib.linear(x, [w], dtype=torch.float32)[0]) or not lib.clean("linear"):
                    raise AssertionError(f"{rows} rows: a repeat differs")
        return worst

    w = random_weight(4096, 14336, 4, "mul1", "cuda")
    large_weight = exact_weight(w, "cuda")

    def large(rows: int) -> float:
        x = torch.randn(rows, 4096, device="cuda").half()
        y = lib.linear(x, [w], dtype=torch.float32)[0]
        for _ in range(10):
            if not torch.equal(y, lib.linear(x, [w], dtype=torch.float32)[0]):
                raise AssertionError("a repeat differs")
        return relative(y, x.double() @ large_weight)

    def gated(rows: int) -> float:
        gate, up = (random_weight(640, 900, K, "mul1", "cuda", seed=K, bias=True) for K in (3, 4))
        x = torch.randn(rows, 640, device="cuda")
        a, b = (x.double() @ exact_weight(w, "cuda") + w["bias"].double() for w in (gate, up))
        want = torch.nn.functional.silu(a) * b
        return relative(lib.linear(x, [gate, up], activation="silu", dtype=torch.float32)[0], want)

    def attention(dim: int, heads: int, kv: int, bits: int) -> float:
        c = make_cache(lib, kv, dim, bits, bits)
        full = make_batch(lib, [(0, 700), (0, 40)], padding=0)
        k, v = (torch.randn(len(full.positions), kv, dim, device="cuda").half() for _ in range(2))
        reference.cache_append(c, k, v, full)
        b = make_batch(lib, [(697, 3), (39, 1)], padding=1)
        q = torch.randn(len(b.positions), heads, dim, device="cuda").half()
        y = lib.attention(q, c, b, scale=dim**-0.5)
        if not all(torch.equal(y, lib.attention(q, c, b, scale=dim**-0.5)) for _ in range(20)):
            raise AssertionError("a repeat differs")
        return relative(y, reference.attention(q.float(), c, b, scale=dim**-0.5))

    def prefill(dim: int, heads: int, kv: int, bits: int, window: int) -> float:
        c = make_cache(lib, kv, dim, bits, bits, pages=6)
        rows = [(0, 1), (90, 400), (30, 20)]  # long rows through one kernel, the rest through the other
        full = make_batch(lib, [(0, first + count) for first, count in rows], padding=0)
        k, v = (torch.randn(len(full.positions), kv, dim, device="cuda").half() for _ in range(2))
        reference.cache_append(c, k, v, full)
        b = make_batch(lib, rows, padding=3)
        q = torch.randn(len(b.positions), heads, dim, device="cuda").half()
        y = lib.attention(q, c, b, scale=dim**-0.5, window=window)
        if not all(torch.equal(y, lib.attention(q, c, b, scale=dim**-0.5, window=window)) for _ in range(20)):
            raise AssertionError("a repeat differs")
        return relative(y, reference.attention(q.float(), c, b, scale=dim**-0.5, window=window))

    def encode(codebook: str, K: float) -> float:
        tiles = torch.randn(4, 256, device="cuda") * 0.9
        _, values = lib.encode(tiles, K, codebook, MULTIPLIERS[codebook])
        _, want = codec.encode_reference(tiles, K, codebook)
        return abs(float((values - tiles).square().mean() / (want - tiles).square().mean()) - 1)

    torch.manual_seed(0)
    for codebook, K in RATES:
        check(f"product {codebook} {K}", 1e-3, lambda c=codebook, k=K: product(c, k))  # type: ignore[misc]
    for rows in (1, 8, 70, 300):
        check(f"4096 x 14336, {rows} rows", 1e-3, lambda r=rows: large(r))  # type: ignore[misc]
        check(f"gate and up, {rows} rows", 2e-3, lambda r=rows: gated(r))  # type: ignore[misc]
    for case in ((64, 4, 4, 16), (128, 32, 8, 16), (128, 8, 2, 4), (256, 4, 2, 6), (512, 2, 1, 3)):
        check(f"attention {case}", 2e-3, lambda c=case: attention(*c))  # type: ignore[misc]
    for case in ((64, 9, 3, 16, 0), (128, 32, 8, 16, 100), (128, 4, 4, 4, 0), (256, 4, 2, 6, 0), (96, 6, 2, 16, 0)):
        check(f"prefill {case}", 2e-3, lambda c=case: prefill(*c))  # type: ignore[misc]
    encodes = (("mul1", 1), ("mul1", 2.5), ("mul1", 4), ("mcg", 3), ("3inst", 8)) if layout == 11 else ()  # the same code in all layouts
    for codebook, K in encodes:
        check(f"encoder {codebook} {K}", 1e-3, lambda c=codebook, k=K: encode(c, k))  # type: ignore[misc]

    native._backends["cuda"] = native.Backend(folder / "libexl3_rocm.so")
    check("self-test", 1.0, lambda: ops.self_test("cuda") or 0.0)  # type: ignore[func-returns-value]
    steps: dict[str, float] = {}

    def model_check() -> float:
        steps.update(model_steps(str(model)))
        return max(steps.values())

    if model:
        check("model: worst of its steps", 2e-2, model_check)
    failed = [n for n, (_, good) in results.items() if not good]
    worst = {n: w for n, (w, _) in results.items()}
    print(json.dumps({"layout": layout, "checks": len(results), "failed": failed, "worst": worst, "model": steps}))
    return not failed


def model_steps(path: str) -> dict[str, float]:
    """Relative difference of the logits of a prefill and of decode steps of one and three rows, libexl3_rocm against libexl3_cuda (or plain
    torch)."""
    import torch

    from exl3.cache import Batch, Cache
    from exl3.models import load
    from exl3.ops import native

    pages = [[0, 1], [2], [3]]

    def logits() -> dict[str, torch.Tensor]:
        model = load(path, device="cuda", max_tokens=1024)
        cache = Cache(model, 1024, model.device)
        ids = torch.randint(0, model.vocab_size, (310,), generator=torch.Generator().manual_seed(1)).tolist()

        def step(*rows: tuple[int, int]) -> torch.Tensor:
            """rows: (first position, tokens) -> logits behind the last token of each"""
            new = [ids[first : first + count] for first, count in rows]
            return model(Batch.packed(new, [first for first, _ in rows], pages[: len(rows)], cache)).float().clone()

        with torch.no_grad():
            return {
                "prefill of 300 tokens": step((0, 300)),
                "decode step": step((300, 1)),
                "prefill of two rows and a decode step": step((301, 1), (0, 20), (0, 5)),
                "decode step of three rows": step((302, 1), (20, 1), (5, 1)),
            }

    got = logits()
    del native._backends["cuda"]
    native._workspaces.buffers.clear()
    want = logits()
    return {name: float((got[name] - want[name]).norm() / want[name].norm()) for name in want}


def run(folder: Path, model: str | None, json_file: Path | None) -> int:
    """The three layouts side by side, each in a process of its own."""
    command = [sys.executable, __file__, "--run", str(folder), *(["--model", model] if model else []), "--layout"]
    with ThreadPoolExecutor(len(LAYOUTS)) as pool:
        runs = list(pool.map(lambda n: subprocess.run([*command, str(n)], stdout=subprocess.PIPE, text=True, check=False), LAYOUTS))
    found = []
    for done in runs:
        *lines, last = done.stdout.splitlines() or [""]
        print("\n".join([*lines, last]) if not last.startswith("{") else "\n".join(lines))
        found.append(json.loads(last) if last.startswith("{") else {"failed": [f"ended with status {done.returncode}"]})
    for one in found:
        print({k: v for k, v in one.items() if k != "worst"})
    if json_file:
        import torch

        facts = {"name": "gpu_portable_check", "date": time.strftime("%Y-%m-%d"), "device": torch.cuda.get_device_name()}
        facts |= {"torch": torch.__version__, "model": Path(model).name if model else "none"}
        json_file.write_text(json.dumps({**facts, "layouts": found}, indent=1) + "\n")
    return int(any(one["failed"] for one in found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--nvcc", default=os.environ.get("CUDACXX", "nvcc"))
    parser.add_argument("--arch", default="90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layout", type=int)
    a = parser.parse_args()
    if a.build:
        build(a.build, a.nvcc, a.arch, a.jobs)
    if a.run and a.layout is not None:
        return 0 if check_layout(a.run.resolve(), a.layout, a.model) else 1
    if a.run:
        return run(a.run, a.model, a.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
