"""Calibration rows: bundled mix, own files."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from exl3.errors import ArgumentError
from exl3.quantize import calibration as cal
from exl3.quantize.sensitivity import rows_for

HELD_OUT = Path(__file__).parents[2] / "benchmarks" / "data" / "heldout.txt"


class Bytes:
    """A tokenizer of bytes with a chat template."""

    vocab_size = 256

    def __init__(self, template: bool = True, bos: int | None = None) -> None:
        self.has_chat_template = template
        self.bos_id, self.demands_bos = bos, bos is not None

    def encode(self, text: str, add_bos: bool | None = False) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str], add_bos: bool | None = False) -> list[list[int]]:
        return [self.encode(t) for t in texts]

    def render_chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def test_bundled_mix():
    c = cal.bundled(Bytes(), 100, 64, 256)
    assert c.ids.shape == (100, 64) and c.ids.dtype == torch.int32
    assert c.sources == cal.MIX  # shares in parts of 100
    assert c.sources["random"] / c.rows <= 0.04
    assert torch.equal(c.ids, cal.bundled(Bytes(), 100, 64, 256).ids)
    assert not torch.equal(c.ids, cal.bundled(Bytes(), 100, 64, 256, seed=1).ids)
    texts = [bytes(row.tolist()).decode("utf-8", "ignore") for row in c.ids]
    assert any("<|" in t for t in texts)
    assert not any("<|user|>" in bytes(r.tolist()).decode("utf-8", "ignore") for r in cal.bundled(Bytes(False), 100, 64, 256).ids)


def test_rows_begin_as_texts_of_the_model_do():
    c = cal.bundled(Bytes(bos=1), 50, 64, 256)
    assert (c.ids[:, 0] == 1).all() and not (c.ids[:, 1:] == 1).any(0).all()
    assert torch.equal(c.ids[:, 1:], cal.bundled(Bytes(), 50, 64, 256).ids[:, 1:])
    assert (rows_for(c.ids, 20 * 16, 16)[:, 0] == 1).all()
    assert not (rows_for(cal.bundled(Bytes(), 50, 64, 256).ids, 20 * 16, 16)[:, 0] == 1).any()


def test_no_row_twice_and_too_many_rows_only_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        c = cal.bundled(Bytes(), 60, 1024, 256)
    assert len({tuple(r) for r in c.ids.tolist()}) == 60
    with pytest.warns(UserWarning, match="calibration rows"):
        c = cal.bundled(Bytes(), 40, 200_000, 256)
    assert 0 < c.rows < 40 and c.cols == 200_000


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(ArgumentError, match="don't belong together"):
        cal.bundled(Bytes(), 10, 64, 100)


def test_held_out_text_is_not_in_the_calibration_text():
    text = HELD_OUT.read_text(encoding="utf-8")
    everything = "\n".join(d for name in cal.MIX if name not in ("chat", "random") for d in cal.read_bundled(name))
    everything += "\n".join(t for pair in cal.read_chats() for t in pair)
    pieces = [text[i : i + 60] for i in range(0, len(text) - 60, 400)]
    assert len(pieces) > 100 and not any(p in everything for p in pieces)


def test_sources_are_listed_and_small():
    folder = Path(cal.__file__).parent / "data"
    listed = (folder / "SOURCES.md").read_text()
    for path in folder.glob("*.xz"):
        assert path.name.split(".")[0] in listed
    assert sum(p.stat().st_size for p in folder.iterdir()) < 1_000_000


def test_own_files(tmp_path: Path):
    ids = torch.arange(60).view(4, 15)
    save_file({"input_ids": ids, "lengths": torch.tensor([15, 12, 15, 4])}, tmp_path / "a.safetensors")
    c = cal.from_file(str(tmp_path / "a.safetensors"), None, 12, 100, None)
    assert c.ids.tolist() == ids[:3, :12].tolist()  # cropped, never padded; a row too short is left out
    with pytest.warns(UserWarning, match="3 rows of the usual 9"):
        cal.from_file(str(tmp_path / "a.safetensors"), 9, 12, 100, None)
    with pytest.raises(ArgumentError, match="3 rows, cal_rows asks for 9"):
        cal.from_file(str(tmp_path / "a.safetensors"), 9, 12, 100, None, all_rows=True)
    with pytest.raises(ArgumentError, match="id 59 in row 3"):
        save_file({"input_ids": ids}, tmp_path / "b.safetensors")
        cal.from_file(str(tmp_path / "b.safetensors"), None, None, 59, None)
    (tmp_path / "t.txt").write_text("some text that is long enough" * 3)
    assert cal.from_file(str(tmp_path / "t.txt"), None, 20, 256, Bytes()).ids.shape == (4, 20)
    for name, content, message in (
        ("c.safetensors", b"nonsense", "not a readable"),
        ("d.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("e.txt", b"short", "one row needs"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArgumentError, match=message):
            cal.from_file(str(tmp_path / name), None, 20, 256, Bytes())
    with pytest.raises(ArgumentError, match="no tokenizer"):
        cal.from_file(str(tmp_path / "t.txt"), None, 20, 256, None)


def test_random_tokens_keep_their_share_where_the_text_ends():
    with pytest.warns(UserWarning, match="calibration rows"):
        c = cal.bundled(Bytes(), 20_000, 2048, 256)
    assert 0 < c.rows < 20_000 and c.sources["random"] / c.rows <= 0.04 and sum(c.sources.values()) == c.rows
    with pytest.raises(ArgumentError, match="no row of 100000000 tokens"):
        cal.bundled(Bytes(), 2, 100_000_000, 256)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([15, 15]), r"whole number for each of 4 rows"),
        (torch.full((4, 1), 15), r"whole number for each of 4 rows"),
        (torch.zeros(0, dtype=torch.int64), r"whole number for each of 4 rows"),
        (torch.full((4,), float("nan")), r"whole number for each of 4 rows"),
        (torch.full((4,), 16), "names 16 tokens, the rows have 15"),
        (torch.full((4,), -5), "rows of -5 tokens are too short"),
    ],
)
def test_lengths_that_do_not_fit_the_rows(tmp_path: Path, lengths: torch.Tensor, message: str):
    save_file({"input_ids": torch.arange(60).view(4, 15), "lengths": lengths}, tmp_path / "a.safetensors")
    with pytest.raises(ArgumentError, match=message):
        cal.from_file(str(tmp_path / "a.safetensors"), None, 12, 100, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_ids_are_whole_numbers(tmp_path: Path, dtype: torch.dtype):
    save_file({"input_ids": torch.ones(4, 15).to(dtype)}, tmp_path / "a.safetensors")
    with pytest.raises(ArgumentError, match="whole numbers"):
        cal.from_file(str(tmp_path / "a.safetensors"), None, 12, 100, None)
