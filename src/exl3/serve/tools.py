"""Tool calls in a model's text: <tool_call> JSON </tool_call> (Hermes, Qwen), [TOOL_CALLS] (Mistral), or a bare JSON call (Llama 3)."""

from __future__ import annotations

import json
import uuid
from typing import Any

from exl3.generate.text import StopStrings

MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")


def call_schema(tools: list[dict[str, Any]], name: str | None = None) -> dict[str, Any]:
    """JSON schema of one call of any of `tools`, or of the one named."""
    options = []
    for tool in tools:
        function = tool["function"]
        if name is not None and function["name"] != name:
            continue
        arguments = function.get("parameters") or {"type": "object"}
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return options[0] if len(options) == 1 else {"anyOf": options}


def _objects(text: str) -> list[Any]:
    """All JSON values that stand one after another in `text`, other characters between them skipped."""
    decoder, at = json.JSONDecoder(), 0
    found: list[Any] = []
    while True:
        at = min((i for i in (text.find("{", at), text.find("[", at)) if i >= 0), default=-1)
        if at < 0:
            return found
        try:
            value, at = decoder.raw_decode(text, at)
            found += value if isinstance(value, list) else [value]
        except ValueError:
            at += 1


def parse_calls(text: str, names: set[str], forced: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """(text before the calls, calls as the API shapes them). Without a marker only a text that is a call as a whole counts.

    Calls of functions that are not in `names` stay text.
    """
    at = min((i for i in (text.find(m) for m in MARKERS) if i >= 0), default=-1)
    if at < 0:
        stripped = text.strip()
        if not (forced or (stripped.startswith(("{", "[")) and stripped.endswith(("}", "]")))):
            return text, []
        before, rest = "", stripped
    else:
        before, rest = text[:at], text[at:]
    calls = []
    for value in _objects(rest):
        if not isinstance(value, dict):
            continue
        inner = value.get("function")
        value = inner if isinstance(inner, dict) else value
        arguments = value.get("arguments", value.get("parameters"))
        if value.get("name") not in names or arguments is None:
            continue
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": value["name"], "arguments": arguments}}
        )
    return (before.rstrip(), calls) if calls else (text, [])


class CallStream:
    """Text of a stream until a tool call may begin; the rest is kept for `finish`."""

    def __init__(self, names: set[str], forced: bool) -> None:
        self.names, self.forced = names, forced
        self.markers = StopStrings(MARKERS)
        self.held = ""  # not handed out yet
        self.kept = ""  # from the marker on
        self.keeping = forced
        self.started = False

    def push(self, text: str) -> str:
        """The part that is certainly plain text."""
        if not self.started and text.strip():
            self.started = True
            self.keeping = self.keeping or text.lstrip()[0] in "{["  # may be a bare call
        if self.keeping:
            self.kept += text
            return ""
        self.held += text
        released, found = self.markers.push(text)
        self.held = self.held[len(released) :]
        if found is not None:
            self.keeping = True
            self.kept = self.held
        return released

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(remaining text, calls)."""
        if not self.keeping:
            return self.markers.finish()[0], []
        return parse_calls(self.kept, self.names, self.forced)
