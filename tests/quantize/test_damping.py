"""Damping chosen on rows held back, against losses counted token by token."""

from __future__ import annotations

import pytest
import torch

from exl3.quantize import hessian
from exl3.quantize.block import corrected
from exl3.quantize.damping import MULTIPLES, for_correction, for_feedback
from exl3.quantize.hessian import HOLD, Hessian

K, ROW = 128, 16
DAMPING = 0.025


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hessian, "CHUNK", ROW)


def gathered(x: torch.Tensor, other: torch.Tensor | None = None, missing: torch.Tensor | None = None) -> Hessian:
    """Statistics of rows of ROW tokens, ten rows at a time."""
    h = Hessian("x", K, "cpu", cross=other is not None, hold=ROW)
    for start in range(0, len(x), 10 * ROW):
        part = slice(start, start + 10 * ROW)
        h.add(x[part], None if other is None else other[part], None, None if missing is None else missing[part])
    return h


def kept(tokens: int) -> torch.Tensor:
    return torch.arange(tokens) // ROW % HOLD != HOLD - 1


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, K, generator=g) @ (torch.randn(K, K, generator=g) * torch.linspace(0.02, 1, K))


def test_parts_are_the_tokens_held_back_and_the_others():
    x, other = inputs(640), inputs(640, 1)
    missing = inputs(640, 2)[:, :96]
    h = gathered(x, other, missing)
    rest, held = h.parts()
    for part, mask in ((rest, kept(640)), (held, ~kept(640))):
        n = int(mask.sum())
        assert part.tokens == n
        assert torch.allclose(part.matrix(), x[mask].T @ x[mask] / n, atol=1e-3)
        assert torch.allclose(part.cross(), x[mask].T @ other[mask] / n, atol=1e-3)
        assert torch.allclose(part.missing(), x[mask].T @ missing[mask] / n, atol=1e-3)
    assert torch.allclose(h.matrix(), x.T @ x / 640, atol=1e-3)
    assert Hessian("x", K, "cpu").parts() is None
    assert gathered(x[: 4 * ROW]).parts() is None  # none was held back


def test_merged_statistics_keep_both_parts():
    x = inputs(64 * ROW)
    first, second = gathered(x[: 32 * ROW]), gathered(x[32 * ROW :])
    first.merge(second)
    whole = gathered(x)
    for a, b in zip(first.parts(), whole.parts()):
        assert a.tokens == b.tokens and torch.allclose(a.matrix(), b.matrix(), atol=1e-3)


@pytest.mark.parametrize("tokens", [160, 16 * 2048])
def test_feedback_takes_the_damping_that_loses_least_on_the_rows_held_back(tokens: int):
    x, scale = inputs(tokens).double(), torch.linspace(0.5, 2, K, dtype=torch.float64)
    mask = kept(tokens)
    i = torch.arange(128)
    bits = sum(((i[:, None] >> b) & (i[None, :] >> b)) & 1 for b in range(7))
    hadamard = torch.where(bits % 2 == 0, 1.0, -1.0).double() / 128**0.5
    losses = {}
    for share in (m * DAMPING for m in MULTIPLES):
        h = x[mask].T @ x[mask] / int(mask.sum())
        h += share * h.diagonal().mean() * torch.eye(K, dtype=torch.float64)
        c = torch.linalg.cholesky(hadamard @ (scale[:, None] * h * scale) @ hadamard)
        d = torch.block_diag(*(c[a : a + 16, a : a + 16] for a in range(0, K, 16)))
        error = torch.linalg.solve((c @ torch.linalg.inv(d)).T, torch.eye(K, dtype=torch.float64))  # of unit noise
        rotated = x[~mask] * scale @ hadamard
        losses[share] = float((rotated @ error).square().sum())
    assert for_feedback(gathered(x.float()), scale.float(), DAMPING) == min(losses, key=losses.get)
    assert for_feedback(Hessian("x", K, "cpu"), scale.float(), DAMPING) == DAMPING


@pytest.mark.parametrize("tokens", [160, 16 * 512])
def test_correction_takes_the_damping_that_loses_least_on_the_rows_held_back(tokens: int):
    original = inputs(tokens).double()
    g = torch.Generator().manual_seed(3)
    x = original + 0.3 * torch.randn(tokens, K, generator=g).double() * original.std()
    weight = torch.randn(40, K, generator=g).double() / K**0.5
    mask = kept(tokens)
    losses = {}
    for share in (m * DAMPING for m in MULTIPLES):
        a, b = x[mask], original[mask]
        h = a.T @ a / len(a)
        h += share * h.diagonal().mean() * torch.eye(K, dtype=torch.float64)
        change = torch.linalg.solve(h, a.T @ (b - a) @ weight.T / len(a)).T
        losses[share] = float((x[~mask] @ (weight + 0.5 * change).T - original[~mask] @ weight.T).square().sum())
    statistics = gathered(x.float(), original.float())
    best = min(losses, key=losses.get)
    assert for_correction(statistics, weight.float(), 0.5, DAMPING) == best
    h = x.T @ x / tokens
    h += best * h.diagonal().mean() * torch.eye(K, dtype=torch.float64)
    want = weight + 0.5 * torch.linalg.solve(h, x.T @ (original - x) @ weight.T / tokens).T
    assert torch.allclose(corrected(weight.float(), statistics, 0.5, DAMPING).double(), want, atol=2e-3)
