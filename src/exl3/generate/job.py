"""`Job`: one request, from its prompt to its last token. What it wants, how far it is, and what each sampled token means for it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from exl3.errors import ArgumentError, UnsupportedError
from exl3.generate import arguments
from exl3.generate.arguments import as_ids, flag, whole
from exl3.generate.pages import JobTooLargeError
from exl3.generate.presets import DefaultSampler
from exl3.generate.sampling import Plan, Sampler
from exl3.generate.stream import Rewind, Stream, Token
from exl3.generate.text import LoopDetector, Pieces

_serials = itertools.count(1)


class ContextLengthError(JobTooLargeError, ArgumentError):
    """Prompt and new tokens are more than the model's context holds."""


class Job:
    """A request.

    input_ids         prompt: (1, n) tensor, list of ids, or a list with one such
    max_new_tokens    tokens to generate, exactly; None: what the cache and the context have room for; 0: only score the prompt
    min_new_tokens    end tokens are masked until this many are there
    sampler           a `CustomSampler`, default `DefaultSampler`; seed: of its draws, default random
    stop_conditions   ids and strings; None: the model's own end tokens; []: none. None entries are dropped
    return_probs, return_top_tokens=k, return_logits     extra result keys; probabilities are a softmax of the raw logits
    return_prompt_probs   log-probability of every prompt token after the first, in the last result
    filters           constraints on the output (`Filter`)
    token_healing     the last prompt token is taken back and the first new one must begin with its text
    banned_strings    the output never contains these (any case): it is taken back and continued otherwise
    max_rq_tokens     tokens to reserve at a time; the job then queues again and finds its pages in the cache
    stop_on_loop      (window, min_repeats): stop when the last `window` tokens repeat a piece that often
    max_skips         how often smaller jobs may overtake it in the queue
    clamp             lower max_new_tokens to what fits in place of an error
    identifier        returned in every result
    """

    join_emoji = True  # an emoji is handed out once nothing more can join it

    def __init__(
        self,
        input_ids: Any,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        max_skips: int = 4,
        sampler: Sampler | None = None,
        seed: int | None = None,
        stop_conditions: Iterable[int | str | None] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: Sequence[Any] | None = None,
        token_healing: bool = False,
        identifier: Any = None,
        banned_strings: Sequence[str] | None = None,
        embeddings: Any = None,
        max_rq_tokens: int | None = None,
        stop_on_loop: tuple[int, int] | None = None,
        rq_state: Any = None,
        return_prompt_probs: bool = False,
        clamp: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ArgumentError(f"Job: unknown argument {next(iter(kwargs))!r}")
        if embeddings is not None and arguments.listed("embeddings", embeddings, "embeddings"):
            raise UnsupportedError("Job: embeddings (images) are not supported yet; pass text tokens only")
        self.prompt = as_ids(input_ids)
        self.max_new_tokens = None if max_new_tokens is None else whole("max_new_tokens", max_new_tokens, 0, "(score the prompt) ")
        self.min_new_tokens = whole("min_new_tokens", 0 if min_new_tokens is None else min_new_tokens, 0)
        self.max_skips = whole("max_skips", max_skips, 0)
        self.stop_conditions = None if stop_conditions is None else arguments.conditions("stop_conditions", stop_conditions)
        self.decode_special_tokens = flag("decode_special_tokens", decode_special_tokens)
        self.return_top_tokens = whole("return_top_tokens", 0 if return_top_tokens is None else return_top_tokens, 0)
        self.return_logits, self.return_probs = flag("return_logits", return_logits), flag("return_probs", return_probs)
        self.return_prompt_probs = flag("return_prompt_probs", return_prompt_probs)
        self.wants_extra = self.return_probs or self.return_logits or self.return_top_tokens > 0  # results carry probabilities or logits
        self.filters = arguments.filters(filters)
        self.token_healing, self.identifier, self.clamp = flag("token_healing", token_healing), identifier, flag("clamp", clamp)
        self.banned_strings = arguments.strings("banned_strings", banned_strings)
        self.max_rq_tokens = None if max_rq_tokens is None else whole("max_rq_tokens", max_rq_tokens, 1)
        self.loop = None if stop_on_loop is None else LoopDetector(*arguments.pair("stop_on_loop", stop_on_loop))
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else whole("seed", seed, -(1 << 200)) & 0xFFFFFFFFFFFFFFFF
        self.serial_number = next(_serials)
        # engine state
        self.generator: Any = None
        self.set_sampler(DefaultSampler() if sampler is None else sampler)
        self.pieces: Pieces | None = None
        self.ids = self.prompt  # buffer of all tokens, `n` of them used, of which `cached` have keys and values
        self.n = self.cached = 0
        self.last = 0  # the last token
        self.last_view: Any = None  # and the same as a tensor (1, 1), a view of the step's
        self.pages: list[int] = []
        self.owner: tuple[int, int] = (self.serial_number, 0)  # names this list of pages; a new one after every change in place
        self.chain: list[bytes] = []  # hashes of the leading pages that are published or shared
        self.names: list[bytes] = []
        self.skips = 0
        self.new_tokens = 0
        self.stint_end = 0  # n at which the reservation ends
        self.cached_pages = self.tokens_from_cache = 0
        self.is_finished = False
        self.is_requeued = False
        self.cancelled = False
        self.limited_by: str | None = None  # "clamped" once max_new_tokens was lowered
        self.eos: dict[str, Any] | None = None
        self.attempt = 0  # rewinds so far: a retried position draws afresh
        self.blocked: dict[int, set[int]] = {}  # position -> tokens a banned string has ruled out there
        self.forced: list[int] = []  # what constrain_output_now still asks for
        self.was_forced = False  # the token to be committed came from there
        self.filters_suspended = False
        self.memory: dict[Any, Any] = {}  # what stateful sampler steps keep
        self.memory_before: dict[Any, Any] = {}  # the same before the last draw, and before the draw at each place that may be taken back
        self.memories: dict[int, dict[Any, Any]] = {}
        self.healing: bytes | None = None
        self.suppressed: list[tuple[str, list[int]]] = []
        self.prompt_logprobs: list[np.ndarray] = []
        self.accepted_draft_tokens = self.rejected_draft_tokens = 0
        self.draft: Any = None  # the drafter's own state
        self.draft_cached = 0
        self.masks: list[Any] = []  # futures or masks of the filters for the next token
        self.lagging = False  # sits out steps until its masks are there
        self.time_enqueue = self.time_start = self.time_first = self.time_last = 0.0
        self.time_first_prefill: float | None = None  # seconds since the epoch, for progress displays

    # settings that may change while the job runs: they count from the next token on

    def _change(self, apply: Callable[[], None]) -> None:
        """Runs `apply` now, or before the next step once the job is enqueued: no thread may touch what a step is using."""
        if self.generator is None:
            apply()
        elif not self.is_finished:
            self.generator.later(self, apply)

    def set_sampler(self, sampler: Sampler) -> None:
        """Replaces the sampler."""
        if not isinstance(sampler, Sampler):
            raise ArgumentError(f"sampler: a CustomSampler is needed, got {type(sampler).__name__}")
        self._change(lambda: self._take_sampler(sampler))

    def _take_sampler(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.plan: Plan = sampler.plan()
        self.plain_sampler = self.plan.params is not None and not self.plan.before and not self.plan.history
        self._params: bytes | None = None

    def set_filters(self, filters: Sequence[Any] | None) -> None:
        """Replaces the filters; each begins afresh."""
        given = arguments.filters(filters)
        arguments.unshared(given, self)
        self._change(lambda: self._take_filters(given))

    def _take_filters(self, filters: list[Any]) -> None:
        for mask, old in zip(self.masks, self.filters):
            if isinstance(mask, Future) and any(old is f for f in filters):
                mask.exception()  # it is attached again: it may not be at work still
        self.filters, self.masks, self.filters_suspended, self.was_forced = filters, [], False, False
        if self.generator is not None:
            arguments.attach(filters, self)
            if self.pages:
                self.generator.masks.request(self)

    def set_banned_strings(self, banned_strings: Sequence[str] | None) -> None:
        """Replaces the banned strings; text that only the old ones held is released."""
        given = arguments.strings("banned_strings", banned_strings)
        self._change(lambda: self._take_banned(given))

    def _take_banned(self, banned_strings: list[str]) -> None:
        self.banned_strings = banned_strings
        if self.generator is not None:
            self.stream.set_banned(banned_strings)

    def constrain_output_now(self, tokens: Any) -> None:
        """The next tokens are these, whatever the sampler would draw: ids, a (1, n) tensor, or text. Filters follow them; those that do not
        allow them are switched off (`filters_suspended`) until `set_filters`."""
        if isinstance(tokens, str):
            if getattr(self, "tokenizer", None) is None:
                raise ArgumentError("constrain_output_now: text needs a running job with a tokenizer; pass ids")
            tokens = self.tokenizer.encode(tokens, add_bos=False)
        forced = as_ids(tokens).tolist()
        if self.generator is not None:
            self._check_vocabulary("constrain_output_now", forced)
        self._change(lambda: setattr(self, "forced", forced))

    def _check_vocabulary(self, what: str, ids: Any) -> None:
        vocab = self.generator.vocab_size
        wrong = next((int(i) for i in ids if i >= vocab), None)
        if wrong is not None:
            raise ArgumentError(f"{what}: {wrong} is outside the vocabulary of {vocab} tokens")

    # set-up

    def prepare(self, generator: Any) -> None:
        """Resolves what depends on the generator. Raises for what can't work; called by `Generator.enqueue`."""
        self.generator, self.tokenizer = generator, generator.tokenizer
        if len(self.prompt) == 0:
            if generator.bos_token_id is None:
                raise ArgumentError("input_ids: the prompt is empty and the model has no BOS token to stand in; pass at least one token")
            self.prompt = np.array([generator.bos_token_id], np.int32)
        self._check_vocabulary("input_ids", self.prompt[self.prompt >= generator.vocab_size])
        self._check_vocabulary("constrain_output_now", self.forced)
        context = generator.max_context
        if len(self.prompt) > context:
            if generator.context_is_cache:
                generator.pagetable.check_fits(len(self.prompt))  # says it in pages
            raise ContextLengthError(
                f"input_ids: the prompt has {len(self.prompt)} tokens, the context holds {context}: it cannot be enqueued; "
                "shorten it, or load with a larger max_tokens"
            )
        pieces = self.pieces = generator.pieces
        if self.token_healing and len(self.prompt) > 1 and pieces is not None:
            last = int(self.prompt[-1])
            if self.healing is None and last not in pieces.special and pieces.bytes_of(last):  # once, also where enqueue is tried again
                self.healing = pieces.bytes_of(last)
                self.prompt = self.prompt[:-1]
        self._resolve_limit(generator, context)
        conditions = generator.eos_token_ids if self.stop_conditions is None else self.stop_conditions
        self.stop_tokens = {int(s) for s in conditions if s is not None and not isinstance(s, str)}
        self.stop_strings = [s for s in conditions if isinstance(s, str) and s]
        if (self.stop_strings or self.banned_strings or self.token_healing) and pieces is None:
            raise ArgumentError("stop strings, banned strings and token healing need a tokenizer; this model directory has none")
        self.stream = Stream(pieces or Pieces([]), self.stop_strings, self.banned_strings, self.decode_special_tokens, self.join_emoji)
        assert self.max_new_tokens is not None
        self.ids = np.zeros(len(self.prompt) + self.max_new_tokens + 1, np.int32)
        self.n = len(self.prompt)
        self.ids[: self.n] = self.prompt
        self.last = int(self.prompt[-1])
        self.time_enqueue = time.perf_counter()

    def _resolve_limit(self, generator: Any, context: int) -> None:
        room = min(context, generator.max_total_tokens) - len(self.prompt)
        if self.max_new_tokens is None:
            if room < 1:
                raise ContextLengthError(f"the prompt of {len(self.prompt)} tokens leaves no room in a context of {context}")
            self.max_new_tokens = room
        elif self.max_new_tokens > room and self.clamp and room >= 1:
            self.max_new_tokens, self.limited_by = room, "clamped"
        if len(self.prompt) + self.max_new_tokens > context and context < generator.max_total_tokens:
            raise ContextLengthError(
                f"prompt {len(self.prompt)} + max_new_tokens {self.max_new_tokens} exceed the context of {context} tokens "
                "and cannot be enqueued; lower max_new_tokens or pass clamp"
            )
        generator.pagetable.check_fits(self.reserve())

    def reserve(self) -> int:
        """Tokens to reserve pages for in the coming stint."""
        assert self.max_new_tokens is not None
        n = self.n or len(self.prompt)
        left = self.max_new_tokens - self.new_tokens
        if self.max_rq_tokens is not None:
            left = min(left, self.max_rq_tokens)
        return n + left

    @property
    def rq_new_tokens(self) -> int:
        """Tokens generated so far over all stints."""
        return self.new_tokens

    @property
    def rq_prompt_tokens(self) -> int:
        """Tokens of the original prompt."""
        return len(self.prompt)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache, those of whole pages included."""
        return self.tokens_from_cache

    @property
    def draft_stats(self) -> dict[str, int]:
        """Accepted and rejected draft tokens."""
        return {"accepted": self.accepted_draft_tokens, "rejected": self.rejected_draft_tokens}

    def moved(self) -> None:
        """The list of pages has changed: recorded steps rewrite its row."""
        self.owner = (self.serial_number, self.owner[1] + 1)

    @property
    def scores_only(self) -> bool:
        """Whether no token is asked for."""
        return self.max_new_tokens == 0

    @property
    def wants_prompt_logits(self) -> bool:
        return self.return_prompt_probs or self.scores_only

    # sampling

    @property
    def plain(self) -> bool:
        """Whether the next token is a fused draw from the logits as they are."""
        return self.plain_sampler and not (
            self.filters or self.blocked or self.forced or self.healing or self.wants_extra or self.new_tokens < self.min_new_tokens
        )

    @property
    def independent(self) -> bool:
        """Whether the draw of a later draft token doesn't depend on the earlier ones."""
        return self.plain

    def counter(self, offset: int = 0) -> int:
        """Number of the coming draw."""
        return self.n - len(self.prompt) + offset + (self.attempt << 32)

    def param_bytes(self) -> bytes:
        """The leading 40 bytes of the job's record for `ops.sample`; the counter follows."""
        if self._params is None:
            from exl3 import ops

            assert self.plan.params is not None
            values = dict(self.plan.params)
            values["top_k"] = int(values.get("top_k", 0))
            values["temperature_last"] = bool(values.get("temperature_last", 0))
            packed = ops.pack_sample_params([ops.SampleParams(**values, seed=self.seed)])  # type: ignore[arg-type]
            self._params = packed.numpy().tobytes()[:40]
        return self._params

    # one token

    def commit(self, token: int, extra: Any = None) -> None:
        """Takes a sampled token: text, stop conditions, limits. Sets `eos` when it ends the job."""
        self.ids[self.n] = token
        self.last = token
        self.n += 1
        self.new_tokens += 1
        if token in self.stop_tokens:
            found = self.stream.finish()
            self._end_with("stop_string", found) if found else self._end("stop_token", token=token)
            return
        data = None
        if self.healing is not None:
            assert self.generator.pieces is not None
            data = self.generator.pieces.bytes_of(token)[len(self.healing) :]
            self.healing = None
        if self.memory and self.banned_strings:
            self.memories[self.n - 1] = self.memory_before
            self.memory_before = dict(self.memory)
        outcome = self.stream.push(token, extra, data)
        if isinstance(outcome, Rewind):
            self._rewind(outcome)
            return
        if self.memories and self.stream.confirmed:
            self.memories.clear()
        if outcome is None and not self.filters and self.loop is None and self.new_tokens < self.max_new_tokens:  # type: ignore[operator]
            return
        self._feed_filters(token)
        looped = self.loop is not None and self.loop.push(token)
        if outcome is not None:
            self._end_with("stop_string", outcome)
        elif self.filters and any(f.ended() for f in self.filters):
            self._finish_text("end_filter")
        elif looped:
            self._finish_text("loop_detected")
        elif self.new_tokens >= (self.max_new_tokens or 0):
            self._finish_text("max_new_tokens")

    def _feed_filters(self, token: int) -> None:
        forced, self.was_forced = self.was_forced, False
        self.masks = []
        try:
            for f in self.filters:
                f.feed(token)
        except Exception:
            if not forced:
                raise
            self.filters, self.masks, self.filters_suspended = [], [], True

    def _finish_text(self, reason: str) -> None:
        found = self.stream.finish()
        self._end_with("stop_string", found) if found else self._end(reason)

    def _end_with(self, reason: str, found: str | None) -> None:
        self._end(reason, string=found)

    def _end(self, reason: str, token: int | None = None, string: str | None = None) -> None:
        self.eos = {"eos_reason": reason}
        if token is not None:
            self.eos["eos_triggering_token_id"] = token
            pieces = self.generator.pieces
            self.eos["eos_triggering_token_str"] = pieces.bytes_of(token, True).decode("utf-8", "replace") if pieces is not None else None
        if string is not None:
            self.eos["eos_triggering_string"] = string

    def _rewind(self, gone: Rewind) -> None:
        """Takes back the tokens from where the banned string began and rules out its first token there."""
        at = self.n - gone.count
        first = int(self.ids[at])
        self.masks = []
        self.blocked = {p: s for p, s in self.blocked.items() if p <= at}
        self.blocked.setdefault(at, set()).add(first)
        self.attempt += 1
        for f in self.filters:
            if gone.count > 1:
                f.rewind(gone.count - 1)  # the last token was never fed
        if at in self.memories:
            self.memory.clear()
            self.memory.update(self.memories[at])
            self.memory_before = dict(self.memory)
        self.memories = {p: m for p, m in self.memories.items() if p < at}
        self.n = at
        self.last = int(self.ids[at - 1])
        self.cached = min(self.cached, at - 1)
        self.draft_cached = min(self.draft_cached, self.cached)
        self.new_tokens -= gone.count
        self.suppressed.append((gone.text, gone.tokens))
        if self.loop is not None:
            self.loop.reset()
            for t in self.ids[max(len(self.prompt), self.n - 2 * self.loop.window) : self.n].tolist():
                self.loop.push(t)

    # results

    def result(self, stage: str, **more: Any) -> dict[str, Any]:
        """The part all results share."""
        made: dict[str, Any] = {"job": self, "stage": stage, "eos": False, "serial": self.serial_number, **more}
        if self.identifier is not None:
            made["identifier"] = self.identifier
        return made

    def streaming(self, requeue: bool = False) -> dict[str, Any] | None:
        """What became certain since the last result, or None if nothing did and the job goes on."""
        quick = self.stream.quick
        if quick is not None and self.eos is None and not requeue and not self.suppressed:
            self.stream.quick = None
            text, token = quick
            made = {"job": self, "stage": "streaming", "eos": False, "serial": self.serial_number}
            if self.identifier is not None:
                made["identifier"] = self.identifier
            if text:
                made["text"] = text
                self.stream.full.append(text)
            made["token_ids"] = torch.tensor([[token]]) if self.last_view is None else self.last_view
            return made
        text, tokens = self.stream.take()
        if not text and not tokens and self.eos is None and not requeue:
            return None
        made = self.result("streaming")
        if text:
            made["text"] = text
        if tokens:
            self._put_tokens(made, tokens)
        if self.suppressed and (tokens or self.eos is not None):
            made["suppressed_text"] = "".join(t for t, _ in self.suppressed)
            made["suppressed_tokens"] = torch.tensor([[i for _, ids in self.suppressed for i in ids]])
            self.suppressed = []
        if requeue:
            made["requeue"] = True
        if self.eos is not None:
            self._put_end(made)
        return made

    def _put_tokens(self, made: dict[str, Any], tokens: list[Token]) -> None:
        made["token_ids"] = torch.tensor([[t.id for t in tokens]])
        if self.wants_extra and tokens[0].extra is not None:
            extras = [t.extra for t in tokens]
            if self.return_probs:
                made["token_probs"] = torch.tensor([[e[0] for e in extras]])
            if self.return_top_tokens:
                made["top_k_tokens"] = torch.stack([e[1] for e in extras])[None]
                made["top_k_probs"] = torch.stack([e[2] for e in extras])[None]
            if self.return_logits:
                made["logits"] = torch.stack([e[3] for e in extras])[None]

    def _put_end(self, made: dict[str, Any]) -> None:
        assert self.eos is not None
        self.time_last = time.perf_counter()
        start = self.time_start or self.time_last
        first = self.time_first or self.time_last
        made.update(self.eos)
        made.update(
            eos=True,
            full_completion="".join(self.stream.full),
            new_tokens=self.new_tokens,
            prompt_tokens=len(self.prompt),
            time_enqueued=start - self.time_enqueue,
            time_prefill=first - start,
            time_generate=self.time_last - first,
            cached_pages=self.cached_pages,
            cached_tokens=self.tokens_from_cache,
        )
        if self.limited_by:
            made["clamped"] = True
        if self.accepted_draft_tokens or self.rejected_draft_tokens:
            made["accepted_draft_tokens"] = self.accepted_draft_tokens
            made["rejected_draft_tokens"] = self.rejected_draft_tokens
        if self.prompt_logprobs or self.wants_prompt_logits:
            logprobs = np.concatenate(self.prompt_logprobs) if self.prompt_logprobs else np.zeros(0, np.float32)
            made["prompt_logprobs"] = torch.from_numpy(logprobs)[None]
        if self.stream.pending:
            held = list(self.stream.pending)
            inner: dict[str, Any] = {}
            self._put_tokens(inner, held)
            table = self.generator.pieces
            inner["text"] = (
                b"".join(table.bytes_of(t.id, self.decode_special_tokens) for t in held).decode("utf-8", "replace") if table else ""
            )
            made["held"] = inner
