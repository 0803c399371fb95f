"""Draws the next token of many rows: what each job's sampler asks for, in one native call where it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from exl3 import ops, settings
from exl3.errors import NumericalError
from exl3.generate.job import Job
from exl3.generate.sampling import NoTokenLeftError, State, apply_mask, check_finite, uniform
from exl3.generate.step import device_failed

_MAX_HISTORY = 8192  # longer histories go step by step: copying them for every row would cost more than it saves

Drawn = tuple[int, Any] | Exception


class Drawer:
    """Draws tokens from logits `(rows, vocab)` fp32. `vocab`: ids the tokenizer has; columns beyond are padding and never drawn."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.fused = bool(settings.get("EXL3_FUSED_SAMPLER"))
        self.fetch: Callable[[Tensor, Sequence[int], Tensor], list[int]] = lambda ids, *_: ids.tolist()  # type: ignore[no-any-return]

    def draw(self, logits: Tensor, rows: Sequence[tuple[Job, int, int]]) -> list[Drawn]:
        """One token for each (job, row, offset): `offset` counts draft tokens before it. An error of one row is returned in its place."""
        if logits.shape[1] > self.vocab:
            logits[:, self.vocab :] = -math.inf
        if self.fused and all(job.plain for job, _, _ in rows):
            out: list[Any] = [None] * len(rows)
            self._draw_together(logits, rows, range(len(rows)), out)
            return [o if isinstance(o, Exception) else (o, None) for o in out]
        return self._draw_mixed(logits, rows)

    def _draw_mixed(self, logits: Tensor, rows: Sequence[tuple[Job, int, int]]) -> list[Drawn]:
        out: list[Any] = [None] * len(rows)
        fused: list[int] = []
        extras: dict[int, Tensor] = {}
        for i, (job, row, offset) in enumerate(rows):
            try:
                if job.wants_extra:
                    extras[i] = logits[row].clone()
                if job.forced:
                    for mask in job.masks:  # the filters move on next: none may still be at work
                        if isinstance(mask, Future):
                            mask.result()
                    out[i] = job.forced.pop(0)
                    job.was_forced = True
                    continue
                if job.filters or job.blocked or job.healing or job.min_new_tokens > job.new_tokens:
                    self._restrict(logits[row], job)
                past = self._history(job)
                if self.fused and past is not None:
                    if job.plan.before:
                        self._run(job.plan.before, logits, row, job, offset)
                    fused.append(i)
                else:
                    out[i] = self._step_by_step(logits[row], job, offset)
            except Exception as error:  # one job's filter or sampler must not end the others
                if device_failed(error):
                    raise
                out[i] = error
        if fused:
            self._draw_together(logits, rows, fused, out)
        return [self._with_extra(rows[i][0], extras.get(i), o) for i, o in enumerate(out)]

    def _restrict(self, row: Tensor, job: Job) -> None:
        """Masks what may not come: filters, tokens blocked by banned strings, end tokens before the minimum, pieces that don't heal."""
        for i, f in enumerate(job.filters):
            mask = job.masks[i] if i < len(job.masks) else f.mask()
            apply_mask(row, mask.result() if isinstance(mask, Future) else mask)
        gone = set(job.blocked.get(job.n, ()))
        if job.new_tokens < job.min_new_tokens:
            gone |= job.stop_tokens
        if gone:
            row[[g for g in gone if g < len(row)]] = -math.inf
        if job.healing is not None and job.pieces is not None:
            keep = job.pieces.starting_with(job.healing)
            kept = row[keep]
            row.fill_(-math.inf)
            row[keep] = kept

    def _history(self, job: Job) -> np.ndarray | None:
        """Tokens the fused penalties look at (maybe none); None if the job's sampler can't run fused."""
        plan = job.plan
        if plan.params is None:
            return None
        if not plan.history:
            return job.ids[:0]
        past = job.ids[max(0, job.n - plan.history) : job.n]
        return past if len(past) <= _MAX_HISTORY else None

    def _state(self, row: Tensor, job: Job, offset: int, u: float = 0.5) -> State:
        return State(row, job.ids[: job.n + offset], u, job.memory, tokenizer=job.pieces)

    def _run(self, steps: Sequence[Any], logits: Tensor, row: int, job: Job, offset: int) -> None:
        state = self._state(logits[row], job, offset)
        for step in steps:
            step.run(state)
        logits[row].copy_(state.logits)

    def _step_by_step(self, row: Tensor, job: Job, offset: int) -> int:
        check_finite(row, f"job {job.serial_number}: logits of token {job.new_tokens + offset}")
        state = self._state(row, job, offset, uniform(job.seed, job.counter(offset)))
        return job.sampler.draw(state)

    def _draw_together(self, logits: Tensor, rows: Sequence[tuple[Job, int, int]], chosen: Sequence[int], out: list[Any]) -> None:
        """One call for all; if it fails, one for each, so that only those whose fault it is get an error."""
        try:
            self._draw_fused(logits, rows, chosen, out)
        except Exception as error:
            if device_failed(error):
                raise
            for i in chosen:
                out[i] = error
                if len(chosen) > 1:
                    self._draw_together(logits, rows, [i], out)

    def _draw_fused(self, logits: Tensor, rows: Sequence[tuple[Job, int, int]], chosen: Sequence[int], out: list[Any]) -> None:
        at = [rows[i][1] for i in chosen]
        first, count = at[0], len(at)
        if at[-1] - first == count - 1 and at == list(range(first, first + count)):
            part = logits[first : first + count]
        else:
            part = logits.index_select(0, ops.put(torch.tensor(at), logits.device))
        longest = 0
        records = []
        for i in chosen:
            job, _, offset = rows[i]
            records.append(job.param_bytes() + job.counter(offset).to_bytes(8, "little"))
            longest = max(longest, job.plan.history)
        params = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).view(count, -1)
        history = lengths = None
        if longest:
            history, lengths = self._pack_history([rows[i] for i in chosen], logits.device)
        ids, _ = ops.sample(part, ops.put(params, logits.device), history, lengths, probs=False)
        for i, token in zip(chosen, self.fetch(ids, at, logits)):
            out[i] = token if token >= 0 else self._bad_row(logits, rows[i])

    def _pack_history(self, rows: Sequence[tuple[Job, int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
        past = []
        for job, _, offset in rows:
            end = job.n + offset
            past.append(job.ids[max(0, end - job.plan.history) : end] if job.plan.history else job.ids[:0])
        table = np.zeros((len(rows), max([1, *map(len, past)])), np.int32)
        for r, ids in enumerate(past):
            table[r, : len(ids)] = ids
        lengths = np.array([len(p) for p in past], np.int32)
        return ops.put(torch.from_numpy(table), device), ops.put(torch.from_numpy(lengths), device)

    def _bad_row(self, logits: Tensor, row: tuple[Job, int, int]) -> Exception:
        job, at, offset = row
        try:
            check_finite(logits[at], f"job {job.serial_number}: logits of token {job.new_tokens + offset}")
        except NumericalError as error:
            return error
        # the step that went ahead has written over the row: NaN or +inf, unless something was masked
        masked = job.filters or job.blocked or job.healing or job.plan.before
        return (NoTokenLeftError if masked else NumericalError)(f"job {job.serial_number}: the sampler found no token")

    def _with_extra(self, job: Job, raw: Tensor | None, drawn: Any) -> Drawn:
        if isinstance(drawn, Exception) or raw is None:
            return drawn if isinstance(drawn, Exception) else (drawn, None)
        try:
            return drawn, self._extra(job, raw, drawn)
        except Exception as error:
            if device_failed(error):
                raise
            return error

    def _extra(self, job: Job, raw: Tensor, token: int) -> Any:
        """(probability, top ids, top probabilities, logits) of the raw logits, on the CPU."""
        probs = torch.softmax(raw, 0)
        top_p = top_i = logits = None
        if job.return_top_tokens:
            top = torch.topk(probs, min(job.return_top_tokens, len(probs)))
            top_p, top_i = top.values.cpu(), top.indices.cpu()
        if job.return_logits:
            logits = raw.cpu()
        return float(probs[token]), top_i, top_p, logits
