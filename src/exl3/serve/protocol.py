"""Requests of the OpenAI API: every field checked by name and type, and turned into what the engine takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class RequestError(Exception):
    """A request that can't be served: HTTP status, message, the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass
class Limits:
    """What one request may ask for."""

    max_body_bytes: int = 4 << 20
    max_choices: int = 8
    max_prompts: int = 32
    max_stop: int = 16
    max_logprobs: int = 20
    max_queue: int = 256
    default_max_tokens: int | None = None


@dataclass
class Sampling:
    """Fields both kinds of request share."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    banned_strings: list[str] = field(default_factory=list)
    grammar: dict[str, Any] | None = None  # one argument of LLGuidanceFilter
    top_logprobs: int | None = None  # None: no log-probabilities
    stream: bool = False
    include_usage: bool = False


@dataclass
class Completion(Sampling):
    """POST /v1/completions."""

    prompts: list[str | list[int]] = field(default_factory=list)
    echo: bool = False


@dataclass
class Chat(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"  # auto, none, required, or the name of a function
    template_options: dict[str, Any] = field(default_factory=dict)


# accepted and without effect: they tell the provider something, not the model
_SILENT = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "model", "parallel_tool_calls"}
_NOT_FOR_TEMPLATES = {"self", "messages", "tools", "template"}  # what the request says elsewhere, or the server decides
_MISSING = object()


class Fields:
    """Takes fields out of a request one by one; what is left in the end is unknown."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = dict(data)

    def take(self, name: str, kinds: type | tuple[type, ...], default: Any = _MISSING) -> Any:
        """The field's value if it has one of the types; null counts as absent."""
        value = self.data.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise RequestError(400, f"'{name}' is required", name)
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if isinstance(value, bool) and bool not in kinds:
            value_ok = False
        elif float in kinds and isinstance(value, int):
            value, value_ok = float(value), True
        else:
            value_ok = isinstance(value, kinds)
        if not value_ok:
            raise RequestError(400, f"'{name}' must be {' or '.join(k.__name__ for k in kinds)}, got {type(value).__name__}", name)
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A float within [low, high]."""
        value = self.take(name, float, default)
        if not low <= value <= high:
            raise RequestError(400, f"'{name}' is {value:g}, it must be from {low:g} to {high:g}", name)
        return value

    def integer(self, name: str, default: int | None, low: int, high: int) -> Any:
        """An int within [low, high]."""
        value = self.take(name, int, default)
        if value is not None and not low <= value <= high:
            raise RequestError(400, f"'{name}' is {value}, it must be from {low} to {high}", name)
        return value

    def finish(self) -> None:
        """Refuses unknown fields by name."""
        unknown = sorted(set(self.data) - _SILENT)
        if unknown:
            raise RequestError(400, f"unknown field '{unknown[0]}'", unknown[0])


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise RequestError(400, f"the body is not valid JSON: {e}") from None
    if (not body.isascii() or b"\\ud" in body.lower()) and _has_lone_surrogate(data):
        raise RequestError(400, "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    if not isinstance(data, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(data).__name__}")
    return data


def _has_lone_surrogate(data: Any) -> bool:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _shared(f: Fields, made: Sampling, limits: Limits) -> None:
    """Reads the fields of `Sampling`."""
    both = f.integer("max_completion_tokens", None, 0, 1 << 24)
    made.max_tokens = f.integer("max_tokens", both if both is not None else limits.default_max_tokens, 0, 1 << 24)
    made.temperature = f.number("temperature", 1.0, 0, 100)
    made.top_p = f.number("top_p", 1.0, 0, 1)
    made.top_k = max(0, f.integer("top_k", 0, -1, 1 << 24))
    made.min_p = f.number("min_p", 0.0, 0, 1)
    made.n = f.integer("n", 1, 1, limits.max_choices)
    made.seed = f.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    made.ignore_eos = f.take("ignore_eos", bool, False)
    made.min_tokens = f.integer("min_tokens", 0, 0, 1 << 24)
    made.presence_penalty = f.number("presence_penalty", 0.0, -10, 10)
    made.frequency_penalty = f.number("frequency_penalty", 0.0, -10, 10)
    made.repetition_penalty = f.number("repetition_penalty", 1.0, 0.01, 100)
    made.stream = f.take("stream", bool, False)
    options = Fields(f.take("stream_options", dict, {}))
    made.include_usage = options.take("include_usage", bool, False)
    options.finish()
    stop = f.take("stop", (str, list), [])
    made.stop = [stop] if isinstance(stop, str) else _strings("stop", stop, limits.max_stop)
    made.stop_token_ids = _integers("stop_token_ids", f.take("stop_token_ids", list, []))
    made.banned_strings = _strings("banned_strings", f.take("banned_strings", list, []), 256)
    for token, bias in f.take("logit_bias", dict, {}).items():
        if not str(token).lstrip("-").isdigit() or isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise RequestError(400, "'logit_bias' must map token ids to numbers", "logit_bias")
        if not -1000 <= bias <= 1000:
            raise RequestError(400, f"'logit_bias' of {token} is {bias:g}, it must be from -1000 to 1000", "logit_bias")
        made.logit_bias[int(token)] = float("-inf") if bias <= -100 else float(bias)
    _grammar(f, made)


def _grammar(f: Fields, made: Sampling) -> None:
    """response_format, or one of the grammar fields."""
    given: dict[str, Any] = {}
    form = f.take("response_format", dict, None)
    if form is not None:
        kind = form.get("type")
        if kind == "json_object":
            given["json_schema"] = {"type": "object"}
        elif kind == "json_schema":
            inner = form.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise RequestError(400, "'response_format.json_schema.schema' must be a JSON schema object", "response_format")
            given["json_schema"] = schema
        elif kind != "text":
            raise RequestError(
                400, f"'response_format.type' is {kind!r}; text, json_object and json_schema are supported", "response_format"
            )
    for name, argument in (
        ("json_schema", "json_schema"), ("guided_json", "json_schema"), ("regex", "regex"), ("guided_regex", "regex"),
        ("lark_grammar", "lark_grammar"), ("gbnf_grammar", "gbnf_grammar"),
    ):  # fmt: skip
        value = f.take(name, (str, dict) if argument == "json_schema" else str, None)
        if value is not None:
            if given:
                raise RequestError(400, f"'{name}': only one constraint on the output can be given", name)
            given[argument] = value
    made.grammar = given or None


def _strings(name: str, values: list[Any], most: int) -> list[str]:
    if len(values) > most:
        raise RequestError(400, f"'{name}' has {len(values)} entries, at most {most} are allowed", name)
    if not all(isinstance(v, str) for v in values):
        raise RequestError(400, f"'{name}' must be a list of strings", name)
    return [v for v in values if v]


def _integers(name: str, values: list[Any]) -> list[int]:
    if not all(type(v) is int for v in values):
        raise RequestError(400, f"'{name}' must be a list of integers", name)
    return values


def parse_completion(data: dict[str, Any], limits: Limits) -> Completion:
    """Checks a request for /v1/completions."""
    f = Fields(data)
    made = Completion()
    prompt = f.take("prompt", (str, list))
    if isinstance(prompt, str):
        made.prompts = [prompt]
    elif prompt and all(type(p) is int for p in prompt):
        made.prompts = [prompt]
    elif prompt and all(isinstance(p, str) or (isinstance(p, list) and all(type(i) is int for i in p)) for p in prompt):
        made.prompts = prompt
    else:
        raise RequestError(400, "'prompt' must be a string, a list of strings, a list of token ids, or a list of such lists", "prompt")
    if len(made.prompts) > limits.max_prompts:
        raise RequestError(400, f"'prompt' has {len(made.prompts)} entries, at most {limits.max_prompts} are allowed", "prompt")
    made.echo = f.take("echo", bool, False)
    made.top_logprobs = f.integer("logprobs", None, 0, limits.max_logprobs)
    best_of = f.integer("best_of", None, 1, 1 << 20)
    if f.take("suffix", str, None):
        raise RequestError(400, "'suffix' is not supported", "suffix")
    if data.get("max_tokens") is None:
        f.data.setdefault("max_tokens", limits.default_max_tokens or 16)
    _shared(f, made, limits)
    if best_of is not None and best_of != made.n:
        raise RequestError(400, "'best_of' is not supported; leave it out, or set it to the value of 'n'", "best_of")
    f.finish()
    return made


def parse_chat(data: dict[str, Any], limits: Limits) -> Chat:
    """Checks a request for /v1/chat/completions."""
    f = Fields(data)
    made = Chat()
    made.messages = [_message(i, m) for i, m in enumerate(f.take("messages", list))]
    if not made.messages:
        raise RequestError(400, "'messages' is empty", "messages")
    wants = f.take("logprobs", bool, False)
    top = f.integer("top_logprobs", None, 0, limits.max_logprobs)
    if top and not wants:
        raise RequestError(400, "'top_logprobs' needs 'logprobs': true", "top_logprobs")
    made.top_logprobs = (top or 0) if wants else None
    made.tools = f.take("tools", list, [])
    for i, tool in enumerate(made.tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, f'\'tools[{i}]\' must be {{"type": "function", "function": {{"name": ...}}}}', "tools")
    made.tool_choice = _tool_choice(f.take("tool_choice", (str, dict), "auto"), made.tools)
    made.template_options = f.take("chat_template_kwargs", dict, {})
    for name in _NOT_FOR_TEMPLATES & made.template_options.keys():
        raise RequestError(400, f"'chat_template_kwargs' may not set '{name}'", "chat_template_kwargs")
    _shared(f, made, limits)
    f.finish()
    if made.grammar and made.tools and made.tool_choice not in ("auto", "none"):
        raise RequestError(400, "'tool_choice' and a constraint on the output exclude each other", "tool_choice")
    return made


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str:
    names = [t["function"]["name"] for t in tools]
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else None
        if choice not in names:
            raise RequestError(400, f"'tool_choice' names {choice!r}, 'tools' has {names}", "tool_choice")
        return str(choice)
    if choice not in ("auto", "none", "required"):
        raise RequestError(400, f"'tool_choice' is {choice!r}; auto, none, required or a function is needed", "tool_choice")
    if choice == "required" and not tools:
        raise RequestError(400, "'tool_choice' is required, but there are no 'tools'", "tool_choice")
    return str(choice)


def _message(i: int, message: Any) -> dict[str, Any]:
    """A message with its content as one text."""
    where = f"messages[{i}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, f"'{where}' must be an object with 'role' and 'content'", "messages")
    content = message.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "input_text") or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RequestError(400, f"'{where}.content' has a part of type {kind!r}; this server takes text only", "messages")
            texts.append(part["text"])
        content = "".join(texts)
    if content is not None and not isinstance(content, str):
        raise RequestError(400, f"'{where}.content' must be text", "messages")
    if content is None and not message.get("tool_calls"):
        raise RequestError(400, f"'{where}.content' is missing", "messages")
    made = {**message, "content": content if content is not None else ""}
    for call in made.get("tool_calls") or []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:  # templates want the object, the API carries its text
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                pass
    return made
