"""Matrix products: `linear` (EXL3 weights), `dense` (plain weights), and the two pieces the converter needs: `rotate` and `encode`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from exl3 import settings
from exl3.codec.codebooks import MULTIPLIERS
from exl3.errors import ArgumentError
from exl3.ops import blocks, checks, folded, native, reference
from exl3.ops.weight import CODEBOOKS, Weight

MAX_GROUP = 4

planes: int | None = None
"""Operands of the EXL3 product: 2 or 1 planes of int8, 0 floating point; None takes the setting's (EXL3_CPU_PLANES, EXL3_INT8_GEMV)."""


def active_planes(device: torch.device) -> int:
    """int8 planes of the activations of an EXL3 product on `device`; 0: floating-point operands."""
    if planes is not None:
        return planes
    return _default_planes(device.type)


@cache
def _default_planes(kind: str) -> int:
    if kind == "cpu":
        return int(str(settings.get("EXL3_CPU_PLANES")))
    backend = "rocm" if torch.version.hip else "cuda"
    return {"0": 0, "1": 2, "2": 1}[str(settings.get("EXL3_INT8_GEMV", backend))]


class _Group:
    """What linear knows about a tuple of weights that share their input, found once."""

    def __init__(self, weights: tuple[Weight, ...]) -> None:
        first = weights[0]
        if not 1 <= len(weights) <= MAX_GROUP:
            raise ArgumentError(f"linear: {len(weights)} weights given, a group has 1 to {MAX_GROUP}")
        for w in weights:
            if not isinstance(w, Weight):
                raise ArgumentError(f"linear: weights must be ops.Weight, got {type(w).__name__}")
            if w.in_features != first.in_features or w.in_padded != first.in_padded:
                raise ArgumentError(f"linear: weights of one group take {first.in_features} and {w.in_features} inputs")
            if w.device != first.device:
                raise ArgumentError(f"linear: weights of one group are on {first.device} and {w.device}")
        with torch.utils._python_dispatch._disable_current_modes():  # may be met first while a tape records
            self.shared_suh = all(torch.equal(first.suh, w.suh) for w in weights[1:])
        self.addresses = [w.address for w in weights] + [0] * (MAX_GROUP - len(weights))
        self.workspace: dict[tuple[int, ...], int] = {}  # bytes by (rows, dtypes, planes, activation, norm)


def _group(weights: tuple[Weight, ...]) -> _Group:
    if not isinstance(weights[0], Weight):
        raise ArgumentError(f"linear: weights must be ops.Weight, got {type(weights[0]).__name__}")
    key = tuple([w.serial for w in weights]) if len(weights) > 1 else ()
    found = weights[0].groups.get(key)
    if found is None:
        found = weights[0].groups[key] = _Group(weights)
    return found


def linear(
    x: Tensor,
    weights: Weight | Sequence[Weight],
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: str | None = None,
    out: Any = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """x @ W + bias for x `(rows, in_features)` and one Weight -> `(rows, out_features)`, or for a tuple of up to four -> a tuple.

    norm: fp32 `(in_features,)`, the input is RMS-normalised with `eps` and scaled first. activation with exactly (gate, up): one
    result act(gate) * up. out: tensor (or tuple) to write into; accumulate adds into it, fp32. dtype of a new result: default x's.
    """
    single = isinstance(weights, Weight)
    group: tuple[Any, ...] = (weights,) if isinstance(weights, Weight) else tuple(weights)
    info = _group(group)
    first = group[0]
    outs = None if out is None else (out,) if isinstance(out, Tensor) else tuple(out)
    op = native.serving("linear", x, first.suh, norm, *(outs or ()))
    if op is None:
        return reference.linear(x, weights, norm=norm, eps=eps, activation=activation, out=out, accumulate=accumulate, dtype=dtype)
    x_stride = checks.rows("linear", "x", x, first.in_features)
    if norm is not None:
        checks.tensor("linear", "norm", norm, checks.F32, shape=(first.in_features,), dense=True)
    if activation is not None:
        if activation not in blocks.ACTIVATIONS or activation == "xielu":
            raise ArgumentError(f"linear: activation {activation!r} cannot be fused; call act_mul")
        if len(group) != 2 or group[0].out_features != group[1].out_features:
            raise ArgumentError("linear: activation needs exactly two weights (gate, up) of one size")
    count = 1 if activation is not None else len(group)
    rows = x.shape[0]
    if outs is None:
        if accumulate:
            raise ArgumentError("linear: accumulate needs out")
        y_dtype = x.dtype if dtype is None else dtype
        if y_dtype not in blocks.DTYPES:
            raise ArgumentError(f"linear: dtype must be float32, float16 or bfloat16, got {y_dtype}")
        outs = tuple([torch.empty((rows, w.out_features), dtype=y_dtype, device=x.device) for w in group[:count]])
        strides = [w.out_features for w in group[:count]]
    else:
        if len(outs) != count:
            raise ArgumentError(f"linear: out has {len(outs)} tensors for {count} results")
        y_dtype = outs[0].dtype
        strides = []
        for w, y in zip(group, outs):
            strides.append(checks.rows("linear", "out", y, w.out_features, checks.F32 if accumulate else (y_dtype,), written=True))
            if y.shape[0] != rows:
                raise ArgumentError(f"linear: out has {y.shape[0]} rows, x has {rows}")
            checks.apart("linear", "out", y, "x", x)
        if y_dtype not in blocks.DTYPES:
            raise ArgumentError(f"linear: out must be float32, float16 or bfloat16, got {y_dtype}")
    if rows >= folded.LEAST_ROWS and folded.serves(x, group, norm, activation, y_dtype):
        folded.linear(x, group, norm, eps, activation, outs, accumulate)
        return outs[0] if single or activation is not None else outs
    pad = MAX_GROUP - count
    act, grade = blocks.ACTIVATIONS[activation], active_planes(x.device)
    key = (rows, blocks.DTYPES[x.dtype], blocks.DTYPES[y_dtype], grade, act, norm is not None)
    pointers = [y.data_ptr() for y in outs] + [0] * pad
    fixed = (x_stride, *strides, *([0] * pad))
    tail = (eps, rows, len(group), key[1], key[2], grade, info.shared_suh, act, accumulate)
    head = (x.data_ptr(), 0 if norm is None else norm.data_ptr(), *info.addresses, *pointers, *fixed)
    nbytes = info.workspace.get(key)
    if nbytes is None:
        nbytes = info.workspace[key] = native.backend(x.device).workspace("linear", blocks.LINEAR.pack(*head, 0, 0, *tail))
    space = native.workspace("linear", x.device, nbytes)
    block = blocks.LINEAR.pack(*head, 0 if space is None else space.data_ptr(), 0 if space is None else space.numel(), *tail)
    native.launch(op, x.device, block, x, norm, group, outs, space)
    return outs[0] if single or activation is not None else outs


MANY_ROWS = 256


def _dense_many(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, accumulate: bool, dtype: torch.dtype | None) -> Tensor:
    """Whole sequences (calibration, evaluation, prefill): torch's product is faster than ours, which is made for few rows. On a GPU
    operands of one half type stay in it (fp32 accumulation inside); everything else is widened to fp32."""
    if x.device.type == "cpu" or x.dtype != weight.dtype or x.dtype == torch.float32:
        return reference.dense(x, weight, bias, out=out, accumulate=accumulate, dtype=dtype)
    y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if out is None:
        return y if dtype is None else y.to(dtype)
    return out.add_(y) if accumulate else out.copy_(y)


def dense(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x @ weight.T + bias for an unquantized weight `(out, in)` fp32, fp16 or bf16 and an fp32 bias `(out,)`; x `(rows, in)`."""
    op = native.serving("dense", x, weight, bias, out)
    if op is None:
        return reference.dense(x, weight, bias, out=out, accumulate=accumulate, dtype=dtype)
    checks.tensor("dense", "weight", weight, checks.FLOATS, ndim=2, dense=True)
    n_out, n_in = weight.shape
    x_stride = checks.rows("dense", "x", x, n_in)
    if bias is not None:
        checks.tensor("dense", "bias", bias, checks.F32, shape=(n_out,), dense=True)
    if x.shape[0] >= MANY_ROWS and native.recording.keep is None:
        return _dense_many(x, weight, bias, out, accumulate, dtype)
    out, y_stride = output("dense", x, n_out, out, accumulate, dtype)
    block = blocks.DENSE.pack(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), x_stride, y_stride,
        x.shape[0], n_in, n_out, blocks.DTYPES[x.dtype], blocks.DTYPES[weight.dtype], blocks.DTYPES[out.dtype], accumulate,
    )  # fmt: skip
    native.launch(op, x.device, block, x, weight, bias, out)
    return out


def output(
    op: str, x: Tensor, n: int, out: Tensor | None, accumulate: bool, dtype: torch.dtype | None, *, in_place: bool = False
) -> tuple[Tensor, int]:
    """The `(rows, n)` result, checked or new, and its row stride."""
    if out is None:
        if accumulate:
            raise ArgumentError(f"{op}: accumulate needs out")
        out = torch.empty((x.shape[0], n), dtype=x.dtype if dtype is None else dtype, device=x.device)
        if out.dtype not in blocks.DTYPES:
            raise ArgumentError(f"{op}: dtype must be float32, float16 or bfloat16, got {out.dtype}")
        return out, n
    stride = checks.rows(op, "out", out, n, checks.F32 if accumulate else checks.FLOATS, written=True)
    if out.shape[0] != x.shape[0]:
        raise ArgumentError(f"{op}: out has {out.shape[0]} rows, x has {x.shape[0]}")
    same = in_place and out.data_ptr() == x.data_ptr() and out.dtype == x.dtype and out.stride() == x.stride()
    if not same or accumulate:
        checks.apart(op, "out", out, "x", x)
    return out, stride


def rotate(x: Tensor, pre: Tensor | None = None, post: Tensor | None = None, n_padded: int | None = None) -> Tensor:
    """post * H128(pre * x) over consecutive blocks of 128 (format section 4.1): x `(rows, n)`, extended with zeros to `(rows, n_padded)`
    (default: n rounded up to a multiple of 128). pre and post: fp32 `(>= n,)` and `(n_padded,)`."""
    op = native.serving("rotate", x, pre, post)
    if op is None or x.dtype not in blocks.DTYPES:
        return reference.rotate(x, pre, post, n_padded)
    x_stride = checks.rows("rotate", "x", x)
    rows, n = x.shape
    n_padded = -(-n // 128) * 128 if n_padded is None else n_padded
    if n_padded % 128 or n_padded < n:
        raise ArgumentError(f"rotate: n_padded {n_padded} must be a multiple of 128 not below {n}")
    if pre is not None:
        checks.tensor("rotate", "pre", pre, checks.F32, ndim=1, dense=True)
        if pre.shape[0] < n:
            raise ArgumentError(f"rotate: pre has {pre.shape[0]} values for {n} columns")
    if post is not None:
        checks.tensor("rotate", "post", post, checks.F32, shape=(n_padded,), dense=True)
    y = torch.empty((rows, n_padded), dtype=x.dtype, device=x.device)
    code = blocks.DTYPES[x.dtype]
    block = blocks.ROTATE.pack(
        x.data_ptr(), y.data_ptr(), 0 if pre is None else pre.data_ptr(), 0 if post is None else post.data_ptr(),
        x_stride, n_padded, rows, n, n_padded, code, code,
    )  # fmt: skip
    native.launch(op, x.device, block, x, pre, post, y)
    return y


def encode(tiles: Tensor, K: float, codebook: str, multiplier: int | None = None, *, seam_window: int = 0) -> tuple[Tensor, Tensor]:
    """Tail-biting trellis search: tiles `(n, 256)` fp32 in stream order -> (states `(n, 256)`, uint16 bit patterns viewed as int16,
    decoded values `(n, 256)` fp32). K: 1..8, 1.5, 2.5, 3.5. `seam_window`: positions of the first pass round the seam;
    0: the whole ring."""
    if codebook not in CODEBOOKS:
        raise ArgumentError(f"encode: codebook {codebook!r}: use one of {', '.join(CODEBOOKS)}")
    op = native.serving("encode", tiles)
    if op is None:
        return reference.encode(tiles, K, codebook, multiplier, seam_window=seam_window)
    checks.tensor("encode", "tiles", tiles, checks.F32, ndim=2, dense=True)
    if tiles.shape[1] != 256:
        raise ArgumentError(f"encode: tiles must have shape (n, 256), got {tuple(tiles.shape)}")
    if not 0 <= seam_window <= 256 or seam_window % 2:
        raise ArgumentError(f"encode: seam_window {seam_window} must be an even number from 0 to 256")
    count = tiles.shape[0]
    states = torch.empty((count, 256), dtype=torch.int16, device=tiles.device)
    values = torch.empty((count, 256), dtype=torch.float32, device=tiles.device)
    constant = MULTIPLIERS[codebook] if multiplier is None or codebook == "3inst" else multiplier & 0xFFFFFFFF
    head = (tiles.data_ptr(), states.data_ptr(), values.data_ptr())
    tail = (count, round(2 * K), CODEBOOKS[codebook], constant, seam_window)
    space = native.workspace(
        "scratch", tiles.device, native.backend(tiles.device).workspace("encode", blocks.ENCODE.pack(*head, 0, 0, *tail))
    )
    block = blocks.ENCODE.pack(*head, 0 if space is None else space.data_ptr(), 0 if space is None else space.numel(), *tail)
    native.launch(op, tiles.device, block, tiles, states, values, space)
    return states, values
