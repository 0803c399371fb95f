"""The tokenizer against transformers on the same files, and against plain UTF-8 arithmetic."""

from __future__ import annotations

import json
import random
from datetime import datetime

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import exl3.files
from exl3.errors import ArgumentError, FormatError
from exl3.files.tokenizer import _byte_alphabet

CORPUS = [
    "The quick brown fox jumps over the lazy dog. 0123456789",
    "def f(x):\n    return x + 1  # plus one\n\n\nclass A: pass",
    "Füchse jagen müde Hühner über Äcker; naïve café; 你好,世界!こんにちは 안녕하세요 \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467",
] * 4
TEXTS = [
    "",
    " ",
    "  two  blanks  ",
    "Hello, world!",
    "Äpfel \U0001f469\u200d\U0001f469\u200d\U0001f467 你好 \U00010348 zürück",
    "\n\n\ttabs\r\nand <|im_start|>user\nhi<|im_end|> done",
    "<0x41> \u2581 Ġ",
    "".join(map(chr, range(32, 400))),
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level():
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    return t


def _spm_vocab():
    t = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256))]
    t.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=380, special_tokens=specials, show_progress=False))
    stored = json.loads(t.to_str())["model"]
    return stored["vocab"], [tuple(m) for m in stored["merges"]]


def sentencepiece_like(style):
    """llama: a blank in front, taken off again; gemma: blanks only; metaspace: the newer spelling of the first."""
    vocab, merges = _spm_vocab()
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama":
        t.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps.append(decoders.Strip(content=" ", left=1))
    elif style == "gemma":
        t.normalizer = normalizers.Replace(" ", "\u2581")
    else:
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False), decoders.Fuse()]
    t.decoder = decoders.Sequence(steps)
    t.add_special_tokens(SPECIAL)
    t.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", t.token_to_id("<|im_start|>"))]
    )
    return t


KINDS = {
    "bytes": byte_level,
    "llama": lambda: sentencepiece_like("llama"),
    "gemma": lambda: sentencepiece_like("gemma"),
    "metaspace": lambda: sentencepiece_like("metaspace"),
}


def save(directory, backend, template=CHATML, **settings):
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        **settings,
    }
    settings |= {"clean_up_tokenization_spaces": False, **({"chat_template": template} if template else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """(ours, transformers')"""
    from transformers import PreTrainedTokenizerFast

    directory = save(tmp_path_factory.mktemp("tok") / request.param, KINDS[request.param]())
    return exl3.files.Tokenizer.from_directory(directory), PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode_as_transformers(pair, text):
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, special=True) == theirs.decode(ids)
    assert ours.encode_batch([text, "x"]) == [ids, ours.encode("x")]
    assert ours.encode(text, special=False) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)


def test_half_a_surrogate_pair_is_no_text(pair):
    """What a terminal or a JSON escape that is no UTF-8 becomes."""
    with pytest.raises(ArgumentError, match="surrogate"):
        pair[0].encode("a\udcff")


def test_bos(pair):
    ours, theirs = pair
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert ours.unk_id is None and ours.vocab_size == len(theirs) == len(ours)
    assert ours.encode("x", add_bos=True) == [ours.bos_id, *ours.encode("x")]
    assert ours.encode("<|im_start|>x", add_bos=True) == ours.encode("<|im_start|>x"), "not doubled"
    assert ours.encode("x", add_bos=None) == theirs.encode("x")
    assert ours.demands_bos == (theirs.encode("x")[0] == theirs.bos_token_id)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_stream_equals_decode_and_never_splits_a_character(pair, text, special):
    ours, _ = pair
    ids = ours.encode(text)
    stream, parts = ours.stream(special), []
    for i in ids:
        parts.append(stream.push(i))
    assert "\ufffd" not in "".join(parts)
    parts.append(stream.finish())
    assert "".join(parts) == ours.decode(ids, special=special)
    again = ours.stream(special)
    assert again.push(ids) + again.finish() == "".join(parts)


def test_stream_that_continues_a_prompt(pair):
    """Prompt and answer streamed apart give the text of both together: the blank between them is not lost."""
    ours, _ = pair
    ids = ours.encode("The quick brown fox jumps")
    for cut in range(1, len(ids)):
        first, rest = ours.stream(), ours.stream(continues=True)
        assert first.push(ids[:cut]) + rest.push(ids[cut:]) == "The quick brown fox jumps"


def test_pieces_are_the_bytes_of_the_text(pair):
    ours, _ = pair
    text = "Füchse 你好 \U0001f600 over<|im_end|>"
    data = b"".join(ours.pieces[i] for i in ours.encode(text))
    assert (data.removeprefix(b" ") if ours.drops_first_blank else data) == text.encode()
    assert len(ours.pieces) == ours.vocab_size


def test_broken_utf8_streams_as_replacement():
    """Random byte tokens: the stream gives what UTF-8 decoding with replacement gives, nothing is held for ever."""
    t = exl3.files.Tokenizer(byte_level())
    to_char = {b: c for c, b in _byte_alphabet().items()}
    rng = random.Random(5)
    for _ in range(50):
        data = bytes(rng.choice([*b"ab ", 0xC3, 0xA4, 0xF0, 0x9F, 0x98, 0x80, 0xFF]) for _ in range(12))
        stream = t.stream()
        out = "".join(stream.push(t.token_to_id(to_char[b])) for b in data) + stream.finish()
        assert out == data.decode("utf-8", "replace") == t.decode([t.token_to_id(to_char[b]) for b in data])


def test_byte_alphabet_is_the_librarys():
    assert set(_byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    t = Tokenizer(models.BPE())
    t.decoder = decoders.ByteLevel()
    assert all(t.decoder.decode([c]) == bytes([b]).decode("utf-8", "replace") for c, b in _byte_alphabet().items())


def test_ids_without_a_token(pair):
    ours, _ = pair
    assert ours.decode([10**9, -1, *ours.encode("ok"), ours.vocab_size]) == ours.decode(ours.encode("ok"))
    stream = ours.stream()
    assert stream.push([10**9, -1]) == ""


def test_lengths_stored_in_the_file_do_not_cut(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    t = exl3.files.Tokenizer.from_directory(save(tmp_path / "t", backend))
    assert t.decode(t.encode("a b c d e f g h i j")) == "a b c d e f g h i j"
    assert t.pad_id not in t.encode("x")


def test_tokens_only_the_settings_know(tmp_path):
    """added_tokens_decoder and bos/eos as transformers takes them: parsed in the text, left out when decoding."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    n = backend.get_vocab_size()
    spec = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    listed = {str(n + i): {"content": c, "special": i < 3, **spec} for i, c in enumerate([*SPECIAL, "<tool>"])}
    d = save(tmp_path / "t", backend, added_tokens_decoder=listed, eos_token={"content": "<|im_end|>", "__type": "AddedToken"})
    ours, theirs = exl3.files.Tokenizer.from_directory(d), PreTrainedTokenizerFast.from_pretrained(d)
    text = "a<|im_start|>b<tool>c<|im_end|>"
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False) and n + 3 in ours.encode(text)
    assert ours.decode(ours.encode(text)) == "ab<tool>c" and ours.eos_id == n + 2 and ours.special_ids == {n, n + 1, n + 2}


def test_add_bos_token_overrules_the_post_processor(tmp_path):
    assert not exl3.files.Tokenizer.from_directory(save(tmp_path / "a", KINDS["llama"](), add_bos_token=False)).demands_bos
    assert exl3.files.Tokenizer.from_directory(save(tmp_path / "b", KINDS["bytes"](), add_bos_token=True)).demands_bos
    without = exl3.files.Tokenizer.from_directory(save(tmp_path / "c", KINDS["bytes"](), bos_token=None))
    assert without.bos_id is None and not without.demands_bos
    with pytest.raises(ArgumentError, match="names no BOS"):
        without.encode("x", add_bos=True)


def test_no_tokenizer(tmp_path):
    assert exl3.files.Tokenizer.from_directory(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b'{"model": 3}',
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}',
    ],
)
def test_broken_tokenizer_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"tokenizer\.json"):
        exl3.files.Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("value", [3, b"x", None, ["x"]])
def test_text_must_be_text(pair, value):
    with pytest.raises(ArgumentError, match="must be a str"):
        pair[0].encode(value)


# --------------------------------------------------------------------------------------------------------- chat templates

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi & <b>\n"},
    {"role": "assistant", "content": "Yo 你"},
    {"role": "user", "content": "?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": 'ü "x" <y>', "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
TEMPLATES = {
    "chatml": CHATML,
    "blocks": """
{%- if tools %}
    {{- tools | tojson }}
    {{- '\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}
{%- endif %}
{% for m in messages %}
    {% if loop.index0 == 2 %}{% continue %}{% endif %}
  {{ bos_token }}{{ m.role | upper }}: {{ m.content | trim }}
    {% if loop.last %}{% break %}{% endif %}
{% endfor %}
{{ eos_token if not add_generation_prompt }}|{{ pad_token }}|{{ unk_token is defined }}|{{ documents }}""",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }} "
    "{{ messages[1:] | length }} {{ thinking | default('off') }}",
    "dict": "{{ messages[0].get('tool_calls', []) | length }}"
    "{{ messages | map(attribute='role') | join(',') }}{{ 'x' in messages[0]['content'] }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_render_as_transformers(pair, name, generation, tools):
    ours, theirs = pair
    options = {"add_generation_prompt": generation, "tools": tools, "thinking": "on"}
    text = ours.render_chat(MESSAGES, template=TEMPLATES[name], **options)
    assert text == theirs.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], tokenize=False, **options)
    assert ours.encode_chat(MESSAGES, template=TEMPLATES[name], **options) == theirs.encode(text, add_special_tokens=False)


def test_strftime(pair):
    before, text, after = datetime.now(), pair[0].render_chat(MESSAGES, template="{{ strftime_now('%Y-%m-%d %H:%M') }}"), datetime.now()
    assert before.strftime("%Y-%m-%d %H:%M") <= text <= after.strftime("%Y-%m-%d %H:%M")


def test_template_sources(tmp_path):
    """A string; a list of named ones with tool_use; a file of its own, which wins; more files in a folder; a processor's file."""

    def load(name, **options):
        return exl3.files.Tokenizer.from_directory(save(tmp_path / name, byte_level(), **options))

    named = [
        {"name": "default", "template": "D"},
        {"name": "tool_use", "template": "T"},
        {"name": "rag", "template": "R"},
        {"name": "broken"},
    ]
    t = load("list", template=named)
    assert [t.render_chat([]), t.render_chat([], tools=TOOLS), t.render_chat([], template="rag")] == ["D", "T", "R"]
    with pytest.raises(ArgumentError, match="no chat template 'x'; there are: default, rag, tool_use"):
        t.render_chat([], template="x")
    (tmp_path / "list" / "chat_template.jinja").write_text("F\u00fc", encoding="utf-8")
    (tmp_path / "list" / "additional_chat_templates").mkdir()
    (tmp_path / "list" / "additional_chat_templates" / "extra.jinja").write_text("E")
    t = exl3.files.Tokenizer.from_directory(tmp_path / "list")
    assert [t.render_chat([]), t.render_chat([], template="extra"), t.render_chat([], tools=TOOLS)] == ["F\u00fc", "E", "T"]
    t = load("none", template=None)
    assert not t.has_chat_template
    with pytest.raises(ArgumentError, match="no chat template"):
        t.render_chat(MESSAGES)
    (tmp_path / "none" / "chat_template.json").write_text('{"chat_template": "P"}')
    assert exl3.files.Tokenizer.from_directory(tmp_path / "none").render_chat([]) == "P"


@pytest.mark.parametrize(
    "template,message",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "broken"),
        ("{% unknown %}", "broken"),
        ("{{ messages[7].content }}", "fails on these messages"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "fails on these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|unsafe"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}", "fails on these messages"),
        ("{% for i in range(10**9) %}{% endfor %}", "fails on these messages"),
    ],
)
def test_template_errors_and_sandbox(pair, template, message):
    with pytest.raises(ArgumentError, match=message):
        pair[0].render_chat(MESSAGES, template=template)
