"""Safetensors headers: what is accepted, what is refused and how the message reads. The library itself is the second opinion."""

from __future__ import annotations

import json
import os
import tracemalloc

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from exl3.errors import FormatError
from exl3.files import read_header, read_tensors
from exl3.files.safetensors import HEADER_LIMIT

from .conftest import entry, write_odd, write_raw

A = {"a": entry("F16", [2], 0, 4)}
MIXED = {
    "a.suh": torch.randn(128).half(),
    "a.mul1": torch.tensor(-2082680531, dtype=torch.int32),
    "a.trellis": torch.randint(-(2**15), 2**15, (8, 8, 64), dtype=torch.int16),
    "b.w": torch.randn(5, 7),
    "c.flag": torch.tensor([True, False, True]),
    "c.bf": torch.randn(33).bfloat16(),
    "d.fp8": torch.randn(3, 5).to(torch.float8_e4m3fn),
    "e.empty": torch.empty(0, 5),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("odd", [True, False])
def test_unaligned_file_reads_as_the_library_reads_it(tmp_path, odd):
    path = write_odd(tmp_path / "x.safetensors", MIXED, odd=odd)
    header = read_header(path)
    assert any(t.offset % 2 for t in header.tensors.values()), "the file was meant to be unaligned"
    got, reference = read_tensors(header.tensors), load_file(path)
    assert list(got) == list(MIXED)
    for name, t in MIXED.items():
        assert same(got[name], t) and same(got[name], reference[name]), name
        assert got[name].data_ptr() % 256 == 0


def test_library_file_and_metadata(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(MIXED, path, metadata={"format": "pt", "note": "ü"})
    header = read_header(path)
    assert header.metadata == {"format": "pt", "note": "ü"}
    got = read_tensors(header.tensors)
    assert got.keys() == MIXED.keys() and all(same(got[n], t) for n, t in MIXED.items())


REFUSED = {
    "overlap": ({**A, "b": entry("F16", [2], 2, 6)}, b"\0" * 6, "share bytes"),
    "same range": ({**A, "b": entry("F16", [2], 0, 4)}, b"\0" * 4, "share bytes"),
    "name twice": (
        b'{"a":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"F16","shape":[2],"data_offsets":[4,8]}}',
        b"\0" * 8,
        "twice",
    ),
    "padded with NUL": (json.dumps(A).encode() + b"\0\0", b"\0" * 4, "not valid JSON"),
    "not JSON": (b"\x80\x04pickle", b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff":1}', b"", "not valid JSON"),
    "deep": (b"[" * 100_000, b"", "not valid JSON"),
    "list": ([], b"", "not an object"),
    "number entry": ({"a": 3}, b"", "needs dtype"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4, "needs dtype"),
    "no shape": ({"a": {"dtype": "F16", "data_offsets": [0, 4]}}, b"\0" * 4, "needs dtype"),
    "three offsets": ({"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4, 4]}}, b"\0" * 4, "needs dtype"),
    "negative dim": ({"a": entry("F16", [-2], 0, 4)}, b"\0" * 4, "needs dtype"),
    "negative offset": ({"a": entry("F16", [2], -4, 0)}, b"\0" * 4, "needs dtype"),
    "float dim": ({"a": entry("F16", [2.0], 0, 4)}, b"\0" * 4, "needs dtype"),
    "bool dim": ({"a": entry("U8", [True], 0, 1)}, b"\0", "needs dtype"),
    "string dim": ({"a": entry("F16", ["2"], 0, 4)}, b"\0" * 4, "needs dtype"),
    "unknown dtype": ({"a": entry("Q4", [2], 0, 4)}, b"\0" * 4, "unknown dtype"),
    "dtype list": ({"a": entry(["F16"], [2], 0, 4)}, b"\0" * 4, "needs dtype"),
    "wrong size": ({"a": entry("F16", [3], 0, 4)}, b"\0" * 4, "takes 6 bytes, its offsets give 4"),
    "backwards": ({"a": entry("F16", [2], 4, 0)}, b"\0" * 4, "takes 4 bytes"),
    "past the end": ({"a": entry("F16", [2], 4, 8)}, b"\0" * 7, "cut off"),
    "huge": ({"a": entry("F16", [2**40, 2**40], 0, 4)}, b"\0" * 4, "impossible shape"),
    "empty but huge": ({"a": entry("F16", [0, 2**40, 2**40], 0, 0)}, b"", "impossible shape"),
    "rank": ({"a": entry("F16", [1] * 4000, 0, 2)}, b"\0\0", "impossible shape"),
    "big integer": (b'{"a":{"dtype":"F16","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}', b"", "not valid JSON"),
    "metadata list": ({"__metadata__": [1], **A}, b"\0" * 4, "__metadata__"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    header, data, message = REFUSED[case]
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(FormatError, match=message) as e:
        read_header(path)
    assert "bad.safetensors" in str(e.value) and len(str(e.value)) < 600
    if case not in ("metadata list", "rank", "empty but huge"):  # the library takes these; no sound writer makes them
        with pytest.raises(SafetensorError):
            load_file(path)


@pytest.mark.parametrize("claim", [2**40, 2**62, 2**64 - 1, HEADER_LIMIT + 1, 600])
def test_header_longer_than_the_file_allocates_nothing(tmp_path, claim):
    path = write_raw(tmp_path / "x.safetensors", A, b"", claim=claim)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"claims {claim} bytes but the file has only"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_cap_holds_for_large_files(tmp_path):
    path = write_raw(tmp_path / "x.safetensors", A, b"", claim=HEADER_LIMIT + 1)
    os.truncate(path, HEADER_LIMIT + 4096)  # sparse
    with pytest.raises(FormatError, match="more than the"):
        read_header(path)


@pytest.mark.parametrize("size", range(8))
def test_shorter_than_a_length_field(tmp_path, size):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\1" * size)
    with pytest.raises(FormatError, match="too short"):
        read_header(path)


def test_every_truncation_is_noticed(tmp_path):
    whole = write_odd(tmp_path / "whole.safetensors", {k: MIXED[k] for k in ("a.suh", "b.w", "c.bf")}).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in [*range(0, len(whole) - 1, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(FormatError):
            read_header(path)
    path.write_bytes(whole)
    assert len(read_header(path).tensors) == 3


def test_untidy_but_harmless(tmp_path):
    """Gaps, bytes after the last tensor, blanks around the JSON, metadata that is not text: nothing that could mislead."""
    gap = {"a": entry("F16", [2], 0, 4), "b": entry("F16", [2], 6, 10)}
    header = read_header(
        write_raw(tmp_path / "x.safetensors", b" " + json.dumps({"__metadata__": {"n": 3}, **gap}).encode() + b"\n ", bytes(range(16)))
    )
    got = read_tensors(header.tensors)
    assert [raw.view(torch.uint8).tolist() for raw in got.values()] == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert header.metadata == {"n": "3"}
    assert read_header(write_raw(tmp_path / "y.safetensors", {})).tensors == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_and_directories_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    for name in ("pipe", "dir", "absent"):
        with pytest.raises(FormatError, match="cannot be read"):
            read_header(tmp_path / f"{name}.safetensors")
