"""The house: which rooms may import which, what lies at the top, what `import exl3` costs, how long a file may be."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "exl3"

# docs/architecture.md: a room imports only from rooms above it; rooms of one line stand side by side and do not see each other
ORDER = [
    {"errors"},
    {"settings"},
    {"diagnose"},
    {"codec"},
    {"files"},
    {"ops"},
    {"cache"},
    {"nn"},
    {"models"},
    {"parallel"},
    {"quantize", "generate"},
    {"evaluate"},
    {"integrations"},
    {"serve"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

TOP_FOLDERS = {"src", "cpp", "cuda", "rocm", "cmake", "tests", "benchmarks", "docs", ".github", ".ci"}
TOP_FILES = {
    "CMakeLists.txt",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    ".gitignore",
}
MAX_LINES = 700


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [Path(name) for name in done.stdout.split("\0") if name]


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_rooms(path: Path) -> list[tuple[int, str]]:
    """(line, room) of every import of exl3 in a file, inside functions and under TYPE_CHECKING too; "" is the package itself."""
    found = []
    package = path.relative_to(PACKAGE.parent).with_suffix("").parts
    package = package if path.name == "__init__.py" else package[:-1]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "exl3" else [module]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec"):
                names = [str(node.args[0].value)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "exl3":
                found.append((node.lineno, parts[1] if len(parts) > 1 else ""))
    return found


def test_imports_are_seen(tmp_path, monkeypatch):
    """The walker itself: every way to import, at any depth."""
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "exl3")
    path = tmp_path / "exl3" / "ops" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import exl3.codec.rings\nfrom exl3 import files, errors\nfrom exl3.nn.linear import A\nfrom ..cache import B\nfrom . import y\n"
        "def f():\n    from exl3.cli import main\n    import importlib\n    importlib.import_module('exl3.serve')\n"
        "import torch\nimport exl3\n"
    )
    assert sorted(imported_rooms(path)) == [
        (1, "codec"), (2, "errors"), (2, "files"), (3, "nn"), (4, "cache"), (5, "ops"), (7, "cli"), (9, "serve"), (11, ""),
    ]  # fmt: skip


def test_rooms_are_known():
    unknown = {room_of(p) for p in files()} - set(LEVEL) - {"__init__", "__main__"}
    assert not unknown, f"rooms without a place in the order: {sorted(unknown)}"


def test_rooms_import_only_from_rooms_above():
    wrong = []
    for path in files():
        room = room_of(path)
        if room in ("__init__", "__main__"):  # lazy names of the package; the command line
            continue
        for line, other in imported_rooms(path):
            if other in ("", "_native", "__version__"):
                allowed = other != "_native" or room == "ops"
            else:
                allowed = other == room or (other in LEVEL and LEVEL[other] < LEVEL[room])
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line} ({room}) imports {other}")
    assert not wrong, "\n".join(wrong)


def test_native_code_is_opened_by_ops_alone():
    """Ctypes, cffi and _native stay behind the one door; so does any use of the process's libraries."""
    for path in files():
        text = path.read_text()
        if room_of(path) != "ops":
            assert "_native" not in [name for _, name in imported_rooms(path)], path
            assert "torch.ops.load_library" not in text, path


def test_order_is_the_documented_one():
    """The list in docs/architecture.md names the same rooms in the same order."""
    text = (ROOT / "docs/architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    cells = [line.split("|")[1].replace("/", ",") for line in text.splitlines() if line.startswith("| `")]
    named = [part.strip(" `") for cell in cells for part in cell.split(",")]
    assert [LEVEL[name] for name in named] == sorted(LEVEL[name] for name in named)
    assert set(named) == set(LEVEL)


def test_top_level():
    top = {p.parts[0] for p in tracked() if len(p.parts) > 1}
    assert top <= TOP_FOLDERS, f"new top-level folders: {sorted(top - TOP_FOLDERS)}"
    loose = {p.parts[0] for p in tracked() if len(p.parts) == 1}
    assert loose <= TOP_FILES, f"new top-level files: {sorted(loose - TOP_FILES)}"


def test_tests_mirror_the_rooms():
    rooms = set(LEVEL) | {"gpu", "rocm", "emulator", "data", "packaging"}
    folders = {p.parts[1] for p in tracked() if p.parts[0] == "tests" and len(p.parts) > 2}
    assert folders <= rooms, f"test folders without a room: {sorted(folders - rooms)}"


def test_files_stay_short():
    kinds = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".hip", ".cmake", ".sh"}
    folders = {"src", "cpp", "cuda", "rocm", "cmake", "tests", "benchmarks"}
    long = {}
    for path in tracked():
        if path.suffix in kinds and path.parts[0] in folders and (ROOT / path).exists():
            lines = (ROOT / path).read_text(errors="replace").count("\n")
            if lines > MAX_LINES:
                long[str(path)] = lines
    assert not long, f"files above {MAX_LINES} lines: {long}"


def test_test_data_stays_small():
    total = sum((ROOT / p).stat().st_size for p in tracked() if p.parts[:2] == ("tests", "data") and (ROOT / p).exists())
    assert total < 2_000_000, f"tests/data holds {total} bytes"


def run(code: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_lazy():
    assert run("import sys, exl3; print(sorted({'torch', 'numpy', 'transformers', 'exl3._native'} & set(sys.modules)))") == "[]"
    assert run("import exl3; print(exl3.Exl3Error.__name__, exl3.settings.get('EXL3_STEP', environ={}))") == "Exl3Error None"


def test_import_is_quick():
    """Under 0.3 s of processor time, so that a busy machine does not count; the best of five tries in fresh processes."""
    code = "import time; t = time.process_time(); import exl3; print(time.process_time() - t)"
    assert min(float(run(code)) for _ in range(5)) < 0.3


def test_rooms_import_alone():
    """Each room can be the first one imported: no hidden circles. One process has torch ready and forks for each."""
    rooms = [r for r in sorted(LEVEL, key=LEVEL.__getitem__) if any(room_of(p) == r for p in files())]
    rooms = [r for r in rooms if r not in ("serve", "integrations")]  # need optional packages
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    code = f"""
import importlib, os, torch
for room in {rooms!r}:
    child = os.fork()
    if not child:
        try:
            importlib.import_module("exl3." + room)
        except BaseException as e:
            print(room, repr(e), flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""
    assert run(code) == ""


def test_public_names_resolve():
    code = """
import exl3
for name in exl3.__all__:
    try:
        getattr(exl3, name)
    except Exception as e:
        print(name, repr(e))
"""
    assert run(code) == ""
