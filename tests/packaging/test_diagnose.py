"""What exl3 says on machines where it cannot run, or where a GPU would stay unused: one sentence, one pip line, no raw loader error."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from exl3 import diagnose
from exl3.diagnose import Facts, findings

ROOT = Path(__file__).parents[2]
FINE = Facts(version="0.1.0", torch="2.9.0", libraries=frozenset({"cpu"}), natives=("_native.so",), glibc=(2, 36))
CUDA = replace(FINE, torch_cuda="13.0", libraries=frozenset({"cpu", "cuda"}))


def only(facts: Facts) -> diagnose.Finding:
    found = findings(facts)
    assert len(found) == 1, found
    return found[0]


def test_nothing_to_say():
    assert findings(FINE) == []
    assert findings(replace(CUDA, label="cu130", card="nvidia", driver_cuda=(13, 0))) == []
    assert findings(replace(CUDA, torch_cuda=None)) == [], "PyPI's wheel on a machine without a card"
    assert findings(replace(CUDA, label="cu128", torch_cuda="12.8", card="nvidia", driver_cuda=(12, 4))) == []  # one major version
    assert findings(replace(CUDA, libraries=frozenset({"cpu", "cuda", "rocm"}), card="nvidia", driver_cuda=(13, 0))) == []
    rocm = replace(FINE, torch_hip="6.4.1", label="rocm6.4", libraries=frozenset({"cpu", "rocm"}), card="amd")
    assert findings(rocm) == []


@pytest.mark.parametrize(
    "facts, level, words",
    [
        (replace(FINE, torch=None), "error", ["needs torch", "not installed", "pip install 'torch>=2.6'"]),
        (replace(FINE, torch="2.5.1+cu121"), "error", ["2.5.1", "pip install --upgrade 'torch>=2.6'"]),
        (replace(FINE, torch="1.13.1"), "error", ["1.13.1"]),
        (replace(FINE, glibc=(2, 17)), "error", ["glibc 2.17", "2.28", "--no-binary exl3"]),
        (replace(FINE, native=False, natives=("_native.cpython-310-x.so",)), "error", ["another Python", "cpython-310"]),
        (replace(FINE, natives=()), "note", ["plain torch"]),
        (replace(CUDA, torch_cuda=None, label="cu128"), "warning", ["+cu128", "CPU alone", "whl/cu128"]),
        (replace(CUDA, torch_cuda=None, card="nvidia"), "warning", ["NVIDIA card", "whl/cu130"]),
        (replace(FINE, torch_cuda="12.6", card="nvidia"), "warning", ["CUDA 12.6", "CPU kernels only", "exl3==0.1.0+cu126", "/cu126"]),
        (replace(FINE, torch_cuda="12.9", card="nvidia"), "warning", ["exl3==0.1.0+cu128"]),
        (replace(FINE, torch_cuda="13.2", card="nvidia", label="cpu"), "warning", ["exl3==0.1.0+cu130"]),
        (replace(FINE, torch_cuda="12.4", card="nvidia"), "warning", ["CUDA 12.4", "whl/cu126"]),
        (replace(FINE, torch_cuda="12.8"), "note", ["CPU kernels only"]),
        (replace(CUDA, card="nvidia", driver_cuda=(0, 0)), "warning", ["driver"]),
        (replace(CUDA, driver_cuda=(0, 0)), "note", ["driver"]),
        (replace(CUDA, card="nvidia", driver_cuda=(12, 8)), "warning", ["serves CUDA 12.8", "CUDA 13", "+cu126"]),
        (replace(CUDA, torch_cuda=None, torch_hip="6.4.43482"), "warning", ["ROCm 6.4", "exl3==0.1.0+rocm6.4"]),
        (replace(FINE, torch_hip="7.1.0", card="amd"), "warning", ["ROCm 7.1", "exl3==0.1.0+rocm7'"]),
        (replace(FINE, label="rocm7", libraries=frozenset({"cpu", "rocm"})), "warning", ["AMD", "CPU alone", "whl/rocm7.0"]),
        (replace(CUDA, label="rocm7", libraries=frozenset({"cpu", "rocm"})), "warning", ["AMD", "built for CUDA 13.0"]),
        (
            replace(FINE, torch_hip="6.4.1", libraries=frozenset({"cpu", "rocm"}), card="amd", card_open=False),
            "warning",
            ["/dev/kfd", "usermod -aG render"],
        ),
        (replace(CUDA, libraries=frozenset({"cpu", "rocm"}), card="amd"), "warning", ["AMD kernels", "CUDA 13.0", "whl/rocm7.0"]),
        (replace(FINE, libraries=frozenset({"cpu", "rocm"})), "note", ["AMD kernels", "CPU alone", "whl/rocm7.0"]),
        (replace(CUDA, libraries=frozenset({"cpu", "rocm"}), card="nvidia"), "warning", ["CUDA 13.0", "CPU kernels only"]),
        (replace(CUDA, card="amd", driver_cuda=(0, 0)), "note", ["AMD card is here", "whl/rocm7.0", "exl3==0.1.0+rocm7"]),
    ],
)
def test_one_sentence_and_the_cure(facts, level, words):
    finding = only(facts)
    assert finding.level == level
    assert all(word in finding.text for word in words), finding.text
    assert "\n" not in finding.text


def test_torch_missing_hides_the_rest():
    assert [f.level for f in findings(replace(CUDA, torch=None, torch_cuda=None, label="cu130", card="nvidia"))] == ["error"]


@pytest.mark.parametrize(
    "said, word",
    [
        ("/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.28' not found (required by _native.so)", "glibc 2.28"),
        ("libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "C++ library"),
        ("_native.so: undefined symbol: _ZN3c1011abi", "different versions"),
        ("DLL load failed: The specified procedure could not be found.", "different versions"),
        ("cannot import name '_native' from 'exl3'", "missing for this Python"),
    ],
)
def test_loader_errors_become_sentences(said, word):
    text = diagnose.native_failure(said)
    assert word in text and "pip install" in text
    assert "_ZN" not in text and "undefined symbol" not in text and "\n" not in text


def test_a_card_this_user_may_not_open(tmp_path, monkeypatch):
    device = tmp_path / "kfd"
    monkeypatch.setattr(diagnose, "KFD", device)
    assert diagnose.facts().card_open
    device.touch()
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    assert not diagnose.facts().card_open and (device, os.R_OK | os.W_OK) in asked


def test_the_same_wheel_again(monkeypatch):
    """PyPI's wheel has no AMD kernels: whoever has a labelled one is told to install that again."""
    monkeypatch.setattr(diagnose, "_label", lambda: "rocm7")
    for said in ("libexl3_rocm.so: file too short", "undefined symbol: x", "cannot import name '_native' from 'exl3'"):
        assert "exl3==0.1.0+rocm7'" in diagnose.native_failure(said)
    assert (
        "exl3==0.1.0+rocm7'"
        in only(replace(FINE, torch_hip="7.0", label="rocm7", libraries=frozenset({"rocm"}), card="amd", natives=())).text
    )


def python(code: str, *paths: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | environ
    env["PYTHONPATH"] = os.pathsep.join(map(str, [*paths, ROOT / "src"]))
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


NO_TORCH = "import sys\nclass H:\n def find_spec(self, n, p=None, t=None):\n  if n == 'torch': raise ModuleNotFoundError(n)\n"


def test_import_without_torch():
    """`import exl3` warns and works, a name that needs torch raises with the same sentence, and nothing shows a traceback of torch's."""
    done = python(NO_TORCH + "sys.meta_path.insert(0, H())\nimport exl3\nprint(exl3.settings.get('EXL3_STEP', environ={}))\nexl3.load")
    assert done.returncode == 1 and done.stdout.strip() == "None"
    assert done.stderr.count("exl3 needs torch") == 2
    assert "exl3.errors.BackendError: exl3 needs torch, which is not installed in this Python: pip install 'torch>=2.6'" in done.stderr


def old_torch(folder: Path, version: str) -> Path:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    (folder / "torch/version.py").write_text(f"__all__ = []\n__version__ = '{version}'\ndebug = False\ncuda: str = '11.7'\nhip = None\n")
    return folder


def test_import_with_an_old_torch(tmp_path):
    """Torch itself is not imported to find out."""
    done = python("import exl3\ntry:\n exl3.Model\nexcept exl3.Exl3Error as e: print(e)", old_torch(tmp_path, "2.5.1+cu117"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "exl3 needs torch 2.6 or newer and found 2.5.1+cu117: pip install --upgrade 'torch>=2.6'"
    assert "_ZN" not in done.stderr


def test_doctor_tells_too(tmp_path):
    code = "from exl3.cli.doctor import report\nimport json\nr = report()\nprint(json.dumps(r))"
    done = python(code, old_torch(tmp_path, "2.4.0"))
    assert done.returncode == 0, done.stderr
    assert '"ok": false' in done.stdout and "needs torch 2.6" in done.stdout


def test_rows_and_index_are_the_matrix_s(matrix):
    """The package repeats the few rows it names in its messages; the release matrix is where they come from."""
    table = matrix.load()
    assert diagnose.INDEX == table["index"]
    assert tuple(map(int, table["torch_floor"].split("."))) == diagnose.TORCH_FLOOR
    assert tuple(map(int, table["manylinux"].split("_"))) == diagnose.GLIBC_FLOOR
    assert set(diagnose.ROWS) == {row["label"] for row in table["rows"]} - {"cpu"}
    for label, low in diagnose.ROWS.items():
        if label.startswith("cu"):
            assert ".".join(map(str, low)) == table["kernels"][label]["toolkit"]


def test_this_python_s_native_module_is_recognised(tmp_path, monkeypatch):
    (tmp_path / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    (tmp_path / "libexl3_cpu.so").write_bytes(b"")
    (tmp_path.parent / "exl3-0.1.0+cu128.dist-info").mkdir(exist_ok=True)
    monkeypatch.setattr(diagnose, "PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    found = diagnose.facts()
    assert found.native and found.libraries == {"cpu"} and found.label == "cu128"
