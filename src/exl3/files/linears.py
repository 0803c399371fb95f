"""One matrix on disk: which tensors make it up, and how they become what a `Linear` holds (spec sections 1.4, 1.5, 4.5, 4.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from exl3.codec import unpack_signs
from exl3.errors import FormatError, NumericalError
from exl3.files.safetensors import TensorInfo
from exl3.files.slabs import read_tensors

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
HALF_RATES = (24, 40, 56)  # trellis widths of K = 1.5, 2.5, 3.5
MARKERS = ("mcg", "mul1")


def pad128(n: int) -> int:
    return -(-n // 128) * 128


class Piece(NamedTuple):
    """Rows [start, start + rows) of a dense source matrix, with the tensors that belong to it."""

    key: str
    start: int
    rows: int
    weight: TensorInfo  # the whole source
    scale: TensorInfo | None  # fp8 only
    bias: TensorInfo | None


@dataclass(frozen=True)
class LinearFiles:
    """Where one logical matrix y = x @ W + b lies on disk.

    kind            "exl3" or "dense"
    key             the module key it was found under
    names           role ("trellis", "suh" or "su", "svh" or "sv", "mcg" or "mul1", "weight", "scale", "bias") -> tensor name
    in_features, out_features   true sizes (the stored ones where the caller gave none)
    in_padded, out_padded       stored sizes
    bits            bits per weight as stored
    K, codebook, multiplier     of an EXL3 matrix; multiplier unsigned, None for 3inst
    covers          every tensor name that is hereby accounted for, used or overruled
    tied            a head that is the embedding table
    """

    kind: str
    key: str
    names: dict[str, str]
    in_features: int
    out_features: int
    in_padded: int
    out_padded: int
    bits: float
    K: int | float | None = None
    codebook: str | None = None
    multiplier: int | None = None
    covers: tuple[str, ...] = ()
    tied: bool = False
    pieces: tuple[Piece, ...] = ()
    infos: Mapping[str, TensorInfo] | None = None  # of an EXL3 matrix, by role

    @property
    def nbytes(self) -> int:
        """Bytes on disk that this matrix needs."""
        if self.infos is not None:
            return sum(info.nbytes for info in self.infos.values())
        return sum(p.weight.nbytes * p.rows // max(p.weight.shape[0], 1) for p in self.pieces)


def load_linears(
    linears: Mapping[str, LinearFiles],
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    check: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """Read many matrices with few reads: label -> tensors.

    EXL3: `trellis` int16 as on disk, `suh` and `svh` fp16 `(in_padded,)`, `(out_padded,)` (packed signs unpacked), `bias` fp32
    `(out_features,)` where there is one. Dense: `weight` `(out_features, in_features)` cropped to true sizes, fp8 sources
    multiplied out, in `dtype` (default: as stored; bfloat16 for fp8), and `bias` fp32.
    Scales and biases must be finite, and dense weights too when `check` is set; a bf16 or fp32 weight must fit when `dtype` is
    fp16. Raises `NumericalError` naming tensor and row otherwise.
    """
    wanted: dict[str, TensorInfo] = {}
    for linear in linears.values():
        if linear.kind == "exl3":
            assert linear.infos is not None
            wanted |= {linear.names[role]: info for role, info in linear.infos.items() if role not in MARKERS}
        else:
            for piece in linear.pieces:
                wanted |= _piece_infos(piece)
    raw = read_tensors(wanted, device)
    loaded = {}
    for label, linear in linears.items():
        loaded[label] = _exl3_tensors(linear, raw) if linear.kind == "exl3" else _dense_tensors(linear, raw, dtype, check)
    _check_scales(linears, loaded)
    return loaded


def _piece_infos(piece: Piece) -> dict[str, TensorInfo]:
    """Tensors to read for one piece: only its rows of weight and bias, the scales whole (a block may straddle the cut)."""
    infos = {f"{piece.key}.weight:{piece.start}+{piece.rows}": piece.weight.rows(piece.start, piece.rows)}
    if piece.scale is not None:
        infos[f"{piece.key}.scale"] = piece.scale
    if piece.bias is not None:
        infos[f"{piece.key}.bias:{piece.start}+{piece.rows}"] = piece.bias.rows(piece.start, piece.rows)
    return infos


def _exl3_tensors(linear: LinearFiles, raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = linear.names
    result = {"trellis": raw[names["trellis"]]}
    for full, packed in (("suh", "su"), ("svh", "sv")):
        result[full] = raw[names[full]] if full in names else unpack_signs(raw[names[packed]])
    if "bias" in names:
        result["bias"] = raw[names["bias"]][: linear.out_features].float()
    return result


def _dense_tensors(linear: LinearFiles, raw: Mapping[str, Tensor], dtype: torch.dtype | None, check: bool) -> dict[str, Tensor]:
    weights, biases = [], []
    for piece in linear.pieces:
        weight = raw[f"{piece.key}.weight:{piece.start}+{piece.rows}"]
        if piece.scale is not None:
            weight = dequantize_fp8(weight, raw[f"{piece.key}.scale"], piece.weight.shape[0], piece.start)
            weight = weight.to(dtype or torch.bfloat16)
        weights.append(weight)
        if piece.bias is not None:
            biases.append(raw[f"{piece.key}.bias:{piece.start}+{piece.rows}"].float())
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    weight = weight[: linear.out_features, : linear.in_features]
    if check:
        check_finite(f"{linear.key}.weight", weight)
    if dtype is not None and weight.dtype != dtype:
        narrow = weight.to(dtype)
        if dtype == torch.float16 and not all_finite(narrow):
            check_finite(f"{linear.key}.weight", weight)
            row = int((~narrow.isfinite()).any(1).nonzero()[0])
            raise NumericalError(f"{linear.key}.weight: row {row} has values beyond fp16's 65504; load this model as bfloat16 or float32")
        weight = narrow
    result = {"weight": weight.contiguous()}
    if biases:
        result["bias"] = torch.cat(biases)[: linear.out_features]
    return result


def dequantize_fp8(weight: Tensor, scale: Tensor, out_features: int, start: int = 0) -> Tensor:
    """fp8 rows [start, start + n) of a matrix with `out_features` rows, times their scales, in fp32.

    `scale` has one element (per tensor), one per output row (`(out,)` or `(out, 1)`), or one per block
    `(ceil(out / b0), ceil(in / b1))`; the blocks' sizes follow from the shapes and are multiples of a power of two in practice,
    so the smallest power of two that fits is taken (128 for DeepSeek's files).
    """
    rows, cols = weight.shape
    w = weight.float()
    s = scale.float()
    if s.numel() == 1:
        return w * s.flatten()[0]
    if s.ndim == 1:
        s = s[:, None]
    b0, b1 = block_size(out_features, s.shape[0]), block_size(cols, s.shape[1])
    s = s[torch.arange(start, start + rows, device=s.device) // b0]
    for j in range(0, s.shape[1]):
        w[:, j * b1 : (j + 1) * b1] *= s[:, j : j + 1]
    return w


def block_size(n: int, blocks: int) -> int:
    """Rows per block when `n` rows are covered by `blocks` of equal, power-of-two size (or by one); FormatError when none fits."""
    if blocks == 1:
        return max(n, 1)
    for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if -(-n // size) == blocks:
            return size
    raise FormatError(f"{blocks} scales do not cover {n} rows in equal blocks")


def all_finite(t: Tensor) -> bool:
    """No NaN, no Inf: one pass, no temporaries (both pass through minimum and maximum)."""
    return t.numel() == 0 or bool(torch.stack(torch.aminmax(t)).isfinite().all())


def check_finite(name: str, t: Tensor) -> None:
    """Raise `NumericalError` naming tensor and row when `t` holds NaN or Inf."""
    if all_finite(t):
        return
    bad = (~t.isfinite()).reshape(t.shape[0] if t.ndim else 1, -1)
    row = int(bad.any(1).nonzero()[0])
    value = t.reshape(bad.shape)[row][bad[row]][0].item()
    raise NumericalError(f"{name}: row {row} holds {value} ({int(bad.sum())} bad values in all); the file or its source is damaged")


def _check_scales(linears: Mapping[str, LinearFiles], loaded: Mapping[str, Mapping[str, Tensor]]) -> None:
    """All scales and biases finite: one test over all of them together, the search for the culprit only when it fails."""
    vectors = [(label, role, t) for label, ts in loaded.items() for role, t in ts.items() if role in ("suh", "svh", "bias")]
    if not vectors or vectors[0][2].is_meta:
        return
    if all_finite(torch.cat([t.float().flatten() for _, _, t in vectors])):
        return
    for label, role, t in vectors:
        check_finite(f"{linears[label].key}.{role}", t)
