"""Text to ids and back, chat templates: tokenizer.json and its companions, without transformers."""

from __future__ import annotations

import codecs
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from exl3.errors import ArgumentError, FormatError
from exl3.files.chat import ChatTemplate
from exl3.files.config import read_json

_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`. Its post-processor never runs: BOS is added when asked for, and nothing else ever is."""

    def __init__(self, backend: Any, settings: Mapping[str, Any] | None = None, templates: Mapping[str, str] | None = None) -> None:
        """`backend` a `tokenizers.Tokenizer`, `settings` the contents of tokenizer_config.json, `templates` name -> Jinja text."""
        self.settings = dict(settings or {})
        self.templates = dict(templates or {})
        self.backend = backend
        backend.no_truncation()  # some published files carry the length of their training
        backend.no_padding()
        self._add_missing_tokens()
        self._plain: Any = None  # a copy that takes special tokens in the text for text
        self._compiled: dict[str, ChatTemplate] = {}

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer | None:
        """The tokenizer of a model directory, or None when it has no tokenizer.json (the model then works with ids only).

        Raises `FormatError` when a file is there but broken.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.exists():
            return None
        import tokenizers

        try:
            if not file.is_file():
                raise OSError("not a regular file")
            backend = tokenizers.Tokenizer.from_file(str(file))
        except BaseException as e:  # the library raises plain Exception, and a BaseException when its Rust code panics
            if isinstance(e, Exception) or type(e).__name__ == "PanicException":
                raise FormatError(f"{file}: cannot be read as a tokenizer ({str(e)[:160]})") from None
            raise
        settings = read_json(path / "tokenizer_config.json", missing_ok=True) or {}
        extra = read_json(path / "special_tokens_map.json", missing_ok=True) or {}
        tokenizer = cls(backend, {**{k: v for k, v in extra.items() if k in _ROLES}, **settings}, _read_templates(path, settings))
        if tokenizer.vocab_size > 16 * len(tokenizer.vocab) + (1 << 20):  # tables are indexed by id
            raise FormatError(f"{file}: {len(tokenizer.vocab)} tokens with ids up to {tokenizer.vocab_size - 1}; the file is damaged")
        return tokenizer

    def _add_missing_tokens(self) -> None:
        """Tokens that only tokenizer_config.json registers, as older files do: added_tokens_decoder and the named special tokens."""
        from tokenizers import AddedToken

        known = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        listed = self.settings.get("added_tokens_decoder")
        entries = sorted((int(i), t) for i, t in listed.items() if str(i).isdigit()) if isinstance(listed, Mapping) else []
        for id, spec in entries:
            content = spec.get("content") if isinstance(spec, Mapping) else None
            if not isinstance(content, str) or not content or content in known:
                continue
            flags = {k: bool(spec[k]) for k in ("lstrip", "rstrip", "single_word", "normalized", "special") if k in spec}
            add = self.backend.add_special_tokens if flags.get("special") else self.backend.add_tokens
            add([AddedToken(content, **flags)])
            if self.backend.token_to_id(content) != id:
                warnings.warn(f"added token {content!r} got id {self.backend.token_to_id(content)}, its file says {id}", stacklevel=4)
            known.add(content)
        named = [content for role in _ROLES if (content := self._content(role)) and content not in known]
        named = [content for content in named if self.backend.token_to_id(content) is not None]
        if named:
            self.backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in named])

    # ----------------------------------------------------------------------------------------------------- special tokens

    def _content(self, role: str) -> str | None:
        value = self.settings.get(role)
        value = value.get("content") if isinstance(value, Mapping) else value
        return value if isinstance(value, str) else None

    def _id(self, role: str) -> int | None:
        content = self._content(role)
        return None if content is None else self.backend.token_to_id(content)

    @property
    def bos_token(self) -> str | None:
        return self._content("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._content("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._content("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self._content("unk_token")

    @cached_property
    def bos_id(self) -> int | None:
        return self._id("bos_token")

    @cached_property
    def eos_id(self) -> int | None:
        """The tokenizer's own; the full stop set is `Checkpoint.eos_ids(tokenizer)`."""
        return self._id("eos_token")

    @cached_property
    def pad_id(self) -> int | None:
        return self._id("pad_token")

    @cached_property
    def unk_id(self) -> int | None:
        return self._id("unk_token")

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def demands_bos(self) -> bool:
        """Whether texts of this model start with BOS: `add_bos_token` where set, else whether the file's post-processor puts it there."""
        if self.bos_id is None:
            return False
        setting = self.settings.get("add_bos_token")
        if isinstance(setting, bool):
            return setting
        return self.backend.encode("a").ids[:1] == [self.bos_id]

    @cached_property
    def vocab_size(self) -> int:
        """Highest id plus one (a model's logits may be wider: rows of padding)."""
        return max(self.vocab.values(), default=-1) + 1

    def __len__(self) -> int:
        return self.vocab_size

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token as spelled in the file -> id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    # ------------------------------------------------------------------------------------------------------ ids and text

    def encode(self, text: str, add_bos: bool | None = False, special: bool = True) -> list[int]:
        """Ids of `text`. `add_bos`: True, False, or None for "if the model demands it"; BOS already there is not doubled.

        `special=False` takes the spelling of a special token in the text for plain text (for text that users typed).
        """
        if not isinstance(text, str):
            raise ArgumentError(f"text to encode must be a str, not {type(text).__name__}")
        if not text.isascii() and _SURROGATE.search(text):
            raise ArgumentError("text to encode has half of a surrogate pair (U+D800 to U+DFFF), no character: was it read as UTF-8?")
        ids = list(self._backend_for(special).encode(text, add_special_tokens=False).ids)
        return self._with_bos(ids, add_bos)

    def encode_batch(self, texts: Sequence[str], add_bos: bool | None = False, special: bool = True) -> list[list[int]]:
        """`encode` for many texts, on the tokenizer library's threads."""
        return [
            self._with_bos(list(e.ids), add_bos) for e in self._backend_for(special).encode_batch(list(texts), add_special_tokens=False)
        ]

    def _with_bos(self, ids: list[int], add_bos: bool | None) -> list[int]:
        if add_bos is None:
            add_bos = self.demands_bos
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise ArgumentError("add_bos: this tokenizer names no BOS token")
        return ids if ids[:1] == [self.bos_id] else [self.bos_id, *ids]

    def _backend_for(self, special: bool) -> Any:
        if special:
            return self.backend
        if self._plain is None:
            try:
                copy = type(self.backend).from_str(self.backend.to_str())
            except Exception as e:  # merges that name no token get in but not out again
                raise FormatError(f"the tokenizer contradicts itself ({str(e)[:160]})") from None
            copy.encode_special_tokens = True
            self._plain = copy
        return self._plain

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids` (a list or a 1-D tensor). Special tokens are left out unless `special`; ids without a token give nothing."""
        if hasattr(ids, "tolist"):
            ids = ids.tolist()
        return self.backend.decode([i for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=not special)

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        """The token as spelled in the file."""
        return self.backend.id_to_token(id)

    @cached_property
    def pieces(self) -> list[bytes]:
        """For each id the bytes it adds to a text, b"" for ids without a token. A piece may be part of a character.

        Concatenated and read as UTF-8 they give what `decode(ids, special=True)` gives, but for a blank that some
        tokenizers drop at the start of a text (`drops_first_blank`).
        """
        spell = _Spelling(self.backend.decoder)
        result = [b""] * self.vocab_size
        for token, id in self.vocab.items():
            result[id] = spell(token)
        return result

    @cached_property
    def drops_first_blank(self) -> bool:
        """Whether `decode` removes the blank that the tokenizer put before the first word."""
        return _Spelling(self.backend.decoder).drops_first_blank

    def stream(self, special: bool = False, continues: bool = False) -> TextStream:
        """A decoder that is fed ids as they come and gives text in whole characters.

        `continues`: the ids go on from an earlier text (a prompt), so a first blank is part of it.
        """
        return TextStream(self, special, continues)

    # ----------------------------------------------------------------------------------------------------------- chat

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """`messages` (role, content, ...) put into the model's chat template, as text.

        `template` names one of `templates` or is Jinja text itself; by default "tool_use" when there are tools and it exists,
        else "default". `variables` reach the template (`enable_thinking=False`, `documents=[...]`). Raises `ArgumentError` when
        there is no template or it refuses the messages.
        """
        text = self._template(template, bool(tools))
        if text not in self._compiled:
            self._compiled[text] = ChatTemplate(text)
        tokens = {role: content for role in _ROLES if (content := self._content(role)) is not None}
        documents = variables.pop("documents", None)
        return self._compiled[text].render(
            messages=messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, **{**tokens, **variables}
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Ids of `render_chat`. The template writes BOS itself where the model wants it."""
        return self.encode(self.render_chat(messages, **options))

    def _template(self, name: str | None, tools: bool) -> str:
        if name is not None:
            if name in self.templates or "{" in name:
                return self.templates.get(name, name)
            raise ArgumentError(f"no chat template {name!r}; there are: {', '.join(sorted(self.templates)) or 'none'}")
        if tools and "tool_use" in self.templates:
            return self.templates["tool_use"]
        if "default" in self.templates:
            return self.templates["default"]
        if len(self.templates) == 1:
            return next(iter(self.templates.values()))
        raise ArgumentError("this model has no chat template: give one as `template`, or a plain prompt")


class TextStream:
    """Text from ids, piece by piece: `push` returns only characters that later ids cannot change, `finish` what is left."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False, continues: bool = False) -> None:
        self.pieces = tokenizer.pieces
        self.skip = frozenset() if special else tokenizer.special_ids
        self.drop = tokenizer.drops_first_blank and not continues
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: int | Iterable[int]) -> str:
        """The text that `ids` complete; "" while a character is still in parts."""
        ids = (ids,) if isinstance(ids, int) else ids
        data = b"".join(self.pieces[i] for i in ids if 0 <= i < len(self.pieces) and i not in self.skip)
        if self.drop and data:
            self.drop = False
            data = data.removeprefix(b" ")
        return self.decoder.decode(data)

    def finish(self) -> str:
        """What is held back: a replacement character for an unfinished one."""
        return self.decoder.decode(b"", True)


class _Spelling:
    """Token as spelled in the file -> bytes, by the file's decoder: byte-level alphabet, or blanks as U+2581 with <0xNN> bytes."""

    def __init__(self, decoder: Any) -> None:
        steps = _decoder_steps(decoder)
        kinds = {step.get("type") for step in steps}
        self.byte_level = _byte_alphabet() if "ByteLevel" in kinds else None
        self.byte_fallback = "ByteFallback" in kinds
        self.replaced = []
        self.drops_first_blank = False
        for step in steps:
            if step.get("type") == "Replace" and "String" in (step.get("pattern") or {}):
                self.replaced.append((step["pattern"]["String"], step.get("content", "")))
            elif step.get("type") == "Metaspace":
                self.replaced.append((step.get("replacement", "\u2581"), " "))
                self.drops_first_blank = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
            elif step.get("type") == "Strip" and step.get("content") == " " and step.get("start"):
                self.drops_first_blank = True

    def __call__(self, token: str) -> bytes:
        if self.byte_level is not None:
            try:
                return bytes(self.byte_level[c] for c in token)
            except KeyError:  # an added token, spelled in plain text
                return token.encode("utf-8", "replace")
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for old, new in self.replaced:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")


def _decoder_steps(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's parts as JSON objects, sequences flattened."""
    if decoder is None:
        return []
    todo, steps = [json.loads(decoder.__getstate__())], []
    while todo:
        step = todo.pop(0)
        if step.get("type") == "Sequence":
            todo = [*step.get("decoders", []), *todo]
        else:
            steps.append(step)
    return steps


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 upwards in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


def _read_templates(path: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> Jinja text, from tokenizer_config.json (a string or a list of named ones), overruled by files of their own."""
    templates: dict[str, str] = {}
    stored = settings.get("chat_template")
    if isinstance(stored, str):
        templates["default"] = stored
    elif isinstance(stored, list):
        for entry in stored:
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
                templates[entry["name"]] = entry["template"]
    if not templates:
        processor = read_json(path / "chat_template.json", missing_ok=True) or {}
        if isinstance(processor.get("chat_template"), str):
            templates["default"] = processor["chat_template"]
    files = [("default", path / "chat_template.jinja")]
    extra = path / "additional_chat_templates"
    files += [(file.stem, file) for file in sorted(extra.glob("*.jinja"))] if extra.is_dir() else []
    for name, file in files:
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise FormatError(f"{file}: cannot be read ({e})") from None
    return templates
