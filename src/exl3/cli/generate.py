"""`exl3 generate MODEL PROMPT`."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from exl3.cli.common import device_option, emit_json, json_flag

# shared by generate and chat
sampling_options = [
    click.option("-n", "--max-new-tokens", type=click.IntRange(min=0), default=256, show_default=True, help="tokens to generate at most"),
    click.option(
        "-t", "--temperature", type=click.FloatRange(min=0.0), default=0.0, show_default=True, help="0: always the most likely token"
    ),
    click.option("--top-k", type=click.IntRange(min=0), default=0, help="0: off"),
    click.option("--top-p", type=click.FloatRange(0.0, 1.0), default=1.0, help="1: off"),
    click.option("--min-p", type=click.FloatRange(0.0, 1.0), default=0.0, help="0: off"),
    click.option("--repetition-penalty", type=click.FloatRange(min=0.01), default=1.0, help="1: off"),
    click.option("--seed", type=int, default=None, help="same seed, same text"),
    click.option("-c", "--max-tokens", "max_tokens", type=click.IntRange(min=1), default=None, help="cache size in tokens"),
]


def with_sampling(function: Any) -> Any:
    """Adds the sampling options to a command."""
    for option in reversed(sampling_options):
        function = option(function)
    return function


@click.command("generate")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.argument("prompt")
@click.option("--chat", is_flag=True, help="put the prompt into the model's chat template")
@click.option(
    "--ids", "as_ids", is_flag=True, help="the prompt is a comma-separated list of token ids; without a tokenizer so is the answer"
)
@with_sampling
@device_option
@json_flag
def command(
    model: str, prompt: str, chat: bool, as_ids: bool, device: str | None, as_json: bool, max_tokens: int | None, **options: Any
) -> None:
    """Continue PROMPT ('-': read it from stdin) with the model in directory MODEL."""
    import exl3
    from exl3.errors import ArgumentError

    if prompt == "-":
        prompt = sys.stdin.read()
    source: Any = prompt
    if as_ids:
        try:
            source = [int(x) for x in prompt.replace(",", " ").split()]
        except ValueError:
            raise ArgumentError(f"--ids: {prompt[:60]!r} is not a comma-separated list of integers") from None
    elif chat:
        source = [{"role": "user", "content": prompt}]
    loaded = exl3.load(model, device=device, max_tokens=max_tokens)
    start = time.perf_counter()
    if as_json:
        result = loaded.generate(source, **options)
        emit_json({**result.as_dict(), "seconds": time.perf_counter() - start})
        return
    if as_ids and loaded.tokenizer is None:  # nothing to make text with
        click.echo(",".join(map(str, loaded.generate(source, **options).ids)))
        return
    for piece in loaded.generate(source, stream=True, **options):
        click.echo(piece, nl=False)
        sys.stdout.flush()
    click.echo()
