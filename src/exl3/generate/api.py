"""`Model.generate`: one prompt, one answer, without setting up an engine."""

from __future__ import annotations

import numbers
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from exl3.errors import ArgumentError
from exl3.generate.arguments import listed, whole
from exl3.generate.generator import Generator
from exl3.generate.job import Job, as_ids
from exl3.generate.presets import ComboSampler


@dataclass
class GenerationResult:
    """What `Model.generate` returns. `str(result)` is the text."""

    text: str
    ids: list[int]
    """tokens generated, the end token left out"""
    finish_reason: str
    """stop_token, stop_string, max_new_tokens, end_filter or loop_detected"""
    stop: int | str | None = None
    """which id or string ended it"""
    prompt_tokens: int = 0
    new_tokens: int = 0
    """tokens sampled, the end token included"""
    cached_tokens: int = 0
    """prompt tokens that were still in the cache"""
    first_token_seconds: float = 0.0
    """from the call to the first token"""
    seconds: float = 0.0
    prompt_logprobs: list[float] | None = None
    """with max_new_tokens=0: log-probability of every prompt token after the first"""
    extra: dict[str, Any] = field(default_factory=dict)
    """other keys of the engine's last result"""

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        """Everything but `extra`, as plain values."""
        made = asdict(self)
        del made["extra"]
        if self.prompt_logprobs is None:
            del made["prompt_logprobs"]
        return made


class Engine:
    """The generator behind `Model.generate`, shared by all callers: threads, and streams that are read while another call runs."""

    def __init__(self, model: Any, tokens: int) -> None:
        from exl3.cache import Cache

        self.generator = Generator(model, Cache(model, tokens, model.device))
        self._lock = threading.Lock()
        self._waiting: dict[Job, deque[dict[str, Any]]] = {}

    def results(self, job: Job) -> Iterator[dict[str, Any]]:
        """Results of one job; its error is raised. Leaving early cancels it."""
        queue: deque[dict[str, Any]] = deque()
        self._waiting[job] = queue
        try:
            self.generator.enqueue(job)
            while True:
                while queue:
                    result = queue.popleft()
                    if result["stage"] == "error":
                        raise result["error"]
                    yield result
                    if result["eos"]:
                        return
                with self._lock:
                    if not queue:  # another caller's step may have served this job
                        for result in self.generator.iterate():
                            other = self._waiting.get(result["job"])
                            if other is not None:
                                other.append(result)
        finally:
            del self._waiting[job]
            self.generator.cancel(job)


_SMALL = 8192
_engines_lock = threading.Lock()


def engine_of(model: Any, need: int = 0) -> Engine:
    """The engine behind `Model.generate`: made on first use with an fp16 cache of 8192 tokens, and made anew with a larger one, up to the
    model's context, when a call needs more."""
    with _engines_lock:
        held = model.__dict__  # the model keeps its engine, which keeps it: both go together
        found = held.get("_engine")
        room = found.generator.max_total_tokens if found is not None and found.generator.closed is None else 0
        if found is None or room < min(need, model.max_tokens):
            tokens = max(_SMALL, 1 << (need - 1).bit_length()) if need else _SMALL
            found = held["_engine"] = Engine(model, min(tokens, model.max_tokens))
        elif not room:
            found = held["_engine"] = Engine(model, found.generator.max_total_tokens)
        return found


def prompt_ids(model: Any, prompt: Any, chat_options: Mapping[str, Any] | None = None) -> list[int]:
    """Ids of a text, of chat messages (dicts with role and content), or of a sequence of ids as it is."""
    tokenizer = model.tokenizer
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping) and not isinstance(prompt, str)
    if not isinstance(prompt, str) and not is_chat:
        return as_ids(prompt).tolist()
    if tokenizer is None:
        raise ArgumentError("generate: this model directory has no tokenizer; pass token ids")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_bos=None) if prompt else []
    return tokenizer.encode_chat(prompt, **(chat_options or {}))


def generate(
    model: Any,
    prompt: Any,
    max_new_tokens: int | None = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_ids: Sequence[int] | None = None,
    stream: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    sampler: Any = None,
    clamp: bool = True,
    **job_options: Any,
) -> GenerationResult | Iterator[str]:
    """Continues a prompt.

    prompt              text, chat messages ({"role", "content"}), or token ids
    max_new_tokens      tokens to generate at most; 0 only scores the prompt; None: as many as the context has room for
    temperature         0: always the most likely token. top_k 0, top_p 1, min_p 0, repetition_penalty 1, other penalties 0: off
    seed                same seed, same text; default: a fresh one
    stop, stop_ids      strings and ids that end the text; stop_ids=None: all end tokens of the model's files, []: none
    stream              True: an iterator of text pieces, whole characters each
    tools, template, template_options   reach the chat template
    sampler             a `CustomSampler` in place of the options above
    clamp               lower max_new_tokens to the room in the context in place of an error
    job_options         what `Job` takes: filters, banned_strings, token_healing ...

    Raises ArgumentError for an empty prompt without BOS and for one longer than the context, NumericalError for NaN or Inf logits.
    """
    start = time.perf_counter()
    _check_types(
        temperature=temperature, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, top_k=top_k, seed=seed,
    )  # fmt: skip
    if not isinstance(max_new_tokens, int | None) or isinstance(max_new_tokens, bool):
        raise ArgumentError(f"max_new_tokens is {max_new_tokens!r}; a whole number or None is needed")
    if stop is not None and not (isinstance(stop, Sequence) and all(isinstance(s, str) for s in stop)):
        raise ArgumentError(f"stop is {stop!r}; a string or a list of strings is needed, ids go to stop_ids")
    ends = None if stop_ids is None else [whole("stop_ids", i, 0) for i in listed("stop_ids", stop_ids, "token ids")]
    if not isinstance(template_options, Mapping | None):
        raise ArgumentError(f"template_options is {template_options!r}; a dict is needed")
    if "stop_conditions" in job_options:
        raise ArgumentError("stop_conditions: generate takes strings as stop and token ids as stop_ids")
    options = {**(template_options or {}), **({"tools": tools} if tools else {}), **({"template": template} if template else {})}
    ids = prompt_ids(model, prompt, options)
    if sampler is None:
        sampler = ComboSampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, rep_p=repetition_penalty, pres_p=presence_penalty,
            freq_p=frequency_penalty,
        )  # fmt: skip
    need = len(ids) + (model.max_tokens if max_new_tokens is None else max(0, max_new_tokens)) + 1
    engine = engine_of(model, min(need, model.max_tokens))
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    conditions: list[int | str | None] = [*(engine.generator.eos_token_ids if ends is None else ends), *strings]
    job = Job(ids, max_new_tokens, sampler=sampler, seed=seed, stop_conditions=conditions, clamp=clamp, **job_options)
    if stream:
        return _stream(engine, job)
    made = GenerationResult("", [], "")
    for result in engine.results(job):
        if "token_ids" in result:
            made.ids += result["token_ids"][0].tolist()
        if not made.first_token_seconds and (job.new_tokens or result["eos"]):
            made.first_token_seconds = time.perf_counter() - start
        if result["eos"]:
            _fill(made, result)
    made.seconds = time.perf_counter() - start
    return made


def _check_types(**values: Any) -> None:
    """ArgumentError for an option that is no number; what a number must be is the sampler's to say."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real) and not (name == "seed" and value is None):
            raise ArgumentError(f"{name} is {value!r}; a number is needed")


def _fill(made: GenerationResult, last: dict[str, Any]) -> None:
    """Copies what the last result says."""
    made.text = last.pop("full_completion")
    made.finish_reason = last.pop("eos_reason")
    made.stop = last.pop("eos_triggering_string", last.pop("eos_triggering_token_id", None))
    made.prompt_tokens, made.new_tokens, made.cached_tokens = last.pop("prompt_tokens"), last.pop("new_tokens"), last.pop("cached_tokens")
    if "prompt_logprobs" in last:
        made.prompt_logprobs = last.pop("prompt_logprobs")[0].tolist()
    made.extra = {k: v for k, v in last.items() if k not in ("job", "stage", "eos", "serial", "text", "token_ids")}


def _stream(engine: Engine, job: Job) -> Iterator[str]:
    if engine.generator.pieces is None:  # said now, not at the first piece
        raise ArgumentError("generate: streaming text needs a tokenizer; this model directory has none")

    def pieces() -> Iterator[str]:
        for result in engine.results(job):
            if result.get("text"):
                yield result["text"]

    return pieces()
