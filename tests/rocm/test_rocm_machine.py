"""What the library says on machines that cannot run it: one sentence with what was found and what to do; opening it never fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Library


@dataclass(frozen=True)
class Case:
    """An odd machine: variables of its environment (None: unset), the pattern of what is said, a change to the library's bytes."""

    environment: dict[str, str | None]
    said: str
    change: tuple[bytes, bytes] = (b"", b"")


EMPTY_BUNDLE = b"CCOB\2\0\1\0\x20"  # conftest's, up to the byte that says its size
CASES = {
    "no runtime": Case({"EXL3_HIP_LIB": None}, "no HIP runtime.*install ROCm"),
    "no runtime where EXL3_HIP_LIB points": Case({"EXL3_HIP_LIB": "/nonexistent/hip.so"}, "EXL3_HIP_LIB.*/nonexistent/hip.so.*unset it"),
    "no driver": Case({"MOCK_DEVICES": "0"}, "no AMD device.*driver loaded.*dev/kfd"),
    "wave64": Case({"MOCK_WAVE": "64"}, "waves of 64 lanes.*RDNA2 and newer"),
    "old runtime": Case({"MOCK_VERSION": "60140093"}, r"ROCm 6\.1.*needs 6\.4 or newer: update ROCm"),
    "no code": Case({"MOCK_LOAD_ERROR": "209"}, "no code for mock card.*EXL3_ROCM_ARCHS"),
    "code this runtime can't read": Case({"MOCK_LOAD_ERROR": "200"}, r"ROCm 7\.1 can't load.*invalid; update ROCm.*EXL3_ROCM_ARCHS"),
    "code cut short": Case({}, r"cut short \(32 of 255 bytes\): build or install", (EMPTY_BUNDLE, EMPTY_BUNDLE[:-1] + b"\xff")),
    "code that is none": Case({}, "holds no code objects.*build or install", (EMPTY_BUNDLE, b"\0" * len(EMPTY_BUNDLE))),
}


@pytest.fixture
def on_machine(
    rocm_file: Path, mock_file: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Case], Path]:
    """Sets the environment of a case; a fresh copy of the library."""

    def make(case: Case) -> Path:
        for name, value in {"EXL3_HIP_LIB": str(mock_file(11)), **case.environment}.items():
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        if case.environment == {"EXL3_HIP_LIB": None} and (find_library("amdhip64") or Path("/opt/rocm/lib").exists()):
            pytest.skip("this machine has a HIP runtime")
        old, new = case.change
        library = rocm_file.read_bytes()
        assert not old or library.count(old) == 1
        path = tmp_path / "libexl3_rocm.so"
        path.write_bytes(library.replace(old, new) if old else library)
        return path

    return make


Ask = Callable[[Case], tuple[str | None, str]]


@pytest.fixture
def ask(on_machine: Callable[[Case], Path]) -> Ask:
    """What a freshly opened library says of device 0: (description or None, error)."""

    def asked(case: Case) -> tuple[str | None, str]:
        table = Library(on_machine(case), "cpu").table
        text = table.describe(0)
        return text and text.decode(), table.last_error().decode()

    return asked


@pytest.mark.parametrize("case", CASES)
def test_refusals(ask: Ask, case: str) -> None:
    text, error = ask(CASES[case])
    assert text is None
    assert re.search(CASES[case].said, error), error
    assert "\n" not in error


@pytest.mark.parametrize("case", CASES)
def test_the_package_says_the_same(case: str, on_machine: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """exl3 on such a machine: a model does not load, the self-test and `exl3 doctor` say why, nothing else fails."""
    pytest.importorskip("exl3._native")
    from exl3 import ops
    from exl3.cli.doctor import report
    from exl3.errors import Exl3Error
    from exl3.ops import native

    said = CASES[case].said
    monkeypatch.setitem(native._backends, "cpu", native.Backend(on_machine(CASES[case])))  # CPU tensors stand in for a card's
    with pytest.raises(Exl3Error, match=said):
        ops.self_test("cpu")
    assert re.search(said, ops.describe()["cpu"])
    printed = report()
    assert not printed["ok"] and re.search(said, printed["self_test"]["cpu"])


def test_importing_needs_nothing_of_rocm(rocm_file: Path, tmp_path: Path) -> None:
    """`import exl3` under a ROCm torch with this library beside it and no HIP runtime: no failure, and the profiler's hook is off."""
    pytest.importorskip("exl3._native")
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
        assert "EXL3_HIP_LIB is no HIP runtime" in done.stdout and done.stdout.split()[-1] == wanted


def test_a_file_that_is_no_runtime(ask: Ask, tmp_path: Path) -> None:
    """A library that lacks the functions: named as too old."""
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "empty.so")], check=True)
    text, error = ask(Case({"EXL3_HIP_LIB": str(tmp_path / "empty.so")}, ""))
    assert text is None and "lacks hip" in error and "too old" in error


def test_described(ask: Ask) -> None:
    text, _ = ask(Case({}, ""))
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
