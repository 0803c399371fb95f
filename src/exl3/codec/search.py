"""The encoder's trellis search in plain torch: slow, but right (quantizer spec 7; QTIP, arXiv 2406.11235).

A node is the overlap of two neighbouring states. Every position tries all 65536 states; each node keeps its cheapest
way in. A ring must close, so the search runs twice: once from the far side with a free start to find the best node
at the seam (between the last position and the first), then around the ring with that node fixed at both ends.
"""

from __future__ import annotations

import torch
from torch import Tensor

from exl3.codec.checks import need_tensors
from exl3.codec.codebooks import check_codebook, check_codebook_rate, codebook_table
from exl3.codec.rings import check_rate, fresh_bits
from exl3.errors import ArgumentError, NumericalError


def encode_reference(
    tiles: Tensor, K: int | float, codebook: str, multiplier: int | None = None, *, seam_window: int = 0
) -> tuple[Tensor, Tensor]:
    """Tail-biting states whose values are closest, in squared error, to the targets.

    tiles: (n, length) in units of the codebook; length is 256 for weights (stream order) and embeddings, 160 for n-gram
    rows; K: rate; seam_window: positions of the first pass around the seam, even, 0 for all of them
    -> (states (n, length) int32, values (n, length) fp32). Costs are fp32; equal costs keep the smallest predecessor.
    ArgumentError for wrong arguments, NumericalError for NaN or Inf. About 0.2 s a tile.
    """
    K = check_rate(K)
    check_codebook(codebook, multiplier)
    check_codebook_rate(codebook, K)
    need_tensors(tiles=tiles)
    if tiles.dim() != 2 or not tiles.dtype.is_floating_point:
        raise ArgumentError(f"tiles must be (n, length) floating point, got {tiles.dtype} of shape {tuple(tiles.shape)}")
    length = tiles.shape[1]
    new = fresh_bits(K, length)
    if sum(new) < 16 or length % 2:
        raise ArgumentError(f"a ring of {length} positions at K = {K} is too short or odd; it needs 16 bits and an even length")
    window = seam_window or length
    if window % 2 or not 2 <= window <= length:
        raise ArgumentError(f"seam_window must be even and at most {length}, 0 for all, got {seam_window}")
    if not bool(torch.isfinite(tiles).all()):
        bad = int((~torch.isfinite(tiles)).any(dim=1).nonzero()[0])
        raise NumericalError(f"tile {bad} holds NaN or Inf; look for them in the weights or the Hessian before encoding")
    table = codebook_table(codebook, multiplier, tiles.device)
    values = table.float()
    batch = 8  # bounds memory: 256 KiB of costs a tile, and 2^(16-K) bytes of history a position and tile
    states = torch.empty(tiles.shape, dtype=torch.int32, device=tiles.device)
    for start in range(0, tiles.shape[0], batch):
        states[start : start + batch] = _search(tiles[start : start + batch].float(), new, values, window)
    return states, values[states.long()]


def _search(tiles: Tensor, new: tuple[int, ...], values: Tensor, window: int) -> Tensor:
    n, length = tiles.shape
    around = [i % length for i in range(length - window // 2, length + window // 2)]
    free = tiles.new_zeros(n, 1 << (16 - new[around[0]]))
    cost, history = _forward(tiles, around, new, values, free)
    node = cost.argmin(dim=1)
    for i in reversed(around[window // 2 :]):  # back to the seam
        node, _ = _step_back(node, i, new, history[i])
    seam = node
    pinned = tiles.new_full((n, 1 << (16 - new[0])), torch.inf)
    pinned[torch.arange(n, device=tiles.device), seam] = 0
    _, history = _forward(tiles, list(range(length)), new, values, pinned)
    states = torch.empty(n, length, dtype=torch.int32, device=tiles.device)
    for i in reversed(range(length)):
        node, state = _step_back(node, i, new, history[i])
        states[:, i] = state.to(torch.int32)
    return states


def _forward(tiles: Tensor, order: list[int], new: tuple[int, ...], values: Tensor, cost: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Cheapest cost of every node behind the last position, and per position the high bits of each node's best state."""
    history = {}
    n, length = tiles.shape
    for i in order:
        error = (values - tiles[:, i, None]).square_().view(n, cost.shape[1], -1)  # state = (node << D(i)) | new bits
        total = error.add_(cost[:, :, None]).view(n, 1 << new[(i + 1) % length], -1)  # next node = low 16 - D(i+1) bits
        cost, best = total.min(dim=1)
        history[i] = best.to(torch.uint8)
    return cost, history


def _step_back(node: Tensor, i: int, new: tuple[int, ...], best: Tensor) -> tuple[Tensor, Tensor]:
    """(node before position i, state at position i) on the best way into `node` behind position i."""
    high = best.gather(1, node[:, None])[:, 0].long()
    state = (high << (16 - new[(i + 1) % len(new)])) | node
    return state >> new[i], state
