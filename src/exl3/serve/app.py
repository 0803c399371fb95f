"""The routes. Every error belongs to one request and has the right status; a client that goes away takes its jobs with it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from exl3.generate.aio import AsyncGenerator
from exl3.serve.answer import Answer, as_request_error
from exl3.serve.metrics import Metrics
from exl3.serve.protocol import Limits, RequestError, parse_body, parse_chat, parse_completion


class Server:
    """The state behind the routes. `engine` exists between start-up and shutdown."""

    def __init__(
        self,
        model: Any,
        cache: Any,
        model_name: str,
        api_keys: Sequence[str],
        limits: Limits,
        grace: float,
        health_timeout: float,
        engine_options: Any,
    ) -> None:
        self.model, self.cache, self.name, self.limits = model, cache, model_name, limits
        self.api_keys = [k.encode() for k in api_keys]
        self.grace, self.health_timeout, self.engine_options = grace, health_timeout, engine_options
        self.engine: AsyncGenerator | None = None
        self.metrics = Metrics()
        self.started = int(time.time())
        self.stopping = False

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Starts the engine; at the end refuses new requests, lets running jobs finish for `grace` seconds, and closes."""
        self.engine = AsyncGenerator(self.model, self.cache, **self.engine_options)
        try:
            yield
        finally:
            self.stopping = True
            end = time.monotonic() + self.grace
            while self.engine.jobs and time.monotonic() < end:
                await asyncio.sleep(0.02)
            await self.engine.close()

    def admit(self, request: Request) -> None:
        """Checks key and state. Raises RequestError."""
        if self.api_keys:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            given = (key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")).encode()
            if not any([hmac.compare_digest(given, k) for k in self.api_keys]):  # noqa: C419  every key is compared, always
                raise RequestError(401, "missing or wrong API key: send 'Authorization: Bearer KEY'", code="invalid_api_key")
        if self.stopping or self.engine is None:
            raise RequestError(503, "the server is shutting down")

    async def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON, never reading more than the limit."""
        limit = self.limits.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise RequestError(413, f"the body has {declared} bytes, at most {limit} are allowed")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > limit:
                raise RequestError(413, f"the body has more than the allowed {limit} bytes")
        return parse_body(bytes(data))

    # routes

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, parse_completion)

    async def _answer(self, request: Request, parse: Callable[[dict[str, Any], Limits], Any]) -> Response:
        self.admit(request)
        engine = self.engine
        assert engine is not None
        data = await self.body(request)
        named = data.get("model")
        if named is not None and named != self.name:
            raise RequestError(404, f"model {named!r} is not here; this server has {self.name!r}", "model", "model_not_found")
        parsed = parse(data, self.limits)
        if engine.generator.num_remaining_jobs() >= self.limits.max_queue:
            raise RequestError(429, f"{self.limits.max_queue} requests are running or waiting; try again later", code="queue_full")
        answer = Answer(engine, parsed, self.name, self.metrics)
        await asyncio.to_thread(answer.prepare)
        await answer.start()
        if parsed.stream:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
            return StreamingResponse(self._events(answer), media_type="text/event-stream", headers=headers)
        return await self._whole(request, answer)

    async def _whole(self, request: Request, answer: Answer) -> Response:
        """Waits for the answer, and for the client going away."""
        task = asyncio.create_task(answer.whole())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.25)
                if not task.done() and await request.is_disconnected():
                    raise ClientDisconnect
            return JSONResponse(task.result())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await answer.cancel()

    async def _events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Server-sent events; an error in the middle is an event too."""
        chunks = answer.chunks()
        try:
            async for chunk in chunks:
                yield b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"
        except Exception as error:
            yield b"data: " + json.dumps(as_request_error(error).body(), ensure_ascii=False).encode() + b"\n\n"
        finally:
            await answer.cancel()
        yield b"data: [DONE]\n\n"

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self.admit(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self.admit(request)
        if request.path_params["name"] != self.name:
            raise RequestError(
                404, f"model {request.path_params['name']!r} is not here; this server has {self.name!r}", "model", "model_not_found"
            )
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "exl3",
            "max_model_len": int(self.model.max_tokens),
        }

    async def health(self, request: Request) -> Response:
        """GET /health: 200 only if a token is really decoded."""
        healthy = self.engine is not None and not self.stopping and await self.engine.check_health(self.health_timeout)
        error = None if self.engine is None or self.engine.error is None else str(self.engine.error)
        return JSONResponse({"status": "ok" if healthy else "unhealthy", "error": error}, 200 if healthy else 503)

    async def metrics_page(self, request: Request) -> Response:
        """GET /metrics."""
        if self.engine is None:
            raise RequestError(503, "the engine is not running")
        return PlainTextResponse(self.metrics.text(self.engine.generator.get_cache_stats()), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """GET /: the chat page."""
        text = resources.files("exl3.serve").joinpath("page.html").read_text(encoding="utf-8")
        policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
        return HTMLResponse(text, headers={"content-security-policy": policy})


def _guarded(server: Server, name: str, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """A route whose errors become answers and whose outcome is counted."""

    async def guarded(request: Request) -> Response:
        try:
            response = await handler(request)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            found = as_request_error(error)
            headers = {"retry-after": "1"} if found.status in (429, 503) else None
            response = JSONResponse(found.body(), found.status, headers)
        server.metrics.requests[(name, response.status_code)] += 1
        return response

    return guarded


def create_app(
    model: Any,
    cache: Any = None,
    *,
    model_name: str = "exl3",
    api_keys: Sequence[str] = (),
    limits: Limits | None = None,
    grace: float = 10.0,
    health_timeout: float = 30.0,
    **engine_options: Any,
) -> Starlette:
    """The ASGI application for a loaded model with a tokenizer.

    cache            default: one for the model's context
    model_name       what clients call it
    api_keys         any of them opens /v1; none: open to all. /health and /metrics are always open
    grace            seconds running jobs get at shutdown
    engine_options   of `Generator` (max_batch_size, draft_model ...)
    """
    if model.tokenizer is None:
        from exl3.errors import ArgumentError

        raise ArgumentError("serve: the model directory has no tokenizer, so it can't serve text")
    server = Server(model, cache, model_name, api_keys, limits or Limits(), grace, health_timeout, engine_options)

    def route(path: str, name: str, method: str, handler: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(path, _guarded(server, name, handler), methods=[method])

    app = Starlette(
        routes=[
            route("/", "page", "GET", server.page),
            route("/health", "health", "GET", server.health),
            route("/metrics", "metrics", "GET", server.metrics_page),
            route("/v1/models", "models", "GET", server.models),
            route("/v1/models/{name:path}", "models", "GET", server.one_model),
            route("/v1/completions", "completions", "POST", server.completions),
            route("/v1/chat/completions", "chat", "POST", server.chat),
        ],
        lifespan=server.lifespan,
    )
    app.state.server = server
    return app
