"""Runs the server with uvicorn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from exl3.errors import ArgumentError, UnsupportedError


def serve(
    model_dir: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str | None = None,
    max_tokens: int | None = None,
    cache_tokens: int | None = None,
    cache_bits: tuple[int, int] = (16, 16),
    model_name: str | None = None,
    api_keys: Sequence[str] = (),
    draft_dir: str | None = None,
    grace: float = 10.0,
    max_queue: int = 256,
    max_body_bytes: int = 4 << 20,
    log_level: str = "info",
    **engine_options: Any,
) -> None:
    """Loads a model directory and serves it until the process is told to stop (SIGINT, SIGTERM): running answers get `grace` seconds.

    max_tokens    longest context of one request; cache_tokens: of all requests together, default the same
    cache_bits    of keys and values: 16, or 2 to 8
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as e:
        raise UnsupportedError(f"the server needs {e.name}: pip install 'exl3[serve]'") from None
    import exl3
    from exl3.cache import Cache
    from exl3.serve.app import create_app
    from exl3.serve.protocol import Limits

    if not 0 <= port < 65536:
        raise ArgumentError(f"port {port}: 0 to 65535 is needed")
    model = exl3.load(model_dir, device=device, max_tokens=max_tokens)
    cache = Cache(model, cache_tokens or model.max_tokens, model.device, *cache_bits)
    if draft_dir is not None:
        engine_options["draft_model"] = exl3.load(draft_dir, device=device, max_tokens=max_tokens)
    app = create_app(
        model,
        cache,
        model_name=model_name or os.path.basename(os.path.abspath(model_dir)),
        api_keys=api_keys,
        limits=Limits(max_body_bytes=max_body_bytes, max_queue=max_queue),
        grace=grace,
        **engine_options,
    )
    uvicorn.run(app, host=host, port=port, log_level=log_level, timeout_graceful_shutdown=int(grace) + 1)
