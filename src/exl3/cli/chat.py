"""`exl3 chat MODEL`: a conversation on the terminal."""

from __future__ import annotations

import sys
from typing import Any

import click

from exl3.cli.common import device_option
from exl3.cli.generate import with_sampling


@click.command("chat")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--system", default=None, help="system message")
@with_sampling
@device_option
def command(model: str, system: str | None, device: str | None, max_tokens: int | None, **options: Any) -> None:
    """Talk to the model in directory MODEL. /reset starts over, /quit or end of input ends."""
    import exl3

    loaded = exl3.load(model, device=device, max_tokens=max_tokens)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            messages = list(opening)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        parts = []
        for piece in loaded.generate(messages, stream=True, **options):
            parts.append(piece)
            click.echo(piece, nl=False)
            sys.stdout.flush()
        click.echo()
        messages.append({"role": "assistant", "content": "".join(parts)})
