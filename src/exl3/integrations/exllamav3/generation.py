"""`Generator`, `Job` and their asyncio forms with exllamav3's constructors, over exl3's own."""

from __future__ import annotations

from typing import Any

from exl3.errors import JobError
from exl3.generate import aio, generator, job


def _inner(x: Any, what: str) -> Any:
    """The exl3 object behind a stand-in."""
    if x is None:
        return None
    inner = getattr(x, "inner", x)
    if inner is None:
        raise JobError(f"Generator: the {what} is not loaded; call model.load() first")
    return inner


class Job(job.Job):
    """exllamav3's `Job`: without stop_conditions nothing but the limit ends it."""

    def __init__(self, input_ids: Any, max_new_tokens: int | None = None, *args: Any, **kwargs: Any) -> None:
        if max_new_tokens is not None:
            assert max_new_tokens > 0, "max_new_tokens must be at least 1"
        super().__init__(input_ids, max_new_tokens, *args, **kwargs)
        if self.stop_conditions is None:
            self.stop_conditions = []
        self.sequences = [self]


class Generator(generator.Generator):
    """exllamav3's `Generator`."""

    job_class = Job

    def __init__(
        self, model: Any, cache: Any, tokenizer: Any, max_batch_size: int = 256, max_chunk_size: int = 2048, **kwargs: Any
    ) -> None:
        kwargs.setdefault("dynamic_draft_tokens", False)
        kwargs["draft_model"] = _inner(kwargs.get("draft_model"), "draft model")
        kwargs["draft_cache"] = _inner(kwargs.get("draft_cache"), "draft cache")
        parts = _inner(model, "model"), _inner(cache, "cache"), _inner(tokenizer, "tokenizer")
        super().__init__(*parts, max_batch_size, max_chunk_size, **kwargs)
        # the incumbent's context is the cache; the model's own limit is the program's affair
        self.max_context = self.max_total_tokens

    def generate(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """As exl3's, prompts being str, or a tuple or list of them."""
        options = dict(zip(("max_new_tokens", "min_new_tokens", "seed"), args))
        options.update(kwargs)
        if options.get("stop_conditions") is None:
            options["stop_conditions"] = []
        return super().generate(list(prompt) if isinstance(prompt, tuple) else prompt, **options)


class AsyncGenerator(aio.AsyncGenerator):
    """exllamav3's `AsyncGenerator`."""

    generator_class = Generator


class AsyncJob(aio.AsyncJob):
    """exllamav3's `AsyncJob`."""

    job_class = Job
