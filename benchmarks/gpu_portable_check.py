"""Runs the AMD backend's kernels on an NVIDIA card: the real libexl3_rocm (host side) on a HIP runtime made of nvcc's build of the source.

    python benchmarks/gpu_portable_check.py --build DIR [--nvcc nvcc] [--arch 90]   compiles; needs no card
    python benchmarks/gpu_portable_check.py --run DIR [--model EXL3_MODEL]          needs a card; nothing is compiled

Checks every rate and codebook at 1 to 100 rows in both matrix layouts and without, groups, activations, attention over fp16 and quantized
caches, the encoder, repeats (bit for bit), the start-up self-test, and with --model one prefill and decode step against libexl3_cuda.
Prints one line a check and a JSON object; exit status 1 where one fails. On this card it is a check, not a measure, of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "src")]
LAYOUTS = (11, 12, 0)
RATES = [("mul1", k) for k in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)] + [(c, k) for c in ("mcg", "3inst") for k in range(1, 9)]


def build(folder: Path, nvcc: str, arch: str) -> None:
    """Compiles the library's host side and one runtime for each layout."""
    folder.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'rocm'}"]
    (folder / "empty.hipfb").write_bytes(b"CCOB")
    sources = [str(p) for p in sorted((ROOT / "rocm").glob("*.cpp"))]
    fatbin = f'-DEXL3_FATBIN="{folder / "empty.hipfb"}"'
    common = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", *includes, fatbin]
    subprocess.run([*common, *sources, "-ldl", "-o", str(folder / "libexl3_rocm.so")], check=True)
    for layout in LAYOUTS:
        out = folder / f"hip{layout}.so"
        source = str(ROOT / "tests" / "emulator" / "cuda_hip.cu")
        flags = ["-std=c++17", "-O3", f"-arch=sm_{arch}", "--expt-relaxed-constexpr", f"-DGPU_WMMA={layout}"]
        flags += ["-Xcompiler", "-fPIC", "-shared", "-cudart", "static"]
        subprocess.run([nvcc, *flags, *includes, source, "-o", str(out)], check=True)
        print("built", out, flush=True)


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
        worst = 0.0
        for rows in (1, 2, 3, 5, 8, 16, 17, 40, 100):
            x = torch.randn(rows, 1000, device="cuda").half()
            y = lib.linear(x, [w], dtype=torch.float32)[0]
            exact = x.cpu().double() @ exact_weight(w) + w["bias"].cpu().double()
            worst = max(worst, relative(y, exact))
            for _ in range(5):
                if not torch.equal(y, lib.linear(x, [w], dtype=torch.float32)[0]) or not lib.clean("linear"):
                    raise AssertionError(f"{rows} rows: a repeat differs")
        return worst

    def large(rows: int) -> float:
        w = random_weight(4096, 14336, 4, "mul1", "cuda")
        x = torch.randn(rows, 4096, device="cuda").half()
        y = lib.linear(x, [w], dtype=torch.float32)[0]
        for _ in range(20):
            if not torch.equal(y, lib.linear(x, [w], dtype=torch.float32)[0]):
                raise AssertionError("a repeat differs")
        return relative(y, x.cpu().double() @ exact_weight(w))

    def gated(rows: int) -> float:
        gate, up = (random_weight(640, 900, K, "mul1", "cuda", seed=K, bias=True) for K in (3, 4))
        x = torch.randn(rows, 640, device="cuda")
        want = torch.nn.functional.silu(x.cpu().double() @ exact_weight(gate) + gate["bias"].cpu()) * (
            x.cpu().double() @ exact_weight(up) + up["bias"].cpu()
        )
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

    def encode(codebook: str, K: float) -> float:
        tiles = torch.randn(4, 256) * 0.9
        _, values = lib.encode(tiles.cuda(), K, codebook, MULTIPLIERS[codebook])
        _, want = codec.encode_reference(tiles, K, codebook)
        return abs(float((values.cpu() - tiles).square().mean() / (want - tiles).square().mean()) - 1)

    torch.manual_seed(0)
    for codebook, K in RATES:
        check(f"product {codebook} {K}", 1e-3, lambda c=codebook, k=K: product(c, k))  # type: ignore[misc]
    for rows in (1, 8, 70, 300):
        check(f"4096 x 14336, {rows} rows", 1e-3, lambda r=rows: large(r))  # type: ignore[misc]
        check(f"gate and up, {rows} rows", 2e-3, lambda r=rows: gated(r))  # type: ignore[misc]
    for case in ((64, 4, 4, 16), (128, 32, 8, 16), (128, 8, 2, 4), (256, 4, 2, 6), (512, 2, 1, 3)):
        check(f"attention {case}", 2e-3, lambda c=case: attention(*c))  # type: ignore[misc]
    for codebook, K in (("mul1", 1), ("mul1", 2.5), ("mul1", 4), ("mcg", 3), ("3inst", 8)):
        check(f"encoder {codebook} {K}", 1e-3, lambda c=codebook, k=K: encode(c, k))  # type: ignore[misc]

    here = native._backends.get("cuda")
    native._backends["cuda"] = native.Backend(folder / "libexl3_rocm.so")
    check("self-test", 1.0, lambda: ops.self_test("cuda") or 0.0)  # type: ignore[func-returns-value]
    if model:
        check("model: prefill and decode step", 2e-2, lambda: model_step(model, folder))
    if here is not None:
        native._backends["cuda"] = here
    print(json.dumps({"layout": layout, "failed": [n for n, (_, good) in results.items() if not good], "checks": len(results)}))
    return all(good for _, good in results.values())


def model_step(path: str, folder: Path) -> float:
    """Relative difference of the logits of one decode step after a prefill, libexl3_rocm against libexl3_cuda (or plain torch)."""
    import torch

    from exl3.cache import Batch, Cache
    from exl3.models import load
    from exl3.ops import native

    def logits() -> torch.Tensor:
        model = load(path, device="cuda", max_tokens=512)
        cache = Cache(model, 512, model.device)
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(0, model.vocab_size, (41,), generator=g, dtype=torch.int32).cuda()
        ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}

        def batch(first: int, count: int) -> Batch:
            return Batch(
                ids=ids[first : first + count].contiguous(), positions=torch.arange(first, first + count, **ints),
                token_row=torch.zeros(count, **ints), row_start=torch.tensor([0, count], **ints),
                lengths=torch.tensor([first + count], **ints),
                block_table=torch.arange(2, **ints).view(1, 2), logits_at=torch.tensor([count - 1], **ints), cache=cache,
            )  # fmt: skip

        with torch.no_grad():
            model(batch(0, 40))
            return model(batch(40, 1))[0].float()

    got = logits()
    mocked = native._backends.pop("cuda")
    want = logits()
    native._backends["cuda"] = mocked
    return float((got - want).norm() / want.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--nvcc", default=os.environ.get("CUDACXX", "nvcc"))
    parser.add_argument("--arch", default="90")
    parser.add_argument("--model")
    parser.add_argument("--layout", type=int)
    a = parser.parse_args()
    if a.build:
        build(a.build, a.nvcc, a.arch)
    if a.run and a.layout is not None:
        return 0 if check_layout(a.run.resolve(), a.layout, a.model) else 1
    if a.run:
        rest = ["--model", a.model] if a.model else []
        runs = [subprocess.run([sys.executable, __file__, "--run", str(a.run), "--layout", str(n), *rest], check=False) for n in LAYOUTS]
        return max(r.returncode for r in runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
