"""Safetensors headers: parsed and checked by hand, so that a lying file is refused before anything is allocated.

A file is an unsigned little-endian 64-bit length n, n bytes of JSON, then tensor data. EXL3 writers neither pad the header
nor align tensors (spec/format: n may be odd, a tensor may start at any byte), so nothing here maps the file: `slabs.py`
copies bytes to aligned places. Stricter than the safetensors library where a file lies (duplicate names), more lenient where
it is merely untidy (gaps between tensors and bytes after the last one are allowed).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exl3.errors import FormatError, MissingTensorError, UnsupportedError

HEADER_LIMIT = 100 << 20  # bytes; the cap of every reader in the field
_MAX_RANK = 16
_MAX_ELEMENTS = 1 << 62

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # torch 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
_SIZES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
_UNSERVED = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"} - DTYPES.keys()


class TensorInfo(NamedTuple):
    """One tensor on disk: where its bytes lie and what they are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int  # of its first byte in the file
    nbytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows(self, start: int, count: int) -> TensorInfo:
        """The part of the tensor with indices [start, start + count) of its first dimension: a contiguous piece of the file."""
        if not self.shape or not 0 <= start <= start + count <= self.shape[0]:
            raise FormatError(f"{self.file}: rows {start} to {start + count} of a tensor of shape {list(self.shape)} do not exist")
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        return self._replace(shape=(count, *self.shape[1:]), offset=self.offset + start * row, nbytes=count * row)


class Header(NamedTuple):
    """The checked header of one file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No garbage collections meanwhile: making 100,000 small objects would set off hundreds, in vain (a third of the time)."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def read_header(path: str | os.PathLike[str]) -> Header:
    """Parse and check one file's header. Allocates nothing but the header itself (at most 100 MiB, never more than the file).

    Raises `FormatError` for everything that is not so: a header longer than the file, JSON that is none, a name given twice,
    an unknown dtype, offsets that do not equal shape times element size, run past the file's end or overlap.
    """
    path = Path(path)
    raw, data_start, size = _header_bytes(path)
    entries = parse_json(raw, f"{path}: the header", lambda pairs: _no_duplicates(path, pairs))
    if not isinstance(entries, dict):
        raise FormatError(f"{path}: the header is a JSON {type(entries).__name__}, not an object")
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise FormatError(f"{path}: __metadata__ is a {type(metadata).__name__}, not an object")
    tensors = {name: _check_entry(path, name, entry, data_start, size) for name, entry in entries.items()}
    _check_overlaps(path, tensors)
    return Header(tensors, {key: str(value) for key, value in metadata.items()})


def parse_json(raw: bytes, what: str, hook: Any = None) -> Any:
    """JSON of an untrusted file; `FormatError` naming `what` for all that is none, text that cannot be encoded again included."""
    try:
        value = json.loads(raw, object_pairs_hook=hook)
        if b"\\ud" in raw or b"\\uD" in raw:  # may be half of a surrogate pair, which Python accepts but nothing can print
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except FormatError:
        raise
    except (ValueError, RecursionError) as e:  # JSONDecodeError and the Unicode errors are ValueErrors
        raise FormatError(f"{what} is not valid JSON ({str(e)[:120]!a}); the file is damaged, fetch it again") from None


def _header_bytes(path: Path) -> tuple[bytes, int, int]:
    """(JSON bytes, offset of the data section, size of the file), length field checked against the file's size first."""
    try:
        with open(path, "rb", opener=_open_regular) as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(8)
            if len(head) < 8:
                raise FormatError(f"{path}: {size} bytes long, too short for a safetensors file; the download was cut off")
            n = struct.unpack("<Q", head)[0]
            if n > size - 8:
                raise FormatError(f"{path}: the header claims {n} bytes but the file has only {size}; it is cut off or no safetensors file")
            if n > HEADER_LIMIT:
                raise FormatError(f"{path}: the header claims {n} bytes, more than the {HEADER_LIMIT} allowed")
            return f.read(n), 8 + n, size
    except OSError as e:
        raise FormatError(f"{path}: cannot be read ({e.strerror or e})") from None


def _open_regular(path: str, flags: int) -> int:
    """Opener that never waits: a pipe or device in a model directory is refused."""
    fd = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(None, "not a regular file")
    return fd


def _no_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"{path}: the header names {twice!r} twice, so it is undefined which one counts")
    return result


def _check_entry(path: Path, name: str, entry: Any, data_start: int, size: int) -> TensorInfo:
    """One header entry as `TensorInfo`; ints only (JSON true is an int in Python, so `type(...) is int`)."""
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = type(dtype) is str and type(shape) is list and all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise FormatError(f"{path}: entry of {name!r} needs dtype, shape and two data_offsets: {str(entry)[:160]}")
    if dtype not in _SIZES:
        if dtype in _UNSERVED:
            raise UnsupportedError(f"{path}: tensor {name!r} has dtype {dtype}, which this torch ({torch.__version__}) lacks")
        raise FormatError(f"{path}: tensor {name!r} has unknown dtype {dtype[:40]!r}; known are {', '.join(DTYPES)}")
    if len(shape) > _MAX_RANK or prod(n for n in shape if n) > _MAX_ELEMENTS:
        raise FormatError(f"{path}: tensor {name!r} has an impossible shape {str(shape)[:160]}")
    nbytes = prod(shape) * _SIZES[dtype]
    if end - begin != nbytes:
        raise FormatError(
            f"{path}: tensor {name!r} of shape {shape} and dtype {dtype} takes {nbytes} bytes, its offsets give {end - begin}"
        )
    if data_start + end > size:
        raise FormatError(
            f"{path}: tensor {name!r} ends at byte {data_start + end} but the file has only {size}; it is cut off, fetch it again"
        )
    return TensorInfo(DTYPES[dtype], tuple(shape), path, data_start + begin, nbytes)


def _check_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    spans = sorted((t.offset, t.offset + t.nbytes, name) for name, t in tensors.items() if t.nbytes)
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise FormatError(f"{path}: tensors {first!r} and {second!r} share bytes")


# ------------------------------------------------------------------------------------------------------------ directories


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a file holds a PEFT adapter and nothing of the model itself (such files often lie beside the model's shards)."""
    lora = other = False
    for name in names:
        if ".lora_" in name or ".lora_magnitude_vector" in name:
            lora = True
        elif not name.startswith("base_model."):
            other = True
    return lora and not other


def read_directory(directory: str | os.PathLike[str]) -> tuple[dict[str, TensorInfo], dict[Path, dict[str, str]], list[Path]]:
    """The union of all headers of the `*.safetensors` files in `directory`: (tensors, metadata by file, adapter files left out).

    The index file is optional and never trusted; only a shard it names that is absent is an error, for then tensors are missing.
    Raises `FormatError` (also for one name in two files, naming both), `MissingTensorError` (nothing there, or a shard absent).
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise MissingTensorError(f"{directory}: no such directory; a model directory holds config.json and *.safetensors files")
    try:
        files = sorted(p for p in directory.iterdir() if p.suffix == ".safetensors" and not p.name.startswith("."))
    except OSError as e:
        raise FormatError(f"{directory}: cannot be listed ({e.strerror})") from None
    if not files:
        raise MissingTensorError(f"{directory}: no *.safetensors file{_hint(directory)}")
    _check_index(directory, {p.name for p in files})
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[Path, dict[str, str]] = {}
    adapters: list[Path] = []
    for path in files:
        header = read_header(path)
        if is_adapter(header.tensors):
            adapters.append(path)
            continue
        for name in header.tensors.keys() & tensors.keys():
            raise FormatError(f"tensor {name!r} is in {tensors[name].file} and in {path}; remove the file that does not belong")
        tensors.update(header.tensors)
        metadata[path] = header.metadata
    return tensors, metadata, adapters


def _check_index(directory: Path, present: set[str]) -> None:
    """Refuse when an index names a shard that is not there. An index that cannot be parsed is ignored, like all else it says."""
    for index in sorted(directory.glob("*.safetensors.index.json")):
        try:
            if index.stat().st_size > HEADER_LIMIT:
                continue
            weight_map = parse_json(index.read_bytes(), index.name)["weight_map"]
            named = {str(shard): name for name, shard in weight_map.items()}
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            continue
        for shard in sorted(named.keys() - present):
            raise MissingTensorError(
                f"{directory / shard[:200]}: named in {index.name} (it should hold {named[shard]!r}) but absent; fetch it"
            )


def _hint(directory: Path) -> str:
    suffixes = {p.suffix for p in directory.iterdir()}
    if ".gguf" in suffixes:
        return "; a GGUF file becomes a model directory with `exl3 import-gguf FILE.gguf OUT_DIR`"
    if suffixes & {".bin", ".pt", ".pth", ".ckpt"}:
        return "; pickled weights (.bin, .pt) are not read because loading them runs code, get the safetensors version"
    return ""
