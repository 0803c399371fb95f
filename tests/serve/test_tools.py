"""Tool calls in text, whole and streamed in any split."""

import json
import random

import pytest

from exl3.serve.tools import CallStream, call_schema, parse_calls

CASES = [
    ('Sure.\n<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>', "Sure.", [("look", {"n": 1})]),
    (
        '<tool_call>{"name": "look", "arguments": {"s": "a}b"}}</tool_call>\n<tool_call>{"name": "walk", "arguments": {}}</tool_call>',
        "",
        [("look", {"s": "a}b"}), ("walk", {})],
    ),
    ('[TOOL_CALLS] [{"name": "look", "arguments": {"n": 2}}]', "", [("look", {"n": 2})]),
    ('{"name": "walk", "parameters": {"to": "é"}}', "", [("walk", {"to": "é"})]),
    ('<|python_tag|>{"name": "walk", "parameters": {}}', "", [("walk", {})]),
    ('{"type": "function", "function": {"name": "look", "arguments": {}}}', "", [("look", {})]),
    ('No tools: {"name": "look"}', None, []),
    ('{"name": "other", "arguments": {}}', None, []),
    ("<tool_call>{broken</tool_call>", None, []),
    ("a < b, [TOOL] <tool", None, []),
    ("", None, []),
]


@pytest.mark.parametrize(("text", "before", "calls"), CASES)
def test_calls_are_found(text, before, calls):
    want = text if before is None else before
    plain, found = parse_calls(text, {"look", "walk"})
    assert plain == want and [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls
    assert all(c["type"] == "function" and c["id"] for c in found)
    rng = random.Random(0)
    for _ in range(100):
        stream, out, at = CallStream({"look", "walk"}, False), "", 0
        while at < len(text):
            n = rng.randint(1, 9)
            out += stream.push(text[at : at + n])
            at += n
        rest, found = stream.finish()
        assert (out + rest).rstrip() == want.rstrip()
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found] == calls


def test_plain_text_streams_at_once():
    stream = CallStream({"look"}, False)
    assert stream.push("Hello ") == "Hello " and stream.push("<") == "" and stream.push("b>") == "<b>"


def test_schema_of_a_call():
    tools = [{"function": {"name": "a", "parameters": {"type": "object"}}}, {"function": {"name": "b"}}]
    assert call_schema(tools, "b")["properties"]["name"] == {"const": "b"}
    assert [o["properties"]["name"]["const"] for o in call_schema(tools)["anyOf"]] == ["a", "b"]
