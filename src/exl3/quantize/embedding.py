"""Ring-quantized token embedding (format description, section 4.8), for --embed-bits and tight --total-bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from exl3.codec.embedding import EMBEDDING_DIM, embedding_decode, pack_rings, prescale
from exl3.codec.rotation import rotate
from exl3.quantize.regularize import random_signs

ROWS = 2048  # encoded at a time


def quantize_embedding(
    key: str, table: Tensor, bits: int, encode: Callable[[Tensor], tuple[Tensor, Tensor]], progress: Callable[[int], None] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors for the file, and the table as they give it, `(rows, hidden)` fp16.

    table: (rows, hidden); `encode`: trellis search with codebook mul1 at `bits`, rings `(count, 256)` -> (states, values).
    """
    rows, hidden = table.shape
    groups = -(-hidden // EMBEDDING_DIM)
    signs = random_signs(f"{key}:rings", groups * EMBEDDING_DIM).view(groups, EMBEDDING_DIM).half()
    parts = []
    for start in range(0, rows, ROWS):
        chunk = table[start : start + ROWS].float()
        extended = torch.nn.functional.pad(chunk, (0, groups * EMBEDDING_DIM - hidden)).view(-1, groups, EMBEDDING_DIM)
        targets = rotate(extended * signs.float().to(chunk.device), EMBEDDING_DIM).view(-1, EMBEDDING_DIM)
        scaled = prescale(targets, bits)
        states, values = encode(scaled.contiguous())
        scales = (targets * values).sum(1) / values.square().sum(1).clamp_min(1e-30)
        parts.append(pack_rings(states, scales, bits).view(len(chunk), -1).cpu())
        if progress is not None:
            progress(scaled.numel())
    trellis = torch.cat(parts)
    decoded = embedding_decode(trellis, signs, hidden).half()
    return {f"{key}.trellis": trellis, f"{key}.signs": signs}, decoded
