"""A Hugging Face tokenizer from the vocabulary in a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from exl3.errors import FormatError, UnsupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BLANK = "\u2581"
# tokens that end a turn or a text wherever they exist as control tokens, whatever else the file calls "eos"
_ENDINGS = (
    "<end_of_turn>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PRE_TOKENIZERS = {
    "smollm": "digits",
    "gpt-2": "plain",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class Vocabulary:
    """The tokenizer part of a GGUF file's metadata, checked: tokens, their types and scores, named ids, flags, templates."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.model = self._get("model", str)
        self.pre = self._get("pre", str)
        self.tokens: list[str] = _strings(self._get("tokens", list), "tokens")
        n = len(self.tokens)
        types = self._get("token_type", np.ndarray)
        self.types = [NORMAL] * n if types is None else [int(t) for t in types]
        if not n or len(self.types) != n:
            raise FormatError(f"GGUF vocabulary: {n} tokens but {len(self.types)} token types")
        self.ids = {role: self._id(name) for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}

    def _get(self, key: str, kind: type) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not isinstance(value, kind):
            raise FormatError(f"GGUF metadata tokenizer.ggml.{key} is a {type(value).__name__}, not {kind.__name__}")
        return value if value is not None else ([] if kind is list else None)

    def _id(self, role: str) -> int | None:
        id = self._get(f"{role}_token_id", int)
        if id is not None and not 0 <= id < len(self.tokens):
            raise FormatError(f"GGUF metadata tokenizer.ggml.{role}_token_id is {id}, the vocabulary has {len(self.tokens)} tokens")
        return id

    @property
    def add_bos(self) -> bool:
        """SentencePiece models add BOS unless told otherwise; byte-level ones only when told to."""
        flag = self._get("add_bos_token", bool)
        return (self.model == "llama" or self.pre in ("llama-bpe", "llama3")) if flag is None else flag

    @property
    def size(self) -> int:
        """Tokens without the rows of padding at the end."""
        n = len(self.tokens)
        while n and self.types[n - 1] == UNUSED:
            n -= 1
        return n

    def added(self) -> list[int]:
        return [i for i in range(self.size) if self.types[i] in (CONTROL, USER_DEFINED)]

    def ending_ids(self) -> list[int]:
        """All ids that end a sequence: the file's own first."""
        named = [self.ids["eos"], *(self._id(role) for role in ("eot", "eom"))]
        by_text = [i for i in self.added() if self.types[i] == CONTROL and self.tokens[i] in _ENDINGS]
        return list(dict.fromkeys(i for i in [*named, *by_text] if i is not None))

    def templates(self) -> str | list[dict[str, str]] | None:
        """The chat template as tokenizer_config.json holds it: one text, or a list of named ones."""
        default = self.metadata.get("tokenizer.chat_template")
        prefix = "tokenizer.chat_template."
        named = {k[len(prefix) :]: v for k, v in self.metadata.items() if k.startswith(prefix) and isinstance(v, str)}
        if not named:
            return default if isinstance(default, str) else None
        entries = {**({"default": default} if isinstance(default, str) else {}), **named}
        return [{"name": name, "template": text} for name, text in entries.items()]


def _strings(values: Sequence[Any], what: str) -> list[str]:
    if not all(isinstance(v, str) for v in values):
        raise FormatError(f"GGUF metadata tokenizer.ggml.{what} does not hold strings")
    return list(values)


def build_tokenizer(vocabulary: Vocabulary) -> Any:
    """A `tokenizers.Tokenizer` with the file's ids. Raises `UnsupportedError` for other kinds of vocabulary or pre-tokenizer."""
    from tokenizers import AddedToken, processors

    if vocabulary.model == "gpt2":
        backend = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        raise UnsupportedError(
            f"GGUF tokenizer model {vocabulary.model!r}; served are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE)"
        )
    tokens = [AddedToken(vocabulary.tokens[i], normalized=False, special=vocabulary.types[i] == CONTROL) for i in vocabulary.added()]
    start = 0
    for i in range(1, len(tokens) + 1):  # in order of ids, in runs of one kind: each call numbers new tokens on from the last
        if i == len(tokens) or tokens[i].special != tokens[start].special:
            (backend.add_special_tokens if tokens[start].special else backend.add_tokens)(tokens[start:i])
            start = i
    for i in vocabulary.added():
        if backend.token_to_id(vocabulary.tokens[i]) != i:
            raise FormatError(f"GGUF vocabulary: token {vocabulary.tokens[i]!r} cannot keep its id {i}; is it there twice?")
    bos = vocabulary.ids["bos"]
    if vocabulary.add_bos and bos is not None:
        text = vocabulary.tokens[bos]
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=[text, "$A"], pair=[text, "$A", f"{text}:1", "$B:1"], special_tokens=[(text, bos)]
            )
        except Exception as e:
            raise FormatError(f"GGUF vocabulary: {text!r} cannot be put before texts ({str(e)[:80]})") from None
    return backend


def _model_vocabulary(vocabulary: Vocabulary) -> dict[str, int]:
    """Token -> id for the model proper: all but the added tokens at the end, which are numbered on after it."""
    n = vocabulary.size
    while n and vocabulary.types[n - 1] in (CONTROL, USER_DEFINED):
        n -= 1
    return {token: i for i, token in enumerate(vocabulary.tokens[:n])}


def _byte_level(vocabulary: Vocabulary) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = _PRE_TOKENIZERS.get(vocabulary.pre or "")
    if rule is None:
        raise UnsupportedError(f"GGUF pre-tokenizer {vocabulary.pre!r}; served are {', '.join(_PRE_TOKENIZERS)}")
    vocab = _model_vocabulary(vocabulary)
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in _strings(vocabulary._get("merges", list), "merges"))]
    llama3 = rule is _LLAMA3
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3))
    except Exception as e:
        raise FormatError(f"GGUF vocabulary: the merges do not fit the tokens ({str(e)[:160]})") from None
    if rule == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    elif rule == "plain":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    if vocabulary.pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = vocabulary._get("scores", np.ndarray)
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise FormatError("GGUF vocabulary: a SentencePiece vocabulary needs one score per token")
    # GGUF writers spell runs of blanks among the user-defined tokens with plain blanks
    vocabulary.tokens = [t.replace(" ", BLANK) if t and set(t) == {" "} else t for t in vocabulary.tokens]
    vocab = _model_vocabulary(vocabulary)
    unk = None if vocabulary.ids["unk"] is None else vocabulary.tokens[vocabulary.ids["unk"]]
    merges = _merges_from_scores(vocabulary, vocab, scores)
    fallback = BYTE in vocabulary.types
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=fallback))
    except Exception as e:
        raise FormatError(f"GGUF vocabulary: no tokenizer can be made of it ({str(e)[:160]})") from None
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary._get("add_space_prefix", bool) is False:
        backend.normalizer = normalizers.Replace(" ", BLANK)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(vocabulary: Vocabulary, vocab: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: a pair may merge when its concatenation is a piece, and the piece's score is its priority.

    Sorted by falling score, then by falling lengths of the halves, as converters in the field do; user-defined pieces carry
    score 0 there, the highest.
    """
    candidates: list[tuple[float, int, int, str, str]] = []
    for i, piece in enumerate(vocabulary.tokens[: len(vocab)]):
        if vocabulary.types[i] not in (NORMAL, USER_DEFINED):
            continue
        score = 0.0 if vocabulary.types[i] == USER_DEFINED else float(scores[i])
        for k in range(1, len(piece)):
            a, b = piece[:k], piece[k:]
            if a in vocab and b in vocab:
                candidates.append((score, k, len(b), a, b))
    candidates.sort(key=lambda c: c[:3], reverse=True)
    return [(a, b) for _, _, _, a, b in candidates]


def tokenizer_config(vocabulary: Vocabulary, max_length: int) -> dict[str, Any]:
    """tokenizer_config.json for `build_tokenizer`'s result."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "add_bos_token": vocabulary.add_bos and vocabulary.ids["bos"] is not None,
    }
    for role in ("bos", "eos", "pad", "unk"):
        id = vocabulary.ids[role]
        config[f"{role}_token"] = None if id is None else vocabulary.tokens[id]
    templates = vocabulary.templates()
    if templates is not None:
        config["chat_template"] = templates
    return config
