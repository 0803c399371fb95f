"""What the library says on machines that cannot run it: one sentence with what was found and what to do; opening it never fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Library

Ask = Callable[..., tuple[str | None, str]]


@pytest.fixture
def ask(rocm_file: Path, mock_file: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """What a freshly opened library says of device 0: (description or None, error)."""

    def asked(**environment: str) -> tuple[str | None, str]:
        for name, value in {"EXL3_HIP_LIB": str(mock_file(11)), **environment}.items():
            monkeypatch.setenv(name, value)
        path = tmp_path / "libexl3_rocm.so"
        path.write_bytes(rocm_file.read_bytes())
        table = Library(path, "cpu").table
        text = table.describe(0)
        return text and text.decode(), table.last_error().decode()

    return asked


CASES = {
    "no runtime": ({"EXL3_HIP_LIB": "/nonexistent/libamdhip64.so"}, "no HIP runtime.*install ROCm"),
    "no driver": ({"MOCK_DEVICES": "0"}, "no AMD device.*driver loaded.*dev/kfd"),
    "wave64": ({"MOCK_WAVE": "64"}, "waves of 64 lanes.*RDNA2 and newer"),
    "old runtime": ({"MOCK_VERSION": "60140093"}, r"ROCm 6\.1.*needs 6\.4 or newer: update ROCm"),
    "no code": ({"MOCK_NO_CODE": "1"}, "no code for mock card.*EXL3_ROCM_ARCHS"),
}


@pytest.mark.parametrize("case", CASES)
def test_refusals(ask: Ask, case: str) -> None:
    environment, pattern = CASES[case]
    text, error = ask(**environment)
    assert text is None
    assert re.search(pattern, error), error
    assert "\n" not in error


@pytest.mark.parametrize("case", CASES)
def test_the_package_says_the_same(
    case: str, rocm_file: Path, mock_file: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exl3 on such a machine: a model does not load, the self-test and `exl3 doctor` say why, nothing else fails."""
    pytest.importorskip("exl3._native")
    from exl3 import ops
    from exl3.cli.doctor import report
    from exl3.errors import Exl3Error
    from exl3.ops import native

    environment, pattern = CASES[case]
    for name, value in {"EXL3_HIP_LIB": str(mock_file(11)), **environment}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "libexl3_rocm.so"
    path.write_bytes(rocm_file.read_bytes())
    monkeypatch.setitem(native._backends, "cpu", native.Backend(path))  # CPU tensors stand in for a card's
    with pytest.raises(Exl3Error, match=pattern):
        ops.self_test("cpu")
    assert re.search(pattern, ops.describe()["cpu"])
    said = report()
    assert not said["ok"] and re.search(pattern, said["self_test"]["cpu"])


def test_importing_needs_nothing_of_rocm(rocm_file: Path, tmp_path: Path) -> None:
    """`import exl3` under a ROCm torch with this library beside it and no HIP runtime: no failure, and the profiler's hook is off."""
    code = (
        "import os, torch\n"
        "torch.version.hip = '6.4.43482'\n"
        "import exl3, exl3.ops, exl3.models\n"
        f"exl3.ops.native._candidates = lambda name: [__import__('pathlib').Path({str(rocm_file)!r})]\n"
        "try: print(exl3.ops.backend('cuda').name, exl3.ops.backend('cuda').describe(0))\n"
        "except exl3.Exl3Error as e: print(e)\n"
        "print(os.environ['ROCPROFILER_REGISTER_ENABLED'])\n"
    )
    kept = {k: v for k, v in os.environ.items() if k != "ROCPROFILER_REGISTER_ENABLED"}
    base = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), "EXL3_HIP_LIB": "/nonexistent/libamdhip64.so"}
    for given, wanted in ((None, "0"), ("1", "1")):
        environment = base if given is None else {**base, "ROCPROFILER_REGISTER_ENABLED": given}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "no HIP runtime" in done.stdout and done.stdout.split()[-1] == wanted


def test_a_file_that_is_no_runtime(ask: Ask, tmp_path: Path) -> None:
    """A library that lacks the functions: named as too old."""
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "empty.so")], check=True)
    text, error = ask(EXL3_HIP_LIB=str(tmp_path / "empty.so"))
    assert text is None and "lacks hip" in error and "too old" in error


def test_described(ask: Ask) -> None:
    text, _ = ask()
    assert text is not None and "mock card" in text and "gfx11" in text and "ROCm 7.1" in text and "WMMA" in text


def test_which_library_serves_a_rocm_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from exl3.ops import native

    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert native.library_name("cuda") == "rocm"
    monkeypatch.setattr(torch.version, "hip", None)
    assert native.library_name("cuda") == "cuda"


def test_a_missing_driver_is_in_the_diagnosis() -> None:
    from exl3 import diagnose

    cases: tuple[tuple[Any, bool], ...] = (("", True), ("amd", False))
    for card, said in cases:
        here = frozenset({"cpu", "rocm"})
        facts = diagnose.Facts(version="1", torch="2.8.0", torch_hip="6.4", libraries=here, natives=("_native.so",), card=card)
        assert any("/dev/kfd is missing" in x.text for x in diagnose.findings(facts)) == said


def test_one_symbol_is_visible(lib: Library) -> None:
    assert not hasattr(lib.handle, "exl3_device_code")
    assert lib.table.name == b"rocm" and set(lib.ops) >= {"linear", "attention", "encode", "sample", "cache_append"}
