"""Text to rows of token ids for evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; a typed error that names the file where it can't be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ArgumentError(f"{path}: not UTF-8 text (byte {e.start}); convert it first") from None
    except OSError as e:
        raise ArgumentError(f"{path}: {e.strerror}; give a readable UTF-8 text file") from None


def text_rows(tokenizer: Any, text: str, row_len: int = 512, rows: int | None = None, *, bos: bool = False) -> Tensor:
    """Consecutive pieces of `row_len` tokens, `(rows, row_len)` int64, the unfinished rest dropped.

    `bos=True` (models that demand one) puts the BOS id first in each row, which then holds row_len - 1 tokens of text.
    """
    if row_len < 2:
        raise ArgumentError(f"row_len is {row_len}; a row needs at least 2 tokens")
    ids = torch.as_tensor(tokenizer.encode(text, add_bos=False), dtype=torch.int64).flatten()
    if bos and tokenizer.bos_id is None:
        raise ArgumentError("this model demands a BOS token but its tokenizer names none")
    step = row_len - 1 if bos else row_len
    count = ids.numel() // step
    if count == 0:
        raise ArgumentError(f"the text has {ids.numel()} tokens, one row needs {step}: give more text or shorter rows")
    if rows is not None:
        if rows < 1:
            raise ArgumentError(f"rows is {rows}; it must be at least 1")
        count = min(count, rows)
    out = ids[: count * step].view(count, step)
    if bos:
        out = torch.cat([torch.full((count, 1), int(tokenizer.bos_id)), out], 1)
    return out.contiguous()
