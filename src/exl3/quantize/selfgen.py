"""Calibration text that the model writes itself: answers to the bundled questions in its own chat template, or continuations of the bundled
prose where it has none, drawn at temperature 1. That is the distribution whose divergence is judged later.

All rows go in step, a token of each at a time; a row whose answer ends is given the next question, so that it becomes a conversation of
`cols` tokens. Questions are fed like answers are drawn: token by token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from exl3.cache import Batch, Cache
from exl3.cache.cache import PAGE
from exl3.errors import ArgumentError
from exl3.quantize.calibration import read_bundled, read_chats

PIECE = 512  # tokens of one conversation
AT_ONCE = 256  # conversations in step
OPENING = 24  # tokens of a document that the model continues where it has no chat template


def prompts(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Token ids of questions in the model's template, or of openings, without end, in an order of `seed`."""
    generator = torch.Generator().manual_seed(seed)
    texts: list[str] = []
    if tokenizer.has_chat_template:
        try:
            texts = [tokenizer.render_chat([{"role": "user", "content": q}], add_generation_prompt=True) for q, _ in read_chats()]
        except ArgumentError:
            texts = []
    encoded = tokenizer.encode_batch(texts) if texts else [d[:OPENING] for d in tokenizer.encode_batch(read_bundled("prose"), add_bos=None)]
    encoded = [list(ids) for ids in encoded if len(ids)]
    while True:
        for i in torch.randperm(len(encoded), generator=generator).tolist():
            yield encoded[i]


def calibration_rows(model: Any, tokenizer: Any, eos: set[int], rows: int, cols: int, seed: int) -> Tensor:
    """(rows, cols) int32 ids; long rows are made of several conversations of at most `PIECE` tokens."""
    length = min(cols, PIECE)
    count = -(-rows * cols // length)
    parts = [write_rows(model, tokenizer, eos, min(AT_ONCE, count - start), length, seed + start) for start in range(0, count, AT_ONCE)]
    return torch.cat(parts).flatten()[: rows * cols].view(rows, cols)


def write_rows(
    model: Any, tokenizer: Any, eos: set[int], rows: int, cols: int, seed: int, *, progress: Callable[[int, int], None] | None = None
) -> Tensor:
    """(rows, cols) int32 token ids. model: loaded, with dense matrices; `eos`: ids that end an answer."""
    device = model.device
    source = prompts(tokenizer, seed)
    waiting = [deque(next(source)) for _ in range(rows)]
    pages = -(-cols // PAGE)
    cache = Cache(model, rows * pages * PAGE, device)
    line = torch.arange(rows, dtype=torch.int32, device=device)
    table = torch.arange(rows * pages, dtype=torch.int32, device=device).view(rows, pages)
    start = torch.arange(rows + 1, dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.empty(rows, cols, dtype=torch.int32)
    drawn: list[int] = []
    with torch.inference_mode():
        for place in range(cols):
            for r, queue in enumerate(waiting):
                if not queue and drawn[r] in eos:
                    queue.extend(next(source))
                    queue.appendleft(drawn[r])
                ids[r, place] = queue.popleft() if queue else drawn[r]
            now = ids[:, place].contiguous().to(device)
            lengths = line.new_full((rows,), place + 1)
            batch = Batch(now, lengths - 1, line, start, lengths, block_table=table, cache=cache)
            logits = model(batch)
            drawn = (logits - torch.empty_like(logits).exponential_(generator=generator).log_()).argmax(1).tolist()
            if progress is not None:
                progress(place + 1, cols)
    return ids
