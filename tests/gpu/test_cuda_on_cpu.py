"""CUDA kernels on the CPU emulator: indices, layouts, rings and epilogues of the tensor core kernels, tested where there is no card."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_portable
import torch
from harness import ROOT, Library, exact_weight, random_weight, relative

from exl3.ops import blocks, reference

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def as_cpp(text: str) -> str:
    """A CUDA source as C++ for cuda_on_cpu.h."""
    text = re.sub(r'#include [<"](?:cuda_runtime\.h|cuda_fp16\.h|\w+\.cuh|parts\.h|product\.h|\.\./cpp/gpu/\w+\.h)[>"]\n', "", text)
    text = text.replace("#pragma once", "").replace("#ifdef __CUDACC__", "#if 1")
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?uint8_t (\w+)\[\];", r"uint8_t* \1 = shared_space;", text)
    text = text.replace("__shared__ __align__(8)", "alignas(8) static").replace("__shared__", "static")
    text = re.sub(r'asm\("lop3\.b32[^\n]*', "p = (p & 0x8fff8fffu) ^ 0x3b603b60u;", text)
    text = text.replace('asm volatile("bar.sync 1, 256;" ::: "memory");', "named_barrier();")
    text = re.sub(r'asm volatile\("wgmma\.(?:fence|commit_group|wait_group)[^;]*;" ::: "memory"\);', "", text)
    return re.sub(r"(?s)// d \+= a b of one warpgroup.*?(?=#endif\n\ntemplate)", "", text)  # wgmma itself: cuda_on_cpu.h has it


def compiled(directory: Path, name: str, sources: list[str]) -> ctypes.CDLL:
    (directory / "source.inc").write_text("\n".join(as_cpp((ROOT / "cuda" / s).read_text()) for s in sources))
    path = directory / f"{name}.so"
    command = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-w", f"-I{ROOT / 'cpp' / 'include'}", f"-I{directory}", f"-I{HERE}"]
    subprocess.run([*command, str(HERE / f"{name}.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path))


class WithAttention:
    """The emulated library with cuda/attention.cu in the place of the portable attention."""

    def __init__(self, emulated: Library, library: ctypes.CDLL) -> None:
        library.on_cpu_workspace.restype = ctypes.c_int64
        self.emulated, self.library, self.spaces = emulated, library, {}
        self.device = emulated.device
        self.ops = {**emulated.ops, "attention": lambda block, stream: library.on_cpu(block, None)}
        self.table = self

    def __getattr__(self, name: str) -> Any:
        value = getattr(Library, name)
        return value.__get__(self) if callable(value) else value

    def attention_workspace(self, block: bytes) -> int:
        return self.library.on_cpu_workspace(block)

    def last_error(self) -> bytes:
        return b"refused"


@pytest.fixture(scope="module")
def attention(emulated: Library, tmp_path_factory: Any) -> WithAttention:
    return WithAttention(emulated, compiled(tmp_path_factory.mktemp("attention"), "cuda_attention_on_cpu", ["attention.cu"]))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: Any) -> ctypes.CDLL:
    return compiled(tmp_path_factory.mktemp("wide"), "cuda_wide_on_cpu", ["product.h", "trellis.cuh", "wide.cuh"])


@pytest.mark.parametrize("case", [c for c in test_portable.CASES if c[0] != 512], ids=str)
def test_attention(attention: WithAttention, case: tuple) -> None:
    torch.manual_seed(0)
    test_portable.test_attention(attention, case)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "codebook,K,tile_rows,rows,n_in,n_out,activation",
    [
        ("mul1", 4, 256, 290, 300, 200, None),
        ("mul1", 4, 128, 140, 700, 130, "silu"),
        ("mul1", 1.5, 256, 40, 1100, 128, None),
        ("mcg", 7, 128, 20, 520, 100, None),
        ("3inst", 7, 256, 33, 1300, 128, "gelu_tanh"),
    ],
)
def test_wide(wide: ctypes.CDLL, codebook: str, K: float, tile_rows: int, rows: int, n_in: int, n_out: int, activation: str | None) -> None:
    torch.manual_seed(rows)
    w = random_weight(n_in, n_out, K, codebook, "cpu", bias=True)
    x, norm = torch.randn(rows, n_in), torch.rand(n_in) + 0.5
    y = torch.randn(rows, n_out) if activation else torch.full((rows, n_out), float("nan"))
    want = reference.rms_norm(x.double(), norm.double(), 1e-5) @ exact_weight(w) + w["bias"].double()
    if activation:
        want = want * reference.activate(y.double(), activation)
    struct = Library.weight(None, w)  # type: ignore[arg-type]
    block = blocks.LINEAR.pack(
        x.data_ptr(), norm.data_ptr(), ctypes.addressof(struct), 0, 0, 0, y.data_ptr(), 0, 0, 0, n_in, n_out, 0, 0, 0, 0, 0, 1e-5, rows, 1,
        0, 0, 2, 1, blocks.ACTIVATIONS[activation], 0,
    )  # fmt: skip
    assert wide.on_cpu(block, tile_rows) == 0
    assert relative(y, want) < 5e-4
