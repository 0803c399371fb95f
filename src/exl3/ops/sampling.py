"""Sampling parameters as the kernels read them: one 48-byte record a row, on the device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.ops import blocks, checks, native, reference

_RECORD = struct.Struct("@6f2i2Q")


@dataclass
class SampleParams:
    """What one row samples with; the defaults change nothing. temperature 0: greedy. The draw is a function of (seed, counter)
    alone, so give each token of a row its own counter. See `ops.sample` for the order of the steps."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature_last: bool = False
    seed: int = 0
    counter: int = 0

    def check(self) -> None:
        """Raises ArgumentError naming the first value that cannot work."""
        for name, ok, want in (
            ("temperature", 0 <= self.temperature < 1e6, "0 (greedy) or positive"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("top_p", 0 <= self.top_p <= 1, "between 0 and 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < 1e6, "positive, 1 is off"),
            ("presence_penalty", abs(self.presence_penalty) < 1e6, "finite, 0 is off"),
            ("frequency_penalty", abs(self.frequency_penalty) < 1e6, "finite, 0 is off"),
        ):
            if not ok:
                raise ArgumentError(f"{name} {getattr(self, name)!r}: must be {want}")


def pack_sample_params(rows: Sequence[SampleParams], device: torch.device | str = "cpu", out: Tensor | None = None) -> Tensor:
    """SampleParams of each row -> uint8 `(rows, 48)` on `device`; with `out` the records are copied into it (a recorded step's buffer)."""
    data = bytearray()
    for p in rows:
        p.check()
        data += _RECORD.pack(
            p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty,
            min(p.top_k, 2**31 - 1), bool(p.temperature_last), p.seed & 0xFFFFFFFFFFFFFFFF, p.counter & 0xFFFFFFFFFFFFFFFF,
        )  # fmt: skip
    packed = torch.frombuffer(data, dtype=torch.uint8).view(-1, _RECORD.size) if data else torch.empty(0, _RECORD.size, dtype=torch.uint8)
    return packed.to(device) if out is None else out[: len(packed)].copy_(packed)


def unpack_sample_params(params: Tensor) -> list[SampleParams]:
    """The inverse of `pack_sample_params`."""
    rows = []
    for record in params.cpu().contiguous():
        t, top_p, min_p, repetition, presence, frequency, top_k, last, seed, counter = _RECORD.unpack(record.numpy().tobytes())
        rows.append(SampleParams(t, top_k, top_p, min_p, repetition, presence, frequency, bool(last), seed, counter))
    return rows


def sample(
    logits: Tensor, params: Tensor, history: Tensor | None = None, history_len: Tensor | None = None, *, probs: bool = True
) -> tuple[Tensor, Tensor | None]:
    """One token per row of logits fp32 `(rows, vocab)` -> (ids int32 `(rows,)`, probs fp32 `(rows,)`; None with `probs=False`, which saves
    a greedy draw its second pass).

    params: `pack_sample_params` of the rows. history: int32 `(rows, n)` tokens the penalties look at, of which the first history_len
    int32 `(rows,)` count (default all). The contract (order of steps, draw, bad rows) is `ops.reference.sample`'s docstring.
    """
    op = native.serving("sample", logits, params, history, history_len)
    if op is None:
        return reference.sample(logits, params, history, history_len)
    stride = checks.rows("sample", "logits", logits, dtypes=checks.F32)
    rows, vocab = logits.shape
    checks.tensor("sample", "params", params, (torch.uint8,), shape=(rows, _RECORD.size), dense=True)
    history_stride = 0
    if history is not None:
        history_stride = checks.rows("sample", "history", history, dtypes=checks.I32)
        if history_len is None:
            history_len = torch.full((rows,), history.shape[1], dtype=torch.int32, device=logits.device)
        checks.tensor("sample", "history_len", history_len, checks.I32, shape=(rows,), dense=True)
        if history.shape[0] != rows:
            raise ArgumentError(f"sample: history has {history.shape[0]} rows, logits have {rows}")
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    chances = torch.empty(rows, dtype=torch.float32, device=logits.device) if probs else None
    head = (
        logits.data_ptr(), stride, params.data_ptr(), 0 if history is None else history.data_ptr(), history_stride,
        0 if history is None or history_len is None else history_len.data_ptr(), ids.data_ptr(),
        0 if chances is None else chances.data_ptr(),
    )  # fmt: skip
    nbytes = native.backend(logits.device).workspace("sample", blocks.SAMPLE.pack(*head, 0, 0, rows, vocab))
    space = native.workspace("sample", logits.device, nbytes)
    block = blocks.SAMPLE.pack(*head, 0 if space is None else space.data_ptr(), 0 if space is None else space.numel(), rows, vocab)
    native.launch(op, logits.device, block, logits, params, history, history_len, ids, chances, space)
    return ids, chances
