"""LDLQ: quantize 16 rows at a time from the last to the first, each time moving the error already made into the rows still to come.

Quantizer description, section 6.2. Matrices of one rate go in step, so that one encoder call serves all of them; those with as many rows
share their buffers. Products are made piece by piece of each matrix: what stands beside it, and where, doesn't change its bytes. Nothing
waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.quantize.ldl import BLOCK

SPAN = 128  # rows after which the error is folded into all rows above by one large product
PIECE = 2048  # columns of a product, whatever the matrix has: a matrix may be cut at these places and come out the same

# tiles (count, 256) fp32 in stream order -> (states (count, 256) int16, values (count, 256) fp32)
Encode = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class Problem:
    """One matrix to quantize: `rotated` (k, n) fp32 in codebook units, `lower` (k, k) from block_ldl or None (no feedback), `right` (n, n)
    likewise for the columns (see twosided; not for `ldlq`)."""

    rotated: Tensor
    lower: Tensor | None
    right: Tensor | None = None


@dataclass
class Solution:
    """`states` (k/16, n/16, 256) int16 bit patterns in stream order; `values` (k, n) fp32, the decoded matrix. Views of shared buffers."""

    states: Tensor
    values: Tensor


class _Stack:
    """Matrices with the same number of rows, side by side, in pieces of at most PIECE columns."""

    def __init__(self, problems: list[Problem]) -> None:
        sizes = [p.rotated.shape[1] for p in problems]
        self.matrices = [(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
        self.pieces = [
            (p.lower, slice(c, min(c + PIECE, end)))
            for p, (start, end) in zip(problems, self.matrices)
            for c in range(start, end, PIECE)
            if p.lower is not None
        ]
        self.original = torch.cat([p.rotated for p in problems], 1)
        self.rows, width = self.original.shape
        self.tiles = width // BLOCK
        self.values = self.original.clone()  # finished rows; targets in those still to come
        self.states = torch.empty(self.rows // BLOCK, self.tiles, BLOCK * BLOCK, dtype=torch.int16, device=self.original.device)
        self.error = self.original.new_empty(min(SPAN, self.rows), width)  # of the present span

    def _span(self, row: int) -> tuple[int, int]:
        end = self.rows - (self.rows - row - 1) // SPAN * SPAN
        return max(0, end - SPAN), end

    def prepare(self, row: int, tiles: Tensor) -> None:
        """Targets of the rows `row` .. `row` + 15, in stream order, into `tiles` (count, 256)."""
        start, span_end = self._span(row)
        end = row + BLOCK
        if end < span_end:
            for lower, c in self.pieces:
                self.values[row:end, c].addmm_(lower[end:span_end, row:end].T, self.error[end - start : span_end - start, c])
        block = self.values[row:end].view(2, 4, 2, self.tiles, 2, 8)  # row 3, row 1-2, row 0, | column 3, column 0-2
        tiles.view(self.tiles, 8, 4, 2, 2, 2).copy_(block.permute(3, 5, 1, 4, 0, 2))

    def take(self, row: int, states: Tensor, values: Tensor) -> None:
        """The encoder's answer for these rows; behind the last of a span, the rows above learn of its errors."""
        start, span_end = self._span(row)
        end = row + BLOCK
        self.states[row // BLOCK] = states
        rows = self.values[row:end]
        rows.view(2, 4, 2, self.tiles, 2, 8).permute(3, 5, 1, 4, 0, 2).copy_(values.view(self.tiles, 8, 4, 2, 2, 2))
        torch.sub(self.original[row:end], rows, out=self.error[row - start : end - start])
        if row == start > 0:
            for lower, c in self.pieces:
                self.values[:start, c].addmm_(lower[start:span_end, :start].T, self.error[: span_end - start, c])

    def solutions(self) -> list[Solution]:
        return [Solution(self.states[:, a // BLOCK : b // BLOCK], self.values[:, a:b]) for a, b in self.matrices]


def ldlq(problems: list[Problem], encode: Encode, progress: Callable[[int], None] | None = None) -> list[Solution]:
    """Quantizes all problems in step. `progress(weights)` is told now and then how many more weights were given to the encoder."""
    by_rows: dict[int, list[int]] = {}
    for i, p in enumerate(problems):
        by_rows.setdefault(p.rotated.shape[0], []).append(i)
    depth = max(by_rows)
    stacks = [_Stack([problems[i] for i in members]) for members in by_rows.values()]
    del problems  # the stacks hold copies
    told = 0
    for step in range(1, depth // BLOCK + 1):
        active = [s for s in stacks if BLOCK * step <= s.rows]
        counts = [s.tiles for s in active]
        tiles = stacks[0].original.new_empty(sum(counts), BLOCK * BLOCK)
        for s, part in zip(active, tiles.split(counts)):
            s.prepare(s.rows - BLOCK * step, part)
        states, values = encode(tiles)
        for s, st, v in zip(active, states.split(counts), values.split(counts)):
            s.take(s.rows - BLOCK * step, st, v)
        told += tiles.numel()
        if progress is not None and (step % (SPAN // BLOCK) == 0 or step == depth // BLOCK):
            progress(told)
            told = 0
    found = [solution for s in stacks for solution in s.solutions()]
    order = [i for members in by_rows.values() for i in members]
    return [solution for _, solution in sorted(zip(order, found), key=lambda pair: pair[0])]
