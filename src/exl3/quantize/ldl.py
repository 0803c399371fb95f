"""Block-16 LDL factorisation of a Hessian with damping that grows until it succeeds (quantizer description, sections 4.6 and 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.errors import NumericalError
from exl3.quantize.regularize import rotate_columns, rotate_rows

BLOCK = 16
MAX_RETRIES = 10


@dataclass
class Factor:
    """H + damping = L D L^T; `lower` is L - I, `(k, k)` fp32, zero above and inside the diagonal 16x16 blocks."""

    lower: Tensor
    damping: float  # share of the mean diagonal that was added
    retries: int


def damped(hessian: Tensor, share: float) -> Tensor:
    """hessian + share * mean(diag) * I, a new tensor."""
    out = hessian.clone()
    diagonal = out.diagonal()
    diagonal += share * diagonal.mean()
    return out


def rotated_hessian(hessian: Tensor, scale: Tensor) -> Tensor:
    """H128 diag(scale) hessian diag(scale) H128: the metric of a weight whose rows were divided by `scale` and rotated."""
    return rotate_columns(rotate_rows(hessian * scale.unsqueeze(1) * scale))


def block_ldl(hessian: Tensor, damping: float, scale: Tensor, *, name: str = "") -> Factor:
    """Factors H128 diag(scale) (hessian + damping) diag(scale) H128.

    hessian: (k, k) symmetric fp32, k a multiple of 128. If Cholesky fails, `2 * max(damping, 0.005)` of the mean diagonal is added, up to
    ten times; then NumericalError. LDLQ runs from the last block of rows to the first: column block b of `lower` holds the weights with
    which errors of later rows enter the target of block b.
    """
    share, extra = damping, 2 * max(damping, 0.005)
    for retries in range(MAX_RETRIES + 1):
        chol, info = torch.linalg.cholesky_ex(rotated_hessian(damped(hessian, share), scale))
        if int(info) == 0 and bool(torch.isfinite(chol).all()):
            return Factor(unit_lower(chol), share, retries)
        share += extra
    raise NumericalError(
        f"{name or 'Hessian'}: the Cholesky factorisation fails even with {share - extra:.4g} of the mean diagonal added; "
        "the calibration activations of this layer are degenerate: use other or more calibration rows"
    )


def unit_lower(chol: Tensor) -> Tensor:
    """C -> C diag(C_bb)^-1 - I with C_bb the 16x16 diagonal blocks."""
    k = chol.shape[0]
    blocks = k // BLOCK
    columns = chol.view(k, blocks, BLOCK).transpose(0, 1)  # (blocks, k, 16)
    index = torch.arange(blocks, device=chol.device)
    diagonal = chol.view(blocks, BLOCK, blocks, BLOCK)[index, :, index, :]  # (blocks, 16, 16), lower triangular
    out: Tensor = torch.linalg.solve_triangular(diagonal, columns, upper=False, left=False)  # X D = C
    out = out.transpose(0, 1).reshape(k, k).contiguous()
    out.view(blocks, BLOCK, blocks, BLOCK)[index, :, index, :] = 0
    return out
