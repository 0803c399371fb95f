"""Drafting: guesses of the next tokens, verified by the model in one step. Lossless: a guess counts only where the sampler
draws the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from exl3.errors import ArgumentError
from exl3.generate.job import Job
from exl3.generate.step import MAX_TOKENS, StepRunner, forward, packed_batch


class Pace:
    """How long a job's drafts should be: longer while all is accepted, shorter when most is not, a pause when nearly nothing is."""

    def __init__(self, most: int, dynamic: bool) -> None:
        self.most, self.dynamic = most, dynamic
        self.length = float(most)
        self.rate = 0.5  # running mean of the accepted share
        self.pause = 0
        self.drafts = 0

    def next(self) -> int:
        """Tokens to draft now; 0: don't."""
        if self.pause > 0:
            self.pause -= 1
            return 0
        return max(1, round(self.length)) if self.dynamic else self.most

    def verified(self, drafted: int, accepted: int) -> None:
        """Learns from one verified draft."""
        self.drafts += 1
        self.rate = 0.85 * self.rate + 0.15 * accepted / drafted
        if not self.dynamic:
            return
        if accepted == drafted:
            self.length = min(self.most, self.length + 1)
        else:
            self.length = max(1.0, self.length + 0.5 * (accepted + 1 - self.length))
        if self.drafts >= 12 and self.rate < 0.08:
            self.pause = 24
            self.rate = 0.2


class SuffixAutomaton:
    """Online suffix automaton of a token sequence (Blumer et al. 1985): the longest suffix that occurred before, in amortised
    constant time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]  # where an occurrence of the state's strings ends
        self._last = 0
        self._match = (0, -1)

    def extend(self, token: int) -> None:
        """Appends a token."""
        at = len(self.tokens)
        self.tokens.append(token)
        follow, link, length, end = self._next, self._link, self._length, self._end
        new = len(length)
        follow.append({})
        link.append(0)
        length.append(length[self._last] + 1)
        end.append(at)
        p = self._last
        while p >= 0 and token not in follow[p]:
            follow[p][token] = new
            p = link[p]
        if p >= 0:
            q = follow[p][token]
            if length[p] + 1 == length[q]:
                link[new] = q
            else:
                copy = len(length)
                follow.append(dict(follow[q]))
                link.append(link[q])
                length.append(length[p] + 1)
                end.append(end[q])
                while p >= 0 and follow[p].get(token) == q:
                    follow[p][token] = copy
                    p = link[p]
                link[q] = link[new] = copy
        self._last = new
        found = link[new]
        self._match = (length[found], end[found]) if found > 0 else (0, -1)
        if found > 0:
            end[found] = at  # the next search finds the latest occurrence

    def match(self) -> tuple[int, int]:
        """(length of the longest suffix that occurred before, where such an occurrence ended); (0, -1) if none."""
        return self._match

    def draft(self, count: int, at_least: int) -> list[int]:
        """Up to `count` tokens that followed an earlier occurrence of the current suffix, if that is `at_least` long."""
        length, end = self._match
        return self.tokens[end + 1 : end + 1 + count] if length >= at_least and end >= 0 else []


class NgramDrafter:
    """Repeats what followed the longest earlier match of the current suffix in the job's own prompt and output."""

    keeps_pages = False  # no cache of its own that follows the engine's pages
    FEED = 4096  # tokens of a long prompt read at each step, so that none is held up

    def __init__(self, count: int, at_least: int, dynamic: bool) -> None:
        self.count, self.at_least, self.dynamic = count, at_least, dynamic

    def prefill(self, rows: Sequence[Any], jobs: Sequence[Job]) -> None:
        """Nothing to do."""

    def copy_page(self, src: int, dst: int) -> None:
        """Nothing to do."""

    def follow(self, job: Job, upto: int) -> None:
        """Nothing to do."""

    def propose(self, jobs: Sequence[Job], room: int) -> dict[Job, list[int]]:
        """Drafts of at most `room` tokens."""
        found = {}
        for job in jobs:
            automaton, pace = self._state(job)
            if len(automaton.tokens) < job.n:
                continue
            count = min(pace.next(), room)
            draft = automaton.draft(count, self.at_least) if count else []
            if draft:
                found[job] = draft
        return found

    def _state(self, job: Job) -> tuple[SuffixAutomaton, Pace]:
        if job.draft is None:
            job.draft = (SuffixAutomaton(), Pace(self.count, self.dynamic))
        automaton, pace = job.draft
        have = len(automaton.tokens)
        if have > job.n or (have and automaton.tokens[-1] != job.ids[have - 1]):
            automaton = SuffixAutomaton()  # tokens were taken back
            job.draft = (automaton, pace)
            have = 0
        for token in job.ids[have : min(job.n, have + self.FEED)].tolist():
            automaton.extend(token)
        return automaton, pace

    def verified(self, job: Job, draft: list[int], accepted: int) -> None:
        """Learns how much of a draft was right."""
        job.draft[1].verified(len(draft), accepted)

    def forget(self, job: Job) -> None:
        """The job has ended."""
        job.draft = None


class ModelDrafter:
    """A smaller model of the same vocabulary, greedy, over its own cache with the same pages."""

    keeps_pages = True

    def __init__(self, generator: Any, model: Any, cache: Any, count: int, dynamic: bool) -> None:
        if model.vocab_size != generator.vocab_size:
            theirs, ours = getattr(model, "tokenizer", None), generator.tokenizer
            same = theirs is not None and ours is not None and theirs.vocab == ours.vocab
            if not same:
                raise ArgumentError(
                    f"draft_model: its vocabulary has {model.vocab_size} tokens, the model's "
                    f"{generator.vocab_size}; a draft model needs the same vocabulary"
                )
        if cache is None:
            from exl3.cache import Cache

            cache = Cache(model, generator.max_total_tokens, model.device)
        if cache.max_tokens < generator.cache.max_tokens:
            raise ArgumentError(
                f"draft_cache: room for {cache.max_tokens} tokens, the model's cache has {generator.cache.max_tokens}; make it as large"
            )
        self.model, self.cache, self.count, self.dynamic = model, cache, count, dynamic
        self.device = torch.device(model.device)
        self.vocab = min(generator.drawer.vocab, model.vocab_size)
        self.runner = StepRunner(model, cache, len(generator.pagetable))
        self.accepted = self.drafted = 0
        self._warned = False

    def prefill(self, rows: Sequence[tuple[np.ndarray, int, Sequence[int]]], jobs: Sequence[Job]) -> None:
        """Follows the model through a prompt."""
        forward(self.model, packed_batch(rows, [], self.cache, self.device), head=False)
        for (ids, first, _), job in zip(rows, jobs):
            if job.draft_cached >= first:
                job.draft_cached = max(job.draft_cached, first + len(ids))

    def copy_page(self, src: int, dst: int) -> None:
        """Copies a page of the draft cache."""
        self.cache.copy_page(src, dst)

    def propose(self, jobs: Sequence[Job], room: int) -> dict[Job, list[int]]:
        """Drafts of at most `room` tokens, made in steps of up to 64 rows."""
        lengths = {}
        for job in jobs:
            if job.draft is None:
                job.draft = Pace(self.count, self.dynamic)
            count = min(job.draft.next(), room, job.stint_end - job.n - 1)
            if count > 0:
                lengths[job] = count
        drafts: dict[Job, list[int]] = {job: [] for job in lengths}
        for i in range(max(lengths.values(), default=0)):
            group: list[tuple[Job, list[int]]] = []
            size = 0
            for job, count in lengths.items():
                if i >= count:
                    continue
                if i == 0:
                    self._catch_up(job)
                new = job.ids[job.draft_cached : job.n].tolist() if i == 0 else [drafts[job][-1]]
                if size + len(new) > MAX_TOKENS:
                    self._step(group, drafts)
                    group, size = [], 0
                group.append((job, new))
                size += len(new)
            if group:
                self._step(group, drafts)
        return drafts

    def _catch_up(self, job: Job) -> None:
        """Feeds what the draft model missed, but for the last few tokens."""
        if job.n - job.draft_cached > 8:
            self.follow(job, job.n - 1)

    def follow(self, job: Job, upto: int) -> None:
        """Feeds the job's tokens before `upto` that the draft model has not seen."""
        while job.draft_cached < upto:
            count = min(upto - job.draft_cached, 1024)
            rows = [(job.ids[job.draft_cached : job.draft_cached + count], job.draft_cached, job.pages)]
            self.prefill(rows, [job])

    def _step(self, group: Sequence[tuple[Job, list[int]]], drafts: dict[Job, list[int]]) -> None:
        logits = self.runner.run([(new, job.draft_cached, job.pages, job.owner) for job, new in group])
        best = logits[:, : self.vocab].argmax(-1).tolist()
        at = -1
        for job, new in group:
            at += len(new)
            job.draft_cached += len(new)
            drafts[job].append(best[at])

    def verified(self, job: Job, draft: list[int], accepted: int) -> None:
        """Forgets the draft model's keys and values of rejected tokens, and learns."""
        job.draft_cached = min(job.draft_cached, job.n - 1)
        job.draft.verified(len(draft), accepted)
        self.accepted += accepted
        self.drafted += len(draft)
        if self.drafted > 500 and self.accepted < 0.02 * self.drafted and not self._warned:
            self._warned = True
            warnings.warn(
                f"of {self.drafted} drafted tokens {self.accepted} were accepted: the draft model doesn't fit this model",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    def forget(self, job: Job) -> None:
        """The job has ended."""
        job.draft = None
