"""Chat templates: the Jinja dialect that Hugging Face models are published with, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from exl3.errors import ArgumentError


class ChatTemplate:
    """A compiled template. Published templates rely on exactly this environment: trimmed blocks, loop controls, `tojson` without
    HTML escapes, `raise_exception`, `strftime_now`, and the `generation` tag, which marks the assistant's turns and here does nothing.
    """

    def __init__(self, text: str) -> None:
        from jinja2 import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(text)
        except (TemplateError, RecursionError) as e:
            raise ArgumentError(f"the model's chat template is broken: {e}") from None

    def render(self, **variables: Any) -> str:
        """The rendered text; `ArgumentError` when the template refuses the messages or fails on them."""
        try:
            return self._template.render(**variables)
        except Exception as e:  # a template can raise anything its expressions can
            raise ArgumentError(f"the chat template fails on these messages: {type(e).__name__}: {e}") from None


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
