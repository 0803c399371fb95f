"""Constraints on the output: the `Filter` base, and grammars through llguidance.

A filter says, token by token, which ids may come next. Masks are computed on worker threads while the model runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from exl3.errors import ArgumentError, UnsupportedError

# work llguidance may spend on building a lexer, and a quarter of it on a mask: some 0.1 s, enough for schemas with hundreds of fields
_FUEL = 200_000


class Filter:
    """Base of filters. A subclass implements `reset`, `accept_token`, `get_next_logit_mask` and `is_completed`, and `rollback_tokens` where
    it is to work with banned strings.

    trigger_token       the filter sleeps until this token is sampled
    prefix_str          text fed to it at the start, as if it had been generated
    eos_after_completed the job ends once the filter is completed

    A mask is None (all may come), additive floats (vocab,), booleans (True may come), or int32 words of 32 bits each.
    """

    logits_dtype = torch.half

    def __init__(
        self, tokenizer: Any, trigger_token: int | None = None, prefix_str: str | None = None, eos_after_completed: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.trigger_token, self.prefix_str, self.eos_after_completed = trigger_token, prefix_str, eos_after_completed
        self.is_active = trigger_token is None
        self.job: Any = None
        self.generator: Any = None
        self.vocab_size = 0
        self._fed: list[bool] = []  # per token: whether it went to accept_token

    def attach(self, job: Any) -> None:
        """Binds the filter to a job that starts; sets job, generator and vocab_size (padded to 32)."""
        self.job, self.generator = job, job.generator
        self.vocab_size = -(-job.generator.vocab_size // 32) * 32
        self.is_active = self.trigger_token is None
        self._fed = []
        self.reset()

    def feed(self, token: int) -> None:
        """A token was sampled."""
        if self.is_active:
            self.accept_token(token)
            self._fed.append(True)
            return
        self._fed.append(False)
        if token == self.trigger_token:
            self.is_active = True

    def rewind(self, count: int) -> None:
        """The last `count` tokens are taken back."""
        gone = self._fed[-count:]
        del self._fed[-count:]
        taken = sum(gone)
        if taken:
            self.rollback_tokens(taken)
        if self.trigger_token is not None and not any(self._fed) and taken < len(gone):
            kept = self.job.ids[len(self.job.prompt) : self.job.n - count]
            self.is_active = self.trigger_token in kept.tolist()

    def mask(self) -> Any:
        """The mask for the next token, None while asleep."""
        return self.get_next_logit_mask() if self.is_active else None

    def ended(self) -> bool:
        """Whether the job ends here."""
        return self.is_active and self.eos_after_completed and self.is_completed()

    def reset(self) -> None:
        """Back to the start."""
        raise NotImplementedError

    def accept_token(self, token: int) -> None:
        """Moves on by one sampled token."""
        raise NotImplementedError

    def get_next_logit_mask(self) -> Any:
        """Which ids may come next."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether nothing more can come."""
        raise NotImplementedError

    def rollback_tokens(self, count: int) -> None:
        """Undoes the last `count` accepted tokens."""
        raise UnsupportedError(f"{type(self).__name__} cannot take tokens back: don't combine it with banned strings")

    def use_background_worker(self) -> bool:
        """Whether masks may be computed on another thread."""
        return True


class LLGuidanceFilter(Filter):
    """Output that follows a JSON schema (dict or text), a regular expression, a Lark or GBNF grammar, or an llguidance grammar:
    exactly one.

    Needs the optional package llguidance (`pip install exl3[grammar]`).
    """

    def __init__(
        self,
        tokenizer: Any,
        trigger_token: int | None = None,
        prefix_str: str | None = None,
        eos_after_completed: bool = False,
        *,
        json_schema: str | dict[str, Any] | None = None,
        regex: str | None = None,
        lark_grammar: str | None = None,
        gbnf_grammar: str | None = None,
        llg_grammar: str | None = None,
        consume_prefix: bool = False,
    ) -> None:
        super().__init__(tokenizer, trigger_token, prefix_str, eos_after_completed)
        given = {
            k: v
            for k, v in locals().items()
            if k in ("json_schema", "regex", "lark_grammar", "gbnf_grammar", "llg_grammar") and v is not None
        }
        if len(given) != 1:
            raise ArgumentError(
                f"LLGuidanceFilter: exactly one of json_schema, regex, lark_grammar, gbnf_grammar, llg_grammar is needed, "
                f"got {sorted(given)}"
            )
        try:
            import llguidance
        except ImportError:
            raise UnsupportedError("constrained output needs the package llguidance: pip install 'exl3[grammar]'") from None
        kind, text = next(iter(given.items()))
        try:
            self.grammar = _grammar(llguidance, kind, text)
        except Exception as e:  # converters raise whatever they like, RecursionError too
            raise ArgumentError(f"{kind}: {e}") from None
        self.consume_prefix = consume_prefix
        self.matcher: Any = None
        self._table = _llg_tokenizer(tokenizer)
        problem = llguidance.LLMatcher.validate_grammar(self.grammar, self._table)
        if problem:
            raise ArgumentError(f"{kind}: {problem}")

    def reset(self) -> None:
        import llguidance

        limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL // 4, verbose_errors=False)
        self.matcher = llguidance.LLMatcher(self._table, self.grammar, log_level=0, limits=limits)
        self._check()
        self._words = np.zeros((1, (self._table.vocab_size + 31) // 32), np.int32)
        if self.prefix_str and self.consume_prefix:
            for token in self._table.tokenize_str(self.prefix_str):
                self.accept_token(token)

    def accept_token(self, token: int) -> None:
        if self.matcher.is_stopped():
            return
        self.matcher.consume_token(token)
        self._check()

    def get_next_logit_mask(self) -> torch.Tensor | None:
        """Words (n,) int32, one bit per id; overwritten by the next call."""
        if self.matcher.is_stopped():
            return self._only_eos()
        import llguidance.numpy

        llguidance.numpy.fill_next_token_bitmask(self.matcher, self._words, 0)
        self._check()
        return torch.from_numpy(self._words[0])

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ArgumentError(f"grammar: {self.matcher.get_error().strip()}")

    def _only_eos(self) -> torch.Tensor:
        words = np.zeros(self._words.shape[1], np.uint32)
        for token in self.job.stop_tokens or {self._table.eos_token}:
            words[token // 32] |= np.uint32(1 << token % 32)
        return torch.from_numpy(words.view(np.int32))

    def is_completed(self) -> bool:
        return bool(self.matcher.is_stopped())  # true as soon as only the end token could follow

    def rollback_tokens(self, count: int) -> None:
        self.matcher.rollback(count)

    def get_captures(self) -> list[tuple[str, str]]:
        """Named captures of the grammar."""
        return self.matcher.get_captures() if self.matcher is not None else []


def _grammar(llguidance: Any, kind: str, text: Any) -> str:
    matcher = llguidance.LLMatcher
    if kind == "json_schema":
        if isinstance(text, str):
            text = json.loads(text)
        return matcher.grammar_from_json_schema(text)
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if kind == "lark_grammar":
        return matcher.grammar_from_lark(text)
    if kind == "gbnf_grammar":
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return matcher.grammar_from_lark(gbnf_to_lark(text))
    return text


class _TokenTable:
    """What llguidance wants to know of a tokenizer: the bytes of every token, the special ones marked, and a greedy `__call__`."""

    def __init__(self, tokenizer: Any) -> None:
        from exl3.generate.text import Pieces

        table = Pieces.of(tokenizer)
        if not table.exact:
            raise UnsupportedError("constrained output is not supported with this kind of tokenizer")
        self.tokens: Sequence[bytes] = table.pieces
        self.special_token_ids = sorted(table.special)
        eos = getattr(tokenizer, "eos_id", None)
        self.eos_token_id = eos if eos is not None else (self.special_token_ids or [0])[0]
        self.bos_token_id = getattr(tokenizer, "bos_id", None)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        from exl3.generate.arguments import as_ids

        return as_ids(self._tokenizer.encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)).tolist()


def _llg_tokenizer(tokenizer: Any) -> Any:
    """llguidance's view of a tokenizer, built once per tokenizer."""
    known = getattr(tokenizer, "_exl3_llg", None)
    if known is not None:
        return known
    import llguidance

    made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_TokenTable(tokenizer)))
    try:
        tokenizer._exl3_llg = made
    except AttributeError:
        pass
    return made
