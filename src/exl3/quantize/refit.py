"""Scale refit after encoding: the best suh and svh for the trellis values that were found (quantizer description, section 6.7)."""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.quantize.regularize import rotate_columns, rotate_rows

FP16_MAX = 65504.0
OUTPUT_DAMPING = 0.025


def refit_scales(
    rotated_q: Tensor, suh: Tensor, svh: Tensor, target: Tensor, hessian: Tensor, output: Tensor | None = None, *, rounds: int = 2
) -> tuple[Tensor, Tensor]:
    """Minimises tr(E^T hessian E output), E = W_hat - target, over suh and svh, alternately; returns both as fp16.

    rotated_q: (k, n) decoded trellis values; target: (k, n) fp32; hessian: (k, k) fp32, damped, original basis; output: (n, n) likewise,
    None for the identity.
    suh is rounded before the last column step, so that svh makes up for its rounding. Columns with svh = 0 stay zero.
    """
    base = rotate_columns(rotate_rows(rotated_q.float()))
    weighted = hessian @ target
    dead = svh == 0
    suh, svh = suh.float(), svh.float()
    if output is not None:
        output = output + OUTPUT_DAMPING * output.diagonal().mean() * torch.eye(len(output), device=output.device)
    for _ in range(rounds):
        svh = _refit_columns(base, suh, svh, weighted, hessian, output)
        suh = _refit_rows(base, suh, svh, weighted, hessian, output)
    suh = round_scales(suh)
    svh = _refit_columns(base, suh.float(), svh, weighted, hessian, output)
    svh = torch.where(dead, torch.zeros_like(svh), svh)
    return suh, round_scales(svh)


def round_scales(scale: Tensor) -> Tensor:
    """fp32 -> fp16 kept inside the finite range."""
    return scale.clamp(-FP16_MAX, FP16_MAX).half()


def _refit_columns(base: Tensor, suh: Tensor, svh: Tensor, weighted: Tensor, hessian: Tensor, output: Tensor | None) -> Tensor:
    q = base * suh.unsqueeze(1)  # columns without svh: the solution is absolute
    if output is None:
        new = (q * weighted).sum(0) / (q * (hessian @ q)).sum(0)
    else:
        new = _solve((q.T @ (hessian @ q)) * output, ((q.T @ weighted) * output).sum(1))
    good = torch.isfinite(new) & (new * svh > 0)  # a changed sign is noise of a column that hardly matters
    return torch.where(good, new, svh)


def _refit_rows(base: Tensor, suh: Tensor, svh: Tensor, weighted: Tensor, hessian: Tensor, output: Tensor | None) -> Tensor:
    q = base * suh.unsqueeze(1) * svh
    felt = q if output is None else q @ output
    r = _solve((felt @ q.T) * hessian, (felt * weighted).sum(1))
    return suh * torch.where(torch.isfinite(r) & (r > 0), r, torch.ones_like(r))


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solution of a positive definite system (n, n), NaN where it is not one."""
    diagonal = system.diagonal()
    diagonal += 1e-6 * diagonal.mean()
    factor, info = torch.linalg.cholesky_ex(system)
    solved = torch.cholesky_solve(right.unsqueeze(1), factor).squeeze(1)
    return torch.where(info == 0, solved, torch.full_like(solved, torch.nan))


def proxy_error(error: Tensor, target: Tensor, hessian: Tensor) -> Tensor:
    """tr(E^T H E) / tr(W^T H W), a float64 scalar on the device: the share of the output energy that is lost on calibration inputs."""
    energy = (target * (hessian @ target)).sum(dtype=torch.float64)
    lost = (error * (hessian @ error)).sum(dtype=torch.float64)
    return torch.where(energy > 0, lost / energy, torch.zeros_like(energy))
