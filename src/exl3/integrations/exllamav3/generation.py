"""`Generator`, `Job` and their asyncio forms with exllamav3's constructors, over exl3's own."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from exl3.errors import JobError
from exl3.generate import aio, generator, job, options

KNOWN = set(inspect.signature(generator.Generator.__init__).parameters) | set(options.IGNORED) | set(options.UNSUPPORTED)


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
    context_is_cache = True  # the model's own limit is the program's affair

    def __init__(
        self, model: Any, cache: Any, tokenizer: Any, max_batch_size: int | None = 256, max_chunk_size: int | None = 2048, **kwargs: Any
    ) -> None:
        if "num_speculative_tokens" in kwargs:  # an older name that frontends still pass
            kwargs.setdefault("num_draft_tokens", kwargs.pop("num_speculative_tokens"))
        kwargs.setdefault("dynamic_draft_tokens", False)
        kwargs["draft_model"] = _inner(kwargs.get("draft_model"), "draft model")
        kwargs["draft_cache"] = _inner(kwargs.get("draft_cache"), "draft cache")
        parts = _inner(model, "model"), _inner(cache, "cache"), _inner(tokenizer, "tokenizer")
        for name in set(kwargs) - KNOWN:  # exllamav3 takes any keyword in silence
            warnings.warn(f"Generator: unknown argument {name!r} is ignored", stacklevel=2)
            del kwargs[name]
        super().__init__(*parts, max_batch_size or 256, max_chunk_size or 2048, **kwargs)

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
