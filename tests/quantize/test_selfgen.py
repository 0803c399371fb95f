"""Calibration text written by the model."""

from __future__ import annotations

from pathlib import Path

import torch
from test_calibration import Bytes
from tiny_llama import write_model

from exl3.models import load
from exl3.quantize.selfgen import calibration_rows, prompts, write_rows


class Tokens(Bytes):
    """Bytes folded into the tiny model's vocabulary."""

    def encode(self, text: str, add_bos: bool | None = False) -> list[int]:
        return [b % 250 for b in text.encode()]


def test_questions_come_in_the_template_and_openings_without_one():
    a, b = prompts(Tokens(), 0), prompts(Tokens(False), 0)
    assert bytes(next(a)).startswith(b"<|user|>") and next(a) != next(a)
    assert len(next(b)) == 24 and not bytes(next(b)).startswith(b"<|user|>")
    assert next(prompts(Tokens(), 3)) == next(prompts(Tokens(), 3)) != next(prompts(Tokens(), 4))


def test_what_is_written_follows_the_models_distribution(tmp_path: Path):
    model = load(write_model(tmp_path / "m"), "cpu")
    source = prompts(Tokens(False), 5)
    given = next(source)
    ids = write_rows(model, Tokens(False), set(), 2, 24 + 300, 5)
    assert ids[0, :24].tolist() == given  # first the opening, then drawn token by token
    logits = model.logits(ids).log_softmax(-1)[:, 24:-1]
    drawn = -logits.gather(-1, ids[:, 25:].long().unsqueeze(-1)).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    assert abs(float(drawn - entropy)) < 0.15  # the surprise of a fair draw is the entropy


def test_an_ended_answer_is_followed_by_the_next_question(tmp_path: Path):
    model = load(write_model(tmp_path / "m"), "cpu")
    ids = write_rows(model, Tokens(False), set(range(250)), 1, 100, 0)[0].tolist()  # every token ends an answer
    source = prompts(Tokens(False), 0)
    first, second = next(source), next(source)
    assert ids[:24] == first and ids[25:49] == second  # one drawn token in between


def test_rows_of_any_size(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("exl3.quantize.selfgen.PIECE", 20)
    monkeypatch.setattr("exl3.quantize.selfgen.AT_ONCE", 3)
    model = load(write_model(tmp_path / "m"), "cpu")
    ids = calibration_rows(model, Tokens(), {1}, 2, 50, 0)
    assert ids.shape == (2, 50) and ids.dtype == torch.int32
    assert torch.equal(ids, calibration_rows(model, Tokens(), {1}, 2, 50, 0))
