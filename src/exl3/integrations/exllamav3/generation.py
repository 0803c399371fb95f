"""`Generator`, `Job` and their asyncio forms with exllamav3's constructors, over exl3's own."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from exl3.errors import JobError, UnsupportedError
from exl3.generate import aio, generator, job
from exl3.generate.pages import PAGE, JobTooLargeError

_JOB = set(inspect.signature(job.Job.__init__).parameters)
_TOKEN_KEYS = {"text", "token_ids", "token_probs", "top_k_tokens", "top_k_probs", "logits", "suppressed_text", "suppressed_tokens"}


def _known(what: str, kwargs: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The arguments that exist; exllamav3 takes any keyword in silence, here others are ignored with a warning."""
    for name in set(kwargs) - names:
        warnings.warn(f"{what}: unknown argument {name!r} is ignored", stacklevel=3)
    return {k: v for k, v in kwargs.items() if k in names}


def _inner(x: Any, what: str) -> Any:
    """The exl3 object behind a stand-in."""
    if x is None:
        return None
    inner = getattr(x, "inner", x)
    if inner is None:
        raise JobError(f"Generator: the {what} is not loaded; call model.load() first")
    return inner


class Job(job.Job):
    """exllamav3's `Job`: without stop_conditions nothing but the limit ends it. A complete character is never held back: it would come with
    the end, where some programs no longer look."""

    join_emoji = False

    def __init__(self, input_ids: Any, max_new_tokens: int | None = None, *args: Any, **kwargs: Any) -> None:
        if max_new_tokens is not None:
            assert max_new_tokens > 0, "max_new_tokens must be at least 1"
        super().__init__(input_ids, max_new_tokens, *args, **_known("Job", kwargs, _JOB))
        if self.stop_conditions is None:
            self.stop_conditions = []
        self.sequences = [self]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache beyond those of the `cached_pages` whole pages. (In results `cached_tokens` counts both.)"""
        return self.tokens_from_cache - PAGE * self.cached_pages


Job.__init__.__signature__ = inspect.signature(job.Job.__init__)  # type: ignore[attr-defined]


class Generator(generator.Generator):
    """exllamav3's `Generator`."""

    job_class = Job
    context_is_cache = True  # the model's own limit is the program's affair

    def __init__(
        self,
        model: Any,
        cache: Any,
        tokenizer: Any,
        max_batch_size: int | None = 256,
        max_chunk_size: int | None = 2048,
        shared_chunk_size: int | None = None,
        prefill_cooldown: int = 4,
        max_q_size: int = 8,
        draft_model: Any = None,
        draft_cache: Any = None,
        num_draft_tokens: int | None = None,
        dynamic_draft_tokens: bool = False,
        draft_confidence: float = 0.4,
        ngram_match_min: int = 0,
        ngram_corpus: str | None = None,
        hybrid_draft_tokens: int = 0,
        draft_max_rows: int = 0,
        sparse_draft_head: int = 0,
        record_draft_stats: bool = False,
        enable_defrag: bool = True,
        show_visualizer: bool = False,
        cpu_cache_size: int = 0,
        disk_cache_dir: str | None = None,
        disk_cache_size: int = 50 << 30,
        disk_cache_flush_on_idle: bool = True,
        disk_cache_checkpoint_interval: int = 4096,
        disk_cache_write_interval: float = 2.0,
        recurrent_cache_size: int = 4 << 30,
        recurrent_checkpoint_interval: int | None = None,
        recurrent_checkpoint_interval_pp: int = 32768,
        **kwargs: Any,
    ) -> None:
        if "num_speculative_tokens" in kwargs:  # an older name that frontends still pass
            num_draft_tokens = kwargs.pop("num_speculative_tokens")
        _known("Generator", kwargs, set())
        if recurrent_checkpoint_interval is not None:
            assert recurrent_checkpoint_interval % PAGE == 0, f"recurrent_checkpoint_interval must be a multiple of {PAGE}"
        super().__init__(
            _inner(model, "model"), _inner(cache, "cache"), _inner(tokenizer, "tokenizer"), max_batch_size or 256, max_chunk_size or 2048,
            shared_chunk_size, prefill_cooldown, max_q_size, _inner(draft_model, "draft model"), _inner(draft_cache, "draft cache"),
            num_draft_tokens, bool(dynamic_draft_tokens), draft_confidence, ngram_match_min, ngram_corpus=ngram_corpus,
            hybrid_draft_tokens=hybrid_draft_tokens, draft_max_rows=draft_max_rows, sparse_draft_head=sparse_draft_head,
            cpu_cache_size=cpu_cache_size, disk_cache_dir=disk_cache_dir,
        )  # fmt: skip
        self.recurrent_checkpoint_interval_pp = recurrent_checkpoint_interval_pp

    def has_idle_work(self) -> bool:
        """Nothing is left for idle time."""
        return False

    def idle_work(self) -> None:
        """Nothing to do."""

    def flush_cache_to_disk(self, wait: bool = False, max_pages: int | None = None) -> None:
        """Refused: there is no disk tier."""
        raise UnsupportedError("flush_cache_to_disk: the disk tier of the cache is not supported by exl3 yet")

    def iterate(self) -> list[dict[str, Any]]:
        """As exl3's, but several tokens that come with the end come in a result before it: exllamav3 gives one result per token, and some
        programs don't look at the last one's text."""
        results = []
        for result in super().iterate():
            if result["eos"] and "token_ids" in result and "logits" not in result and result["token_ids"].shape[1] > 1:
                common = ("job", "stage", "serial", "identifier")
                results.append({k: v for k, v in result.items() if k in _TOKEN_KEYS or k in common} | {"eos": False})
                result = {k: v for k, v in result.items() if k not in _TOKEN_KEYS}
            results.append(result)
        return results

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
        embeddings: Any = None,
        max_rq_tokens: int | None = None,
        stop_on_loop: Any = None,
        **kwargs: Any,
    ) -> Any:
        """As exl3's, prompts being str, or a tuple or list of them."""
        return super().generate(
            list(prompt) if isinstance(prompt, tuple) else prompt, max_new_tokens, min_new_tokens, seed, sampler, token_healing,
            encode_special_tokens, decode_special_tokens, [] if stop_conditions is None else stop_conditions, add_bos, abort_event,
            completion_only, filters, return_last_results, embeddings=embeddings, max_rq_tokens=max_rq_tokens, stop_on_loop=stop_on_loop,
            **kwargs,
        )  # fmt: skip


class AsyncGenerator(aio.AsyncGenerator):
    """exllamav3's `AsyncGenerator`."""

    generator_class = Generator

    def enqueue(self, job: Any) -> None:
        """Adds a job. That it can never fit is told where its results are awaited: there programs look for it."""
        try:
            super().enqueue(job)
        except JobTooLargeError as error:
            job.job.is_finished = True
            job.queue.put_nowait(error)


class AsyncJob(aio.AsyncJob):
    """exllamav3's `AsyncJob`."""

    job_class = Job
