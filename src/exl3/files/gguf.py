"""Reading GGUF files: metadata and tensors, every count and offset checked against the file's size before it is believed.

A file is a magic, a version, counts, key/value metadata, tensor descriptions, padding, tensor data; all little-endian.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from exl3.errors import FormatError, UnsupportedError
from exl3.files.gguf_dequant import BLOCKS, TYPES, dequantize

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_CHUNK = 4 << 20  # weights dequantized at a time
_MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: `shape` in torch's order (rows first), `type` a name such as "Q4_K", bytes [offset, offset + nbytes) of the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUF:
    """A checked GGUF file: `metadata` (numbers, strings, lists of strings, numpy arrays) and `tensors` by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `FormatError` for a damaged file, `UnsupportedError` for versions, byte orders and tensor types not served."""
        self.path = Path(path)
        if not self.path.is_file():
            raise FormatError(f"{path}: absent or not a regular file")
        with open(self.path, "rb") as f:
            self._read(_Cursor(f, self.path))

    def _read(self, cursor: _Cursor) -> None:
        if cursor.take(4) != b"GGUF":
            raise FormatError(f"{self.path}: not a GGUF file (it does not start with 'GGUF')")
        version = cursor.number("<I")
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            raise UnsupportedError(
                f"{self.path}: GGUF {'big-endian' if big else f'version {version}'}; versions 2 and 3, little-endian, are read"
            )
        tensors, pairs = cursor.number("<Q"), cursor.number("<Q")
        cursor.check_count(pairs, 13, "metadata entries")  # a key of length 0, a type, a byte
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = cursor.string()
            if key in self.metadata:
                raise FormatError(f"{self.path}: metadata names {key!r} twice")
            self.metadata[key] = cursor.value(cursor.number("<I"))
        cursor.check_count(tensors, 24, "tensors")  # name length, rank, type, offset
        described = [self._describe(cursor) for _ in range(tensors)]
        self.tensors = self._place(described, cursor)

    def _describe(self, cursor: _Cursor) -> tuple[str, list[int], int, int]:
        name, rank = cursor.string(), cursor.number("<I")
        if rank > 4:
            raise FormatError(f"{self.path}: tensor {name!r} has {rank} dimensions, the format allows 4")
        dims = [cursor.number("<Q") for _ in range(rank)]
        return name, dims, cursor.number("<I"), cursor.number("<Q")

    def _place(self, described: list[tuple[str, list[int], int, int]], cursor: _Cursor) -> dict[str, GGUFTensor]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise FormatError(f"{self.path}: general.alignment is {alignment!r}, not a small power of two")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dims, type_id, offset in described:
            if name in tensors:
                raise FormatError(f"{self.path}: tensor {name!r} is described twice")
            kind = TYPES.get(type_id)
            if kind is None:
                raise FormatError(f"{self.path}: tensor {name!r} has unknown type {type_id}")
            if kind not in BLOCKS:
                raise UnsupportedError(f"{self.path}: tensor {name!r} is {kind}; read are {', '.join(BLOCKS)}")
            weights, size = BLOCKS[kind]
            if prod(dims) > _MAX_ELEMENTS or (dims and dims[0] % weights):
                raise FormatError(f"{self.path}: tensor {name!r} has an impossible shape {dims} for {kind} (blocks of {weights})")
            nbytes = prod(dims) // weights * size
            if offset % alignment or start + offset + nbytes > cursor.size:
                raise FormatError(
                    f"{self.path}: tensor {name!r} ends at byte {start + offset + nbytes} of {cursor.size}; the file is cut off or lies"
                )
            tensors[name] = GGUFTensor(name, kind, tuple(reversed(dims)), start + offset, nbytes)
        spans = sorted((t.offset, t.offset + t.nbytes, t.name) for t in tensors.values() if t.nbytes)
        for (_, end, first), (begin, _, second) in pairwise(spans):
            if begin < end:
                raise FormatError(f"{self.path}: tensors {first!r} and {second!r} share bytes")
        return tensors

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """One tensor, dequantized in fp32 and rounded once to `dtype`."""
        info = self.tensors[name]
        weights, size = BLOCKS[info.type]
        out = torch.empty(prod(info.shape), dtype=dtype)
        step = _CHUNK // weights
        with open(self.path, "rb") as f:
            f.seek(info.offset)
            for start in range(0, info.nbytes // size, step):
                count = min(step, info.nbytes // size - start)
                blocks = np.frombuffer(f.read(count * size), dtype=np.uint8)
                if blocks.size != count * size:
                    raise FormatError(f"{self.path}: ends within {name!r}; it has been changed since its header was read")
                values = torch.from_numpy(dequantize(blocks.reshape(count, size), info.type).reshape(-1))
                out[start * weights : (start + count) * weights] = values.to(dtype)
        return out.reshape(info.shape)


class _Cursor:
    """A reading position that never runs past the end of the file."""

    def __init__(self, f: BinaryIO, path: Path) -> None:
        self.f, self.path, self.at = f, path, 0
        self.size = os.fstat(f.fileno()).st_size

    def take(self, n: int) -> bytes:
        if n > self.size - self.at:
            raise FormatError(
                f"{self.path}: {n} bytes are announced at byte {self.at} but the file has only {self.size}; it is cut off or lies"
            )
        self.at += n
        data = self.f.read(n)
        if len(data) != n:
            raise FormatError(f"{self.path}: shrinks while it is read")
        return data

    def check_count(self, count: int, each: int, what: str) -> None:
        """`count` things of at least `each` bytes must fit into the rest of the file."""
        if count > (self.size - self.at) // each:
            raise FormatError(f"{self.path}: {count} {what} are announced, more than the file's {self.size} bytes can hold")

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 3:
            raise FormatError(f"{self.path}: metadata of unknown type {kind} at byte {self.at}")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _SCALARS:
            dtype = np.dtype(np.bool_ if inner == _BOOL else _SCALARS[inner])
            self.check_count(count, dtype.itemsize, "array elements")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype)
        self.check_count(count, 8 if inner == _STRING else 12, "array elements")
        return [self.value(inner, depth + 1) for _ in range(count)]
