"""The text layer: what comes out is the decode of all tokens, whatever the split; stop strings by a brute-force rule."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stubs import ToyTokenizer

from exl3.files.tokenizer import Tokenizer
from exl3.generate.stream import Rewind, Stream
from exl3.generate.text import BannedStrings, Detokenizer, LoopDetector, Pieces, StopStrings, fold


def byte_pieces():
    return Pieces([bytes([i]) for i in range(256)])


def byte_fallback():
    """A SentencePiece-like tokenizer: 256 byte pieces, some words, special and added tokens (fixture F3)."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    words = ["▁", "▁The", "▁br", "own", "é", "▁日本", "👩"]
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {w: 256 + i for i, w in enumerate(words)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(s, special=True) for s in ("<s>", "</s>", "<pad>")])
    backend.add_tokens([AddedToken("<tool_call>"), AddedToken("é x")])
    return Tokenizer(backend)


def byte_level():
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)} | {"Ġthe": 256, "ĠØ": 257}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    backend.add_tokens([AddedToken("<tool_call>")])
    return Tokenizer(backend)


def streamed(pieces, ids, special=False):
    d = Detokenizer(pieces, special)
    parts = [d.push(i) for i in ids]
    return [*parts, d.finish()]


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@pytest.mark.parametrize("special", [False, True])
def test_stream_is_the_decode_of_all_tokens(make, special):
    tokenizer = make()
    pieces = Pieces.of(tokenizer)
    assert pieces.exact and Pieces.of(tokenizer) is pieces
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice(["a", " ", "é", "日本", "👩‍👩‍👧", "👍🏽", "🇩🇪", "❤️", "\n", "Ж"]) for _ in range(rng.randint(1, 8)))
        ids = []
        for b in text.encode():  # every character in bytes, now and then another token between whole characters
            ids.append(next(i for i, p in enumerate(pieces.pieces) if p == bytes([b]) and i not in pieces.special))
        ids.insert(0, rng.choice([i for i in range(len(pieces)) if i >= 256 and pieces.pieces[i][-1] < 128]))
        ids.append(rng.choice([i for i in range(len(pieces)) if i >= 256]))
        assert "".join(streamed(pieces, ids, special)) == tokenizer.decode(ids, special=special)


# bad bytes: one replacement per maximal bad part, as Python and byte-level tokenizers have it. (A byte-fallback decoder of the tokenizers
# library replaces every byte of a run that is bad anywhere, which a stream can't know in time.)


@given(st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_bytes_give_what_python_decodes(values):
    assert "".join(streamed(byte_pieces(), values)) == bytes(values).decode("utf-8", "replace")


@given(st.text(max_size=12), st.randoms())
@settings(max_examples=200, deadline=None)
def test_no_replacement_characters_of_our_own(text, rng):
    data = text.encode("utf-8", "ignore")
    parts = streamed(byte_pieces(), data)
    assert "".join(parts) == data.decode()
    assert not any("�" in p for p in parts) or "�" in text


@pytest.mark.parametrize("emoji", ["👩‍👩‍👧", "👍🏽", "🇩🇪", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿"])
def test_joined_emoji_come_in_one_piece(emoji):
    parts = [p for p in streamed(byte_pieces(), f"a{emoji}b".encode()) if p]
    assert parts == ["a", emoji + "b"] or parts == ["a", emoji, "b"]
    assert next(p for p in streamed(byte_pieces(), f"{emoji}{emoji}!".encode()) if p) in (emoji, emoji * 2)


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = byte_fallback()
    end, tool = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<tool_call>")
    pieces = Pieces.of(tokenizer)
    assert "".join(streamed(pieces, [257, end, tool])) == " The<tool_call>"
    assert "".join(streamed(pieces, [257, end, tool], special=True)) == " The</s><tool_call>"


def test_unusual_decoder_goes_through_the_tokenizer():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    vocab = {"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, "game": 4, "##s": 5}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = Tokenizer(backend)
    pieces = Pieces.of(tokenizer)
    assert not pieces.exact
    ids = [3, 4, 5, 1, 2, 3, 4] * 5
    assert "".join(streamed(pieces, ids)) == tokenizer.decode(ids)


# stop strings


def leftmost_longest(text, stops):
    """The rule, spelled out: (text before the match, the match or None)."""
    found = [(text.find(s), -len(s), s) for s in stops if s and s in text]
    if not found:
        return text, None
    at, _, stop = min(found)
    return text[:at], stop


def stopped(parts, stops):
    matcher, out = StopStrings(stops), ""
    for p in parts:
        text, found = matcher.push(p)
        out += text
        if found is not None:
            return out, found
    text, found = matcher.finish()
    return out + text, found


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("The brown fox jumps", ["own fox"]), ("The brown fox jumps", ["fox jumps over"]), ("xxabcxx", ["ab", "abc"]),
        ("xxabdxx", ["ab", "abc"]), ("a\n\nb", ["\n", "\n\n"]), ("a\n\nb", ["\n\n"]), ("own fork", ["own fox", "fo"]),
        ("abab", ["", "abab"]), ("👩‍👩‍👧!", ["👩‍👧"]),
        ("aaaab", ["aab"]), ("abcabd", ["abd", "cab"]), ("ab", ["ab", "abc"]),
    ],
)  # fmt: skip
def test_any_split_gives_the_same(text, stops):
    rng = random.Random(1)
    want = leftmost_longest(text, stops)
    for _ in range(1000):
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(0, len(text) - 1))) if len(text) > 1 else []
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        assert stopped(parts, stops) == want


@given(st.text("ab\n", max_size=12), st.lists(st.text("ab\n", max_size=4), max_size=4), st.randoms())
@settings(max_examples=200, deadline=None)
def test_stop_rule_by_brute_force(text, stops, rng):
    parts, at = [], 0
    while at < len(text):
        n = rng.randint(1, 3)
        parts.append(text[at : at + n])
        at += n
    assert stopped(parts, stops) == leftmost_longest(text, stops)


def test_text_is_released_as_soon_as_it_is_ruled_out():
    matcher = StopStrings(["own fox"])
    assert matcher.push("The br") == ("The br", None)
    assert matcher.push("own f") == ("", None)
    assert matcher.push("at") == ("own fat", None)


# banned strings and loops


def test_banned_strings_ignore_case_and_hold_beginnings():
    b = BannedStrings(["Bad Word"])
    assert b.check("say bad w") == (None, 4)
    assert b.check("a bad word!") == (2, 2)
    assert b.check("fine") == (None, 4)
    assert len(fold("İSTANBUL ẞ")) == len("İSTANBUL ẞ")


def test_rewind_takes_back_whole_tokens_only():
    pieces = Pieces([b"ok ", b"x fo", b"o!", b"r"])
    s = Stream(pieces, banned=["foo"])
    assert s.push(0) is None and s.take()[0] == "ok "
    assert s.push(1) is None and s.take() == ("", [])  # held whole: "x " must not be out when the token is taken back
    outcome = s.push(2)
    assert isinstance(outcome, Rewind) and outcome.tokens == [1, 2] and outcome.text == "x foo!"
    assert s.push(1) is None
    assert s.push(3) is None
    text, tokens = s.take()
    assert text == "x for" and [t.id for t in tokens] == [1, 3]
    assert "".join(s.full) == "ok x for"


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 16), st.integers(2, 4))
@settings(max_examples=150, deadline=None)
def test_loop_detector_by_brute_force(tokens, window, repeats):
    if window < repeats:
        return
    detector, seen = LoopDetector(window, repeats), []
    for t in tokens:
        seen.append(t)
        tail = seen[-window:]
        want = len(tail) == window and any(tail[p:] == tail[:-p] for p in range(1, window // repeats + 1))
        assert detector.push(t) == want


def test_pieces_by_prefix():
    pieces = Pieces.of(ToyTokenizer(["a", "ab", "abc", "b", "<s>a"], special=[4]))
    assert pieces.starting_with(b"ab") == [1, 2] and pieces.starting_with(b"") == [0, 1, 2, 3] and pieces.starting_with(b"z") == []
