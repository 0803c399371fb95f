"""Calibration rows: bundled text of several kinds, or the user's own file, as token ids `(rows, cols)`.

The bundled mix (data/SOURCES.md): English prose, technical English, code, 25 languages, conversations in the model's own chat template,
and 2 % random tokens.
"""

from __future__ import annotations

import json
import lzma
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exl3.errors import ArgumentError, ResourceError

SEPARATOR = "\n\x1e\n"
# share of the rows, in parts
MIX = {"prose": 26, "technical": 24, "code": 14, "languages": 10, "chat": 24, "random": 2}


@dataclass
class Calibration:
    """`ids` (rows, cols) int32 on the CPU; `sources`: rows of each kind."""

    ids: Tensor
    sources: dict[str, int]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def cols(self) -> int:
        return self.ids.shape[1]

    def describe(self) -> str:
        mix = ", ".join(f"{name} {count}" for name, count in self.sources.items() if count)
        return f"{self.rows} rows of {self.cols} tokens ({mix})"


def read_bundled(name: str) -> list[str]:
    """Documents of one kind of the bundled text."""
    data = resources.files("exl3.quantize").joinpath("data").joinpath(f"{name}.txt.xz").read_bytes()
    return lzma.decompress(data).decode("utf-8").split(SEPARATOR)


def read_chats() -> list[list[str]]:
    """Bundled [user, assistant] pairs."""
    data = resources.files("exl3.quantize").joinpath("data").joinpath("chat.jsonl.xz").read_bytes()
    return [json.loads(line) for line in lzma.decompress(data).decode("utf-8").splitlines()]


def bundled(tokenizer: Any, rows: int, cols: int, vocab_size: int, seed: int = 0) -> Calibration:
    """The bundled mix. Without a tokenizer only random tokens are left, with a warning.

    Documents of a kind are chained and cut into rows; BOS stands before each document and first in each row where the model demands it.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokenizer is None:
        warnings.warn("no tokenizer: calibrating on random tokens, which costs quality; give token ids with --cal-data", stacklevel=2)
        try:
            ids = torch.randint(0, vocab_size, (rows, cols), generator=generator, dtype=torch.int32)
        except RuntimeError:  # torch has no better name for it on the CPU
            raise ResourceError(f"{rows} rows of {cols} tokens do not fit into memory; use fewer --cal-rows or --cal-cols") from None
        return Calibration(ids, {"random": rows})
    wanted = _shares(rows)
    parts: list[Tensor] = []
    sources: dict[str, int] = {}
    short = 0
    for name in MIX:
        if name == "random":
            continue
        pieces = _cut(_stream(tokenizer, name), cols, wanted[name] + short)
        short += wanted[name] - len(pieces)
        parts.append(pieces)
        sources[name] = len(pieces)
    random = wanted["random"]
    if short > 0:
        found = sum(sources.values())
        if found == 0:
            raise ArgumentError(f"the bundled text gives no row of {cols} tokens; use fewer --cal-cols, or give more with --cal-data")
        random = min(random, found * MIX["random"] // (sum(MIX.values()) - MIX["random"]))  # their share of what is there
        warnings.warn(f"the bundled text gives {found + random} of {rows} calibration rows; give more with --cal-data", stacklevel=2)
    parts.append(torch.randint(0, min(vocab_size, tokenizer.vocab_size), (random, cols), generator=generator, dtype=torch.int32))
    sources["random"] = random
    ids = torch.cat(parts)
    if tokenizer.demands_bos:
        ids[:, 0] = tokenizer.bos_id
    if int(ids.max()) >= vocab_size:
        raise ArgumentError(
            f"the tokenizer produces id {int(ids.max())}, the model's vocabulary has {vocab_size}; the files don't belong together"
        )
    return Calibration(ids[torch.randperm(len(ids), generator=generator)].contiguous(), sources)


def _shares(rows: int) -> dict[str, int]:
    """Rows of each kind: floors of the shares, what is left to prose; random tokens only where they are below 4 %."""
    total = sum(MIX.values())
    counts = {name: rows * part // total for name, part in MIX.items()}
    counts["prose"] += rows - sum(counts.values())
    return counts


def _stream(tokenizer: Any, name: str) -> Tensor:
    """All documents of a kind as one line of ids."""
    if name == "chat":
        texts = [_render(tokenizer, pair) for pair in read_chats()]
        encoded = tokenizer.encode_batch(texts)
    else:
        encoded = tokenizer.encode_batch(read_bundled(name), add_bos=None)
    return torch.tensor([i for ids in encoded for i in ids], dtype=torch.int32)


def _render(tokenizer: Any, pair: list[str]) -> str:
    """One exchange in the model's chat template, or as plain paragraphs where it has none or refuses."""
    messages = [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if tokenizer.has_chat_template:
        try:
            text: str = tokenizer.render_chat(messages, add_generation_prompt=False)
            return text
        except ArgumentError:
            pass
    return f"{pair[0]}\n\n{pair[1]}\n\n"


def _cut(stream: Tensor, cols: int, rows: int) -> Tensor:
    """At most `rows` pieces of `cols` ids, spread evenly over the stream; a second helping starts half a row later."""
    whole = stream[: stream.numel() // cols * cols].view(-1, cols)
    shifted = stream[cols // 2 :]
    shifted = shifted[: shifted.numel() // cols * cols].view(-1, cols)
    if rows <= len(whole):
        return whole[torch.arange(rows) * len(whole) // max(rows, 1)]
    return torch.cat([whole, shifted])[:rows]


def from_file(path: str, rows: int | None, cols: int | None, vocab_size: int, tokenizer: Any, *, all_rows: bool = False) -> Calibration:
    """The user's own: a safetensors file with `input_ids` (rows, cols) and optional `lengths` (rows,), or UTF-8 text.

    Rows of ids are cropped to `cols`, or to the greatest length where none has so many, never padded; shorter ones are left out. Text is
    chained and cut. Fewer than `rows` are a warning, with `all_rows` (somebody asked for that number) an error. ArgumentError for ids
    outside the vocabulary.
    """
    if not Path(path).is_file():
        raise ArgumentError(f"cal_data {path}: no such file")
    ids = _ids_file(path, cols) if path.endswith(".safetensors") else _text_file(path, cols or 2048, tokenizer)
    if rows is not None and len(ids) < rows:
        if all_rows:
            raise ArgumentError(f"cal_data {path}: {len(ids)} rows, cal_rows asks for {rows}; give more text, or fewer --cal-rows")
        warnings.warn(f"cal_data {path} has {len(ids)} rows of the usual {rows}", stacklevel=2)
    ids = ids[:rows].to(torch.int64)
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        row, column = outside[0].tolist()
        raise ArgumentError(
            f"cal_data {path}: id {int(ids[row, column])} in row {row}, column {column} is outside the vocabulary of {vocab_size}"
        )
    return Calibration(ids.to(torch.int32), {Path(path).name: len(ids)})


def _ids_file(path: str, cols: int | None) -> Tensor:
    try:
        with safe_open(path, "pt") as f:
            names = set(f.keys())
            ids = f.get_tensor("input_ids") if "input_ids" in names else None
            lengths = f.get_tensor("lengths") if "lengths" in names else None
    except (SafetensorError, OSError) as e:
        raise ArgumentError(f"cal_data {path}: not a readable safetensors file ({e})") from None
    if ids is None or ids.dim() != 2 or not ids.numel() or not _whole(ids):
        raise ArgumentError(f"cal_data {path}: needs a tensor input_ids of token ids, whole numbers, (rows, cols)")
    width = ids.shape[1] if cols is None else min(cols, ids.shape[1])
    if lengths is not None:
        if lengths.shape != ids.shape[:1] or not _whole(lengths):
            raise ArgumentError(
                f"cal_data {path}: lengths is {lengths.dtype} {tuple(lengths.shape)}; it needs a whole number for each of {len(ids)} rows"
            )
        if int(lengths.max()) > ids.shape[1]:
            raise ArgumentError(f"cal_data {path}: lengths names {int(lengths.max())} tokens, the rows have {ids.shape[1]}")
        keep = lengths >= min(width, int(lengths.max()))
        ids, width = ids[keep], min(width, int(lengths.max()))
    if width < 2:
        raise ArgumentError(f"cal_data {path}: rows of {width} tokens are too short")
    rows: Tensor = ids[:, :width]
    return rows


def _whole(t: Tensor) -> bool:
    """Whether a tensor holds whole numbers; a mask of booleans does not."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _text_file(path: str, cols: int, tokenizer: Any) -> Tensor:
    if tokenizer is None:
        raise ArgumentError(f"cal_data {path}: the model directory has no tokenizer; give token ids in a .safetensors file")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ArgumentError(f"cal_data {path}: not UTF-8 text (byte {e.start})") from None
    ids = torch.tensor(tokenizer.encode(text, add_bos=None), dtype=torch.int32)
    if ids.numel() < cols:
        raise ArgumentError(f"cal_data {path}: {ids.numel()} tokens, one row needs {cols}; give more text or fewer --cal-cols")
    return ids[: ids.numel() // cols * cols].view(-1, cols)
