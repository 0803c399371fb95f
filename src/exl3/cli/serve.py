"""`exl3 serve MODEL`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Any

import click

from exl3.cli.common import device_option


@click.command("serve")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0: reachable from other machines")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--name", "model_name", default=None, help="name clients use for the model; default: its directory's")
@click.option("--api-key", "api_keys", multiple=True, help="key clients must send, may be repeated; none: open to all")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False), default=None, help="keys, one a line; `ps` doesn't show them")
@click.option("-c", "--max-tokens", type=click.IntRange(min=1), default=None, help="longest context of one request")
@click.option("--cache-tokens", type=click.IntRange(min=256), default=None, help="room for all requests together; default: one context")
@click.option("--cache-bits", default="16", show_default=True, help="bits of cached keys and values: K or K,V (16, or 2 to 8)")
@click.option(
    "--draft-model", "draft_dir", type=click.Path(exists=True, file_okay=False), default=None, help="smaller model of the same vocabulary"
)
@click.option(
    "--ngram", "ngram_match_min", type=click.IntRange(min=0), default=0, help="draft from earlier text: shortest match in tokens, 0: off"
)
@click.option("--max-batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="requests that run at once")
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=256, show_default=True, help="requests running and waiting, above: status 429"
)
@click.option("--grace", type=click.FloatRange(min=0.0), default=10.0, show_default=True, help="seconds running answers get at shutdown")
@device_option
def command(cache_bits: str, api_keys: tuple[str, ...], api_key_file: str | None, model: str, **options: Any) -> None:
    """Serve the model in directory MODEL: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and a chat page at /."""
    from exl3.errors import ArgumentError
    from exl3.serve import serve

    try:
        bits = [int(b) for b in cache_bits.split(",")]
    except ValueError:
        bits = []
    if len(bits) not in (1, 2):
        raise ArgumentError(f"--cache-bits {cache_bits!r}: K or K,V is needed, as 16 or 8,6")
    keys = list(api_keys)
    if api_key_file is not None:
        with open(api_key_file, encoding="utf-8") as f:
            keys += [line.strip() for line in f if line.strip()]
        if not keys:
            raise ArgumentError(f"--api-key-file {api_key_file}: holds no key")
    serve(model, api_keys=keys, cache_bits=(bits[0], bits[-1]), **options)
