"""Linear algebra of the converter against float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch

from exl3.errors import NumericalError
from exl3.quantize.hessian import Hessian, check_activations, check_weights
from exl3.quantize.ldl import BLOCK, block_ldl, damped, rotated_hessian
from exl3.quantize.ldlq import Problem, ldlq
from exl3.quantize.refit import proxy_error, refit_scales
from exl3.quantize.regularize import padded, random_signs, regularize, restore, rotate_columns, rotate_rows
from exl3.quantize.scales import global_scales, is_gaussian, sample_tiles, table_scale


def correlated(k: int, tokens: int = 2000, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, k, generator=g) @ (torch.randn(k, k, generator=g) * torch.linspace(0.1, 1, k))
    return x.T @ x / tokens


def grid(step: float):
    """A scalar quantizer in place of the trellis search: what LDLQ does doesn't depend on which quantizer it feeds."""
    return lambda tiles: (torch.zeros(tiles.shape, dtype=torch.int16), torch.round(tiles / step) * step)


def test_rotation_is_the_sylvester_matrix():
    h = rotate_columns(torch.eye(128))
    expected = [[(-1) ** bin(a & b).count("1") / math.sqrt(128) for b in range(128)] for a in range(128)]
    assert torch.allclose(h.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-6)
    w = torch.randn(256, 128)
    assert torch.allclose(rotate_rows(rotate_rows(w)), w, atol=1e-5)
    assert torch.allclose(rotate_rows(w)[128:], h @ w[128:], atol=1e-5)


def test_signs_depend_on_name_and_seed_alone():
    a = random_signs("model.layers.0.self_attn.q_proj:in", 640)
    assert set(a.tolist()) == {-1.0, 1.0} and abs(a.mean()) < 0.2
    assert torch.equal(a, random_signs("model.layers.0.self_attn.q_proj:in", 640))
    assert not torch.equal(a, random_signs("model.layers.0.self_attn.q_proj:in", 640, seed=1))
    assert not torch.equal(a, random_signs("model.layers.1.self_attn.q_proj:in", 640))


@pytest.mark.parametrize(("k", "n"), [(128, 256), (192, 320), (64, 40)])
def test_regularize_gives_unit_noise_and_is_undone(k: int, n: int):
    g = torch.Generator().manual_seed(k)
    w = torch.zeros(padded(k), padded(n))
    w[:k, :n] = torch.randn(k, n, generator=g) * torch.rand(n, generator=g).add(0.1) * torch.rand(k, 1, generator=g).add(0.1)
    w[:, 5] = 0
    reg = regularize(w, random_signs("a", padded(k)), random_signs("b", padded(n)))
    assert torch.allclose(restore(reg.rotated, reg.suh, reg.svh), w, atol=1e-4)
    assert reg.svh[5] == 0 and bool((reg.svh[n:] == 0).all())
    for block in reg.rotated.split(128):  # also the blocks that are half padding use the full range
        assert abs(block.square().mean().sqrt() - 1) < 0.05
    assert abs(reg.svh[reg.svh != 0].abs().mean() - 1) < 0.5


def test_out_scales_off_leaves_equal_column_scales():
    w = torch.randn(128, 128) * torch.linspace(0.1, 2, 128)
    reg = regularize(w, torch.ones(128), torch.ones(128), out_scales=False)
    assert torch.allclose(reg.svh, reg.svh[0].expand(128))


def test_block_ldl_factors_the_rotated_hessian():
    h = correlated(256)
    scale = torch.rand(256) + 0.5
    factor = block_ldl(h, 0.01, scale)
    lower = factor.lower.double() + torch.eye(256, dtype=torch.float64)
    reference = rotated_hessian(damped(h, 0.01), scale).double()
    inverse = torch.linalg.inv(lower)
    d = inverse @ reference @ inverse.T  # must be block diagonal
    off = d.clone().view(16, 16, 16, 16)
    off[torch.arange(16), :, torch.arange(16), :] = 0
    assert off.abs().max() < 1e-4 * d.diagonal().max()
    strict = factor.lower.view(16, 16, 16, 16).permute(0, 2, 1, 3)
    assert all(float(strict[a, b].abs().max()) == 0 for a in range(16) for b in range(a, 16))
    assert factor.retries == 0


def test_rank_one_and_damaged_hessians():
    x = torch.randn(128)
    factor = block_ldl(torch.outer(x, x), 0.0, torch.ones(128))
    assert 1 <= factor.retries <= 10 and factor.damping > 0 and bool(torch.isfinite(factor.lower).all())
    assert block_ldl(torch.outer(x, x), 0.025, torch.ones(128)).retries == 0
    with pytest.raises(NumericalError, match=r"layers\.3"):
        block_ldl(torch.full((128, 128), float("nan")), 0.025, torch.ones(128), name="layers.3.q_proj")


def naive_ldlq(w: torch.Tensor, lower: torch.Tensor, step: float) -> torch.Tensor:
    w, lower = w.double(), lower.double()
    q = torch.zeros_like(w)
    for a in range(w.shape[0] - BLOCK, -1, -BLOCK):
        b = a + BLOCK
        q[a:b] = torch.round((w[a:b] + lower[b:, a:b].T @ (w[b:] - q[b:])) / step) * step
    return q


def test_ldlq_is_the_plain_recursion():
    h = correlated(384)
    factor = block_ldl(h, 0.025, torch.ones(384))
    w = torch.randn(384, 64, generator=torch.Generator().manual_seed(1))
    told = []
    [solution] = ldlq([Problem(w, factor.lower)], grid(0.5), told.append)
    expected = naive_ldlq(w, factor.lower, 0.5)
    assert (solution.values.double() - expected).abs().gt(1e-6).float().mean() < 1e-3  # ties of rounding may fall either way
    assert sum(told) == w.numel()
    # the identity behind it: L^T (W - Q) is exactly the rounding error of each target
    unit = factor.lower.double() + torch.eye(384, dtype=torch.float64)
    assert float((unit.T @ (w.double() - solution.values.double())).abs().max()) <= 0.25 + 1e-4


def test_ldlq_beats_rounding_and_shares_calls():
    h = correlated(256)
    g = torch.Generator().manual_seed(2)
    a, b = torch.randn(256, 128, generator=g), torch.randn(256, 32, generator=g)
    factor = block_ldl(h, 0.025, torch.ones(256))
    rotated = rotated_hessian(h, torch.ones(256))
    calls = []

    def encode(tiles):
        calls.append(tiles.shape[0])
        return grid(0.5)(tiles)

    together = ldlq([Problem(a, factor.lower), Problem(b, factor.lower)], encode)
    assert calls == [(128 + 32) // 16] * 16
    [alone] = ldlq([Problem(a, factor.lower)], grid(0.5))
    assert (together[0].values - alone.values).ne(0).float().mean() < 1e-3
    plain = ldlq([Problem(a, None)], grid(0.5))[0].values
    assert torch.equal(plain, torch.round(a / 0.5) * 0.5)
    assert proxy_error(alone.values - a, a, rotated) < 0.6 * proxy_error(plain - a, a, rotated)


def test_refit_never_loses_and_solves_columns_exactly():
    g = torch.Generator().manual_seed(3)
    h = damped(correlated(128), 0.025)
    w = torch.randn(128, 128, generator=g)
    w[:, 7] = 0
    reg = regularize(w, random_signs("a", 128), random_signs("b", 128))
    q = torch.round(reg.rotated / 0.7) * 0.7
    suh, svh = refit_scales(q, reg.suh, reg.svh, w, h)
    assert suh.dtype == svh.dtype == torch.float16 and svh[7] == 0
    before = proxy_error(restore(q, reg.suh, reg.svh) - w, w, h)
    after = proxy_error(restore(q, suh, svh) - w, w, h)
    assert after < before
    base = rotate_columns(rotate_rows(q)).double() * suh.double()[:, None]
    root = torch.linalg.cholesky(h.double()).T  # least squares in the metric, column 3
    best = torch.linalg.lstsq((root @ base[:, 3])[:, None], (root @ w[:, 3].double())[:, None]).solution.item()
    assert abs(svh[3].item() - best) < 2e-3 * abs(best)


def test_hessian_matches_float64_and_reports_dead_channels():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(5000, 40, generator=g).half()
    x[:, 11] = 0
    h = Hessian("layer", 40, "cpu", cross=True)
    weights = torch.rand(5000, generator=g)
    y = torch.randn(5000, 40, generator=g)
    h.add(x[:3000], y[:3000], weights[:3000])
    h.add(x[3000:], y[3000:], weights[3000:])
    expected = (x.double() * weights.double()[:, None]).T @ x.double() / weights.double().sum()
    assert torch.allclose(h.matrix()[:40, :40].double(), expected, rtol=1e-5, atol=1e-6)
    cross = (x.double() * weights.double()[:, None]).T @ y.double() / weights.double().sum()
    assert torch.allclose(h.cross()[:40, :40].double(), cross, rtol=1e-5, atol=1e-5)
    assert h.matrix().shape == (128, 128) and float(h.matrix()[40:].abs().max()) == 0
    assert h.dead_channels == [11] and h.usable and h.tokens == 5000
    assert not Hessian("layer", 40, "cpu").usable


def test_not_finite_is_named():
    x = torch.zeros(2, 3, 4)
    x[1, 2, 3] = float("inf")
    with pytest.raises(NumericalError, match=r"layers\.7.*q_proj.*inf.*row 11, token 2, channel 3"):
        check_activations(x, "model.layers.7", "self_attn.q_proj", first_row=10)
    w = torch.zeros(4, 4)
    w[2, 1] = float("nan")
    with pytest.raises(NumericalError, match=r"layers\.0\.mlp\.up_proj\.weight: nan in row 2, column 1"):
        check_weights(w, "model.layers.0.mlp.up_proj")
    h = Hessian("layers.2.o_proj", 4, "cpu")
    h.add(torch.full((2, 4), 1e30))
    with pytest.raises(NumericalError, match=r"layers\.2\.o_proj"):
        h.check()


def test_scale_comes_from_the_table_unless_tiles_are_odd():
    def forbidden(tiles):
        raise AssertionError("a Gaussian matrix must not pay for a search")

    g = torch.Generator().manual_seed(5)
    w = torch.randn(256, 256, generator=g)
    assert global_scales([w, w], "mul1", 4, forbidden) == [(table_scale("mul1", 4), False)] * 2
    odd = torch.randn(256, 256, generator=g).pow(3)
    assert not is_gaussian(sample_tiles(odd / odd.square().mean().sqrt()))

    def clip(tiles):  # a quantizer for [-2, 2]: its best scale is where clipping and rounding balance
        return tiles, torch.round(tiles.clamp(-2, 2) / 0.25) * 0.25

    (_, plain), (scale, searched) = global_scales([w, odd / odd.square().mean().sqrt()], "mul1", 4, clip)
    assert searched and not plain
    errors = {s: float(((clip(odd * s)[1] / s - odd) ** 2).mean()) for s in (scale / odd.square().mean().sqrt() * f for f in (0.5, 1, 2))}
    assert min(errors, key=errors.get) == list(errors)[1]


def test_table_is_the_published_one():
    assert table_scale("mul1", 4) == pytest.approx(0.74 * 1.24371, rel=1e-4)
    assert table_scale("mcg", 2) == pytest.approx(1.2437, rel=1e-4)


def test_a_matrix_comes_out_the_same_whatever_stands_beside_it_and_where_it_is_cut(monkeypatch):
    monkeypatch.setattr("exl3.quantize.ldlq.PIECE", 32)
    g = torch.Generator().manual_seed(6)
    h, deep = correlated(256), correlated(384, seed=1)
    factor, other = block_ldl(h, 0.025, torch.ones(256)), block_ldl(deep, 0.025, torch.ones(384))
    w, long = torch.randn(256, 128, generator=g), torch.randn(384, 48, generator=g)
    [alone] = ldlq([Problem(w, factor.lower)], grid(0.5))
    mixed = ldlq([Problem(long, other.lower), Problem(w[:, :64], factor.lower), Problem(w[:, 64:], factor.lower)], grid(0.5))
    assert torch.equal(alone.values, torch.cat([mixed[1].values, mixed[2].values], 1))
    assert torch.equal(mixed[0].values, ldlq([Problem(long, other.lower)], grid(0.5))[0].values)
