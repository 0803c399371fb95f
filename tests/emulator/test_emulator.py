"""The emulator finds what it is there for: a missing barrier, barriers and lane exchanges not all threads reach, wrong matrix layouts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=[11, 12])
def faults(request: Any, tmp_path_factory: Any) -> tuple[int, Path]:
    out = tmp_path_factory.mktemp("faults") / "faults"
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'rocm'}"]
    source = str(Path(__file__).parent / "faults.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", f"-DGPU_WMMA={request.param}", *includes, source, "-o", str(out)], check=True)
    return request.param, out


def run(program: Path, name: str) -> tuple[int, str, str]:
    done = subprocess.run([str(program), name], capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr


def test_right_kernels_go_through(faults: tuple[int, Path]) -> None:
    assert run(faults[1], "barrier_right") == (0, "64", "")
    assert run(faults[1], "product_right") == (0, "0", "")


def test_missing_barrier_shows(faults: tuple[int, Path]) -> None:
    code, out, _ = run(faults[1], "barrier_missing")
    assert code == 0 and "nan" in out


@pytest.mark.parametrize(
    "name,text", [("barrier_divergent", "barrier that not all threads"), ("exchange_divergent", "exchange that not all lanes")]
)
def test_divergence_ends_the_program(faults: tuple[int, Path], name: str, text: str) -> None:
    code, _, error = run(faults[1], name)
    assert code != 0 and text in error and "block (0, 0)" in error


def test_wrong_layouts_show(faults: tuple[int, Path]) -> None:
    layout, program = faults
    assert run(program, "product_rows_wrong")[1] == "1"
    code, _, error = run(program, "product_halves_differ")
    assert (code != 0 and "lanes 16 to 31" in error) == (layout == 11)
