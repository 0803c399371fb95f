"""From token ids to text, piece by piece: bytes of each token, incremental decoding, stop strings, loop detection.

Nothing here knows a model or an engine. Positions count Unicode code points.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from exl3.errors import ArgumentError

_REPLACEMENT = "�"


class Pieces:
    """The bytes of every token of a tokenizer: `pieces[id]`, and the set of special ids.

    A piece is what the token adds in the middle of a text (a SentencePiece token keeps its leading space). `exact` is False where the
    tokenizer's decoder joins pieces otherwise (WordPiece and the like); `Detokenizer` then decodes a window through the tokenizer itself.
    """

    def __init__(self, pieces: Sequence[bytes], special: Iterable[int] = (), exact: bool = True, tokenizer: Any = None) -> None:
        self.pieces = list(pieces)
        self.special = frozenset(special)
        self.exact = exact
        self.tokenizer = tokenizer
        self._sorted: list[tuple[bytes, int]] | None = None
        # text of tokens that stand for themselves: ASCII, so complete and nothing can join them; None for the rest
        self.plain = [p.decode() if p.isascii() and i not in self.special else None for i, p in enumerate(self.pieces)] if exact else []

    def __len__(self) -> int:
        return len(self.pieces)

    def bytes_of(self, token: int, special: bool = False) -> bytes:
        """Bytes of one token; empty for an unknown id, and for a special one unless `special`."""
        if not 0 <= token < len(self.pieces) or (token in self.special and not special):
            return b""
        return self.pieces[token]

    def starting_with(self, prefix: bytes) -> list[int]:
        """Ordinary tokens whose bytes start with `prefix`, by id."""
        if self._sorted is None:
            self._sorted = sorted((p, i) for i, p in enumerate(self.pieces) if i not in self.special and p)
        import bisect

        at = bisect.bisect_left(self._sorted, (prefix, -1))
        found = []
        while at < len(self._sorted) and self._sorted[at][0].startswith(prefix):
            found.append(self._sorted[at][1])
            at += 1
        return sorted(found)

    @classmethod
    def of(cls, tokenizer: Any) -> Pieces:
        """Of an `exl3.Tokenizer` or of a `tokenizers.Tokenizer` as it is; built once per tokenizer."""
        if isinstance(tokenizer, Pieces):
            return tokenizer
        known = getattr(tokenizer, "_exl3_pieces", None)
        if known is not None:
            return known
        if not hasattr(tokenizer, "pieces"):
            from exl3.files.tokenizer import Tokenizer

            return cls.of(Tokenizer(tokenizer))
        backend = getattr(tokenizer, "backend", None)
        exact = backend is None or _decoder_kinds(json.loads(backend.to_str()).get("decoder")) <= _EXACT_DECODERS
        made = cls(tokenizer.pieces, tokenizer.special_ids, exact, tokenizer)
        tokenizer._exl3_pieces = made
        return made


# decoders that join the pieces of tokens as they are
_EXACT_DECODERS = {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Kinds of the steps of a tokenizer.json's decoder."""
    if decoder is None:
        return {"none"}
    if decoder["type"] == "Sequence":
        return {kind for step in decoder["decoders"] for kind in _decoder_kinds(step)}
    return {decoder["type"]}


_FLAGS = "".join(map(chr, range(0x1F1E6, 0x1F200)))


def _joins_next(text: str) -> bool:
    """Whether the last character may still grow into a joined emoji: it is a joiner, or something a joiner or modifier can follow."""
    c = ord(text[-1])
    return c == 0x200D or 0x1F000 <= c <= 0x1FAFF or c == 0xFE0F or 0x2600 <= c <= 0x27BF or 0xE0020 <= c <= 0xE007F


def _extends(c: int) -> bool:
    """Whether code point `c` continues the emoji before it: joiner, variation selector, keycap, skin tone, tag."""
    return c in (0x200D, 0xFE0F, 0x20E3) or 0x1F3FB <= c <= 0x1F3FF or 0xE0020 <= c <= 0xE007F


def _settled(text: str) -> int:
    """Length of the prefix of `text` that later text can't join to: everything before a trailing emoji cluster."""
    if not text or not _joins_next(text):
        return len(text)
    start = len(text) - 1
    if 0x1F1E6 <= ord(text[start]) <= 0x1F1FF:  # two regional indicators are one flag, counted from the left
        run = len(text) - len(text.rstrip(_FLAGS))
        return len(text) - run % 2
    while start > 0 and len(text) - start < 32 and (_extends(ord(text[start])) or text[start - 1] == "\u200d"):
        start -= 1
    return start


class Detokenizer:
    """Text of a growing list of tokens: `push(token)` gives the text that became certain, `finish()` the rest.

    An incomplete UTF-8 sequence is held until it is complete or ruled out; bad bytes become U+FFFD as Python's "replace" handler does it
    (one per maximal bad part). With `join_emoji` a trailing emoji is held for one more token, since a joiner or skin tone may follow it.
    The joined output is the decode of all tokens, however they are split.
    """

    def __init__(self, pieces: Pieces, special: bool = False, join_emoji: bool = True, context: Sequence[int] = ()) -> None:
        self.table, self.special, self.join_emoji = pieces, special, join_emoji
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._idle = pieces.exact  # nothing is held in any form
        self._window = list(context[-8:])  # the inexact path only
        self._window_text = self._decode_window() if not pieces.exact else ""

    def push(self, token: int) -> str:
        """Text that became certain with this token; may be empty."""
        if self._idle:
            plain = self.table.plain[token] if 0 <= token < len(self.table.plain) else ""
            if plain is not None:
                return plain
        if not self.table.exact:
            return self._push_inexact(token)
        return self.push_bytes(self.table.bytes_of(token, self.special))

    def push_bytes(self, data: bytes) -> str:
        """The same for bytes that are no token's."""
        text = self._utf8.decode(data) if data else ""
        if self.join_emoji and (self._held or not text.isascii()):
            text = self._held + text
            cut = _settled(text)
            text, self._held = text[:cut], text[cut:]
        self._idle = not self._held and not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """What was held back, with a broken tail replaced. The object then starts afresh."""
        text = self._held + self._utf8.decode(b"", True)
        self._held = ""
        self._utf8.reset()
        self._idle = self.table.exact
        return text

    @property
    def held(self) -> int:
        """Code points held back; an incomplete one counts as one."""
        return 0 if self._idle else len(self._held) + bool(self._utf8.getstate()[0])

    def copy(self) -> Detokenizer:
        """An independent copy in the same state (for a rewind)."""
        other = object.__new__(Detokenizer)
        other.table, other.special, other.join_emoji = self.table, self.special, self.join_emoji
        other._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        other._utf8.setstate(self._utf8.getstate())
        other._idle = self._idle
        other._held, other._window, other._window_text = self._held, list(self._window), self._window_text
        return other

    def _decode_window(self) -> str:
        return self.table.tokenizer.decode(self._window, special=self.special) if self._window else ""

    def _push_inexact(self, token: int) -> str:
        """Difference of two decodes of a window of tokens, for decoders whose pieces depend on their neighbours."""
        self._window.append(token)
        text = self._decode_window()
        if text.endswith(_REPLACEMENT) and len(self._window) < 24:
            return ""
        new = text[len(self._window_text) :] if text.startswith(self._window_text) else text
        self._window = self._window[-8:]
        self._window_text = self._decode_window()
        return new


class StopStrings:
    """Finds stop strings in a stream: the leftmost match wins, then the longest, whatever the split into pieces.

    `push(text)` returns the text that can no longer be part of a match, and the match once it is decided. A match is decided only when no
    earlier or longer one can still complete. `finish()` settles the rest. Empty strings are ignored. Case counts.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = sorted({s for s in stops if s}, key=lambda s: (-len(s), s))
        self.longest = max(map(len, self.stops), default=0)
        self._first = re.compile("[" + "".join(re.escape(c) for c in sorted({s[0] for s in self.stops})) + "]") if self.stops else None
        self._held = ""

    @property
    def held(self) -> str:
        """Text held back because it may begin a stop string."""
        return self._held

    def push(self, text: str) -> tuple[str, str | None]:
        """(text released, stop string found or None). After a match the object holds nothing."""
        if self._first is None:
            return text, None
        if not self._held and not self._first.search(text):
            return text, None
        buffer = self._held + text
        found, start = self._match(buffer)
        open_at = self._partial(buffer, found, start)
        if found is not None and open_at is None:
            self._held = ""
            return buffer[:start], found
        cut = len(buffer) if open_at is None else open_at
        if found is not None:
            cut = min(cut, start)
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> tuple[str, str | None]:
        """At the end of the stream: (text released, stop string found or None); an unfinished prefix is released."""
        buffer, self._held = self._held, ""
        found, start = self._match(buffer)
        return (buffer, None) if found is None else (buffer[:start], found)

    def _match(self, buffer: str) -> tuple[str | None, int]:
        best, start = None, len(buffer)
        for stop in self.stops:  # longest first, so that ties go to the longest
            at = buffer.find(stop)
            if at >= 0 and at < start:
                best, start = stop, at
        return best, start

    def _partial(self, buffer: str, found: str | None, start: int) -> int | None:
        """Earliest position whose rest begins a stop string that would beat `found`; None if there is none."""
        low = max(0, len(buffer) - self.longest + 1)
        assert self._first is not None
        for m in self._first.finditer(buffer, low):
            at = m.start()
            if at > start:
                return None
            rest = buffer[at:]
            for stop in self.stops:
                longer = len(stop) > len(rest) and stop.startswith(rest)
                if longer and (at < start or found is None or len(stop) > len(found)):
                    return at
        return None


class BannedStrings:
    """Finds the first banned string in held text, ignoring case (one code point at a time, so that positions stay true)."""

    def __init__(self, banned: Iterable[str]) -> None:
        self.banned = sorted({fold(s) for s in banned if s}, key=lambda s: (-len(s), s))
        self.longest = max(map(len, self.banned), default=0)

    def check(self, folded: str) -> tuple[int | None, int]:
        """(start of the leftmost full match or None, length of the prefix of `folded` that is free of any beginning match)."""
        start = min((at for s in self.banned if (at := folded.find(s)) >= 0), default=None)
        free = len(folded)
        for at in range(max(0, len(folded) - self.longest + 1), len(folded)):
            rest = folded[at:]
            if any(s.startswith(rest) for s in self.banned):
                free = at
                break
        if start is not None and start <= free:
            return start, start
        return None, min(free, start) if start is not None else free


def fold(text: str) -> str:
    """Lower case, code point by code point: the length never changes."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c if len(c.lower()) != 1 else c.lower() for c in text)


class LoopDetector:
    """True once the last `window` tokens repeat with a period of at most `window // min_repeats`.

    Keeps, per period p, how many tokens in a row equal the one p before: O(window / min_repeats) a token.
    """

    def __init__(self, window: int, min_repeats: int) -> None:
        if window < 2 or min_repeats < 2 or window < min_repeats:
            raise ArgumentError(f"stop_on_loop needs window >= min_repeats >= 2, got ({window}, {min_repeats})")
        self.window, self.periods = window, window // min_repeats
        self._need = window - np.arange(1, self.periods + 1)
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._recent = np.full(self.periods, -1, np.int64)  # the last tokens, newest first
        self._run = np.zeros(self.periods, np.int64)
        self._count = 0

    def push(self, token: int) -> bool:
        """Adds a token; True if the window is now a loop."""
        same = self._recent == token
        self._run = np.where(same, self._run + 1, 0)
        self._recent = np.roll(self._recent, 1)
        self._recent[0] = token
        self._count += 1
        return self._count >= self.window and bool((self._run >= self._need).any())
