"""`Batch`: one step's tokens, packed. One decode token per row, a draft and a prefill chunk are the same structure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from exl3 import ops
from exl3.errors import ArgumentError

if TYPE_CHECKING:
    from exl3.cache.cache import Cache


@dataclass
class Batch:
    """All tensors int32 on the device; T tokens of R rows, P pages a row at most."""

    ids: Tensor
    """(T,) token ids"""
    positions: Tensor
    """(T,) place of each token in its row, from 0"""
    token_row: Tensor
    """(T,) row of each token, -1 for padding"""
    row_start: Tensor
    """(R+1,) first token of each row in this batch"""
    lengths: Tensor
    """(R,) tokens in the row's cache after this step"""
    block_table: Tensor | None = None
    """(R, P) pages of each row in order"""
    logits_at: Tensor | None = None
    """(L,) packed indices whose logits are wanted; None: all"""
    logits: Tensor | None = None
    """(L, vocab_size) fp32 for the head to write to; None: a new tensor"""
    cache: Cache | None = None
    """None: a whole-sequence pass without a cache"""
    tables: dict[Any, Any] = field(default_factory=dict)
    """rotary tables of this step by kind, filled by the model"""
    elsewhere: dict[torch.device, Batch] = field(default_factory=dict)
    """copies on other devices"""
    runs: list[tuple[int, int]] | None = None
    """(first position, tokens) of each row in order, where the host knows them and no padding follows: prefill; None: a recorded step"""

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    def on(self, device: torch.device) -> Batch:
        """This batch on `device`, with rotary tables of its own: itself where it lies there already, else a copy made once."""
        if self.ids.device == device:
            return self
        if device not in self.elsewhere:
            names = ("ids", "positions", "token_row", "row_start", "lengths", "block_table", "logits_at")
            moved: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else ops.move(t, device) for name in names}
            self.elsewhere[device] = replace(self, **moved, tables={}, elsewhere={})
        return self.elsewhere[device]

    @classmethod
    def whole(cls, ids: Tensor) -> Batch:
        """A pass over whole sequences ids `(B, T)` without a cache: every row starts at position 0."""
        if ids.ndim != 2 or ids.shape[0] == 0 or ids.shape[1] == 0:
            raise ArgumentError(f"ids: needs shape (rows, tokens), both at least 1, got {tuple(ids.shape)}")
        rows, n = ids.shape
        line = torch.arange(n, dtype=torch.int32, device=ids.device)
        return cls(
            ids=ids.reshape(-1).to(torch.int32),
            positions=line.repeat(rows),
            token_row=torch.arange(rows, dtype=torch.int32, device=ids.device).repeat_interleave(n),
            row_start=torch.arange(0, rows * n + 1, n, dtype=torch.int32, device=ids.device),
            lengths=torch.full((rows,), n, dtype=torch.int32, device=ids.device),
        )

    @classmethod
    def packed(
        cls,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]],
        cache: Cache,
        *,
        logits: str = "last",
    ) -> Batch:
        """A step over `cache`: rows[r] are the new token ids of row r, which stand from position starts[r] on; pages[r] its
        pages, enough for all of them. logits: "last" token of each row, or "all"."""
        device = cache.device
        ids: list[int] = []
        positions: list[int] = []
        token_row: list[int] = []
        row_start, lengths, last = [0], [], []
        for r, (row, start, table) in enumerate(zip(rows, starts, pages, strict=True)):
            if start + len(row) > 256 * len(table):
                raise ArgumentError(f"row {r}: {start + len(row)} tokens do not fit its {len(table)} pages of 256")
            ids += row
            positions += range(start, start + len(row))
            token_row += [r] * len(row)
            row_start.append(len(ids))
            lengths.append(start + len(row))
            last.append(len(ids) - 1)
        width = max((len(p) for p in pages), default=1)
        table_rows = [[*p, *([0] * (width - len(p)))] for p in pages]

        def ints(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            ids=ints(ids),
            positions=ints(positions),
            token_row=ints(token_row),
            row_start=ints(row_start),
            lengths=ints(lengths),
            block_table=ints(table_rows).view(len(pages), width),
            logits_at=ints(last) if logits == "last" else None,
            cache=cache,
            runs=[(start, len(row)) for row, start in zip(rows, starts, strict=True)],
        )
