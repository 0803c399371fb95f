"""libexl3_rocm without a card: the real library on a mock HIP runtime that runs the real kernels on CPU fibers (tests/emulator)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# src last: an installed exl3 goes first, and none is needed
sys.path += [str(Path(__file__).resolve().parents[1] / "gpu"), str(Path(__file__).resolve().parents[2] / "src")]

from harness import ROOT, Library

INCLUDES = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'rocm'}"]


def compile_shared(out: Path, sources: list[Path], *flags: str) -> Path:
    # without -fno-gnu-unique two mocks in one process would share the emulator's state
    common = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fvisibility=hidden", "-fno-gnu-unique", *INCLUDES, *flags]
    subprocess.run([*common, *map(str, sources), "-o", str(out), "-ldl"], check=True)
    return out


@pytest.fixture(scope="session")
def build(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("rocm")


@pytest.fixture(scope="session")
def rocm_file(build: Path) -> Path:
    """The library's host side, with a bundle of device code that holds nothing: the mock has its own."""
    (build / "empty.hipfb").write_bytes(b"CCOB\2\0\1\0\x20" + bytes(23))
    return compile_shared(
        build / "host.so", sorted((ROOT / "rocm").glob("*.cpp")), "-Wl,-z,defs", f'-DEXL3_FATBIN="{build / "empty.hipfb"}"'
    )


@pytest.fixture(scope="session")
def mock_file(build: Path) -> Callable[[int], Path]:
    """The mock runtime of a card with WMMA layout 11 (RDNA3), 12 (RDNA4) or 0 (RDNA2), these two without products of few rows."""

    def make(layout: int) -> Path:
        path = build / f"mock{layout}.so"
        if not path.exists():
            only = [] if layout == 11 else ["-DMOCK_LAYOUT_ONLY"]
            compile_shared(path, [ROOT / "tests" / "emulator" / "mock_hip.cpp"], f"-DGPU_WMMA={layout}", *only)
        return path

    return make


@pytest.fixture(scope="session")
def open_mocked(build: Path, rocm_file: Path, mock_file: Callable[[int], Path]) -> Callable[[int], Library]:
    """A library of its own for each layout: the HIP runtime is looked up once a library."""

    def make(layout: int) -> Library:
        path = build / f"libexl3_rocm{layout}.so"
        path.write_bytes(rocm_file.read_bytes())
        library = Library(path, "cpu")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EXL3_HIP_LIB", str(mock_file(layout)))
            assert library.table.describe(0), library.table.last_error()
        return library

    return make


@pytest.fixture(scope="session")
def lib(open_mocked: Callable[[int], Library]) -> Library:
    return open_mocked(11)


@pytest.fixture(scope="session", params=[11, 12, 0], ids=["rdna3", "rdna4", "rdna2"])
def gemm(request: Any, open_mocked: Callable[[int], Library], lib: Library) -> Library:
    return lib if request.param == 11 else open_mocked(request.param)


@pytest.fixture
def as_cpu(lib: Library, build: Path) -> Iterator[None]:
    """exl3.ops with CPU tensors through libexl3_rocm: the tensors stand in for those of a card."""
    from exl3.ops import native

    pytest.importorskip("exl3._native")
    saved = dict(native._backends)
    native._backends["cpu"] = native.Backend(build / "libexl3_rocm11.so")
    native._workspaces.buffers.clear()
    yield
    native._backends.clear()
    native._backends.update(saved)
    native._workspaces.buffers.clear()
