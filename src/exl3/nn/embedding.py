"""Token embedding: a dense table or a ring-quantized one (spec 4.8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.errors import ArgumentError


class Embedding(nn.Module):
    """ids `(tokens,)` -> fp32 `(tokens, hidden_size)`, times `scale` (Gemma's sqrt(hidden)). An id outside the table gives zeros."""

    weight: nn.Parameter | None

    def __init__(self, vocab_size: int, hidden_size: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.scale = scale
        self.table: ops.RingTable | None = None
        self.unload()

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.hidden_size}"

    @property
    def loaded(self) -> bool:
        return self.table is not None or (self.weight is not None and not self.weight.is_meta)

    def set_dense(self, weight: Tensor) -> None:
        """Hold `weight` `(vocab_size, hidden_size)` in its own dtype."""
        if tuple(weight.shape) != (self.vocab_size, self.hidden_size):
            raise ArgumentError(f"embedding has shape {tuple(weight.shape)}, this model needs {(self.vocab_size, self.hidden_size)}")
        self.table = None
        self.weight = nn.Parameter(weight, requires_grad=False)

    def set_rings(self, table: ops.RingTable) -> None:
        """Hold a ring-quantized table."""
        if tuple(table.shape) != (self.vocab_size, self.hidden_size):
            raise ArgumentError(f"embedding has shape {tuple(table.shape)}, this model needs {(self.vocab_size, self.hidden_size)}")
        self.table = table
        self.weight = None

    def unload(self) -> None:
        self.table = None
        self.weight = nn.Parameter(torch.empty(self.vocab_size, self.hidden_size, device="meta"), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        table = self.weight if self.table is None else self.table
        assert table is not None
        return ops.embedding(ids, table, self.scale, dtype=torch.float32)
