"""Text of one job as it grows: tokens in, released text and tokens out, with stop strings, banned strings and held characters between."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from exl3.generate.text import BannedStrings, Detokenizer, Pieces, StopStrings, fold


@dataclass
class Token:
    """A token not yet handed out. begin, end: code points of certain text before and after it, held ones counted in `end`."""

    id: int
    begin: int
    end: int
    extra: Any
    before: Detokenizer | None  # state before it, kept while banned strings may drop it


@dataclass
class Rewind:
    """A banned string was found: the last `count` tokens go; `text` is what they said."""

    count: int
    tokens: list[int]
    text: str


class Stream:
    """push(token) -> None, a stop string, or a Rewind; take() -> what was released since the last take; finish() at the end."""

    def __init__(
        self, pieces: Pieces, stops: Iterable[str] = (), banned: Iterable[str] | None = None, special: bool = False, join_emoji: bool = True
    ) -> None:
        self.stops = StopStrings(stops)
        self.banned = BannedStrings(banned or ())
        self.join_emoji = join_emoji
        self.detok = Detokenizer(pieces, special, join_emoji=join_emoji and not self.banned.banned)
        self.pending: deque[Token] = deque()
        self._certain = 0  # code points the detokenizer gave out
        self._released = 0  # code points handed on
        self._ban_text = ""
        self._out: list[str] = []
        self.full: list[str] = []  # all text handed out
        self.quick: tuple[str, int] | None = None  # the only token since the last take, released whole: (text, id)

    def set_banned(self, banned: Iterable[str] | None) -> None:
        """Replaces the banned strings; what only the old ones held is released with the next token."""
        self.banned = BannedStrings(banned or ())
        self.detok.join_emoji = self.join_emoji and not self.banned.banned

    def push(self, token: int, extra: Any = None, data: bytes | None = None) -> str | Rewind | None:
        """`data`: bytes to add in place of the token's own (token healing)."""
        detok = self.detok
        if (
            detok._idle
            and extra is None
            and data is None
            and not (self.pending or self._ban_text or self.banned.banned or self._out or self.quick)
        ):
            text = detok.push(token)  # the common case: nothing is held, and nothing of this need be
            if detok._idle:
                released, found = self.stops.push(text)
                self._certain += len(text)
                if released == text and found is None:
                    self._released += len(text)
                    self.quick = (text, token)
                    return None
                return self._queue(token, None, self._certain - len(text), None, released, found)
            self._certain += len(text)
            return self._queue(token, None, self._certain - len(text), None, *self.stops.push(text))
        if self.quick is not None:
            self._slow_down()
        before = detok.copy() if self.banned.banned else None
        begin = self._certain
        text = detok.push(token) if data is None else detok.push_bytes(data)
        self._certain += len(text)
        self.pending.append(Token(token, begin, self._certain + detok.held, extra, before))
        if self.banned.banned or self._ban_text:
            passed = self._check_banned(text)
            if isinstance(passed, Rewind):
                return passed
            text = passed
        return self._check_stops(text) if text else None

    def _queue(self, token: int, extra: Any, begin: int, before: Detokenizer | None, released: str, found: str | None) -> str | None:
        """Queues a token and hands text on."""
        self.pending.append(Token(token, begin, self._certain + self.detok.held, extra, before))
        if released:
            self._out.append(released)
            self._released += len(released)
        return found

    def _slow_down(self) -> None:
        """Turns the quick token into an ordinary pending one."""
        assert self.quick is not None
        text, token = self.quick
        self.quick = None
        self.pending.append(Token(token, self._certain - len(text), self._certain, None, None))
        if text:
            self._out.append(text)

    def _check_banned(self, text: str) -> str | Rewind:
        """Text free of banned strings, whole tokens at a time, or the rewind."""
        self._ban_text += text
        origin = self._certain - len(self._ban_text)
        start, free = self.banned.check(fold(self._ban_text))
        if start is not None:
            at = next((i for i, t in enumerate(self.pending) if t.end > origin + start), len(self.pending) - 1)
            return self._rewind(at)
        if free < len(self._ban_text):  # a token that is held in part is held whole, else a rewind would take back what was handed out
            holder = next(t for t in self.pending if t.end > origin + free)
            free = max(0, min(free, holder.begin - origin))
        passed, self._ban_text = self._ban_text[:free], self._ban_text[free:]
        return passed

    def _rewind(self, at: int) -> Rewind:
        dropped = [self.pending.pop() for _ in range(len(self.pending) - at)][::-1]
        first = dropped[0]
        assert first.before is not None
        self.detok = first.before
        cut = len(self._ban_text) - (self._certain - first.begin)
        gone = self._ban_text[max(0, cut) :]
        self._ban_text = self._ban_text[: max(0, cut)]
        self._certain = first.begin
        return Rewind(len(dropped), [t.id for t in dropped], gone)

    def _check_stops(self, text: str) -> str | None:
        released, found = self.stops.push(text)
        if released:
            self._out.append(released)
            self._released += len(released)
        return found

    def finish(self) -> str | None:
        """Releases what is held, or finds the stop string in it."""
        if self.quick is not None:
            self._slow_down()
        rest = self._ban_text + self.detok.finish()
        self._certain += len(rest) - len(self._ban_text)
        self._ban_text = ""
        found = self._check_stops(rest)
        if found is None:
            text, found = self.stops.finish()
            if text:
                self._out.append(text)
                self._released += len(text)
        if found is None:
            self._released = max([self._certain, *(t.end for t in self.pending)])  # a broken tail may be shorter than it promised
        return found

    def take(self) -> tuple[str, list[Token]]:
        """(text, tokens) released since the last call."""
        if self.quick is not None:
            self._slow_down()
        text = "".join(self._out)
        self._out.clear()
        if text:
            self.full.append(text)
        tokens = []
        while self.pending and self.pending[0].end <= self._released:
            tokens.append(self.pending.popleft())
        return text, tokens

    @property
    def held_tokens(self) -> int:
        """Tokens that may still be dropped or whose text is held."""
        return len(self.pending)

    @property
    def confirmed(self) -> bool:
        """Whether no token can be taken back any more."""
        return not self._ban_text and not self.pending
