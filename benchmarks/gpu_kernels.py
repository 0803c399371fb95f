"""Times the CUDA kernels by graph replay over distinct data larger than the L2 cache, and prints tables.

    python benchmarks/gpu_kernels.py [--only linear,prefill,attention,prefill-attention,encode] [--json FILE]

Each figure is the median of 15 replays; of large products that of 7 short ones with pauses between them, too. Random trellis bits: any
bits are a legal code, and timing does not depend on them.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from harness import MULTIPLIERS, Library, cuda_library

from exl3.ops import blocks, folded

ENOUGH = 320 << 20  # bytes of distinct weights: several times the L2 of any card
BURST = 3000  # microseconds of large products between pauses


def replay(calls: list[Callable[[], Any]], repeats: int = 15, least: int = 40, idle: float = 0.0) -> float:
    """Microseconds of one call, all of them recorded in one graph: in turn, `least` in all, so that starting the graph does not show.

    idle: seconds in which the card has nothing to do before each replay. Without them large products run at the card's power limit, and so
    at lower clocks than a prompt's first milliseconds do.
    """
    calls = (calls * -(-least // len(calls)))[: max(least, 2)]
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    end = time.perf_counter() + 0.08
    while time.perf_counter() < end:  # until the clocks are up
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for i in range(repeats + 3):
        time.sleep(idle)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def random_weights(n_in: int, n_out: int, K: float, codebook: str, most: int = 24) -> list[dict[str, Any]]:
    nbytes = n_in * n_out * K / 8
    made = []
    for _ in range(min(most, max(2, int(ENOUGH / nbytes)))):
        made.append(
            {
                "trellis": torch.randint(-32768, 32768, (n_in // 16, n_out // 16, round(16 * K)), dtype=torch.int16, device="cuda"),
                "suh": (torch.rand(n_in, device="cuda") + 0.5).half() / 64,
                "svh": (torch.rand(n_out, device="cuda") + 0.5).half(),
                "bias": None,
                "in": n_in,
                "out": n_out,
                "codebook": codebook,
                "multiplier": MULTIPLIERS[codebook],
            }
        )
    return made


def linear_call(lib: Library, x: torch.Tensor, ws: list[dict[str, Any]], **options: Any) -> Callable[[], Any]:
    count = 1 if options.get("activation") else len(ws)
    outs = [torch.empty(x.shape[0], w["out"], dtype=torch.half, device="cuda") for w in ws[:count]]
    lib.linear(x, ws, outs=outs, shared=True, **options)  # makes the workspace
    return lambda: lib.linear(x, ws, outs=outs, shared=True, **options)


def linear(lib: Library) -> list[dict[str, Any]]:
    cases: list[tuple[int, int, float, str, tuple[int, ...]]] = [
        (4096, 4096, 4, "mul1", (1, 2, 4, 8, 16)),
        (4096, 6144, 4, "mul1", (1,)),
        (4096, 14336, 4, "mul1", (1, 2, 4, 8, 16, 32, 64)),
        (4096, 28672, 4, "mul1", (1,)),
        (14336, 4096, 4, "mul1", (1, 8)),
        (8192, 28672, 4, "mul1", (1, 8)),
        *((4096, 14336, K, "mul1", (1, 8)) for K in (1, 2, 2.5, 3, 5, 6, 8)),
        (4096, 14336, 4, "mcg", (1, 8, 16)),
        (4096, 14336, 4, "3inst", (1,)),
    ]
    found = []
    for n_in, n_out, K, codebook, row_counts in cases:
        ws = random_weights(n_in, n_out, K, codebook)
        for rows in row_counts:
            x = torch.randn(rows, n_in, device="cuda").half()
            us = replay([linear_call(lib, x, [w]) for w in ws])
            gbs = n_in * n_out * K / 8 / us / 1e3
            found.append({"kernel": "linear", "k": n_in, "n": n_out, "K": K, "codebook": codebook, "rows": rows, "us": us, "GB/s": gbs})
            print(f"linear {n_in}x{n_out} K={K:g} {codebook} m={rows}: {us:.1f} us, {gbs:.0f} GB/s", flush=True)
        del ws
        lib.spaces.clear()
        torch.cuda.empty_cache()
    return found


def folded_call(lib: Library, x: torch.Tensor, w: dict[str, Any], matrix: torch.Tensor) -> Callable[[], Any]:
    """The matrix rebuilt with its rotations, then torch's product."""
    struct, y = lib.weight(w), torch.empty(x.shape[0], w["out"], dtype=torch.half, device="cuda")
    block = blocks.RECONSTRUCT.pack(ctypes.addressof(struct), matrix.data_ptr(), blocks.DTYPES[matrix.dtype], 1)

    def call(keep: Any = struct) -> None:
        lib.call("reconstruct", block)
        torch.mm(x, matrix, out=y)

    return call


def prefill(lib: Library) -> list[dict[str, Any]]:
    """The fused product, and what exl3.ops does from `folded.LEAST_ROWS` rows on."""
    found = []
    for n_in, n_out, K, codebook in ((4096, 14336, 4, "mul1"), (4096, 14336, 4, "mcg"), (14336, 4096, 4, "mul1")):
        ws = random_weights(n_in, n_out, K, codebook, 4)
        matrix = torch.empty(n_in, n_out, dtype=torch.half, device="cuda")
        plain = [torch.randn(n_in, n_out, device="cuda").half() for _ in range(4)]
        for rows in (64, 128, 256, 512, 1024, 2048, 4096):
            x = torch.randn(rows, n_in, device="cuda").half()
            ways = {"prefill": [linear_call(lib, x, [w]) for w in ws]}
            if rows >= folded.LEAST_ROWS // 2:
                ways["folded"] = [folded_call(lib, x, w, matrix) for w in ws]
            y = torch.empty(rows, n_out, dtype=torch.half, device="cuda")
            if codebook == "mul1":
                ways["fp16 by torch"] = [lambda x=x, y=y, w=m: torch.mm(x, w, out=y) for m in plain]
            for kernel, calls in ways.items():
                us = replay(calls)
                burst = replay(calls, repeats=7, least=max(4, round(BURST / us)), idle=0.05)
                case = {"kernel": kernel, "k": n_in, "n": n_out, "K": K, "codebook": codebook, "rows": rows}
                rates = {name: 2 * rows * n_in * n_out / t / 1e6 for name, t in (("TFLOP/s", us), ("burst TFLOP/s", burst))}
                found.append(case | {"us": us, "burst us": burst} | rates)
                print(f"{kernel} {n_in}x{n_out} K={K:g} {codebook} m={rows}: {us:.1f} us, {rates['TFLOP/s']:.0f} TFLOP/s;", end=" ")
                print(f"after a pause {burst:.1f} us, {rates['burst TFLOP/s']:.0f} TFLOP/s", flush=True)
    return found


def make_layer(kv: int, dim: int, bits: tuple[int, int], pages: int) -> SimpleNamespace:
    def side(b: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        if b == 16:
            return torch.randn(pages, 256, kv, dim, device="cuda").half(), None
        words = torch.randint(-(2**31), 2**31 - 1, (pages, 256, kv * dim // 32 * b), dtype=torch.int32, device="cuda")
        return words, torch.rand(pages, 256, kv * dim // 32, device="cuda").half()

    (k, ks), (v, vs) = side(bits[0]), side(bits[1])
    return SimpleNamespace(k=k, v=v, k_scale=ks, v_scale=vs, kv_heads=kv, head_dim=dim, k_bits=bits[0], v_bits=bits[1], compand=0.0)


def make_batch(rows: int, length: int, pages_each: int) -> SimpleNamespace:
    return SimpleNamespace(
        positions=torch.full((rows,), length - 1, dtype=torch.int32, device="cuda"),
        token_row=torch.arange(rows, dtype=torch.int32, device="cuda"),
        block_table=torch.randperm(rows * pages_each, device="cuda").view(rows, pages_each).int(),
    )


def attention_call(lib: Library, q: torch.Tensor, layer: Any, batch: Any) -> tuple[torch.Tensor, Callable[[], Any]]:
    y = torch.empty_like(q)
    head = (
        *lib.layer(layer), q.data_ptr(), y.data_ptr(), q.stride(0), y.stride(0), batch.positions.data_ptr(), batch.token_row.data_ptr(),
        batch.block_table.data_ptr(), 0,
    )  # fmt: skip
    tail = (q.shape[0], q.shape[1], batch.block_table.stride(0), blocks.DTYPES[q.dtype], q.shape[2] ** -0.5, 0.0, 0)
    space = lib.space("attention", lib.table.attention_workspace(blocks.ATTENTION.pack(*head, 0, 0, *tail)))
    block = blocks.ATTENTION.pack(*head, space.data_ptr(), space.numel(), *tail)

    def call(keep: Any = (q, y, layer, batch, space)) -> None:
        lib.call("attention", block)

    return y, call


def cache_bytes(bits: tuple[int, int], kv: int = 8, dim: int = 128) -> float:
    """Of one position."""
    return kv * dim * sum(2.0 if b == 16 else b / 8 + 2 / 32 for b in bits)


def attention(lib: Library) -> list[dict[str, Any]]:
    """A decode step's attention: rotation, append and all, 32 heads over 8. Alone: one after another. Between products: what it adds to
    the q/k/v and output products of an 8B layer, as a step has them. Each call has pages of its own."""
    found = []
    half: dict[str, Any] = {"dtype": torch.half, "device": "cuda"}
    qkv = [[random_weights(4096, n, 4, "mul1", 1)[0] for n in (4096, 1024, 1024)] for _ in range(6)]
    out = [random_weights(4096, 4096, 4, "mul1", 1)[0] for _ in range(6)]
    products: dict[int, float] = {}
    for rows, length in ((1, 2), (1, 256), (1, 4096), (1, 32768), (8, 2), (8, 1024), (8, 32768), (32, 640)):
        for bits in ((16, 16), (8, 8), (4, 4), (6, 5)):
            each = -(-length // 256)
            pages = max(rows * each, int(1.25 * ENOUGH / cache_bytes(bits) / 256))
            layer = make_layer(8, 128, bits, pages)
            x, norm = torch.randn(rows, 4096, device="cuda"), torch.ones(4096, device="cuda")
            y = torch.zeros(rows, 4096, device="cuda")
            attends, layers = [], []
            for i in range(max(4, min(40, pages // (rows * each)))):
                batch = make_batch(rows, length, each)
                batch.block_table = torch.randperm(pages, device="cuda")[: rows * each].view(rows, each).int()
                q, k, v = (torch.randn(rows, n, 128, **half) for n in (32, 8, 8))
                cos, sin = (torch.rand(rows, 64, device="cuda") for _ in range(2))
                z, call = lib.attend_call(q, k, v, layer, batch, (cos, sin), scale=128**-0.5)
                attends.append(call)
                layers.append((i % 6, [t.view(rows, -1) for t in (q, k, v)], z.view(rows, -1), call))

            def step(of: tuple[Any, ...], attend: bool, x: Any = x, norm: Any = norm, y: Any = y) -> None:
                turn, made, z, call = of
                lib.linear(x, qkv[turn], norm=norm, outs=made, shared=True)
                if attend:
                    call()
                lib.linear(z, [out[turn]], outs=[y], accumulate=True, shared=True)

            times = -(-40 // len(layers))
            us = replay(attends * times)
            if rows not in products:
                products[rows] = replay([lambda of=of: step(of, False) for of in layers * times])  # type: ignore[misc]
            added = replay([lambda of=of: step(of, True) for of in layers * times]) - products[rows]  # type: ignore[misc]
            gbs = rows * length * cache_bytes(bits) / us / 1e3
            figures = {"us": us, "us between products": added, "GB/s": gbs}
            found.append({"kernel": "attention", "rows": rows, "length": length, "bits": bits, **figures})
            print(f"attention {rows} x {length}, cache {bits}: {us:.1f} us, {gbs:.0f} GB/s; between products {added:.1f} us", flush=True)
            lib.spaces.pop("attention", None)
            del layer, layers, attends
            torch.cuda.empty_cache()
    return found


def prefill_attention(lib: Library) -> list[dict[str, Any]]:
    """One row's chunk of `tokens` from position `first` on, 32 heads over 8."""
    found = []
    for bits in ((16, 16), (4, 4)):
        for tokens, first in ((512, 0), (2048, 0), (2048, 32768)):
            pages = (tokens + first) // 256
            layer, batch = make_layer(8, 128, bits, pages), make_batch(1, 1, pages)
            batch.positions = torch.arange(first, first + tokens, dtype=torch.int32, device="cuda")
            batch.token_row = torch.zeros_like(batch.positions)
            q = torch.randn(tokens, 32, 128, device="cuda").half()
            us = replay([attention_call(lib, q, layer, batch)[1]] * 4)
            tflops = 4 * 32 * 128 * tokens * (first + tokens / 2) / us / 1e6
            found.append({"kernel": "prefill attention", "tokens": tokens, "first": first, "bits": bits, "us": us, "TFLOP/s": tflops})
            print(f"prefill attention {tokens} at {first}, cache {bits}: {us:.1f} us, {tflops:.0f} TFLOP/s", flush=True)
            lib.spaces.clear()
    return found


def encode(lib: Library) -> list[dict[str, Any]]:
    found = []
    for K in (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8):
        for count in (256, 1056):
            tiles = torch.randn(count, 256, device="cuda")
            lib.encode(tiles, K, "mul1", MULTIPLIERS["mul1"])
            times = []
            for _ in range(3):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(4):
                    lib.encode(tiles, K, "mul1", MULTIPLIERS["mul1"])
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) / 4)
            rate = count * 256 / min(times) / 1e6
            found.append({"kernel": "encode", "K": K, "tiles": count, "us": min(times) * 1e6, "Mw/s": rate})
            print(f"encode K={K:g}, {count} tiles: {rate:.1f} million weights/s", flush=True)
    return found


KINDS = {"linear": linear, "prefill": prefill, "attention": attention, "prefill-attention": prefill_attention, "encode": encode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = cuda_library()
    if path is None or not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU and libexl3_cuda.so (EXL3_TEST_CUDA_LIB=...)")
    lib = Library(path, "cuda")
    print(lib.table.describe(0).decode(), "|", lib.table.build.decode())
    found = []
    for kind in options.only.split(","):
        with torch.no_grad():
            found += KINDS[kind](lib)
    if options.json:
        result = {"device": lib.table.describe(0).decode(), "build": lib.table.build.decode(), "torch": torch.__version__, "results": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
