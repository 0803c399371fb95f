"""`exl3 <verb>`: one file per verb, loaded when called."""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

import click

from exl3 import __version__
from exl3.errors import Exl3Error

# verb -> module under exl3.cli; each defines `command`
VERBS = {
    "convert": "convert",
    "eval": "eval",
    "measure": "measure",
    "optimize": "optimize",
    "tune": "tune",
    "generate": "generate",
    "chat": "chat",
    "inspect": "inspect",
    "plan": "plan",
    "doctor": "doctor",
    "bench": "bench",
    "import-gguf": "import_gguf",
    "serve": "serve",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command = importlib.import_module(f"exl3.cli.{VERBS[name]}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="exl3")
def cli() -> None:
    """Quantize language models to EXL3 and run them."""


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the place in the code."""
    click.echo(f"exl3: warning: {message}", err=True)


def main(args: list[str] | None = None) -> None:
    """Entry point of the `exl3` command: errors made on purpose become one line on stderr and exit status 1."""
    warnings.showwarning = _warn
    try:
        cli.main(args=args, prog_name="exl3", standalone_mode=False)
    except click.exceptions.Exit as e:
        sys.exit(e.exit_code)
    except click.ClickException as e:
        e.show()
        sys.exit(e.exit_code)
    except Exl3Error as e:
        click.echo(f"exl3: {e}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("exl3: interrupted", err=True)
        sys.exit(130)
    except MemoryError:
        click.echo("exl3: out of memory; close other programs, or use a smaller model, fewer rows or a smaller cache", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as e:
        place = f"{e.filename}: " if e.filename else ""
        click.echo(f"exl3: {place}{e.strerror or e}", err=True)
        sys.exit(1)
