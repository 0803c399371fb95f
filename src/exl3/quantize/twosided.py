"""Two-sided LDLQ: rounding errors are fed back along the rows' metric (inputs) and along the columns' (how the loss couples the outputs).

Minimises tr(E^T H_in E H_out) over one 16x16 tile after the other from the far corner (YAQA, arXiv 2505.22988; quantizer description,
section 6.5). With H = L D L^T on each side, the target of a tile is W + (L_in^T E L_out) with the errors E made so far. Tiles of one
anti-diagonal don't see each other: they are encoded in one call, together with those of the other matrices of the same rate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exl3.codec.tiles import matrix_to_tiles, tiles_to_matrix
from exl3.quantize.ldl import BLOCK, unit_lower
from exl3.quantize.ldlq import Encode, Problem, Solution
from exl3.quantize.regularize import rotate_columns, rotate_rows

DAMPING = 0.025  # of the output side, a share of the mean diagonal: the least that is tried
_RETRIES = 6


def output_metric(output: Tensor, svh: Tensor) -> Tensor:
    """H128 diag(svh) output diag(svh) H128 for columns that were divided by `svh` and rotated; (n, n), n a multiple of 128."""
    return rotate_columns(rotate_rows(output * svh.unsqueeze(1) * svh))


def output_factor(output: Tensor, svh: Tensor, damping: float = DAMPING) -> Tensor:
    """L - I of the damped output metric: (n, n) fp32, zero above and inside the diagonal 16x16 blocks."""
    metric = output_metric(output, svh)
    mean = metric.diagonal().mean().clamp_min(1e-30)
    for retry in range(_RETRIES):
        damped = metric + damping * 4**retry * mean * torch.eye(len(metric), device=metric.device)
        chol, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0:
            return unit_lower(chol)
    return torch.zeros_like(metric)


class _Front:
    """One matrix on its way."""

    def __init__(self, problem: Problem) -> None:
        assert problem.right is not None
        self.rows, self.cols = (n // BLOCK for n in problem.rotated.shape)
        self.original = problem.rotated
        self.target = problem.rotated.clone()  # with what the errors so far ask for
        eye = torch.eye(problem.rotated.shape[0], device=problem.rotated.device)
        self.left = eye if problem.lower is None else problem.lower + eye
        self.right = problem.right + torch.eye(len(problem.right), device=problem.right.device)
        self.values = torch.empty_like(problem.rotated)
        self.states = torch.empty(self.rows, self.cols, BLOCK * BLOCK, dtype=torch.int16, device=problem.rotated.device)
        self.down = torch.arange(self.rows, device=problem.rotated.device)
        self.across = torch.arange(self.cols, device=problem.rotated.device)

    def span(self, step: int) -> tuple[int, int, int]:
        """(first row of tiles, last column of tiles, how many) of an anti-diagonal; tile i is (first + i, last - i)."""
        most = self.rows - 1 + self.cols - 1 - step  # row + column of its tiles
        first, end = max(0, most - self.cols + 1), min(self.rows - 1, most) + 1
        return first, most - first, end - first

    def index(self, step: int) -> tuple[Tensor, Tensor]:
        first, last, count = self.span(step)
        return self.down[first : first + count], self.across[last - count + 1 : last + 1].flip(0)

    def tiles(self, matrix: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
        """(count, 16, 16)"""
        return matrix.view(self.rows, BLOCK, self.cols, BLOCK)[where[0], :, where[1], :]

    def take(self, step: int, states: Tensor, tiles: Tensor) -> None:
        """Enters what was found for a step and moves its errors into the targets still to come."""
        where = self.index(step)
        found = _from_stream(tiles)
        self.states[where] = states
        self.values.view(self.rows, BLOCK, self.cols, BLOCK)[where[0], :, where[1], :] = found
        error = self.tiles(self.original, where) - found
        first, last, count = self.span(step)
        top, width = (first + count) * BLOCK, (last + 1) * BLOCK  # nothing beyond is still open
        right = self.right.view(self.cols, BLOCK, -1)[where[1], :, :width]
        left = self.left[first * BLOCK : top, :top]
        self.target[:top, :width].addmm_(left.T, torch.bmm(error, right).flatten(0, 1))


def _to_stream(tiles: Tensor) -> Tensor:
    """(count, 16, 16) -> (count, 256) in stream order."""
    return matrix_to_tiles(tiles.transpose(0, 1).flatten(1))[0]


def _from_stream(tiles: Tensor) -> Tensor:
    return tiles_to_matrix(tiles.unsqueeze(0)).unflatten(1, (-1, BLOCK)).transpose(0, 1)


def ldlq_two_sided(problems: list[Problem], encode: Encode, progress: Callable[[int], None] | None = None) -> list[Solution]:
    """As `ldlq`, for problems that all have a factor of the output side (`right`)."""
    fronts = [_Front(p) for p in problems]
    for step in range(max(f.rows + f.cols for f in fronts) - 1):
        open_ = [f for f in fronts if step < f.rows + f.cols - 1]
        parts = [_to_stream(f.tiles(f.target, f.index(step))) for f in open_]
        states, values = encode(torch.cat(parts))
        sizes = [len(p) for p in parts]
        for f, s, v in zip(open_, states.split(sizes), values.split(sizes)):
            f.take(step, s, v)
        if progress is not None:
            progress(BLOCK * BLOCK * sum(sizes))
    return [Solution(f.states, f.values) for f in fronts]
