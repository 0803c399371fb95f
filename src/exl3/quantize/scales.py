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


def is_gaussian(tiles: Tensor) -> Tensor:
    """Whether sample tiles `(count, 256)` of RMS 1 look iid Gaussian: even energies over tiles, no heavy tails. A bool on the device."""
    energy = tiles.square().mean(1)
    expected = math.sqrt(2 / tiles.shape[1])
    kurtosis = tiles.pow(4).mean() / tiles.square().mean().square() - 3
    return (energy.std(unbiased=False) < _SPREAD * expected) & (kurtosis.abs() < _KURTOSIS)


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


def global_scales(
    matrices: list[Tensor], codebook: str, bits: float, encode: Callable[[Tensor], tuple[Tensor, Tensor]], *, always_search: bool = False
) -> list[tuple[float, bool]]:
    """-> (g, searched) of each matrix. `encode` is a quick encoder (a windowed first pass does) of tiles `(count, 256)`.

    matrices: rotated, (k, n) fp32, RMS 1 over their non-empty blocks. They are searched together: two calls, two waits for the device.
    """
    guess = table_scale(codebook, bits)
    samples = [sample_tiles(m) for m in matrices]
    if always_search:
        odd = [True] * len(samples)
    else:
        odd = [not normal for normal in torch.stack([is_gaussian(s) for s in samples]).tolist()]
    wanted = [s * _FEEDBACK_GROWTH.get(bits, 1.0) for s, o in zip(samples, odd) if o]
    found = iter(_search(wanted, guess, encode) if wanted else [])
    return [(next(found), True) if o else (guess, False) for o in odd]


def _search(samples: list[Tensor], guess: float, encode: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[float]:
    """Least mean squared error over scales: a coarse pass on a third of the tiles, a fine one on all, then a parabola."""
    factors = (0.4, 0.6, 0.8, 1.0, 1.2, 1.5)
    coarse = [[guess * f for f in factors] for _ in samples]
    errors = _errors([s[::3] for s in samples], coarse, encode)
    centres = [scales[e.index(min(e))] for scales, e in zip(coarse, errors)]
    fine = [[c * (1 + 0.06 * i) for i in (-2, -1, 0, 1, 2)] for c in centres]
    errors = _errors(samples, fine, encode)
    return [_vertex(scales, e) for scales, e in zip(fine, errors)]


def _errors(samples: list[Tensor], scales: list[list[float]], encode: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Mean squared error of each sample at each of its scales, in units of the sample."""
    batch = torch.cat([sample * s for sample, row in zip(samples, scales) for s in row])
    squares = (encode(batch)[1] - batch).square().mean(1)
    parts = squares.split([len(sample) for sample, row in zip(samples, scales) for _ in row])
    means = iter(torch.stack([part.mean() for part in parts]).tolist())
    return [[next(means) / s**2 for s in row] for row in scales]


def _vertex(scales: list[float], errors: list[float]) -> float:
    """Least point of the parabola through the best of five even steps and its neighbours."""
    i = min(max(errors.index(min(errors)), 1), 3)
    curve = errors[i - 1] - 2 * errors[i] + errors[i + 1]
    shift = 0.5 * (errors[i - 1] - errors[i + 1]) / curve if curve > 0 else 0.0
    return max(0.01, scales[i] + (scales[1] - scales[0]) * min(max(shift, -0.5), 0.5))
