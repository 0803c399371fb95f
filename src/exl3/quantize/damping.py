"""Damping chosen on rows held back: what a Hessian of the other rows, damped so and so, leaves of the loss that those rows measure.

Two uses, judged apart. LDLQ leaves E = L^-T N with N white, so the loss on the held rows is tr(L^-1 H L^-T), L from the other rows' damped
Hessian, H of the held ones. A corrected target moves the weight by a change C; the held rows lose tr(C H C^T) - 2 tr(C B), B what they ask
for. Both are known before anything is encoded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.quantize.hessian import Hessian
from exl3.quantize.ldl import damped, rotated_hessian, unit_lower

MULTIPLES = (1.0, 0.04, 0.2, 5.0)  # of --damping; the first wins where nothing is better


def for_feedback(hessian: Hessian, scale: Tensor, damping: float) -> float:
    """The share of the mean diagonal whose factor loses least on the rows held back; `damping` without such rows."""
    parts = hessian.parts()
    if parts is None:
        return damping
    rest, held = (p.matrix(scale.device) for p in parts)
    metric = rotated_hessian(held, scale)
    shares = [m * damping for m in MULTIPLES]
    return _least(shares, [_feedback_loss(rotated_hessian(damped(rest, share), scale), metric) for share in shares])


def _feedback_loss(known: Tensor, metric: Tensor) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(known)
    lower = unit_lower(factor)  # less the identity, which unitriangular adds
    left = torch.linalg.solve_triangular(lower, metric, upper=False, unitriangular=True)
    loss = torch.linalg.solve_triangular(lower, left.T, upper=False, unitriangular=True).trace()
    return torch.where(info == 0, loss, torch.inf)


def for_correction(hessian: Hessian, weight: Tensor, share: float, damping: float) -> float:
    """The damping of the least squares whose change, `share` of it, loses least on the rows held back. weight: (out, in) fp32."""
    parts = hessian.parts()
    if parts is None:
        return damping
    k = weight.shape[1]
    rest, held = parts
    asked, wanted = wanted_change(rest, weight), wanted_change(held, weight)
    metric = held.matrix()[:k, :k]
    shares = [m * damping for m in MULTIPLES]
    losses = []
    for d in shares:
        factor, info = torch.linalg.cholesky_ex(damped(rest.matrix()[:k, :k], d))
        change = share * torch.cholesky_solve(asked, factor)
        loss = (change * (metric @ change - 2 * wanted)).sum()
        losses.append(torch.where(info == 0, loss, torch.inf))
    return _least(shares, losses)


def wanted_change(hessian: Hessian, weight: Tensor) -> Tensor:
    """(in, out): the right side of the least squares for a change of `weight` (out, in): the original's output on its own input less this
    one's, and what the residual stream lacks where the output goes straight into it."""
    k = weight.shape[1]
    wanted = (hessian.cross()[:k, :k] - hessian.matrix()[:k, :k]) @ weight.T
    missing = hessian.missing()
    if missing is not None and missing.shape[1] == weight.shape[0]:
        wanted += missing[:k]
    return wanted


def _least(shares: list[float], losses: list[Tensor]) -> float:
    found = torch.stack(losses).tolist()
    return shares[min(range(len(shares)), key=lambda i: (not found[i] == found[i], found[i]))]
