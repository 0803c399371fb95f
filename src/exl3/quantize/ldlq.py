"""LDLQ: quantize 16 rows at a time from the last to the first, each time moving the error already made into the rows still to come.

Quantizer description, section 6.2. Several matrices with as many rows and the same rate go in step, so that one encoder call serves
all of them: matrices that share a factor are concatenated along n beforehand, others bring their own factor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.codec.tiles import matrix_to_tiles, tiles_to_matrix
from exl3.quantize.ldl import BLOCK

SPAN = 128  # rows after which the error is folded into all rows above by one large product

# tiles (count, 256) fp32 in stream order -> (states (count, 256) int16, values (count, 256) fp32)
Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """One matrix to quantize: `rotated` (k, n) fp32 in codebook units, `lower` (k, k) from block_ldl or None (no feedback)."""

    rotated: Tensor
    lower: Tensor | None


@dataclass
class Solution:
    """`states` (k/16, n/16, 256) int16 bit patterns in stream order; `values` (k, n) fp32, the decoded matrix."""

    states: Tensor
    values: Tensor


def ldlq(problems: list[Problem], encode: Encode, progress: Callable[[int], None] | None = None) -> list[Solution]:
    """Quantizes all problems in step. All have the same k. `progress(weights)` is told after each step how many weights were encoded."""
    k = problems[0].rotated.shape[0]
    widths = [p.rotated.shape[1] // BLOCK for p in problems]
    solutions = [_empty_solution(p.rotated) for p in problems]
    # the error W - Q of finished rows and, for each problem, what it adds to the rows above
    errors = [torch.zeros_like(p.rotated) if p.lower is not None else None for p in problems]
    for span_end in range(k, 0, -SPAN):
        span = max(0, span_end - SPAN)
        targets = [_span_target(p, e, span, span_end) for p, e in zip(problems, errors)]
        for row in range(span_end - BLOCK, span - 1, -BLOCK):
            end = row + BLOCK
            tiles = []
            for p, e, target in zip(problems, errors, targets):
                block = target[row - span : end - span]
                if p.lower is not None and e is not None and end < span_end:
                    block = block + p.lower[end:span_end, row:end].T @ e[end:span_end]
                tiles.append(matrix_to_tiles(block)[0])
            states, values = encode(torch.cat(tiles))
            for p, e, s, st, v in zip(problems, errors, solutions, torch.split(states, widths), torch.split(values, widths)):
                s.states[row // BLOCK] = st
                s.values[row:end] = tiles_to_matrix(v.unsqueeze(0))
                if e is not None:
                    torch.sub(p.rotated[row:end], s.values[row:end], out=e[row:end])
            if progress is not None:
                progress(BLOCK * BLOCK * sum(widths))
    return solutions


def _empty_solution(rotated: Tensor) -> Solution:
    k, n = rotated.shape
    states = torch.empty(k // BLOCK, n // BLOCK, BLOCK * BLOCK, dtype=torch.int16, device=rotated.device)
    return Solution(states, torch.empty_like(rotated))


def _span_target(problem: Problem, error: Tensor | None, start: int, end: int) -> Tensor:
    rows = problem.rotated[start:end]
    if problem.lower is None or error is None or end == problem.rotated.shape[0]:
        return rows
    return torch.addmm(rows, problem.lower[end:, start:end].T, error[end:])
