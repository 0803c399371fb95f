"""Two-sided feedback against the recursion written plainly, and against what it is for."""

from __future__ import annotations

import pytest
import torch

from exl3.quantize.ldl import block_ldl
from exl3.quantize.ldlq import Problem, ldlq
from exl3.quantize.refit import refit_scales
from exl3.quantize.twosided import ldlq_two_sided, output_factor, output_metric


def metric(n: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * n, n, generator=g) * torch.rand(n, generator=g).mul(spread).exp()
    return (x @ (torch.eye(n) + 0.3 * torch.randn(n, n, generator=g) / n**0.5)).T.cov()


def rounding(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A coarse quantizer that sees each value alone."""
    return torch.zeros(tiles.shape, dtype=torch.int16), (tiles / 1.5).round() * 1.5


def problem(k: int = 128, n: int = 256, seed: int = 0) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    w = torch.randn(k, n, generator=torch.Generator().manual_seed(seed))
    inside, outside = metric(k, 1), metric(n, 2, 2.0)
    return Problem(w, block_ldl(inside, 0.01, torch.ones(k)).lower, output_factor(outside, torch.ones(n))), inside, outside


def plain(p: Problem) -> torch.Tensor:
    """Tile by tile in the order of rows: target = W + (L_in^T E L_out) - E with the errors made so far."""
    k, n = p.rotated.shape
    left, right = p.lower.double() + torch.eye(k).double(), p.right.double() + torch.eye(n).double()
    w, error = p.rotated.double(), torch.zeros(k, n, dtype=torch.float64)
    values = torch.zeros_like(w)
    for r in range(k - 16, -1, -16):
        for c in range(n - 16, -1, -16):
            here = (slice(r, r + 16), slice(c, c + 16))
            target = w[here] + left[r:, here[0]].T @ error[r:] @ right[:, here[1]]
            values[here] = rounding(target)[1]
            error[here] = w[here] - values[here]
    return values


def test_the_front_gives_what_the_plain_recursion_gives():
    p, _, _ = problem(96 + 32, 128)
    [got] = ldlq_two_sided([p], rounding)
    different = (got.values.double() - plain(p)).abs() > 1e-3  # a value on the edge may round either way and move others
    assert different.float().mean() < 0.02


def test_matrices_of_different_shapes_go_together():
    problems = [problem(128, 256, 3)[0], problem(256, 128, 4)[0]]
    together = ldlq_two_sided(problems, rounding)
    for p, solution in zip(problems, together):
        assert torch.equal(solution.values, ldlq_two_sided([p], rounding)[0].values)


def test_the_joint_loss_falls_as_predicted():
    p, inside, outside = problem(seed=5)
    rotated_in, rotated_out = output_metric(inside, torch.ones(len(inside))), output_metric(outside, torch.ones(len(outside)))

    def loss(values: torch.Tensor) -> float:
        e = p.rotated - values
        return float((e.T @ rotated_in @ e @ rotated_out).trace())

    one = loss(ldlq([Problem(p.rotated, p.lower)], rounding)[0].values)
    two = loss(ldlq_two_sided([p], rounding)[0].values)
    inverse = torch.linalg.inv(p.right + torch.eye(len(p.right)))
    assert two / one == pytest.approx(float((inverse @ rotated_out @ inverse.T).trace() / rotated_out.trace()), rel=0.1)
    assert two < 0.8 * one


def test_refit_takes_the_joint_metric():
    g = torch.Generator().manual_seed(1)
    w, inside, outside = torch.randn(128, 128, generator=g), metric(128, 7), metric(128, 8, 2.0)
    q, ones = output_metric(w, torch.ones(128)) + 0.4 * torch.randn(128, 128, generator=g), torch.ones(128)

    def loss(suh: torch.Tensor, svh: torch.Tensor) -> float:
        base = output_metric(q, torch.ones(128))
        e = base * suh.float().unsqueeze(1) * svh.float() - w
        return float((e.T @ inside @ e @ outside).trace())

    joint = loss(*refit_scales(q, ones, ones, w, inside, outside))
    assert joint < loss(*refit_scales(q, ones, ones, w, inside)) < loss(ones, ones)


def test_a_metric_of_low_rank_and_empty_columns_still_factor():
    g = torch.Generator().manual_seed(2)
    x = torch.randn(3, 256, generator=g)
    x[:, 192:] = 0
    svh = torch.ones(256)
    svh[192:] = 0
    assert bool(torch.isfinite(output_factor(x.T @ x, svh)).all())
    assert bool((output_factor(torch.zeros(128, 128), torch.zeros(128)) == 0).all())
