"""Rows of the token embedding, plain or ring-quantized (format section 4.8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.ops import blocks, checks, native, reference


@dataclass(frozen=True)
class RingTable:
    """A ring-quantized token embedding: trellis int16 `(vocab, G*(1+16*K))`, signs fp16 `(G, 256)`, G = ceil(n/256); n: hidden size."""

    trellis: Tensor
    signs: Tensor
    n: int

    def __post_init__(self) -> None:
        groups = -(-self.n // 256)
        checks.tensor("RingTable", "trellis", self.trellis, (torch.int16,), ndim=2)
        checks.tensor("RingTable", "signs", self.signs, (torch.float16,), shape=(groups, 256))
        if self.trellis.shape[1] != groups * (1 + 16 * self.bits) or not 1 <= self.bits <= 8:
            raise ArgumentError(
                f"RingTable: trellis rows of {self.trellis.shape[1]} words are not {groups} rings of 1 + 16*K words, K in 1..8"
            )

    @property
    def bits(self) -> int:
        return (self.trellis.shape[1] // -(-self.n // 256) - 1) // 16

    @property
    def shape(self) -> tuple[int, int]:
        return self.trellis.shape[0], self.n


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for x `(rows, n)` and int32 index `(count,)`, as a recorded step may do it."""
    return embedding(index, x, dtype=x.dtype)


def embedding(ids: Tensor, table: Tensor | RingTable, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """scale * table[ids] for ids int32 `(tokens,)` -> `(tokens, n)`. `table`: `(vocab, n)` fp32, fp16 or bf16, or a `RingTable`.
    An id outside the vocabulary gives zeros."""
    data = table if isinstance(table, Tensor) else table.trellis
    op = native.serving("embedding", data, ids)
    if op is None:
        return reference.embedding(ids, table, scale, dtype)
    checks.tensor("embedding", "ids", ids, (torch.int32,), ndim=1, dense=True)
    if isinstance(table, Tensor):
        checks.tensor("embedding", "table", table, checks.FLOATS, ndim=2, dense=True)
        signs, bits, code = None, 0, blocks.DTYPES[table.dtype]
    else:
        signs, bits, code = table.signs, table.bits, 0
    vocab, n = table.shape
    y = torch.empty((ids.shape[0], n), dtype=dtype, device=data.device)
    block = blocks.EMBEDDING.pack(
        ids.data_ptr(), data.data_ptr(), 0 if signs is None else signs.data_ptr(), y.data_ptr(), n,
        ids.shape[0], n, vocab, code, blocks.DTYPES[dtype], bits, scale,
    )  # fmt: skip
    native.launch(op, data.device, block, ids, data, signs, y)
    return y
