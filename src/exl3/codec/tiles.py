"""Stream order: which weight of a 16x16 tile stands at which of the 256 positions of its ring (spec 2.1).

Bits of a stream position, high to low: column 2,1,0 | row 2,1 | column 3 | row 3 | row 0. Eight consecutive positions
are what one lane of a warp holds of two m16n8k16 matrix fragments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.errors import ArgumentError


def tile_coordinates() -> tuple[Tensor, Tensor]:
    """(row, column) inside the tile of each stream position: two (256,) int64 tensors."""
    i = torch.arange(256, device="cpu")
    t, j = i >> 3, i & 7
    return 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1), (t >> 2) + 8 * (j >> 2)


def tiles_to_matrix(tiles: Tensor) -> Tensor:
    """(in/16, out/16, 256) in stream order -> (in, out); any dtype."""
    need_tensors(tiles=tiles)
    if tiles.dim() != 3 or tiles.shape[2] != 256:
        raise ArgumentError(f"tiles must be (in/16, out/16, 256), got shape {tuple(tiles.shape)}")
    rows, cols, _ = tiles.shape
    bits = tiles.reshape(rows, cols, 8, 4, 2, 2, 2)  # col 0-2, row 1-2, col 3, row 3, row 0
    return bits.permute(0, 5, 3, 6, 1, 4, 2).reshape(16 * rows, 16 * cols)


def matrix_to_tiles(matrix: Tensor) -> Tensor:
    """(in, out), both multiples of 16, -> (in/16, out/16, 256) in stream order; any dtype."""
    need_tensors(matrix=matrix)
    if matrix.dim() != 2 or matrix.shape[0] % 16 or matrix.shape[1] % 16:
        raise ArgumentError(f"matrix must be (in, out), both multiples of 16, got shape {tuple(matrix.shape)}")
    rows, cols = matrix.shape[0] // 16, matrix.shape[1] // 16
    bits = matrix.reshape(rows, 2, 4, 2, cols, 2, 8)  # row 3, row 1-2, row 0, | col 3, col 0-2
    return bits.permute(0, 4, 6, 2, 5, 1, 3).reshape(rows, cols, 256)
