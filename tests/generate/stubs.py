"""Models without weights: their next token is a function of what really stands in the cache, so a wrong page changes the text."""

from __future__ import annotations

import zlib

import numpy as np
import torch


class StubCache:
    """Keeps token ids where a real cache keeps keys and values."""

    def __init__(self, max_tokens: int) -> None:
        self.pages = -(-max_tokens // 256)
        self.max_tokens = self.pages * 256
        self.tokens = torch.full((self.pages, 256), -1, dtype=torch.int32)
        self.layers: list = []
        self.copied = 0

    def copy_page(self, src: int, dst: int) -> None:
        self.copied += 1
        self.tokens[dst] = self.tokens[src]


class HistoryModel:
    """Logits are pseudo-random numbers seeded by the whole history as read back from the cache."""

    def __init__(self, vocab: int = 300, max_tokens: int = 4096, salt: int = 0, fail=None) -> None:
        self.vocab_size, self.max_tokens, self.salt, self.fail = vocab, max_tokens, salt, fail
        self.device = torch.device("cpu")
        self.eos_token_ids: list[int] = []
        self.bos_token_id = 1
        self.tokenizer = None
        self.passes: list[int] = []  # tokens of each pass
        self.blocks = [self.block]
        self.revision = 0

    def embed(self, batch):
        ids, rows, pos = batch.ids.numpy(), batch.token_row.numpy(), batch.positions.numpy()
        if self.fail is not None:
            self.fail(ids[rows >= 0])
        self.passes.append(int((rows >= 0).sum()))
        table, store = batch.block_table.numpy(), batch.cache.tokens.numpy()
        for t in range(len(ids)):
            if rows[t] >= 0:
                store[table[rows[t], pos[t] // 256], pos[t] % 256] = ids[t]
        return batch

    def block(self, x, batch):
        return x

    def history(self, batch, t: int) -> np.ndarray:
        row, n = int(batch.token_row[t]), int(batch.positions[t]) + 1
        pages = batch.block_table.numpy()[row, : -(-n // 256)]
        return batch.cache.tokens.numpy()[pages].reshape(-1)[:n]

    def logits_of(self, history: np.ndarray) -> np.ndarray:
        seed = zlib.crc32(np.ascontiguousarray(history, "<i4").tobytes(), self.salt)
        return np.random.default_rng(seed).normal(0, 3, self.vocab_size).astype(np.float32)

    def head(self, x, batch):
        at = range(len(batch.ids)) if batch.logits_at is None else batch.logits_at.tolist()
        blank = np.zeros(self.vocab_size, np.float32)
        return torch.from_numpy(np.stack([self.logits_of(self.history(batch, t)) if batch.token_row[t] >= 0 else blank for t in at]))

    def greedy(self, prompt, n: int) -> list[int]:
        """What an engine must generate."""
        ids = list(prompt)
        for _ in range(n):
            ids.append(int(self.logits_of(np.array(ids)).argmax()))
        return ids[len(prompt) :]


class ChainModel(HistoryModel):
    """The next token is a function of the last one: `chain[t]`. Nearly free, for scripts and for timing the engine."""

    def __init__(self, chain, vocab: int = 512, max_tokens: int = 4096) -> None:
        super().__init__(vocab, max_tokens)
        follow = np.arange(1, vocab + 1) % vocab
        for a, b in chain.items():
            follow[a] = b
        self.table = torch.full((vocab, vocab), -10.0)
        self.table[torch.arange(vocab), torch.from_numpy(follow)] = 10.0

    def embed(self, batch):
        return batch.ids

    def head(self, x, batch):
        ids = x if batch.logits_at is None else x[batch.logits_at.long()]
        return self.table[ids.long()]


class ToyTokenizer:
    """Pieces given outright."""

    def __init__(self, pieces, special=(), eos_id=None, bos_id=None) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.special_ids = frozenset(special)
        self.eos_id, self.bos_id = eos_id, bos_id
        self.vocab_size = len(self.pieces)

    def encode(self, text, add_bos=False, special=True):
        data, ids = text.encode(), [self.bos_id] if add_bos else []
        while data:
            best = max((i for i, p in enumerate(self.pieces) if p and data.startswith(p)), key=lambda i: len(self.pieces[i]))
            ids.append(best)
            data = data[len(self.pieces[best]) :]
        return ids

    def decode(self, ids, special=False):
        return b"".join(self.pieces[i] for i in ids if special or i not in self.special_ids).decode("utf-8", "replace")


def run(generator, *jobs, limit: int = 100_000):
    """Enqueues jobs and iterates until all are done -> {job: list of its results}."""
    generator.enqueue(list(jobs))
    results = {job: [] for job in jobs}
    for _ in range(limit):
        if not generator.num_remaining_jobs():
            return results
        for r in generator.iterate():
            results.setdefault(r["job"], []).append(r)
    raise AssertionError("jobs did not finish")


def tokens_of(results) -> list[int]:
    """All tokens a job handed out, in order."""
    return [t for r in results if "token_ids" in r for t in r["token_ids"][0].tolist()]


def text_of(results) -> str:
    return "".join(r.get("text", "") for r in results)
