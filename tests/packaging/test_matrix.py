"""The release matrix: sound, one source for workflows, documentation and package; faults in it are found."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_matrix_is_sound(matrix):
    assert matrix.check(matrix.load()) == []


def test_rows_are_the_promised_ones(matrix):
    table = matrix.load()
    assert [row["label"] for row in table["rows"]] == ["cpu", "cu126", "cu128", "cu130", "rocm6.4", "rocm7"]
    assert "cu124" in table["refused"]
    assert table["pythons"] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert len(matrix.jobs(table, "kernels")) == sum(len(k["platforms"]) for k in table["kernels"].values())
    assert {j["python"] for j in matrix.jobs(table, "tests")} == set(table["pythons"])


@pytest.mark.parametrize(
    "change, word",
    [
        (lambda m: m["kernels"]["cu126"]["archs"].append("120"), "neither"),
        (lambda m: m["kernels"]["cu126"].update(compress="require"), "size compression"),
        (lambda m: m["kernels"]["cu130"].update(compress="auto"), "compress = 'require'"),
        (lambda m: m["kernels"]["cu126"].update(toolkit="12.4"), "below the floor"),
        (lambda m: m["rows"].append(m["rows"][0]), "twice"),
        (lambda m: m["rows"][1]["kernels"].append("cu999"), "cu999"),
        (lambda m: m["rows"][1].update(torch="2.5"), "older than the floor"),
        (lambda m: m["pypi"].update(linux_aarch64=["rocm"]), "not built there"),
        (lambda m: m["kernels"]["cpu"]["platforms"].append("macos_arm64"), "unknown platform"),
    ],
)
def test_faults_are_found(matrix, change, word):
    table = copy.deepcopy(matrix.load())
    change(table)
    assert any(word in line for line in matrix.check(table)), matrix.check(table)


def test_cibuildwheel_s_answer_is_compared(matrix):
    table = matrix.load()
    known = [i for p in matrix.RUNNERS for i in matrix.identifiers(table, p)]
    assert matrix.check(table, known) == []
    assert any("cp314-manylinux_aarch64" in line for line in matrix.check(table, [k for k in known if k != "cp314-manylinux_aarch64"]))


def test_pyproject_builds_the_matrix_s_pythons(matrix):
    text = (ROOT / "pyproject.toml").read_text()
    table = matrix.load()
    build = re.search(r'\nbuild = "([^"]+)"', text)[1].split()
    assert build == [f"cp{p.replace('.', '')}-*" for p in table["pythons"]]
    assert f'"torch>={table["torch_floor"]}"' in text
    assert all(f"Python :: {p}" in text for p in table["pythons"])


def test_documentation_shows_the_matrix(matrix):
    page = (ROOT / "docs/install.md").read_text()
    assert matrix.table(matrix.load()) in page, "run python .github/scripts/matrix.py table"
    assert all(reason in page for reason in matrix.load()["refused"].values())


def test_workflows_pin_and_call_what_exists(script):
    lint = script("lint")
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        text = path.read_text()
        assert lint.unpinned(text) == [], path.name
        called = lint.scripts(text)
        assert called and all((ROOT / s).exists() for s in called), path.name
    assert lint.unpinned("uses: actions/checkout@v4\n run: pip install x") == ["actions/checkout@v4", "run: pip install x"]


def test_requirements_are_pinned_and_hashed():
    files = sorted((ROOT / ".github/requirements").glob("*.txt"))
    assert {f.stem for f in files} == {f.stem for f in (ROOT / ".github/requirements").glob("*.in")}
    for path in files:
        lines = path.read_text().splitlines()
        pinned = [i for i, line in enumerate(lines) if line and not line.startswith((" ", "#"))]
        assert pinned
        for i in pinned:
            assert re.match(r"[\w.-]+==[\w.]+", lines[i]), f"{path.name}: {lines[i]}"
            assert "--hash=sha256:" in lines[i + 1], f"{path.name}: {lines[i]}"
        assert not re.search(r"https?://", path.read_text()), f"{path.name} names a host"
