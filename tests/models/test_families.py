"""Every family against transformers in fp32: short, past the window, past a cache page; through the cache in chunks and steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic_models import FAMILIES, ids, kl, make, old_spelling

from exl3 import ops
from exl3.cache import Batch, Cache
from exl3.files import Checkpoint
from exl3.models import build, locate
from exl3.models.model import Model

transformers = pytest.importorskip("transformers")
LONG = 300  # past every window here and past one page of 256 tokens


def open_model(directory: Path, max_tokens: int | None = None) -> Model:
    """The model in `directory` on the CPU, without the tokenizer and the memory check of `exl3.load`."""
    checkpoint = Checkpoint.open(directory)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    assert checkpoint.unused(found.used) == []
    model.max_tokens = max_tokens or model.max_tokens
    model.place("cpu")
    found.load("cpu")
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Any:
    """name -> (directory, reference logits of ids(2, LONG), transformers model), made once."""
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            if not hasattr(transformers, FAMILIES[name][0]):
                pytest.skip(f"this transformers has no {FAMILIES[name][0]}")
            directory = tmp_path_factory.mktemp(name)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reference = make(name, directory)
            with torch.no_grad():
                logits = reference(ids(2, LONG), use_cache=False).logits
            cache[name] = directory, logits, reference
        return cache[name]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_sequences(made: Any, name: str) -> None:
    directory, reference, hf = made(name)
    model = open_model(directory)
    logits = model.logits(ids(2, LONG))
    assert logits.shape == reference.shape and logits.dtype == torch.float32
    assert reference.std() > 0.2
    assert abs(kl(reference, logits)) < 1e-7
    assert (reference - logits).abs().max() < 1e-3
    short = ids(1, 17)
    with torch.no_grad():
        expected = hf(short, use_cache=False).logits
    assert abs(kl(expected, model.logits(short))) < 1e-7


@pytest.mark.parametrize("name", FAMILIES)
def test_through_the_cache(made: Any, name: str) -> None:
    """Two rows of unequal length, prefilled in chunks over scattered pages, then decoded together, equal the whole-sequence pass."""
    directory, _, _ = made(name)
    model = open_model(directory, max_tokens=LONG)
    tokens = ids(2, LONG)
    cache = Cache(model, 4 * 256, "cpu")
    pages = [[2, 0], [1, 3]]
    rows = tokens.tolist()
    done = [0, 0]
    got: list[list[torch.Tensor]] = [[], []]

    def step(news: list[int]) -> None:
        batch = Batch.packed([row[d : d + n] for row, d, n in zip(rows, done, news)], done, pages, cache, logits="all")
        with torch.no_grad():
            logits = model(batch)
        for r, part in enumerate(logits.split(news)):
            got[r].append(part)
            done[r] += news[r]

    for news in ([100, 97], [150, 1], [0, 150], [45, 45], [1, 1], [1, 2], [3, 1]):
        step(news)
    for r in range(2):
        expected = model.logits(tokens[r : r + 1, : done[r]])[0]
        logits = torch.cat(got[r])
        if name in ("phi3_longrope", "llama_dynamic"):  # over a cache the frequencies follow max_tokens, here LONG
            expected = model.logits(tokens[r : r + 1])[0, : done[r]]
        assert logits.shape == expected.shape
        assert abs(kl(expected, logits)) < 1e-5  # the cache holds fp16
        assert done[r] > 256


@pytest.mark.parametrize("name", FAMILIES)
def test_in_the_dtype_of_a_card(made: Any, name: str) -> None:
    """fp16 or bf16 between operations, as on a GPU: every operation takes it, logits stay fp32 and close."""
    directory, _, hf = made(name)
    checkpoint = Checkpoint.open(directory)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    model.max_tokens = 40
    model.place("cpu", model.gpu_dtype)
    found.load("cpu", model.dtype)
    logits = model.logits(ids(2, 40))
    assert logits.dtype == torch.float32
    with torch.no_grad():
        expected = hf(ids(2, 40), use_cache=False).logits
    assert 0 < kl(expected, logits) < (5e-4 if model.gpu_dtype == torch.bfloat16 else 1e-5)
    cache = Cache(model, 256, "cpu")
    with torch.no_grad():
        parts = [model(Batch.packed([ids(2, 40)[0, a:b].tolist()], [a], [[0]], cache, logits="all")) for a, b in ((0, 39), (39, 40))]
    assert abs(kl(expected[0], torch.cat(parts))) < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_decode_step(made: Any, name: str) -> None:
    """A decode step of two rows is native calls only (the tape refuses any torch computation); replayed with other contents, and on the
    second page, it equals the eager step bit for bit."""
    try:
        ops.backend("cpu")
    except ops.native.BackendError as error:
        pytest.skip(str(error))
    directory, _, _ = made(name)
    model = open_model(directory)
    rows = ids(2, 270).tolist()
    cache = Cache(model, 4 * 256, "cpu")
    pages = [[0, 2], [3, 1]]
    with torch.no_grad():
        model(Batch.packed([rows[0][:20], rows[1][:254]], [0, 0], pages, cache))
        batch = Batch.packed([[rows[0][20]], [rows[1][254]]], [20, 254], pages, cache, logits="all")
        tape = ops.Tape("cpu")
        with tape:
            out = model(batch)
        for i in (1, 2, 3):
            later = Batch.packed([[rows[0][20 + i]], [rows[1][254 + i]]], [20 + i, 254 + i], pages, cache, logits="all")
            expected = model(later)
            for field in ("ids", "positions", "lengths"):
                getattr(batch, field).copy_(getattr(later, field))
            tape.replay()
            assert torch.equal(out, expected)


@pytest.mark.parametrize(("name", "trained"), [("phi3_longrope", 128), ("llama_dynamic", 64)])
def test_around_the_trained_length(made: Any, name: str, trained: int) -> None:
    """Frequencies that depend on the length change at the right one."""
    directory, _, hf = made(name)
    model = open_model(directory)
    for n in (trained - 1, trained, trained + 1, 2 * trained):
        with torch.no_grad():
            expected = hf(ids(1, n), use_cache=False).logits
        assert (expected - model.logits(ids(1, n))).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["llama_llama3", "llama_linear", "llama_dynamic", "llama_yarn", "phi3_longrope", "gemma3", "glm4"])
def test_old_spelling_of_rope_keys(made: Any, name: str, tmp_path: Path) -> None:
    import shutil

    directory, reference, _ = made(name)
    shutil.copytree(directory, tmp_path / "m")
    old_spelling(tmp_path / "m")
    assert abs(kl(reference, open_model(tmp_path / "m").logits(ids(2, LONG)))) < 1e-7


def test_gemma3_inside_a_vision_model(tmp_path: Path) -> None:
    """The text part of Gemma3ForConditionalGeneration: nested config, prefixed names, vision tensors left alone."""
    keys = {**FAMILIES["gemma3"][2]}
    from synthetic_models import BASE

    text = transformers.Gemma3TextConfig(**{**BASE, **keys})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=1, image_token_index=5)
    torch.manual_seed(1)
    hf = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    hf.save_pretrained(tmp_path)
    tokens = ids(1, 40)
    tokens[tokens == 5] = 6
    with torch.no_grad():
        expected = hf(input_ids=tokens, token_type_ids=torch.zeros_like(tokens)).logits
    checkpoint = Checkpoint.open(tmp_path)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    unused = checkpoint.unused(found.used)
    assert unused and all(name.startswith(model.other_parts) for name in unused)
    model.place("cpu")
    found.load("cpu")
    assert abs(kl(expected, model.logits(tokens))) < 1e-7
