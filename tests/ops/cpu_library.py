"""libexl3_cpu by itself, through ctypes and numpy: every instruction tier in one process, without torch in between."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
CODEBOOKS = {"3inst": 0, "mcg": 1, "mul1": 2}
MULTIPLIERS = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
OPS = (
    "linear dense repack reconstruct rotate rms_norm rotary_table rotary cache_append attention cache_read act_mul embedding add softcap "
    "sample encode attend"
).split()


class WeightBlock(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in ("trellis", "suh", "svh", "bias")],
        *[(n, c_int32) for n in ("in_features", "out_features", "in_padded", "out_padded", "k2", "codebook")],
        ("multiplier", c_uint32),
        ("layout", c_int32),
    ]


class LinearArgs(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p), ("norm_weight", c_void_p), ("weights", c_void_p * 4), ("y", c_void_p * 4), ("x_stride", c_int64),
        ("y_stride", c_int64 * 4), ("workspace", c_void_p), ("workspace_bytes", c_int64), ("norm_eps", c_float),
        *[(n, c_int32) for n in ("rows", "count", "x_dtype", "y_dtype", "planes", "shared_suh", "activation", "accumulate")],
    ]  # fmt: skip


class DenseArgs(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in ("x", "weight", "bias", "y")],
        *[(n, c_int64) for n in ("x_stride", "y_stride")],
        *[(n, c_int32) for n in ("rows", "in_features", "out_features", "x_dtype", "weight_dtype", "y_dtype", "accumulate")],
    ]


class RepackArgs(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("out", c_void_p)]


class ReconstructArgs(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("out", c_void_p), ("out_dtype", c_int32), ("original_basis", c_int32)]


class RotateArgs(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in ("x", "y", "pre", "post")],
        *[(n, c_int64) for n in ("x_stride", "y_stride")],
        *[(n, c_int32) for n in ("rows", "n", "n_padded", "x_dtype", "y_dtype")],
    ]


class EncodeArgs(ctypes.Structure):
    _fields_ = [
        *[(n, c_void_p) for n in ("tiles", "states", "values", "workspace")],
        ("workspace_bytes", c_int64),
        *[(n, c_int32) for n in ("tiles_count", "k2", "codebook")],
        ("multiplier", c_uint32),
        ("seam_window", c_int32),
    ]


class BackendTable(ctypes.Structure):
    _fields_ = [
        ("abi", c_int32), ("bytes", c_int32), ("name", c_char_p), ("build", c_char_p),
        ("last_error", ctypes.CFUNCTYPE(c_char_p)), ("describe", ctypes.CFUNCTYPE(c_char_p, c_int)),
        *[(n, ctypes.CFUNCTYPE(c_int64, c_void_p))
          for n in ("repack_bytes", "linear_workspace", "attention_workspace", "sample_workspace", "encode_workspace")],
        *[(n, ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)) for n in OPS],
    ]  # fmt: skip


class NativeError(Exception):
    pass


def find() -> Path | None:
    """The library, the newest of those beside the package's files and in build folders."""
    places = [ROOT / "src/exl3/libexl3_cpu.so", *sorted((ROOT / "build").glob("**/libexl3_cpu.so"))]
    try:
        from exl3.ops import native

        places = [*native._candidates("cpu"), *places]
    except ImportError:
        pass
    return max((p for p in places if p.exists()), key=lambda p: p.stat().st_mtime, default=None)


def address(a: np.ndarray | None) -> int:
    return 0 if a is None else a.ctypes.data


class Library:
    """One copy of the library, whose tier EXL3_CPU_MAX_ISA decides on first use: so each tier needs its own copy."""

    def __init__(self, path: Path, tier: str, folder: Path) -> None:
        self.scratch = np.empty(0, np.uint8)  # reused from call to call, as the package does
        copy = folder / f"libexl3_cpu_{tier}.so"
        shutil.copyfile(path, copy)
        before = os.environ.get("EXL3_CPU_MAX_ISA")
        os.environ["EXL3_CPU_MAX_ISA"] = tier
        try:
            library = ctypes.CDLL(str(copy))
            library.exl3_get_backend.restype = POINTER(BackendTable)
            self.table = library.exl3_get_backend().contents
            self.tier = (self.table.describe(0) or b"").decode().split(",")[0]
        finally:
            os.environ.pop("EXL3_CPU_MAX_ISA")
            if before is not None:
                os.environ["EXL3_CPU_MAX_ISA"] = before

    def call(self, op: str, args: ctypes.Structure, threads: int = 1) -> None:
        if getattr(self.table, op)(ctypes.addressof(args), threads):
            raise NativeError((self.table.last_error() or b"").decode())

    def weight(
        self, trellis: np.ndarray, suh: np.ndarray, svh: np.ndarray, codebook: str, multiplier: int | None = None,
        bias: np.ndarray | None = None, in_features: int | None = None, out_features: int | None = None, repack: bool = True,
    ) -> WeightBlock:  # fmt: skip
        """A matrix as the library wants it; keeps its arrays alive."""
        rows, columns, words = trellis.shape
        w = WeightBlock(
            address(trellis), address(suh), address(svh), address(bias), in_features or 16 * rows, out_features or 16 * columns,
            16 * rows, 16 * columns, words // 8, CODEBOOKS[codebook], multiplier or MULTIPLIERS[codebook], 0,
        )  # fmt: skip
        w.keep = [trellis, suh, svh, bias]
        if repack:
            packed = np.empty(self.table.repack_bytes(ctypes.addressof(w)), np.uint8)
            self.call("repack", RepackArgs(ctypes.addressof(w), address(packed)))
            w.keep.append(packed)
            w.trellis, w.layout = address(packed), 1
        return w

    def linear_call(
        self, x: np.ndarray, weights: list[WeightBlock], *, norm: np.ndarray | None = None, eps: float = 0.0, activation: int = 0,
        out: list[np.ndarray] | None = None, accumulate: bool = False, planes: int = 2, shared_suh: bool = False, threads: int = 1,
        x_dtype: str | None = None,
    ) -> Callable[[], list[np.ndarray]]:  # fmt: skip
        """The call ready to run: x (rows, in_features) fp32 or fp16 (bf16 as uint16 with x_dtype) -> one array a matrix, or with an
        activation one in all."""
        rows = x.shape[0]
        count = 1 if activation else len(weights)
        if out is None:
            out = [np.full((rows, w.out_features), np.nan, np.float32) for w in weights[:count]]
        a = LinearArgs(x=address(x), norm_weight=address(norm), x_stride=x.shape[1], norm_eps=eps, rows=rows, count=len(weights))
        for i, w in enumerate(weights):
            a.weights[i] = ctypes.addressof(w)
        for i, y in enumerate(out):
            a.y[i], a.y_stride[i] = address(y), y.strides[0] // y.itemsize
        a.x_dtype, a.y_dtype = DTYPES[x_dtype or str(x.dtype)], DTYPES[str(out[0].dtype)]
        a.planes, a.shared_suh, a.activation, a.accumulate = planes, shared_suh, activation, accumulate
        space = np.zeros(self.table.linear_workspace(ctypes.addressof(a)), np.uint8)
        a.workspace, a.workspace_bytes = address(space), space.nbytes
        keep = (x, weights, norm, space)

        def run() -> list[np.ndarray]:
            self.call("linear", a, threads)
            assert keep is not None
            return out

        run.workspace = space  # type: ignore[attr-defined]
        return run

    def linear(self, x: np.ndarray, weights: list[WeightBlock], **options: Any) -> list[np.ndarray]:
        """linear_call, run once; the workspace's counters must be zero behind it."""
        call = self.linear_call(x, weights, **options)
        out = call()
        assert not call.workspace[: 1 << 16].any(), "counters are not zero after the call"  # type: ignore[attr-defined]
        return out

    def reconstruct(self, w: WeightBlock, original_basis: bool = False) -> np.ndarray:
        shape = (w.in_features, w.out_features) if original_basis else (w.in_padded, w.out_padded)
        out = np.full(shape, np.nan, np.float32 if original_basis else np.float16)
        self.call("reconstruct", ReconstructArgs(ctypes.addressof(w), address(out), DTYPES[str(out.dtype)], original_basis))
        return out

    def rotate(self, x: np.ndarray, pre: np.ndarray | None = None, post: np.ndarray | None = None) -> np.ndarray:
        rows, n = x.shape
        padded = -(-n // 128) * 128
        y = np.full((rows, padded), np.nan, x.dtype)
        code = DTYPES[str(x.dtype)]
        self.call("rotate", RotateArgs(address(x), address(y), address(pre), address(post), n, padded, rows, n, padded, code, code))
        return y

    def dense(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, out: np.ndarray | None = None, threads: int = 1,
        weight_dtype: str | None = None,
    ) -> np.ndarray:  # fmt: skip
        accumulate = out is not None
        if out is None:
            out = np.full((x.shape[0], weight.shape[0]), np.nan, np.float32)
        self.call("dense", DenseArgs(
            address(x), address(weight), address(bias), address(out), x.shape[1], out.shape[1], x.shape[0], x.shape[1], weight.shape[0],
            DTYPES[str(x.dtype)], DTYPES[weight_dtype or str(weight.dtype)], DTYPES[str(out.dtype)], accumulate,
        ), threads)  # fmt: skip
        return out

    def encode(
        self, tiles: np.ndarray, K: float, codebook: str, multiplier: int | None = None, seam_window: int = 0, threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """tiles (n, 256) fp32 -> states uint16, values fp32."""
        n = tiles.shape[0]
        states, values = np.zeros((n, 256), np.uint16), np.full((n, 256), np.nan, np.float32)
        a = EncodeArgs(address(tiles), address(states), address(values), 0, 0, n, round(2 * K), CODEBOOKS[codebook],
                       multiplier or MULTIPLIERS[codebook], seam_window)  # fmt: skip
        need = self.table.encode_workspace(ctypes.addressof(a))
        if self.scratch.nbytes < need:
            self.scratch = np.empty(need, np.uint8)
        a.workspace, a.workspace_bytes = address(self.scratch), self.scratch.nbytes
        self.call("encode", a, threads)
        return states, values


def random_matrix(seed: int, rows: int, columns: int, K: float, codebook: str) -> dict[str, Any]:
    """Random bits are a valid trellis; sizes in features, multiples of 128."""
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-32768, 32768, (rows // 16, columns // 16, round(16 * K))).astype(np.int16)
    suh = (rng.choice([-1.0, 1.0], rows) * rng.uniform(0.01, 0.03, rows)).astype(np.float16)
    svh = (rng.choice([-1.0, 1.0], columns) * rng.uniform(0.5, 1.5, columns)).astype(np.float16)
    return {"trellis": trellis, "suh": suh, "svh": svh, "codebook": codebook}
