"""The jobs behind one request, and the answers made of their results."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from exl3.errors import ArgumentError, Exl3Error, JobError, NumericalError, ResourceError, UnsupportedError
from exl3.generate.aio import AsyncGenerator, AsyncJob
from exl3.generate.filters import LLGuidanceFilter
from exl3.generate.pages import JobTooLargeError
from exl3.generate.presets import ComboSampler
from exl3.generate.sampling import NoTokenLeftError
from exl3.serve.metrics import Metrics
from exl3.serve.protocol import Chat, Completion, RequestError, Sampling
from exl3.serve.tools import CallStream, call_schema, parse_calls

_STINT = 1024  # tokens a job reserves at a time, so that one without a limit doesn't take the whole cache


def as_request_error(error: BaseException) -> RequestError:
    """The HTTP face of an engine's error."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, JobTooLargeError):
        return RequestError(400, str(error), "messages", "context_length_exceeded")
    if isinstance(error, (ArgumentError, UnsupportedError)):
        return RequestError(400, str(error))
    if isinstance(error, NoTokenLeftError):
        return RequestError(400, str(error), code="no_token_left")
    if isinstance(error, NumericalError):
        return RequestError(500, str(error), code="bad_logits")
    if isinstance(error, (JobError, ResourceError)):
        return RequestError(503, str(error))
    return RequestError(500, str(error) if isinstance(error, Exl3Error) else f"{type(error).__name__}: {error}")


class Answer:
    """One request's jobs: made by `prepare` (on a thread, it tokenizes and compiles grammars) and `start`."""

    def __init__(self, engine: AsyncGenerator, request: Completion | Chat, model: str, metrics: Metrics) -> None:
        self.engine, self.request, self.model, self.metrics = engine, request, model, metrics
        self.is_chat = isinstance(request, Chat)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.jobs: list[AsyncJob] = []
        self.options: list[dict[str, Any]] = []
        self.prompts: list[list[int]] = []
        self.usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}

    # set-up

    def prepare(self) -> None:
        """Prompt ids and job options of every choice."""
        r, g = self.request, self.engine.generator
        tokenizer = g.tokenizer
        if isinstance(r, Chat):
            tools = {"tools": r.tools} if r.tools and r.tool_choice != "none" else {}
            self.prompts = [tokenizer.encode_chat(r.messages, **{**r.template_options, **tools})]
        else:
            self.prompts = [list(p) if isinstance(p, list) else tokenizer.encode(p, add_bos=None) if p else [] for p in r.prompts]
        for prompt in self.prompts:
            for k in range(r.n):
                self.options.append({"input_ids": prompt, **self._job_options(r, k)})

    def _job_options(self, r: Sampling, k: int) -> dict[str, Any]:
        g = self.engine.generator
        stops: list[Any] = [*r.stop_token_ids, *r.stop]
        if not r.ignore_eos:
            stops += g.eos_token_ids
        uses_tools = isinstance(r, Chat) and r.tools and r.tool_choice != "none"
        grammar = r.grammar
        if isinstance(r, Chat) and self.forced_tool:
            grammar = {"json_schema": call_schema(r.tools, None if r.tool_choice == "required" else r.tool_choice)}
        scores = isinstance(r, Completion) and r.echo and r.top_logprobs is not None
        return {
            "max_new_tokens": r.max_tokens,
            "min_new_tokens": r.min_tokens,
            "sampler": ComboSampler(
                temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, pres_p=r.presence_penalty,
                freq_p=r.frequency_penalty, rep_p=r.repetition_penalty, logit_bias=r.logit_bias,
            ),
            "seed": None if r.seed is None else r.seed + k,
            "stop_conditions": stops,
            "banned_strings": r.banned_strings,
            "filters": [LLGuidanceFilter(g.tokenizer, eos_after_completed=True, **grammar)] if grammar else None,
            "return_probs": r.top_logprobs is not None,
            "return_top_tokens": r.top_logprobs or 0,
            "return_prompt_probs": scores,
            "decode_special_tokens": bool(uses_tools),
            "max_rq_tokens": _STINT,
            "clamp": True,
        }  # fmt: skip

    @property
    def forced_tool(self) -> bool:
        """Whether the answer has to be a tool call."""
        return isinstance(self.request, Chat) and bool(self.request.tools) and self.request.tool_choice not in ("auto", "none")

    async def start(self) -> None:
        """Enqueues all jobs, or none if one can't run."""
        try:
            for options in self.options:
                self.jobs.append(AsyncJob(self.engine, **options))
        except BaseException:
            await self.cancel()
            raise

    async def cancel(self) -> None:
        """Ends what still runs."""
        running = [job for job in self.jobs if not job.job.is_finished and not job.cancelled]
        self.metrics.cancelled += bool(running)
        for job in running:
            await job.cancel()

    async def results(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """(choice, result) as they come; leaving early cancels the rest."""
        try:
            if len(self.jobs) == 1:
                async for result in self.jobs[0]:
                    yield 0, self._count(result)
                return
            queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()

            async def pump(i: int, job: AsyncJob) -> None:
                try:
                    async for result in job:
                        queue.put_nowait((i, result))
                    queue.put_nowait((i, None))
                except Exception as error:
                    queue.put_nowait((i, error))

            tasks = [asyncio.create_task(pump(i, job)) for i, job in enumerate(self.jobs)]
            try:
                open_ = len(tasks)
                while open_:
                    i, result = await queue.get()
                    if isinstance(result, Exception):
                        raise result
                    if result is None:
                        open_ -= 1
                    else:
                        yield i, self._count(result)
            finally:
                for task in tasks:
                    task.cancel()
        finally:
            await self.cancel()

    def _count(self, result: dict[str, Any]) -> dict[str, Any]:
        if result["eos"]:
            self.metrics.finished(result)
            first_of_prompt = self.jobs.index(next(j for j in self.jobs if j.job is result["job"])) % self.request.n == 0
            self.usage["prompt_tokens"] += result["prompt_tokens"] if first_of_prompt else 0  # type: ignore[operator]
            self.usage["completion_tokens"] += result["new_tokens"]
            self.usage["prompt_tokens_details"]["cached_tokens"] += result["cached_tokens"]  # type: ignore[index]
            self.usage["total_tokens"] = self.usage["prompt_tokens"] + self.usage["completion_tokens"]  # type: ignore[operator]
        return result

    # shapes

    def head(self, kind: str) -> dict[str, Any]:
        """Fields all answers begin with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def finish_reason(self, result: dict[str, Any], calls: Any = None) -> str:
        """The API's name for why it ended."""
        return "tool_calls" if calls else "length" if result["eos_reason"] == "max_new_tokens" else "stop"

    def piece(self, token: int) -> bytes:
        """Bytes of a token."""
        return self.engine.generator.pieces.bytes_of(token, True)  # type: ignore[union-attr]

    def chat_logprobs(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Chat form of the log-probabilities of a result's tokens."""
        found = []
        for token, p, top in token_probs(result):
            entry = self._logprob(token, p)
            entry["top_logprobs"] = [self._logprob(t, q) for t, q in top]
            found.append(entry)
        return found

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.piece(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def completion_logprobs(self, result: dict[str, Any], made: dict[str, list[Any]]) -> None:
        """Appends a result's tokens to the completion form."""
        for token, p, top in token_probs(result):
            self.append_logprob(made, token, p, {self.piece(t).decode("utf-8", "replace"): q for t, q in top})

    def append_logprob(self, made: dict[str, list[Any]], token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        """One token of the completion form."""
        text = self.piece(token).decode("utf-8", "replace")
        offset = made["text_offset"][-1] + len(made["tokens"][-1]) if made["tokens"] else 0
        made["tokens"].append(text)
        made["token_logprobs"].append(logprob)
        made["top_logprobs"].append(top)
        made["text_offset"].append(offset)

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        texts = ["" for _ in self.jobs]
        ends: list[dict[str, Any]] = [{} for _ in self.jobs]
        logprobs: list[Any] = [[] if self.is_chat else empty_logprobs() for _ in self.jobs]
        async for i, result in self.results():
            texts[i] += result.get("text", "")
            if self.request.top_logprobs is not None and "token_ids" in result:
                if self.is_chat:
                    logprobs[i] += self.chat_logprobs(result)
                else:
                    self.completion_logprobs(result, logprobs[i])
            if result["eos"]:
                ends[i] = result
        make = self._chat_choice if self.is_chat else self._completion_choice
        choices = [make(i, texts[i], ends[i], logprobs[i]) for i in range(len(self.jobs))]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.head(kind), "choices": choices, "usage": self.usage}

    def _chat_choice(self, i: int, text: str, end: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        r = self.request
        assert isinstance(r, Chat)
        calls: list[dict[str, Any]] = []
        if r.tools and r.tool_choice != "none":
            text, calls = parse_calls(text, {t["function"]["name"] for t in r.tools}, self.forced_tool)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        made = {"index": i, "message": message, "finish_reason": self.finish_reason(end, calls)}
        made["logprobs"] = {"content": logprobs} if r.top_logprobs is not None else None
        return made

    def _completion_choice(self, i: int, text: str, end: dict[str, Any], logprobs: Any) -> dict[str, Any]:
        r = self.request
        assert isinstance(r, Completion)
        if r.echo:
            prompt = self.prompts[i // r.n]
            text = self.engine.generator.tokenizer.decode(prompt, special=True) + text
            if r.top_logprobs is not None:
                scored = empty_logprobs()
                scores = [None, *end["prompt_logprobs"][0].tolist()] if prompt else []
                for token, p in zip(prompt, scores):
                    self.append_logprob(scored, token, p, None if p is None else {self.piece(token).decode("utf-8", "replace"): p})
                offset = scored["text_offset"][-1] + len(scored["tokens"][-1]) if scored["tokens"] else 0
                logprobs["text_offset"] = [o + offset for o in logprobs["text_offset"]]
                logprobs = {k: scored[k] + logprobs[k] for k in scored}
        made = {"index": i, "text": text, "finish_reason": self.finish_reason(end)}
        made["logprobs"] = logprobs if r.top_logprobs is not None else None
        return made

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces, for server-sent events."""
        make = self._chat_chunks if self.is_chat else self._completion_chunks
        async for chunk in make():
            yield chunk
        if self.request.include_usage:
            kind = "chat.completion.chunk" if self.is_chat else "text_completion"
            yield {**self.head(kind), "choices": [], "usage": self.usage}

    async def _chat_chunks(self) -> AsyncIterator[dict[str, Any]]:
        r = self.request
        assert isinstance(r, Chat)
        head = self.head("chat.completion.chunk")

        def chunk(i: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return {**head, "choices": [{"index": i, "delta": delta, "finish_reason": reason, "logprobs": logprobs}]}

        names = {t["function"]["name"] for t in r.tools} if r.tool_choice != "none" else set()
        streams = [CallStream(names, self.forced_tool) if names else None for _ in self.jobs]
        for i in range(len(self.jobs)):
            yield chunk(i, {"role": "assistant", "content": ""})
        async for i, result in self.results():
            stream, text = streams[i], result.get("text", "")
            if stream is not None and text:
                text = stream.push(text)
            wants = r.top_logprobs is not None and "token_ids" in result
            if text or wants:
                yield chunk(i, {"content": text}, None, {"content": self.chat_logprobs(result)} if wants else None)
            if result["eos"]:
                rest, calls = stream.finish() if stream is not None else ("", [])
                if rest:
                    yield chunk(i, {"content": rest})
                for k, call in enumerate(calls):
                    yield chunk(i, {"tool_calls": [{"index": k, **call}]})
                yield chunk(i, {}, self.finish_reason(result, calls))

    async def _completion_chunks(self) -> AsyncIterator[dict[str, Any]]:
        r = self.request
        assert isinstance(r, Completion)
        head = self.head("text_completion")
        if r.echo:
            for i in range(len(self.jobs)):
                text = self.engine.generator.tokenizer.decode(self.prompts[i // r.n], special=True)
                yield {**head, "choices": [{"index": i, "text": text, "finish_reason": None, "logprobs": None}]}
        async for i, result in self.results():
            text = result.get("text", "")
            logprobs = None
            if r.top_logprobs is not None and "token_ids" in result:
                logprobs = empty_logprobs()
                self.completion_logprobs(result, logprobs)
            reason = self.finish_reason(result) if result["eos"] else None
            if text or logprobs or reason:
                yield {**head, "choices": [{"index": i, "text": text, "finish_reason": reason, "logprobs": logprobs}]}


def empty_logprobs() -> dict[str, list[Any]]:
    """The completion form without tokens."""
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def token_probs(result: dict[str, Any]) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """(token, log-probability, [(token, log-probability) of the likeliest]) of each token of a result."""
    if "token_probs" not in result:
        return []
    logs = result["token_probs"].log().clamp(min=-9999.0)[0].tolist()
    ids = result["token_ids"][0].tolist()
    if "top_k_probs" not in result:
        return [(t, p, []) for t, p in zip(ids, logs)]
    tops = result["top_k_probs"].log().clamp(min=-9999.0)[0].tolist()
    names = result["top_k_tokens"][0].tolist()
    return [(t, p, list(zip(n, q))) for t, p, n, q in zip(ids, logs, names, tops)]
