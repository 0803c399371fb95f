"""`Generator`: many jobs over one model and one paged cache. Each `iterate()` admits what fits, prefills a chunk, decodes a token for all.

A job reserves its pages when it starts, so nothing can run out of cache later. Errors belong to one job: it ends with an "error" result and
its pages go back; the others go on. Only a fault of the device closes the engine.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from exl3.errors import ArgumentError, BackendError, JobError
from exl3.generate import arguments
from exl3.generate.arguments import whole
from exl3.generate.conveniences import Conveniences
from exl3.generate.drawing import Drawer
from exl3.generate.job import Job
from exl3.generate.masks import Masks
from exl3.generate.options import check_unused, make_drafter, special_ids
from exl3.generate.pages import PAGE, PageTable
from exl3.generate.step import MAX_TOKENS, StepRunner, device_failed, forward, packed_batch
from exl3.generate.text import Pieces

Result = dict[str, Any]
_STALL = 0.15  # seconds a shared prefill chunk may hold up decoding


class Generator(Conveniences):
    """The engine.

    model, cache, tokenizer   a loaded model, its `Cache` (default: one for the model's context), its tokenizer (default: the model's)
    max_batch_size            jobs that run at once
    max_chunk_size            prompt tokens in one pass
    shared_chunk_size         the same while others decode; default: as many as take about 0.15 s here
    prefill_cooldown          decode steps between such chunks; fewer while most jobs wait for their prompt
    max_q_size                rows of one job in a decode step (drafts)
    draft_model, draft_cache  a smaller model with the same vocabulary, for drafts of num_draft_tokens
    ngram_match_min           draft by repeating what followed the longest earlier match of at least so many tokens; 0: off
    dynamic_draft_tokens      adapt the draft's length to how much of it is accepted

    `iterate` may be called from one thread while others call `enqueue` and `cancel`.
    """

    context_is_cache = False  # whether a job may be longer than the model's own limit

    def __init__(
        self,
        model: Any,
        cache: Any = None,
        tokenizer: Any = None,
        max_batch_size: int = 256,
        max_chunk_size: int = 2048,
        shared_chunk_size: int | None = None,
        prefill_cooldown: int = 4,
        max_q_size: int = 8,
        draft_model: Any = None,
        draft_cache: Any = None,
        num_draft_tokens: int | None = None,
        dynamic_draft_tokens: bool = True,
        draft_confidence: float = 0.4,
        ngram_match_min: int = 0,
        **unused: Any,
    ) -> None:
        check_unused(unused)
        self.model = model
        if cache is None:
            from exl3.cache import Cache

            cache = Cache(model, model.max_tokens, model.device)
        self.cache = cache
        self.tokenizer = tokenizer if tokenizer is not None else getattr(model, "tokenizer", None)
        self.pieces = Pieces.of(self.tokenizer) if self.tokenizer is not None else None
        self.device = torch.device(model.device)
        self.vocab_size = int(model.vocab_size)
        self.padded_vocab_size = self.vocab_size
        self.max_context = int(cache.max_tokens if self.context_is_cache else getattr(model, "max_tokens", cache.max_tokens))
        self.max_total_tokens = int(cache.max_tokens)
        self.pagetable = PageTable(cache.max_tokens // PAGE)
        self.max_batch_size, self.max_chunk_size = whole("max_batch_size", max_batch_size, 1), whole("max_chunk_size", max_chunk_size, 1)
        self.shared_chunk_size = None if shared_chunk_size is None else whole("shared_chunk_size", shared_chunk_size, 1)
        self.prefill_cooldown, self.max_q_size = whole("prefill_cooldown", prefill_cooldown, 0), whole("max_q_size", max_q_size, 1)
        self.eos_token_ids, self.bos_token_id = special_ids(model, self.tokenizer)
        width = min(-(-self.max_context // PAGE) + 1, len(self.pagetable))
        self.runner = StepRunner(model, cache, width)
        self.drawer = Drawer(min(self.vocab_size, len(self.pieces)) if self.pieces is not None else self.vocab_size)
        self.drafter = make_drafter(
            self, draft_model, draft_cache, num_draft_tokens, ngram_match_min, dynamic_draft_tokens, draft_confidence
        )
        self.drawer.fetch = self.runner.fetch
        self.pending_jobs: deque[Job] = deque()
        self.active_jobs: list[Job] = []
        self.recurrent_cache = None
        self.recurrent_checkpoint_interval = 0
        self.closed: Exception | None = None
        self.job_serial = 0  # of the newest job
        self._lock = threading.RLock()
        self._stepping = False
        self._inbox: deque[Job] = deque()
        self._cancelled: deque[Job] = deque()
        self._changes: deque[tuple[Job, Callable[[], None]]] = deque()  # to jobs' settings, by any thread
        self.masks = Masks()
        self._retry = True  # something changed since a waiting job last found no room
        self._cooldown = 0
        self._prefill_rate = 0.0  # tokens a second, measured
        self.tokens_out = 0
        claim = getattr(cache, "_exl3_owner", None)
        if claim is not None and claim() is not None:
            claim().closed = JobError("another Generator was made on the same cache; use that one, or give each its own cache")
        import weakref

        try:
            cache._exl3_owner = weakref.ref(self)
        except AttributeError:
            pass

    # from any thread

    def enqueue(self, job: Job | Sequence[Job]) -> int | list[int]:
        """Adds a job (or several) to the queue; its serial number(s). Raises at once for what can never run."""
        if not isinstance(job, Job):
            return [self.enqueue(j) for j in job]  # type: ignore[misc]
        self._check_open()
        if job.is_finished or job.time_enqueue:
            raise ArgumentError(f"job {job.serial_number} was enqueued before; make a new Job")
        job.prepare(self)
        arguments.attach(job.filters, job)
        self._inbox.append(job)
        self.job_serial = job.serial_number
        return job.serial_number

    def cancel(self, job: Job) -> None:
        """Ends a job wherever it stands, without a further result. Unknown and finished jobs are no error."""
        if job.is_finished or job.cancelled:
            return
        job.cancelled = True
        self._cancelled.append(job)
        if self._lock.acquire(blocking=False):  # nobody iterates: its pages go back now, else at the end of this step
            try:
                if not self._stepping:  # a filter, or a forgotten stream that is collected, may call this in the middle of a step
                    self._apply_cancellations()
            finally:
                self._lock.release()

    def later(self, job: Job, change: Callable[[], None]) -> None:
        """Runs `change` before the next step; if it raises, the job ends with that error."""
        self._changes.append((job, change))

    def num_pending_jobs(self) -> int:
        """Jobs that wait for room."""
        return len(self.pending_jobs) + len(self._inbox)

    def num_active_jobs(self) -> int:
        """Jobs that run."""
        return len(self.active_jobs)

    def num_remaining_jobs(self) -> int:
        """All jobs not finished."""
        return self.num_pending_jobs() + self.num_active_jobs()

    def clear_queue(self) -> None:
        """Cancels all jobs."""
        for job in [*self._inbox, *self.pending_jobs, *self.active_jobs]:
            self.cancel(job)

    def close(self) -> None:
        """Cancels all jobs; the generator takes no more. The model may be unloaded already."""
        self.clear_queue()
        with self._lock:
            self._apply_cancellations()
            self.closed = self.closed or JobError("the generator is closed")
            self.runner.reset()
            self.masks.close()

    def _check_open(self) -> None:
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))

    # the loop

    @torch.inference_mode()
    def iterate(self) -> list[Result]:
        """One step for all: the results it gave, possibly none."""
        with self._lock:
            self._check_open()
            results: list[Result] = []
            self._apply_cancellations()
            while self._inbox:
                self.pending_jobs.append(self._inbox.popleft())
                self._retry = True
            self._apply_changes(results)
            self._stepping = True
            try:
                self._step(results)
            except Exception as error:
                if not device_failed(error):
                    raise
                self._close_on_fault(error, results)
            finally:
                self._stepping = False
            self._apply_cancellations()
            return results

    def _step(self, results: list[Result]) -> None:
        self._admit(results)
        behind = [j for j in self.active_jobs if j.n - j.cached == 1 and not j.scores_only]  # the others draw no token
        waiting = [j for j in self.active_jobs if j.n - j.cached != 1 or j.scores_only]
        ready = self.masks.present(behind)
        if waiting and (not ready or self._cooldown <= 0):
            self._prefill(waiting, bool(ready), results)
            share = min(1.0, 2 * len(ready) / (len(ready) + len(waiting)))
            self._cooldown = math.ceil(self.prefill_cooldown * share)
        elif behind and not ready:
            self.masks.idle(behind)
        if ready:
            self._cooldown -= 1
            # not where the next run will have other rows: drafts, jobs that a prefill pass brings in, more rows than one run takes
            alike = self.drafter is None and len(ready) <= MAX_TOKENS
            self.runner.ahead = alike and (not waiting or self._cooldown > 0)
            self._decode([j for j in ready if not j.is_finished], results)

    def _apply_cancellations(self) -> None:
        while self._cancelled:
            job = self._cancelled.popleft()
            if job.is_finished:
                continue
            for queue in (self.pending_jobs, self._inbox):
                if job in queue:
                    queue.remove(job)
            self._leave(job)

    def _apply_changes(self, results: list[Result]) -> None:
        while self._changes:
            job, change = self._changes.popleft()
            if job.is_finished:
                continue
            try:
                change()
            except Exception as error:
                if job in self.pending_jobs:
                    self.pending_jobs.remove(job)
                self._fail(job, error, results)

    def _leave(self, job: Job) -> None:
        """The job gives its pages back and is finished."""
        job.is_finished = True
        self._give_pages_back(job)
        if job in self.active_jobs:
            self.active_jobs.remove(job)
        if self.drafter is not None:
            self.drafter.forget(job)

    def _give_pages_back(self, job: Job) -> None:
        if job.pages:
            full = len(job.chain)
            parent = job.chain[-1] if full else self.pagetable.root
            keeps_pages = self.drafter is not None and self.drafter.keeps_pages
            known = min(job.cached, job.draft_cached) if keeps_pages else job.cached
            self.pagetable.release(job.pages, (full, parent, job.ids[full * PAGE : known]))
            job.pages = []
            job.chain = []
            self._retry = True

    def _fail(self, job: Job, error: Exception, results: list[Result]) -> None:
        """Ends one job with an error result."""
        if not job.is_finished:
            self._leave(job)
            results.append({**job.result("error", eos=True), "eos": True, "error": error})

    def _close_on_fault(self, error: Exception, results: list[Result]) -> None:
        """A fault of the device: every job ends with the same error and the engine stays closed."""
        fault = error if isinstance(error, BackendError) else BackendError(f"the device failed: {error}")
        self.closed = fault
        for job in [*self.active_jobs, *self.pending_jobs, *self._inbox]:
            self._fail(job, fault, results)
        self.pending_jobs.clear()
        self._inbox.clear()

    def _drafting(self, call: Callable[[Any], Any]) -> Any:
        """Calls the drafter, which nothing depends on: if it fails (its cache or memory), the engine goes on without."""
        if self.drafter is None:
            return None
        try:
            return call(self.drafter)
        except Exception as error:
            if device_failed(error):
                raise
            warnings.warn(f"drafting is switched off: {error}", RuntimeWarning, stacklevel=2)
            self.drafter = None
            return None

    # admission

    def _admit(self, results: list[Result]) -> None:
        """Starts waiting jobs in order; a job that finds no room may be overtaken `max_skips` times."""
        if not self.pending_jobs or not self._retry:
            return
        self._retry = False
        passed: list[Job] = []
        for job in list(self.pending_jobs):
            if len(self.active_jobs) >= self.max_batch_size or any(p.skips >= p.max_skips for p in passed):
                break
            try:
                started = self._start(job, results)
            except Exception as error:
                self.pending_jobs.remove(job)
                self._fail(job, error, results)
                continue
            if started:
                self.pending_jobs.remove(job)
                for earlier in passed:
                    earlier.skips += 1
            else:
                passed.append(job)

    def _start(self, job: Job, results: list[Result]) -> bool:
        tokens = job.ids[: job.n]
        reserve = job.reserve()
        if not job.names or job.is_requeued:
            job.names = self.pagetable.names(tokens)
        found = self.pagetable.allocate(tokens, reserve, reuse=not (job.wants_prompt_logits and job.new_tokens == 0), names=job.names)
        if found is None:
            return False
        job.pages, job.cached = found.pages, found.cached
        job.draft_cached = found.cached
        job.chain = job.names[: found.cached_pages]
        job.stint_end = reserve
        self.active_jobs.append(job)
        if found.copy is not None:
            source, target = found.copy
            self.cache.copy_page(source, target)
            self._drafting(lambda drafter: drafter.copy_page(source, target))
        if not job.time_start:
            job.time_start, job.time_first_prefill = time.perf_counter(), time.time()
            job.cached_pages, job.tokens_from_cache = found.cached_pages, found.cached
            results.append(job.result("started"))
        job.moved()
        self.masks.request(job)
        return True

    # prefill

    def _chunk(self, shared: bool) -> int:
        """Prompt tokens to take in this pass."""
        if not shared:
            return self.max_chunk_size
        if self.shared_chunk_size is not None:
            return min(self.shared_chunk_size, self.max_chunk_size)
        if not self._prefill_rate:
            return max(32, self.max_chunk_size // 2)
        return int(min(self.max_chunk_size, max(32, self._prefill_rate * _STALL)))

    def _prefill(self, waiting: list[Job], shared: bool, results: list[Result]) -> None:
        """One pass over prompt tokens of one or more jobs."""
        room = self._chunk(shared)
        work: list[tuple[Job, int]] = []
        coming: set[bytes] = set()  # pages this pass computes: a job that needs the same one waits and shares it
        for job in waiting:
            if room <= 0:
                break
            self._adopt_pages(job)
            page = job.cached // PAGE
            name = job.names[page] if page < len(job.names) and not job.wants_prompt_logits else None
            if name is not None and name in coming:
                continue
            if name is not None:
                coming.add(name)
            count = min(job.n - job.cached, room, 256 if job.wants_prompt_logits and job.new_tokens == 0 else room)
            work.append((job, count))
            room -= count
        # the next pass begins with another job
        done = [j for j, _ in work]
        self.active_jobs.sort(key=lambda j: j in done and j.n - j.cached > 1)
        start = time.perf_counter()
        try:
            logits = self._prefill_pass(work)
        except Exception as error:
            self._isolate(work, error, results)
            return
        self._after_prefill(work, logits, results)
        total = sum(n for _, n in work)
        if total >= 32 and (logits is not None or self.device.type == "cpu"):  # a card goes on by itself until something is drawn
            rate = total / max(time.perf_counter() - start, 1e-6)
            self._prefill_rate = rate if not self._prefill_rate else 0.7 * self._prefill_rate + 0.3 * rate

    def _adopt_pages(self, job: Job) -> None:
        """Takes over pages another job has computed meanwhile."""
        while job.cached % PAGE == 0 and len(job.chain) == job.cached // PAGE < len(job.names) and not job.wants_prompt_logits:
            at = len(job.chain)
            other = self.pagetable.share(job.names[at], job.pages[at])
            if other is None:
                return
            job.pages[at] = other
            job.chain.append(job.names[at])
            if job.draft_cached == job.cached:
                job.draft_cached += PAGE
            job.cached += PAGE
            job.tokens_from_cache += PAGE
            job.cached_pages += 1
            job.moved()

    def _prefill_pass(self, work: list[tuple[Job, int]]) -> torch.Tensor | None:
        """Runs the pass; logits of the rows `_after_prefill` expects."""
        rows, at = [], 0
        wanted: list[int] = []
        for job, count in work:
            rows.append((job.ids[job.cached : job.cached + count], job.cached, job.pages))
            if job.wants_prompt_logits and job.new_tokens == 0:
                wanted += range(at, at + count)
            elif job.cached + count == job.n:
                wanted.append(at + count - 1)
            at += count
        batch = packed_batch(rows, wanted, self.cache, self.device)
        logits = forward(self.model, batch, head=bool(wanted))
        self._drafting(lambda drafter: drafter.prefill(rows, [job for job, _ in work]))
        return logits

    def _isolate(self, work: list[tuple[Job, int]], error: Exception, results: list[Result]) -> None:
        """A pass failed: find whose fault it was by running each job alone."""
        if device_failed(error):
            self._close_on_fault(error, results)
            return
        if len(work) == 1:
            self._fail(work[0][0], error, results)
            return
        for item in work:
            try:
                logits = self._prefill_pass([item])
            except Exception as own:
                if device_failed(own):
                    self._close_on_fault(own, results)
                    return
                self._fail(item[0], own, results)
                continue
            self._after_prefill([item], logits, results)

    def _after_prefill(self, work: list[tuple[Job, int]], logits: torch.Tensor | None, results: list[Result]) -> None:
        row = 0
        draws: list[tuple[Job, int, list[int]]] = []
        for job, count in work:
            scoring = job.wants_prompt_logits and job.new_tokens == 0
            first = job.cached
            job.cached += count
            self._publish(job)
            if scoring:
                assert logits is not None
                self._score(job, logits[row : row + count], first)
                row += count
            results.append(job.result("prefill", curr_progress=min(job.cached, len(job.prompt)), max_progress=len(job.prompt)))
            if job.cached < job.n:
                continue
            if job.scores_only:
                job.time_first = time.perf_counter()
                job._end("max_new_tokens")
                self._emit(job, results)
                continue
            draws.append((job, row - 1 if scoring else row, []))
            row += 0 if scoring else 1
        if draws:
            assert logits is not None
            late = self.masks.late(j for j, _, _ in draws)
            for job in late:
                job.cached = job.draft_cached = job.n - 1  # the last token runs again once the mask is there
            self._draw([d for d in draws if d[0] not in late], logits, results)

    def _score(self, job: Job, logits: torch.Tensor, first: int) -> None:
        """Log-probabilities of the prompt tokens that follow positions first .. first + rows - 1."""
        n = min(len(logits), len(job.prompt) - 1 - first)
        if n > 0:
            following = torch.from_numpy(job.prompt[first + 1 : first + 1 + n].astype(np.int64)).to(logits.device)
            scores = torch.log_softmax(logits[:n].float(), -1).gather(1, following[:, None])[:, 0]
            job.prompt_logprobs.append(scores.cpu().numpy())

    # decode

    def _decode(self, ready: list[Job], results: list[Result]) -> None:
        """One step (of up to 64 tokens at a time) for all jobs that are ready."""
        drafts: dict[Job, list[int]] = {}
        if self.drafter is not None and ready:
            room = min(self.max_q_size, MAX_TOKENS // min(len(ready), MAX_TOKENS)) - 1
            if room > 0:
                drafts = self._drafting(lambda drafter: drafter.propose(ready, room)) or {}
        group: list[tuple[Job, list[int]]] = []
        size = 0
        for job in ready:
            draft = drafts.get(job, [])[: max(0, job.stint_end - job.n - 1)]
            if size + 1 + len(draft) > MAX_TOKENS:
                self._decode_group(group, results)
                group, size = [], 0
            group.append((job, draft))
            size += 1 + len(draft)
        if group:
            self._decode_group(group, results)

    def _decode_group(self, group: list[tuple[Job, list[int]]], results: list[Result]) -> None:
        group = [(j, d) for j, d in group if not j.is_finished]
        if not group:
            return
        rows = [([j.last, *d] if d else [j.last], j.cached, j.pages, j.owner) for j, d in group]
        try:
            logits = self.runner.run(rows)
        except Exception as error:
            if device_failed(error):
                self._close_on_fault(error, results)
            elif len(group) == 1:
                self._fail(group[0][0], error, results)
            else:
                for item in group:
                    self._decode_group([item], results)
            return
        late = self.masks.late(j for j, _ in group)
        draws, row = [], 0
        for job, draft in group:
            if job in late:  # its token runs again once the mask is there
                job.draft_cached = min(job.draft_cached, job.n - 1)
            else:
                job.cached += 1
                draws.append((job, row, draft))
            row += 1 + len(draft)
        if draws:
            self._draw(draws, logits, results)

    def _draw(self, draws: list[tuple[Job, int, list[int]]], logits: torch.Tensor, results: list[Result]) -> None:
        """Samples each job's rows one after another for as long as the sample equals the draft."""
        if not any(draft for _, _, draft in draws):
            self._draw_one_each(draws, logits, results)
            return
        ahead: dict[Job, list[Any]] = {}
        first: list[tuple[Job, int, int]] = []
        for job, row, draft in draws:
            first += [(job, row + i, i) for i in range(1 + len(draft) if draft and job.independent else 1)]
        for (job, _, _), drawn in zip(first, self.drawer.draw(logits, first)):
            ahead.setdefault(job, []).append(drawn)
        for job, _, _ in draws:
            job.last_view = None
        alive = [(job, row, draft, 0) for job, row, draft in draws]
        while alive:
            missing = [(job, row + i, 0) for job, row, draft, i in alive if not ahead.get(job)]
            if missing:
                for (job, _, _), drawn in zip(missing, self.drawer.draw(logits, missing)):
                    ahead[job] = [drawn]
            following = []
            for job, row, draft, i in alive:
                drawn = ahead[job].pop(0)
                at = job.n
                try:
                    if isinstance(drawn, Exception):
                        raise drawn
                    job.commit(*drawn)
                except Exception as error:
                    self._fail(job, error, results)
                    continue
                self.tokens_out += 1
                if not job.time_first:
                    job.time_first = time.perf_counter()
                going = job.eos is None and job.n == at + 1
                accepted = i < len(draft) and drawn[0] == draft[i]
                if accepted:
                    job.accepted_draft_tokens += 1
                if going and accepted:
                    job.cached += 1
                    self.masks.request(job)
                    following.append((job, row, draft, i + 1))
                else:
                    self._end_draft(job, draft, i + accepted, results)
            late = self.masks.late(job for job, _, _, _ in following)
            for job, _, draft, i in following:
                if job in late:
                    self._end_draft(job, draft, i, results)
            alive = [item for item in following if item[0] not in late]

    def _end_draft(self, job: Job, draft: list[int], accepted: int, results: list[Result]) -> None:
        """The job's part of this step ends after `accepted` tokens of its draft."""
        if draft:
            job.rejected_draft_tokens += len(draft) - accepted
            if self.drafter is not None:
                self.drafter.verified(job, draft, accepted)
        self._advance(job, results)

    def _draw_one_each(self, draws: list[tuple[Job, int, list[int]]], logits: torch.Tensor, results: list[Result]) -> None:
        drawn = self.drawer.draw(logits, [(job, row, 0) for job, row, _ in draws])
        views = torch.tensor([0 if isinstance(d, Exception) else d[0] for d in drawn]).view(-1, 1, 1).unbind(0)
        now = time.perf_counter()
        for (job, _, _), d, view in zip(draws, drawn, views):
            try:
                if isinstance(d, Exception):
                    raise d
                job.last_view = view
                job.commit(d[0], d[1])
            except Exception as error:
                self._fail(job, error, results)
                continue
            self.tokens_out += 1
            if not job.time_first:
                job.time_first = now
            self._advance(job, results)

    def _advance(self, job: Job, results: list[Result]) -> None:
        """After the last token of a step: publish pages, results, the next masks, or the end of the stint."""
        if (job.n - 1) // PAGE > len(job.chain):
            self._publish(job)
        if job.eos is None and job.n < job.stint_end and not job.filters:
            made = job.streaming()
            if made is not None:
                results.append(made)
            return
        requeue = job.eos is None and job.n >= job.stint_end and job.new_tokens < (job.max_new_tokens or 0)
        self._emit(job, results, requeue)
        if job.is_finished:
            return
        if requeue:
            self._give_pages_back(job)
            self.active_jobs.remove(job)
            job.cached = job.draft_cached = 0
            job.is_requeued = True
            job.masks = []
            self.pending_jobs.appendleft(job)
            self._retry = True
        elif job.filters:
            self.masks.request(job)

    def _publish(self, job: Job) -> None:
        """Names the pages that are full and can't be taken back."""
        sure = min(job.cached, job.n - job.stream.held_tokens if job.banned_strings else job.cached)
        if (len(job.chain) + 1) * PAGE > sure:
            return
        self._drafting(lambda drafter: drafter.follow(job, sure // PAGE * PAGE))  # a page is shared with its draft cache or not at all
        while (len(job.chain) + 1) * PAGE <= sure:
            at = len(job.chain)
            parent = job.chain[-1] if at else self.pagetable.root
            job.chain.append(self.pagetable.publish(job.pages[at], parent, job.ids[at * PAGE : (at + 1) * PAGE]))

    def _emit(self, job: Job, results: list[Result], requeue: bool = False) -> None:
        made = job.streaming(requeue)
        if made is not None:
            results.append(made)
        if job.eos is not None:
            self._leave(job)
