"""Writers for test files that know nothing of exl3: raw safetensors with any header one likes, and tiny model directories."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

NAMES = {
    torch.int16: "I16",
    torch.float16: "F16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float32: "F32",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}


def raw_bytes(t: Tensor) -> bytes:
    return t.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def write_raw(path: Path, header: Any, data: bytes = b"", claim: int | None = None) -> Path:
    """A file with this header (object or bytes) and data; `claim` lies about the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claim is None else claim) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_odd(path: Path, tensors: dict[str, Tensor], *, odd: bool = True) -> Path:
    """As EXL3 writers do it: minified header without padding (made odd here), tensors back to back in the order given."""
    header, blobs, at = {}, [], 0
    for name, t in tensors.items():
        blob = raw_bytes(t)
        header[name] = entry(NAMES[t.dtype], list(t.shape), at, at + len(blob))
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((len(text) % 2 == 0) == odd)
    return write_raw(path, text, b"".join(blobs))


def exl3_tensors(
    key: str, n_in: int, n_out: int, K: float = 4, marker: str | None = "mul1", seed: int = 0, bias: bool = False
) -> dict[str, Tensor]:
    """The tensors of one EXL3 matrix, random (every bit pattern is a valid trellis), in the writer's order."""
    g = torch.Generator().manual_seed(seed)
    tensors = {
        f"{key}.suh": torch.randn(n_in, generator=g).half(),
        f"{key}.svh": torch.randn(n_out, generator=g).half(),
        f"{key}.trellis": torch.randint(-(2**15), 2**15, (n_in // 16, n_out // 16, int(16 * K)), generator=g, dtype=torch.int16),
    }
    if marker:
        value = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[marker]
        tensors[f"{key}.{marker}"] = torch.tensor(value - 2**32, dtype=torch.int32)
    if bias:
        tensors[f"{key}.bias"] = torch.randn(n_out, generator=g).half()
    return tensors


@pytest.fixture
def model_dir(tmp_path: Path) -> Any:
    """make(tensors, config=..., **files): a model directory with one unaligned shard."""

    def make(tensors: dict[str, Tensor], config: dict[str, Any] | None = None, name: str = "m", **files: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        write_odd(directory / "model.safetensors", tensors)
        (directory / "config.json").write_text(json.dumps(config if config is not None else {"architectures": ["LlamaForCausalLM"]}))
        for file, content in files.items():
            (directory / f"{file}.json").write_text(json.dumps(content))
        return directory

    return make
