"""What several verbs share: options, progress bars, JSON and tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

device_option = click.option(
    "-d",
    "--device",
    default=None,
    metavar="DEVICE",
    help="cpu, cuda, cuda:N, several as cuda:0,cuda:1 or cuda:0,cpu, or auto (default: a GPU if one is usable, else cpu)",
)
json_flag = click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of text")


def emit_json(value: Any, path: str | None = None) -> None:
    """Prints `value` as JSON, or writes it to `path` through a temporary file."""
    text = json.dumps(value, indent=2, default=str)
    if path is None or path == "-":
        click.echo(text)
        return
    from exl3.errors import ResourceError

    target = Path(path)
    part = target.with_name(target.name + ".part")
    try:
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, target)
    except OSError as e:
        part.unlink(missing_ok=True)
        raise ResourceError(f"--json {path}: cannot be written ({e.strerror or e}); give another place") from None


def check_json_path(path: str | None, option: str = "--json") -> None:
    """Refuses a destination of `emit_json` that cannot be, before work of hours is done for it."""
    from exl3.errors import ArgumentError

    if path is not None and path != "-" and (Path(path).is_dir() or not os.access(Path(path).absolute().parent, os.W_OK | os.X_OK)):
        other = ", or -" if option == "--json" else ""
        raise ArgumentError(f"{option} {path}: not a file that can be written; give a file in an existing, writable directory{other}")


def human_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError


def table(rows: list[tuple[str, str]]) -> None:
    """Two aligned columns on stdout."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A callback(done, total): a bar with ETA on a terminal, else a line each tenth on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = -1

    def plain(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth != last:
            last = tenth
            click.echo(f"{description}: {done}/{total}", err=True)

    yield plain
