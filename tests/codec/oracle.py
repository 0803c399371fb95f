"""A second decoder, one weight at a time in numpy and Python integers, written from the format's text: no code shared with exl3.codec."""

from __future__ import annotations

import numpy as np

ADD = {"3inst": 64248484, "mcg": 0, "mul1": 0}
MULTIPLIER = {"3inst": 89226354, "mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def ring_states(words: np.ndarray, K: float) -> list[int]:
    """States of one tile of 16*K uint16 words, by walking the ring bit by bit."""
    bits = [(int(words[(p // 16) ^ 1]) >> (15 - p % 16)) & 1 for p in range(16 * len(words))]
    states, end = [], 0
    for i in range(256):
        end += int(K) if K == int(K) else int(K) + (i & 1)
        states.append(sum(bits[(end - 16 + b) % len(bits)] << (15 - b) for b in range(16)))
    return states


def lsb_ring_states(words: np.ndarray, K: int, dim: int) -> list[int]:
    """States of one embedding or n-gram ring, whose first word is the scale."""
    bits = [(int(words[1 + b // 16]) >> (b % 16)) & 1 for b in range(16 * (len(words) - 1))]
    symbols = [sum(bits[i * K + b] << b for b in range(K)) for i in range(dim)]
    return [sum(symbols[(i - m) % dim] << (m * K) for m in range(-(-16 // K))) & 0xFFFF for i in range(dim)]


def value(state: int, codebook: str, multiplier: int | None = None) -> np.float16:
    x = (state * (MULTIPLIER[codebook] if multiplier is None else multiplier) + ADD[codebook]) % 2**32
    if codebook == "mul1":
        total = 1024 + sum(x.to_bytes(4, "little"))
        return np.float16(np.float64(total) * 0.00676727294921875 - 10.3828125)
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    lo, hi = np.frombuffer(x.to_bytes(4, "little"), dtype=np.float16).astype(np.float64)
    return np.float16(lo + hi)


def place(i: int) -> tuple[int, int]:
    """(row, column) of stream position i."""
    t, j = i >> 3, i & 7
    return 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1), (t >> 2) + 8 * (j >> 2)


def hadamard(n: int) -> np.ndarray:
    return np.array([[(-1.0) ** (a & b).bit_count() for b in range(n)] for a in range(n)]) / np.sqrt(n)


def dequantize(inner: np.ndarray, suh: np.ndarray, svh: np.ndarray) -> np.ndarray:
    """diag(suh) H inner H diag(svh) in float64."""
    h = hadamard(128)
    left = np.kron(np.eye(inner.shape[0] // 128), h)
    right = np.kron(np.eye(inner.shape[1] // 128), h)
    return suh.astype(np.float64)[:, None] * (left @ inner.astype(np.float64) @ right) * svh.astype(np.float64)[None, :]
