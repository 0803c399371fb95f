"""What `Generator` offers beside the loop: whole texts, statistics, a health check."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from exl3.errors import ArgumentError
from exl3.generate.job import Job
from exl3.generate.pages import PAGE, PageTable


class Conveniences:
    """Part of `Generator`."""

    job_class: type[Job] = Job
    pagetable: PageTable
    pending_jobs: deque[Job]
    tokenizer: Any
    bos_token_id: int | None
    closed: Exception | None
    tokens_out: int
    _lock: threading.RLock
    _retry: bool
    enqueue: Any
    iterate: Any
    cancel: Any
    num_active_jobs: Any
    num_pending_jobs: Any

    def get_cache_stats(self) -> dict[str, Any]:
        """Tokens and pages in use, cached, free; how much of all prompts was found in the cache."""
        t = self.pagetable
        return {
            "page_size": PAGE, "max_tokens": len(t) * PAGE, "used_tokens": t.referenced * PAGE, "cached_tokens": t.cached * PAGE,
            "free_tokens": len(t.free) * PAGE, "tier_cached_tokens": 0, "tier_max_tokens": 0, "disk_cached_tokens": 0, "disk_pages": 0,
            "disk_states": 0, "disk_used_bytes": 0, "disk_max_bytes": 0, "alloc_pages": t.allocated_pages,
            "alloc_prompt_pages": t.prompt_pages, "alloc_cached_pages": t.hit_pages, "alloc_tier_pages": 0, "alloc_disk_pages": 0,
            "hit_rate": t.hit_pages / t.prompt_pages if t.prompt_pages else 0.0, "tier_hit_rate": 0.0, "disk_hit_rate": 0.0,
            "active_jobs": self.num_active_jobs(), "pending_jobs": self.num_pending_jobs(),
        }  # fmt: skip

    def generate(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        seed: int | None = None,
        sampler: Any = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Any = None,
        add_bos: bool = False,
        abort_event: Any = None,
        completion_only: bool = False,
        filters: Any = None,
        return_last_results: bool = False,
        **options: Any,
    ) -> Any:
        """Runs one or more prompts (a str, or a list of them) to their end: the text(s), prompt included unless `completion_only`; with
        `return_last_results` a pair with the last result(s). Errors of a job are raised."""
        if self.tokenizer is None:
            raise ArgumentError("generate: this model has no tokenizer; use Job with ids")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        many = filters if filters and isinstance(filters[0], (list, tuple)) else [filters] * len(prompts)
        jobs = [
            self.job_class(
                self.tokenizer.encode(p, add_bos=add_bos, special=encode_special_tokens), max_new_tokens, min_new_tokens, sampler=sampler,
                seed=seed, stop_conditions=stop_conditions, decode_special_tokens=decode_special_tokens, token_healing=token_healing,
                filters=f, **options,
            )
            for p, f in zip(prompts, many)
        ]  # fmt: skip
        self.enqueue(jobs)
        last: dict[Job, dict[str, Any]] = {}
        while len(last) < len(jobs):
            if abort_event is not None and abort_event.is_set():
                for job in jobs:
                    self.cancel(job)
                break
            for result in self.iterate():
                if result["stage"] == "error" and result["job"] in jobs:
                    for job in jobs:
                        self.cancel(job)
                    raise result["error"]
                if result["eos"]:
                    last[result["job"]] = result
        texts = [("" if completion_only else p) + "".join(j.stream.full) for p, j in zip(prompts, jobs)]
        finals = [last.get(j) for j in jobs]
        single = isinstance(prompt, str)
        text = texts[0] if single else texts
        return (text, finals[0] if single else finals) if return_last_results else text

    def check_health(self, timeout: float = 30.0, step: bool = True) -> bool:
        """Whether the engine decodes: a one-token job goes to the head of the queue; True once it, or any other job, gets a token.

        step=False: another thread iterates. Raises nothing; False also when closed or out of time.
        """
        if self.closed is not None:
            return False
        before = self.tokens_out
        probe = Job([self.bos_token_id or 0], max_new_tokens=1, stop_conditions=[], max_skips=0)
        try:
            probe.prepare(self)
            with self._lock:
                self.pending_jobs.appendleft(probe)
                self._retry = True
            end = time.monotonic() + timeout
            while time.monotonic() < end and self.tokens_out == before and self.closed is None:
                if probe.is_finished and not self.num_active_jobs() + self.num_pending_jobs():
                    break  # it failed, and nobody else is there to do better
                if step:
                    self.iterate()
                else:
                    time.sleep(0.002)
            return self.tokens_out > before
        except Exception:
            return False
        finally:
            self.cancel(probe)
