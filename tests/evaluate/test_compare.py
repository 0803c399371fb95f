"""Comparisons beyond the metrics: errors of the layers, GGUF files, the page."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "quantize"))
from tiny_llama import HIDDEN, LAYERS, VOCAB, write_model

import exl3
from exl3.cli.eval import command
from exl3.errors import ArgumentError, MissingTensorError
from exl3.evaluate import Comparison, Summary
from exl3.evaluate import compare as module_function
from exl3.evaluate.compare import check_pair, gguf_logits, is_gguf, layer_errors
from exl3.evaluate.report import write_report
from exl3.models import stages

compare_module = sys.modules["exl3.evaluate.compare"]


def test_layer_errors_against_streams_kept_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    a, b = (exl3.load(write_model(tmp_path / n, seed=s), "cpu") for n, s in (("a", 0), ("b", 1)))
    row = torch.arange(20) * 7 % VOCAB
    got = layer_errors(a, b, row)
    kept = []
    for model in (a, b):
        seen: list[torch.Tensor] = []
        handles = [block.register_forward_hook(lambda _, __, y, seen=seen: seen.append(y.clone())) for block in model.blocks]
        model.logits(row)
        for handle in handles:
            handle.remove()
        kept.append(seen)
    assert len(got) == LAYERS and kept[0][0].shape == (20, HIDDEN)
    for value, x, y in zip(got, *kept):
        assert value == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-5)
    assert layer_errors(a, a, row) == [0.0] * LAYERS
    deep = exl3.load(write_model(tmp_path / "deep", layers=LAYERS + 1), "cpu")
    assert layer_errors(a, deep, row) == []  # nothing to compare block by block
    split = exl3.load(tmp_path / "b", "cpu,cpu")
    moves: list[torch.device] = []
    monkeypatch.setattr(stages.ops, "move", lambda x, device: moves.append(device) or x.clone())
    assert layer_errors(a, split, row) == got and moves


def test_gguf_files_go_through_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_model(tmp_path / "source")
    model = exl3.load(source, "cpu")
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x" * 1000)

    class Llama:
        """Answers with the model's own logits, a little off."""

        def __init__(self, model_path: str, n_ctx: int, logits_all: bool, **_: object) -> None:
            assert model_path == str(file) and n_ctx == 16 and logits_all
            self.scores = np.zeros((16, VOCAB), dtype=np.float32)

        def reset(self) -> None:
            self.scores[:] = 0

        def eval(self, ids: list[int]) -> None:
            self.scores[: len(ids)] = model.logits(torch.tensor(ids))[0].numpy() + np.linspace(0, 0.1, VOCAB, dtype=np.float32)

    class Bytes:
        bos_id = None

        def encode(self, text: str, add_bos: bool = False) -> list[int]:
            return [c % VOCAB for c in text.encode()]

    (tmp_path / "t.txt").write_text("some text to be judged by, long enough for two rows")
    monkeypatch.setattr(compare_module.Tokenizer, "from_directory", lambda _: Bytes())
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ArgumentError, match=r"exl3\[gguf\]"):
        module_function(source, file, tmp_path / "t.txt", row_len=16, device="cpu")
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama))
    result = module_function(source, file, tmp_path / "t.txt", row_len=16, device="cpu")
    ids = torch.tensor(Bytes().encode((tmp_path / "t.txt").read_text())[:48]).view(3, 16)
    p = model.logits(ids).double().log_softmax(-1)
    q = (model.logits(ids).double() + torch.linspace(0, 0.1, VOCAB).double()).log_softmax(-1)
    assert result.summary.kl_mean == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert result.bytes_quantized == 1000 and is_gguf(file) and not is_gguf(source)


def test_a_gguf_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: object) -> None:
        raise ValueError("bad magic")

    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=refuse))
    with pytest.raises(ArgumentError, match=r"m\.gguf: .*bad magic"):
        gguf_logits("m.gguf", 16)


def test_the_page_names_texts_calibration_and_layers(tmp_path: Path):
    s = Summary(10, 0.1, 0.05, 1.0, 0.9, 5.0, 6.0)
    made = [
        Comparison("/r", f"/q{i}", "held.txt", 2, 8, s, 1000, 500 + i, 3.0, 6.0, [0.1 * i, 0.2], {"rows": 9, "cols": 64}) for i in (1, 2)
    ]
    page = write_report(made, tmp_path / "report").read_text()
    assert "held.txt" in page and "q1 9 rows of 64 tokens" in page
    assert "| 0 | 0.1000 | 0.2000 |" in page and "| 1 | 0.2000 | 0.2000 |" in page
    assert json.loads((tmp_path / "report" / "report.json").read_text())[0]["layer_errors"] == [0.1, 0.2]
    assert "GGUF" not in page
    named = dataclasses.replace(made[0], calibration={"rows": 9, "cols": 64, "sources": {"prose": 7, "mine.txt": 2}})
    assert "q1 9 rows of 64 tokens (prose 7, mine.txt 2)." in write_report([named], tmp_path / "report").read_text()
    odd = dataclasses.replace(made[0], quantized="/m.gguf", layer_errors=[], calibration={"method": "another program's"})
    page = write_report([*made, odd], tmp_path / "report").read_text()
    assert "those of the whole file" in page and "| m.gguf | 3.000 |" in page


def test_what_cannot_be_compared_is_told_from_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, other = write_model(tmp_path / "source"), write_model(tmp_path / "other")
    assert check_pair(source, other) == VOCAB
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB - 2}))
    with pytest.raises(ArgumentError, match=f"other: has a vocabulary of {VOCAB - 2}, .*source one of {VOCAB}"):
        check_pair(source, other)
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS + 1}))
    with pytest.raises(MissingTensorError, match=rf"layers\.{LAYERS}"):
        check_pair(source, other)
    with pytest.raises(ArgumentError, match="no such file"):
        check_pair(source, tmp_path / "m.gguf")

    class Large:
        bos_id = None

        def encode(self, text: str, **_: object) -> list[int]:
            return [VOCAB + 3] * len(text)

    (tmp_path / "t.txt").write_text("some text")

    class Small(Large):
        def encode(self, text: str, **_: object) -> list[int]:
            return [3] * len(text)

    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 3}))
    monkeypatch.setattr(compare_module.Tokenizer, "from_directory", lambda _: Small())
    with pytest.warns(UserWarning, match="rows of 4 tokens go beyond the 3 positions .*give --row-len 3"):
        module_function(source, source, tmp_path / "t.txt", row_len=4, device="cpu")
    monkeypatch.setattr(compare_module.Tokenizer, "from_directory", lambda _: Large())
    with pytest.raises(ArgumentError, match=f"produces id {VOCAB + 3}.*don't belong together"):
        module_function(source, source, tmp_path / "t.txt", row_len=4, device="cpu")


def test_the_verb_checks_every_directory_before_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, other = write_model(tmp_path / "source"), tmp_path / "other"
    other.mkdir()
    (tmp_path / "t.txt").write_text("some text")
    monkeypatch.setattr("exl3.evaluate.compare", None)  # is not reached
    with pytest.raises(MissingTensorError, match="other"):
        command.main([str(p) for p in (source, source, other, "--text", tmp_path / "t.txt")], standalone_mode=False)
