"""The global scale g: how large a unit-RMS matrix should be in codebook units before it is encoded.

After regularisation a matrix is near Gaussian by construction, so the optimum is a property of codebook and rate (quantizer description,
table in 5.3). A cheap look at the tiles decides whether a matrix is odd enough to be worth a search.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from exl3.errors import ArgumentError

_TABLE_RMS = 1.24371088  # the table is in units of the 3inst codebook's RMS
_MUL1: dict[float, float] = {1: 0.90, 1.5: 0.82, 2: 0.80, 2.5: 0.77, 3: 0.76, 3.5: 0.755, 4: 0.74, 5: 0.71, 6: 0.67, 7: 0.64, 8: 0.60}
_GAUSS_PAIR: dict[float, float] = {1: 1.15, 2: 1.00, 3: 0.95, 4: 0.89, 5: 0.85, 6: 0.78, 7: 0.75, 8: 0.72}
# error feedback makes what is encoded a little larger than the matrix itself (quantizer description 5.3)
_FEEDBACK_GROWTH: dict[float, float] = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}

_SAMPLE_TILES = 256
_SPREAD = 1.6  # times the spread of tile energies that iid Gaussian tiles have
_KURTOSIS = 0.35  # excess


def table_scale(codebook: str, bits: float) -> float:
    """RMS in codebook units at which unit Gaussian tiles have the least relative error."""
    table = _MUL1 if codebook == "mul1" else _GAUSS_PAIR
    if bits not in table:
        raise ArgumentError(f"codebook {codebook} has no rate {bits}; it has {', '.join(f'{k:g}' for k in table)}")
    return table[bits] * _TABLE_RMS


def is_gaussian(tiles: Tensor) -> bool:
    """Whether sample tiles `(count, 256)` of RMS 1 look iid Gaussian: even energies over tiles, no heavy tails."""
    energy = tiles.square().mean(1)
    expected = math.sqrt(2 / tiles.shape[1])
    kurtosis = tiles.pow(4).mean() / tiles.square().mean().square() - 3
    return bool((energy.std(unbiased=False) < _SPREAD * expected) & (kurtosis.abs() < _KURTOSIS))


def sample_tiles(rotated: Tensor, count: int = _SAMPLE_TILES) -> Tensor:
    """Evenly spread 16x16 tiles `(count, 256)`, the order within a tile left as it is."""
    k, n = rotated.shape
    total = (k // 16) * (n // 16)
    count = max(8, min(count, total // 32))  # a search costs about seven encodings of the sample: a small matrix must not pay much for it
    step = max(1, total // count)
    step += step % 2 == 0 and step > 1  # odd, so that a power-of-two width doesn't pick one column of tiles
    index = torch.arange(0, total, step, device=rotated.device)[: 2 * count]
    view = rotated.view(k // 16, 16, n // 16, 16)
    return view[index // (n // 16), :, index % (n // 16), :].reshape(-1, 256)


def global_scale(
    rotated: Tensor, codebook: str, bits: float, encode: Callable[[Tensor], tuple[Tensor, Tensor]], *, always_search: bool = False
) -> tuple[float, bool]:
    """-> (g, searched). `encode` is a quick encoder (a windowed first pass does) of tiles `(count, 256)`.

    rotated: (k, n) fp32, RMS 1 over its non-empty blocks.
    """
    guess = table_scale(codebook, bits)
    tiles = sample_tiles(rotated)
    if not always_search and is_gaussian(tiles):
        return guess, False
    return _search(tiles * _FEEDBACK_GROWTH.get(bits, 1.0), guess, encode), True


def _search(tiles: Tensor, guess: float, encode: Callable[[Tensor], tuple[Tensor, Tensor]]) -> float:
    """Least mean squared error over scales: a coarse pass on a third of the tiles, a fine one on all, then a parabola."""

    def errors(sample: Tensor, scales: list[float]) -> list[float]:
        batch = torch.cat([sample * s for s in scales])
        _, values = encode(batch)
        per = (values - batch).square().view(len(scales), -1).mean(1)
        return [float(e) / s**2 for e, s in zip(per.tolist(), scales)]

    coarse = [guess * f for f in (0.4, 0.6, 0.8, 1.0, 1.2, 1.5)]
    e = errors(tiles[::3], coarse)
    centre = coarse[e.index(min(e))]
    step = 0.06 * centre
    fine = [centre + step * i for i in (-2, -1, 0, 1, 2)]
    e = errors(tiles, fine)
    i = min(max(e.index(min(e)), 1), 3)
    curve = e[i - 1] - 2 * e[i] + e[i + 1]
    shift = 0.5 * (e[i - 1] - e[i + 1]) / curve if curve > 0 else 0.0
    return max(0.01, fine[i] + step * min(max(shift, -0.5), 0.5))
