"""The examples of docs/format.md run, and its tables are true."""

from __future__ import annotations

import re
from pathlib import Path

from exl3 import codec

TEXT = (Path(__file__).parent.parent.parent / "docs/format.md").read_text()


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)


def test_functions_exist():
    named = set(re.findall(r"`([a-z_]+)`", TEXT.split("## 9")[0]))
    functions = {n for n in named if "_" in n and hasattr(codec, n)}
    assert functions >= {"unpack_signs", "rate_of_width", "tile_coordinates", "encode_reference", "kv_quantize", "ngram_rows", "bit_planes"}
    assert not {n for n in named if "_" in n and not n.endswith("_proj")} - functions


def test_position_bits():
    row, col = codec.tile_coordinates()
    order = re.search(r"is +((?:[rc]\d +)+)", TEXT).group(1).split()
    for i in range(256):
        bits = {name: i >> (7 - place) & 1 for place, name in enumerate(order)}
        assert sum(bits[f"r{b}"] << b for b in range(4)) == row[i] and sum(bits[f"c{b}"] << b for b in range(4)) == col[i]


def test_table_of_codebooks():
    for name, rms in re.findall(r"\| `(\w+)` \|.*\| (1\.\d{4}) \|", TEXT):
        assert f"{codec.codebook_rms(name):.4f}" == rms
