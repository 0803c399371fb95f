"""GGUF's quantized blocks to fp32, vectorised over blocks. Each function takes `(blocks, bytes)` uint8, gives `(blocks, weights)` fp32.

In all formats a block is one or two fp16 factors and small integers; 256-weight ("K") blocks have second-level integer scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]  # uint8; NumPy's stubs lose the width in shifts
Floats = NDArray[np.float32]

# type number in a file -> name
TYPES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16"},
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
# served types -> (weights, bytes) of a block
BLOCKS = {
    **{"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)},
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)},
    **{"Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}


def dequantize(blocks: Bytes, kind: str) -> Floats:
    """`(blocks, bytes)` of type `kind` -> `(blocks, weights)` fp32."""
    return _FUNCTIONS[kind](blocks)


def _half(b: Bytes) -> Floats:
    """fp16 factors stored in the given two bytes, `(blocks, 1)`."""
    return np.ascontiguousarray(b).view("<f2").astype(np.float32)


def _nibbles(qs: Bytes) -> Bytes:
    """`(..., n)` bytes -> `(..., 2 n)`: all low halves, then all high ones."""
    return np.concatenate([qs & 15, qs >> 4], axis=-1)


def _fifth_bits(qh: Bytes) -> Bytes:
    """32 bits stored in 4 bytes, as 0 or 16 each."""
    return np.unpackbits(qh, axis=-1, bitorder="little") << 4


def _q4_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    return _half(b[:, :2]) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b[:, 2:4])


def _q5_0(b: Bytes) -> Floats:
    q = _nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])
    return _half(b[:, :2]) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    q = _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8])
    return _half(b[:, :2]) * q.astype(np.float32) + _half(b[:, 2:4])


def _q8_0(b: Bytes) -> Floats:
    return _half(b[:, :2]) * b[:, 2:].view(np.int8).astype(np.float32)


def _crumbs(qs: Bytes) -> Bytes:
    """64 bytes of 2-bit numbers -> `(blocks, 2, 4, 32)`: two halves of 32 bytes, in each all lowest pairs, then the next ones up."""
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    return (qs.reshape(-1, 2, 1, 32) >> shifts) & 3


def _q2_k(b: Bytes) -> Floats:
    scales = b[:, :16]  # 4-bit scale below, 4-bit minimum above, for 16 weights each
    d, dmin = _half(b[:, 80:82]), _half(b[:, 82:84])
    q = _crumbs(b[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    y = (d * (scales & 15))[..., None] * q - (dmin * (scales >> 4))[..., None]
    return y.reshape(-1, 256)


def _q3_k(b: Bytes) -> Floats:
    low, high = _nibbles(b[:, 96:104]), b[:, 104:108]  # 16 scales of 6 bits: 4 low ones, then 2 high ones
    high = (high[:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(np.int8) - np.int8(32)
    masks = b[:, None, None, :32] >> np.arange(8, dtype=np.uint8).reshape(2, 4, 1) & 1  # third bits; absent means minus 4
    q = _crumbs(b[:, 32:96]).astype(np.int8) - np.where(masks, 0, 4).astype(np.int8)
    d = _half(b[:, 108:110]) * scales
    return (d[..., None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


def _scales_k4(b: Bytes) -> tuple[Bytes, Bytes]:
    """12 bytes -> eight 6-bit scales and eight 6-bit minima: four of each whole, the rest's upper two bits in the first eight bytes."""
    first, second, rest = b[:, 0:4], b[:, 4:8], b[:, 8:12]
    scales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=1)
    return scales, minima


def _q4_k(b: Bytes) -> Floats:
    return _affine_k(b, _nibbles(b[:, 16:].reshape(-1, 4, 32)))


def _q5_k(b: Bytes) -> Floats:
    fifth = (b[:, 16:48][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return _affine_k(b, _nibbles(b[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth)


def _affine_k(b: Bytes, q: Bytes) -> Floats:
    scales, minima = _scales_k4(b[:, 4:16])
    d, dmin = _half(b[:, :2]), _half(b[:, 2:4])
    y = (d * scales)[..., None] * q.reshape(-1, 8, 32).astype(np.float32) - (dmin * minima)[..., None]
    return y.reshape(-1, 256)


def _q6_k(b: Bytes) -> Floats:
    low = _nibbles(b[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)  # two halves of 128 weights
    q = (low | _crumbs(b[:, 128:192]) << 4).astype(np.float32) - 32
    d = _half(b[:, 208:210]) * b[:, 192:208].view(np.int8)
    return (d[..., None] * q.reshape(-1, 16, 16)).reshape(-1, 256)


_FUNCTIONS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": lambda b: b.copy().view("<f4"),
    "F16": _half,
    "BF16": lambda b: (np.ascontiguousarray(b).view("<u2").astype(np.uint32) << 16).view(np.float32),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
