"""`exl3 plan DIR`: memory needs from headers alone."""

from __future__ import annotations

from typing import Any

import click

from exl3.cli.common import device_option, emit_json, human_bytes, json_flag, table


@click.command("plan")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("-c", "--max-tokens", type=click.IntRange(min=1), default=None, help="cache size in tokens (default: the model's context)")
@click.option("--cache-bits", default="16", show_default=True, metavar="K[,V]", help="bits of cached keys and values, 2 to 8 or 16")
@device_option
@json_flag
def command(model: str, max_tokens: int | None, cache_bits: str, device: str | None, as_json: bool) -> None:
    """Weights, cache per token, workspace and the largest context that fits."""
    from exl3.errors import ArgumentError
    from exl3.parallel import plan

    parts = cache_bits.replace(" ", "").split(",")
    if not all(p.isdigit() and (2 <= int(p) <= 8 or int(p) == 16) for p in parts) or len(parts) > 2:
        raise ArgumentError(f"--cache-bits {cache_bits}: give one or two of 2, 3, 4, 5, 6, 7, 8, 16, for example 8,4")
    result = plan(model, device=device, max_tokens=max_tokens, k_bits=int(parts[0]), v_bits=int(parts[-1])).as_dict()
    if as_json:
        emit_json(result)
        return
    parts = result.pop("parts")
    table(_rows(result))
    for part in parts if len(parts) > 1 else ():
        click.echo()
        table(_rows(part))


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(k.replace("_", " "), human_bytes(v) if k.endswith("bytes") else str(v)) for k, v in values.items()]
