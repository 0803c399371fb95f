"""The kernel tests run twice where they can: on the CPU emulator (portable kernels only) and on an NVIDIA GPU (marker gpu)."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from harness import Library, cuda_library, emulated_library


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: Any) -> Library:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return Library(emulated_library(tmp_path_factory.mktemp("emulated")), "cpu")


@pytest.fixture(scope="session")
def cuda() -> Library:
    path = cuda_library()
    if not torch.cuda.is_available() or path is None:
        pytest.skip("needs an NVIDIA GPU and libexl3_cuda.so")
    return Library(path, "cuda")


@pytest.fixture(scope="session")
def no_wgmma(cuda: Library, tmp_path_factory: Any) -> Library:
    """A second instance of the library that takes the way of cards without wgmma (8.0 and up)."""
    path = tmp_path_factory.mktemp("no_wgmma") / "libexl3_cuda_no_wgmma.so"
    shutil.copy(cuda_library() or "", path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXL3_TEST_NO_WGMMA", "1")
        library = Library(path, "cuda")
        assert library.table.describe(0)  # looks at the card, once
    return library


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def lib(request: Any) -> Library:
    return request.getfixturevalue(request.param)


@pytest.fixture
def cuda_or_not() -> tuple[Any, bool]:
    """The table of libexl3_cuda, which loads without a card too, and whether one is there."""
    path = cuda_library()
    if path is None:
        pytest.skip("needs libexl3_cuda.so")
    return Library(path, "cpu").table, torch.cuda.is_available()
