"""The reference search against exhaustive search, the distortion table of the quantizer study, and its own promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from exl3 import codec
from exl3.codec.search import encode_reference
from exl3.errors import ArgumentError, FormatError, NumericalError


def all_rings(K: int, length: int) -> torch.Tensor:
    """States of every ring of 16 bits: (65536, length)."""
    ring = torch.arange(65536)
    return torch.stack([((ring << 16 | ring) >> (32 - 16 - (i + 1) * K % 16)) & 0xFFFF for i in range(length)], dim=1)


@pytest.mark.parametrize("K, length", [(8, 2), (4, 4), (2, 8), (1, 16)])
@pytest.mark.parametrize("codebook", codec.CODEBOOKS)
def test_best_of_all_short_rings_through_the_same_seam(K, length, codebook):
    """A ring of 16 bits has 65536 fillings. Of those with the search's seam node none may be cheaper."""
    targets = torch.randn(6, length, generator=torch.Generator().manual_seed(K))
    states, values = encode_reference(targets, K, codebook)
    table = codec.codebook_table(codebook).float()
    assert torch.equal(values, table[states.long()])
    rings = all_rings(K, length)
    assert codec.is_tail_biting(rings, K)
    cost = (table[rings][None] - targets[:, None]).square().sum(dim=2)
    for n in range(len(targets)):
        same_seam = rings[:, 0] >> K == int(states[n, 0]) >> K
        found = (values[n] - targets[n]).square().sum()
        assert found <= cost[n][same_seam].min() * (1 + 1e-5)
    assert codec.is_tail_biting(states, K)


@pytest.mark.parametrize("K, rms, mse", [(1, 1.12, 0.2727), (1.5, 1.02, 0.1374), (2, 1.0, 0.0684), (4, 0.92, 0.00447), (8, 0.75, 0.000021)])
def test_distortion_of_gaussian_tiles(K, rms, mse):
    """Published relative MSE on unit Gaussian tiles at the best input rms; 8 tiles leave about 3 % of noise, 8 bpw more."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(7))
    states, values = encode_reference(x * rms, K, "mul1")
    assert codec.is_tail_biting(states, K)
    assert float((values / rms - x).square().mean()) == pytest.approx(mse, rel=0.08 if K < 8 else 0.15)
    assert torch.equal(codec.unpack(codec.pack(states[None], K))[0], states)


def test_tiles_do_not_see_each_other():
    x = torch.randn(11, 256, generator=torch.Generator().manual_seed(1))
    states, _ = encode_reference(x, 6, "mcg")
    alone, _ = encode_reference(x[9:10], 6, "mcg")
    assert torch.equal(states[9:10], alone)


def test_decoded_values_are_a_fixed_point():
    """Values of a code word are encoded without loss."""
    states = codec.unpack(torch.randint(-32768, 32768, (1, 2, 64), dtype=torch.int16, generator=torch.Generator().manual_seed(3)))[0]
    targets = codec.codebook_table("mcg").float()[states.long()]
    _, values = encode_reference(targets, 4, "mcg")
    assert torch.equal(values, targets)


def test_seam_window_costs_little():
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(2))
    full = float((encode_reference(x, 2, "mul1")[1] - x).square().mean())
    short = float((encode_reference(x, 2, "mul1", seam_window=64)[1] - x).square().mean())
    assert full * 0.995 <= short < full * 1.06  # 1.4 % on average


def test_stored_multiplier_counts():
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(4))
    states, values = encode_reference(x, 4, "mcg", 0xFF7A83E5)
    assert torch.equal(values, codec.codebook_table("mcg", 0xFF7A83E5).float()[states.long()])
    assert float((values - x).square().mean()) < 0.02


@pytest.mark.parametrize(
    "tiles, K, codebook, window, error",
    [
        (torch.zeros(2, 256), 2.5, "mcg", 0, FormatError),
        (torch.zeros(2, 256), 9, "mcg", 0, ArgumentError),
        (torch.zeros(256), 2, "mcg", 0, ArgumentError),
        (torch.zeros(2, 256, dtype=torch.int32), 2, "mcg", 0, ArgumentError),
        (torch.zeros(2, 255), 2, "mcg", 0, ArgumentError),
        (torch.zeros(2, 6), 2, "mcg", 0, ArgumentError),
        (torch.zeros(2, 256), 2, "mcg", 33, ArgumentError),
        (torch.zeros(2, 256), 2, "mcg", 258, ArgumentError),
        (torch.full((2, 256), torch.nan), 2, "mcg", 0, NumericalError),
        (torch.full((2, 256), torch.inf), 2, "mcg", 0, NumericalError),
    ],
)
def test_typed_errors(tiles, K, codebook, window, error):
    with pytest.raises(error):
        encode_reference(tiles, K, codebook, seam_window=window)


def test_no_tiles():
    states, values = encode_reference(torch.zeros(0, 256), 2, "mul1")
    assert states.shape == values.shape == (0, 256)


def test_extreme_targets_stay_finite():
    for scale in itertools.chain([0.0, 1e-30, 1e6]):
        x = torch.full((1, 256), scale)
        states, values = encode_reference(x, 8, "3inst")
        assert codec.is_tail_biting(states, 8) and torch.isfinite(values).all()
