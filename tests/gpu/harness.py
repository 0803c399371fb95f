"""Drives a kernel library through its C table with ctypes: the tests below need neither _native nor the package's dispatch."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.ops import blocks

ROOT = Path(__file__).resolve().parents[2]
# the table of cpp/include/exl3/ops.h in order
QUERIES = ("repack_bytes", "linear_workspace", "attention_workspace", "sample_workspace", "encode_workspace")
OPS = (
    "linear dense repack reconstruct rotate rms_norm rotary_table rotary cache_append attention cache_read act_mul embedding add softcap"
    " sample encode attend"
).split()


class Table(ctypes.Structure):
    _fields_ = [
        ("abi", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("name", ctypes.c_char_p),
        ("build", ctypes.c_char_p),
        ("last_error", ctypes.CFUNCTYPE(ctypes.c_char_p)),
        ("describe", ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_int)),
        *((name, ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)) for name in QUERIES),
        *((name, ctypes.c_void_p) for name in OPS),
    ]


class Library:
    """One opened backend library; `device` is where its tensors live."""

    def __init__(self, path: str | Path, device: str) -> None:
        self.handle = ctypes.CDLL(str(path))
        self.handle.exl3_get_backend.restype = ctypes.POINTER(Table)
        self.table = self.handle.exl3_get_backend().contents
        assert self.table.bytes == ctypes.sizeof(Table)
        self.device = torch.device(device)
        prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self.ops = {name: prototype(address) for name in OPS if (address := getattr(self.table, name))}
        self.spaces: dict[str, Tensor] = {}

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream if self.device.type == "cuda" else 0

    def call(self, op: str, block: bytes) -> None:
        status = self.ops[op](block, self.stream())
        if status:
            raise RuntimeError(f"{op}: status {status}: {self.table.last_error().decode()}")

    def space(self, kind: str, nbytes: int) -> Tensor:
        """A workspace, zero when new. Its first 64 KiB must be zero again after each call; `clean` checks that."""
        found = self.spaces.get(kind)
        if found is None or found.numel() < nbytes:
            found = self.spaces[kind] = torch.zeros(max(nbytes, 1 << 20), dtype=torch.uint8, device=self.device)
        return found

    def clean(self, kind: str) -> bool:
        return kind not in self.spaces or not bool(self.spaces[kind][:65536].any())

    # ------------------------------------------------------------------ operations
    def weight(self, w: dict[str, Any]) -> ctypes.Array[ctypes.c_char]:
        return ctypes.create_string_buffer(
            blocks.WEIGHT.pack(
                w["trellis"].data_ptr(), w["suh"].data_ptr(), w["svh"].data_ptr(), 0 if w["bias"] is None else w["bias"].data_ptr(),
                w["in"], w["out"], w["trellis"].shape[0] * 16, w["trellis"].shape[1] * 16, w["trellis"].shape[2] // 8,
                {"3inst": 0, "mcg": 1, "mul1": 2}[w["codebook"]], w["multiplier"], 0,
            )
        )  # fmt: skip

    def linear(
        self,
        x: Tensor,
        weights: list[dict[str, Any]],
        *,
        norm: Tensor | None = None,
        eps: float = 1e-5,
        activation: str | None = None,
        outs: list[Tensor] | None = None,
        accumulate: bool = False,
        dtype: torch.dtype = torch.float16,
        planes: int = 2,
        shared: bool | None = None,
    ) -> list[Tensor]:
        structs = [self.weight(w) for w in weights]
        count = 1 if activation else len(weights)
        if outs is None:  # poisoned: whatever is not written shows
            outs = [torch.full((x.shape[0], w["out"]), float("nan"), dtype=dtype, device=x.device) for w in weights[:count]]
        pad = [0] * (4 - count)
        if shared is None:
            shared = all(torch.equal(weights[0]["suh"], w["suh"]) for w in weights)
        head = (
            x.data_ptr(), 0 if norm is None else norm.data_ptr(), *(ctypes.addressof(s) for s in structs), *[0] * (4 - len(structs)),
            *(y.data_ptr() for y in outs), *pad, x.stride(0), *(y.stride(0) for y in outs), *pad,
        )  # fmt: skip
        tail = (
            eps, x.shape[0], len(weights), blocks.DTYPES[x.dtype], blocks.DTYPES[outs[0].dtype], planes, shared,
            blocks.ACTIVATIONS[activation], accumulate,
        )  # fmt: skip
        nbytes = self.table.linear_workspace(blocks.LINEAR.pack(*head, 0, 0, *tail))
        space = self.space("linear", nbytes)
        self.call("linear", blocks.LINEAR.pack(*head, space.data_ptr(), space.numel(), *tail))
        return outs

    def reconstruct(self, w: dict[str, Any], original_basis: bool, dtype: torch.dtype) -> Tensor:
        struct = self.weight(w)
        shape = (w["in"], w["out"]) if original_basis else (w["trellis"].shape[0] * 16, w["trellis"].shape[1] * 16)
        out = torch.full(shape, float("nan"), dtype=dtype, device=self.device)
        self.call("reconstruct", blocks.RECONSTRUCT.pack(ctypes.addressof(struct), out.data_ptr(), blocks.DTYPES[dtype], original_basis))
        return out

    def layer(self, c: Any) -> tuple[Any, ...]:
        def ptr(t: Tensor | None) -> int:
            return 0 if t is None else t.data_ptr()

        return (ptr(c.k), ptr(c.v), ptr(c.k_scale), ptr(c.v_scale), c.k.shape[0], c.kv_heads, c.head_dim, c.k_bits, c.v_bits, c.compand)

    def attention(
        self, q: Tensor, c: Any, b: Any, *, scale: float, window: int = 0, softcap: float = 0.0, sinks: Tensor | None = None
    ) -> Tensor:
        y = torch.full_like(q, float("nan"))
        head = (
            *self.layer(c), q.data_ptr(), y.data_ptr(), q.stride(0), y.stride(0), b.positions.data_ptr(), b.token_row.data_ptr(),
            b.block_table.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        tail = (q.shape[0], q.shape[1], b.block_table.stride(0), blocks.DTYPES[q.dtype], scale, softcap, window)
        nbytes = self.table.attention_workspace(blocks.ATTENTION.pack(*head, 0, 0, *tail))
        space = self.space("attention", nbytes)
        self.call("attention", blocks.ATTENTION.pack(*head, space.data_ptr(), space.numel(), *tail))
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor, c: Any, b: Any, table: tuple[Tensor, Tensor] | None = None, **options: Any) -> Tensor:
        """Rotation, append and attention in one call; q and k are copied first."""
        y, call = self.attend_call(q.clone(), k.clone(), v, c, b, table, **options)
        call()
        return y

    def attend_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        c: Any,
        b: Any,
        table: tuple[Tensor, Tensor] | None = None,
        *,
        interleaved: bool = False,
        norms: tuple[Tensor, Tensor] | None = None,
        eps: float = 1e-6,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Callable[[], None]]:
        """The result's tensor and the call that fills it."""
        y = torch.full_like(q, float("nan"))
        head = (
            *self.layer(c), q.data_ptr(), y.data_ptr(), q.stride(0), y.stride(0), b.positions.data_ptr(), b.token_row.data_ptr(),
            b.block_table.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        tail = (q.shape[0], q.shape[1], b.block_table.stride(0), blocks.DTYPES[q.dtype], scale, softcap, window)
        space = self.space("attention", self.table.attention_workspace(blocks.ATTENTION.pack(*head, 0, 0, *tail)))
        pointers = [0 if t is None else t.data_ptr() for t in (*(table or (None, None)), *(norms or (None, None)))]
        rotary_dim = 0 if table is None else 2 * table[0].shape[1]
        more = (k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), *pointers, rotary_dim, interleaved, eps)
        block = blocks.ATTEND.pack(*head, space.data_ptr(), space.numel(), *tail, *more)

        def call(keep: Any = (q, k, v, c, b, table, norms, sinks, space)) -> None:
            self.call("attend", block)

        return y, call

    def encode(self, tiles: Tensor, K: float, codebook: str, multiplier: int, seam_window: int = 0) -> tuple[Tensor, Tensor]:
        states = torch.full((len(tiles), 256), -1, dtype=torch.int16, device=self.device)
        values = torch.full((len(tiles), 256), float("nan"), device=self.device)
        head = (tiles.data_ptr(), states.data_ptr(), values.data_ptr())
        tail = (len(tiles), round(2 * K), {"3inst": 0, "mcg": 1, "mul1": 2}[codebook], multiplier, seam_window)
        space = self.space("encode", self.table.encode_workspace(blocks.ENCODE.pack(*head, 0, 0, *tail)))
        self.call("encode", blocks.ENCODE.pack(*head, space.data_ptr(), space.numel(), *tail))
        return states, values


def cuda_library() -> Path | None:
    """libexl3_cuda.so: EXL3_TEST_CUDA_LIB, or where a build left it."""
    places = [Path(p) for p in (os.environ.get("EXL3_TEST_CUDA_LIB"),) if p]
    places += [ROOT / "build" / "cuda" / "libexl3_cuda.so", ROOT / "src" / "exl3" / "libexl3_cuda.so"]
    return next((p for p in places if p.exists()), None)


def emulated_library(directory: Path) -> Path:
    """Compiles the portable kernels for the CPU emulator."""
    path = directory / "libexl3_emulated.so"
    source = ROOT / "cpp" / "gpu" / "emulated.cpp"
    subprocess.run(
        ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-w", f"-I{ROOT / 'cpp' / 'include'}", str(source), "-o", str(path)], check=True
    )
    return path


MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def random_weight(n_in: int, n_out: int, K: float, codebook: str, device: Any, *, bias: bool = False, seed: int = 0) -> dict[str, Any]:
    """A matrix of random trellis bits: any bits are a legal code."""
    g = torch.Generator().manual_seed(seed + n_in * 7 + n_out * 3 + int(2 * K))
    kb, nb = -(-n_in // 128) * 8, -(-n_out // 128) * 8
    suh = (torch.rand(kb * 16, generator=g) + 0.5) * (torch.randint(0, 2, (kb * 16,), generator=g) * 2 - 1) / 64
    svh = (torch.rand(nb * 16, generator=g) + 0.5) * (torch.randint(0, 2, (nb * 16,), generator=g) * 2 - 1)
    return {
        "trellis": torch.randint(-32768, 32768, (kb, nb, round(16 * K)), dtype=torch.int16, generator=g).to(device),
        "suh": suh.half().to(device),
        "svh": svh.half().to(device),
        "bias": torch.randn(n_out, generator=g).to(device) if bias else None,
        "in": n_in,
        "out": n_out,
        "codebook": codebook,
        "multiplier": MULTIPLIERS[codebook],
    }


def exact_weight(w: dict[str, Any], device: str = "cpu") -> Tensor:
    """float64 `(in, out)` by the package's plain torch codec, which the conformance vectors hold."""
    from exl3 import codec

    m = None if w["codebook"] == "3inst" else w["multiplier"]
    inner = codec.decode(w["trellis"].to(device), w["codebook"], m).double()
    h = hadamard128().to(device)
    a, b = inner.shape
    inner = (h @ inner.view(a // 128, 128, b)).view(a, b // 128, 128) @ h
    full = w["suh"].to(device).double()[:, None] * inner.reshape(a, b) * w["svh"].to(device).double()
    return full[: w["in"], : w["out"]]


def hadamard128() -> Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / 128**0.5


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float64; NaN where an output was not written."""
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
