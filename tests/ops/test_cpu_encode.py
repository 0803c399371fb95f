"""The CPU's trellis search: every tier finds the same states, closed rings, and errors as small as an exact search's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_library import Library, NativeError, find

from exl3 import codec

RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
INPUT_RMS = dict(zip(RATES, (1.12, 1.02, 1.0, 0.96, 0.95, 0.94, 0.92, 0.88, 0.83, 0.80, 0.75)))
CASES = [("mul1", K) for K in RATES] + [(c, K) for c in ("mcg", "3inst") for K in (1, 4, 8)]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    path = find()
    assert path is not None, "libexl3_cpu.so was not found"
    folder = tmp_path_factory.mktemp("tier")
    tiers = [Library(path, tier, folder) for tier in ("scalar", "avx2", "avx512")]
    return {t.tier: t for t in tiers}


@pytest.fixture
def best(libraries):
    return list(libraries.values())[-1]


def tiles(n, K, codebook="mul1", seed=5):
    scale = INPUT_RMS[K] * codec.codebook_rms(codebook)
    return (np.random.default_rng(seed).standard_normal((n, 256)) * scale).astype(np.float32)


def closed(states, K):
    """Whether packing and unpacking gives the states back: they form a ring."""
    packed = codec.pack(torch.from_numpy(states.astype(np.int32))[:, None], K)
    return np.array_equal(codec.unpack(packed)[:, 0].numpy().astype(np.uint16), states)


@pytest.mark.parametrize(("codebook", "K"), CASES)
def test_states_are_rings_and_tiers_agree(libraries, codebook, K):
    x = tiles(3, K, codebook)
    found = {tier: library.encode(x, K, codebook) for tier, library in libraries.items()}
    states, values = found["scalar"]
    assert closed(states, K)
    assert np.array_equal(values, codec.codebook_table(codebook).float().numpy()[states])
    for other, _ in found.values():
        assert np.array_equal(other, states)


@pytest.mark.parametrize("K", RATES)
def test_error_on_gaussian_tiles(best, K):
    """Within 2 % of the distortion table, allowing for the sample: the error of the same tiles under an fp32 search moves with it."""
    table = (0.2727, 0.1374, 0.0684, 0.0346, 0.01738, 0.00883, 0.00447, 0.00116, 0.000305, 0.0000815, 0.000021)
    x = tiles(96, K)
    _, values = best.encode(x, K, "mul1")
    error = ((values - x) ** 2).mean(1) / INPUT_RMS[K] ** 2
    slack = 2 * error.std() / np.sqrt(len(error))
    assert error.mean() < 1.02 * dict(zip(RATES, table))[K] + slack


@pytest.mark.parametrize(
    ("codebook", "K"), [("mul1", 1), ("mul1", 2), ("mul1", 4), ("mul1", 5), ("mul1", 8), ("mcg", 1), ("mcg", 4), ("3inst", 1), ("3inst", 2)]
)
def test_as_good_as_an_exact_search(best, codebook, K):
    """16-bit costs lose next to nothing against fp32 costs, on the same tiles."""
    x = tiles(6, K, codebook, seed=8)
    _, values = best.encode(x, K, codebook)
    _, exact = codec.encode_reference(torch.from_numpy(x), K, codebook)
    got, want = ((values - x) ** 2).mean(), ((exact.numpy() - x) ** 2).mean()
    assert got < 1.004 * want


def test_seam_window(best):
    """A short first pass costs a little quality, never a ring that does not close; the whole ring is the same as 256."""
    x = tiles(16, 3)
    errors = {}
    for window in (0, 256, 128, 32, 2):
        states, values = best.encode(x, 3, "mul1", seam_window=window)
        assert closed(states, 3)
        errors[window] = ((values - x) ** 2).mean()
    assert errors[0] == errors[256]
    assert errors[128] < 1.03 * errors[0] and errors[32] < 1.1 * errors[0]


def test_far_out_targets_still_make_rings(best):
    for K in (1.5, 4, 8):
        x = tiles(6, K)
        x[0] = 0
        x[1] = 1e30
        x[2] = -1e30
        x[3, ::2], x[3, 1::2] = 50, -50
        x[4, 100:] *= 1000
        states, values = best.encode(x, K, "mul1")
        assert closed(states, K)
        if K == 8:  # fp32 costs: as far out as an exact search goes
            _, exact = codec.encode_reference(torch.full((1, 256), 64.0), K, "mul1")
            least = float(exact.mean()) - 0.02
        else:  # all-equal far targets are past what 16-bit costs can tell apart
            least = {1.5: 0.5, 4: 2.3}[K]
        assert values[1].mean() > least and values[2].mean() < -least
        assert (values[3, ::2] > values[3, 1::2]).all() if K == 8 else values[3, ::2].mean() > values[3, 1::2].mean()


def test_neighbours_threads_and_multipliers(best):
    x = tiles(7, 4)
    states, _ = best.encode(x, 4, "mul1")
    assert np.array_equal(best.encode(x[3:4], 4, "mul1")[0][0], states[3])
    assert np.array_equal(best.encode(x, 4, "mul1", threads=2)[0], states)
    other, values = best.encode(x, 4, "mul1", multiplier=0xFF7A83E5)
    assert closed(other, 4) and not np.array_equal(other, states)
    assert np.array_equal(values, codec.codebook_table("mul1", 0xFF7A83E5).float().numpy()[other])
    assert best.encode(x[:0], 4, "mul1")[0].shape == (0, 256)


def test_bad_input_is_named(best):
    x = tiles(3, 4)
    for bad in (np.nan, np.inf):
        x[1, 200] = bad
        with pytest.raises(NativeError, match="tile 1 holds NaN or Inf"):
            best.encode(x, 4, "mul1")
    with pytest.raises(NativeError, match="seam_window"):
        best.encode(tiles(1, 4), 4, "mul1", seam_window=3)
    with pytest.raises(NativeError, match="rate"):
        best.encode(tiles(1, 4), 4.5, "mul1")


@pytest.mark.parametrize("K", [5, 6, 7, 8])
def test_targets_in_the_tails_get_near_values(best, K):
    """Few code values lie beyond 3: such a target must cost its neighbours a little, not be given up."""
    x = tiles(6, K, seed=11)
    x[:, 40] = (3.1, -3.2, 3.3, -3.4, 2.9, -3.0)
    _, values = best.encode(x, K, "mul1")
    _, exact = codec.encode_reference(torch.from_numpy(x), K, "mul1")
    got, want = ((values - x) ** 2).mean(1), ((exact.numpy() - x) ** 2).mean(1)
    assert (got < 1.3 * want).all(), (got, want)
