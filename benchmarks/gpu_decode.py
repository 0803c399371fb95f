"""Times one decode step of a whole model shape as one graph: every kernel of its layers and head, no Python in between.

    python benchmarks/gpu_decode.py [--shape 8B] [--cases 1:1:16,1:32768:16,8:32768:4] [--json FILE]

A case is rows:context:cache bits. Weights are random trellis bits (4 bits a weight, mul1; 6-bit head); norms are ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import Library, cuda_library, make_batch, make_layer, random_weights, replay


@dataclass
class Shape:
    hidden: int
    inner: int
    heads: int
    kv: int
    dim: int
    vocab: int
    layers: int


SHAPES = {"8B": Shape(4096, 14336, 32, 8, 128, 128256, 32), "70B": Shape(8192, 28672, 64, 8, 128, 128256, 80)}


class Step:
    """The buffers and weights of one decode step; calling it launches all its kernels."""

    def __init__(self, lib: Library, shape: Shape, rows: int, length: int, bits: int) -> None:
        s, half = shape, {"dtype": torch.half, "device": "cuda"}
        self.lib, self.shape, self.rows = lib, shape, rows
        pages = -(-length // 256)
        self.batch = make_batch(rows, length, pages)
        self.caches = [make_layer(s.kv, s.dim, (bits, bits), rows * pages) for _ in range(4)]  # layers take turns: more than the L2 holds
        self.x, self.norm = torch.randn(rows, s.hidden, device="cuda"), torch.ones(s.hidden, device="cuda")
        self.q, self.k, self.v = (torch.empty(rows, n, s.dim, **half) for n in (s.heads, s.kv, s.kv))
        self.gated = torch.empty(rows, s.inner, **half)
        self.cos, self.sin = (torch.rand(rows, s.dim // 2, device="cuda") for _ in range(2))
        self.logits = torch.empty(rows, s.vocab, device="cuda")
        self.layers = [
            {
                "qkv": [weight(s.hidden, n * s.dim) for n in (s.heads, s.kv, s.kv)],
                "o": weight(s.heads * s.dim, s.hidden),
                "gate_up": [weight(s.hidden, s.inner) for _ in range(2)],
                "down": weight(s.inner, s.hidden),
            }
            for _ in range(s.layers)
        ]
        self.head = weight(s.hidden, s.vocab, 6)
        self.attended: list[torch.Tensor] = []
        self.attend: list[Callable[[], Any]] = []
        for cache in self.caches:
            y, call = lib.attend_call(self.q, self.k, self.v, cache, self.batch, (self.cos, self.sin), scale=s.dim**-0.5)
            self.attended.append(y)
            self.attend.append(call)
        lib.space("linear", 64 << 20)

    def __call__(self) -> None:
        lib, rows = self.lib, self.rows
        for i, layer in enumerate(self.layers):
            turn = i % 4
            outs = [t.view(rows, -1) for t in (self.q, self.k, self.v)]
            lib.linear(self.x, layer["qkv"], norm=self.norm, outs=outs, shared=True)
            self.attend[turn]()
            lib.linear(self.attended[turn].view(rows, -1), [layer["o"]], outs=[self.x], accumulate=True)
            lib.linear(self.x, layer["gate_up"], norm=self.norm, activation="silu", outs=[self.gated], shared=True)
            lib.linear(self.gated, [layer["down"]], outs=[self.x], accumulate=True)
        lib.linear(self.x, [self.head], norm=self.norm, outs=[self.logits])


def weight(n_in: int, n_out: int, K: float = 4) -> dict[str, Any]:
    return random_weights(n_in, n_out, K, "mul1", 1)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8B")
    parser.add_argument("--cases", default="1:1:16,1:4096:16,1:32768:16,1:32768:4,8:1:16,8:32768:16,8:32768:4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    path = cuda_library()
    if path is None or not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU and libexl3_cuda.so (EXL3_TEST_CUDA_LIB=...)")
    lib = Library(path, "cuda")
    found = []
    for case in options.cases.split(","):
        rows, length, bits = map(int, case.split(":"))
        us = replay([Step(lib, SHAPES[options.shape], rows, length, bits)])
        rate = rows * 1e6 / us
        found.append(
            {"kernel": "decode step", "shape": options.shape, "rows": rows, "length": length, "bits": bits, "us": us, "tokens/s": rate}
        )
        print(f"decode step {options.shape}, {rows} x {length}, {bits}-bit cache: {us:.0f} us, {rate:.0f} tokens/s", flush=True)
        lib.spaces.clear()
        torch.cuda.empty_cache()
    if options.json:
        result = {"device": lib.table.describe(0).decode(), "build": lib.table.build.decode(), "torch": torch.__version__, "results": found}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
