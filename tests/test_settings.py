"""The table of environment variables: complete, typed, in step with its document and with the code that reads it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from exl3 import settings
from exl3.errors import ArgumentError

ROOT = Path(__file__).parent.parent
DOCUMENTED = dict(line.split("\t") for line in (ROOT / "tests/data/exllamav3_variables.tsv").read_text().splitlines())


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("EXL3_", "EXLLAMA"))}
    base["PYTHONPATH"] = str(ROOT / "src")
    return subprocess.run([sys.executable, "-c", code], env=base | environ, capture_output=True, text=True, timeout=60)


def test_every_documented_variable_has_a_row():
    assert len(DOCUMENTED) == 124
    assert sorted(set(DOCUMENTED) - set(settings.TABLE)) == []


@pytest.mark.parametrize("name", [n for n, default in DOCUMENTED.items() if default])
def test_defaults_are_the_documented_ones(name):
    """On CUDA, read with the row's own type."""
    setting, documented = settings.TABLE[name], DOCUMENTED[name]
    default = setting.default_for("cuda")
    if name == "EXL3_INT8_GEMV":  # ours starts with the precise mode
        assert (default, documented) == ("1", "2")
    elif documented in ("unset", "auto"):
        assert default is None or default is False
    else:
        assert default == setting.parse(documented)


def test_defaults_per_backend():
    """The documentation's table of what differs on ROCm."""
    differ = {"EXL3_QKV_SLICE": (1, 0), "EXL3_INT8_GEMV": ("1", "0"), "EXL3_MOE_FUSED_ROWS": (128, 512), "EXL3_MOE_BATCH_RECON": (1, 0)}
    differ |= {"EXL3_MOE_MTILE": (1, 0), "EXL3_HC_FOLD": (0, 1), "EXL3_GRAPHS": (1, 0)}
    for name, setting in settings.TABLE.items():
        cuda, rocm = setting.default_for("cuda"), setting.default_for("rocm")
        assert (cuda, rocm) == differ[name] if name in differ else cuda == rocm, name


def test_document_is_in_step():
    assert (ROOT / "docs/env_vars.md").read_text() == settings.markdown(), "run python -m exl3.settings > docs/env_vars.md"


def test_rows_are_sound():
    for setting in settings.TABLE.values():
        choices = setting.kind.split("|")
        assert setting.kind in settings.KINDS or len(choices) > 1, setting.name
        assert setting.status in ("works", "not yet", "not applicable")
        assert bool(setting.why) == (setting.status != "works"), f"{setting.name}: a reason where and only where it has no effect"
        for backend in settings.BACKENDS:
            default = setting.default_for(backend)
            expected = {"flag": bool, "one": bool, "present": bool, "int": int, "float": float}.get(setting.kind)
            assert default is None or expected is None or type(default) is expected, setting.name
            if len(choices) > 1 and default is not None:
                assert default in choices


def sources() -> dict[str, str]:
    rooms = ("src/exl3", "cpp", "cuda", "rocm", "cmake", "CMakeLists.txt")
    listed = subprocess.run(["git", "ls-files", "-z", *rooms], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    else:  # a source archive
        found = [p for room in rooms for p in (ROOT / room).rglob("*") if p.is_file()]
    kinds = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".hip", ".cmake", ".txt"}
    return {str(p.relative_to(ROOT)): p.read_text(errors="replace") for p in found if p.suffix in kinds and p.name != "settings.py"}


def test_status_is_what_the_code_does():
    """A variable that works is read somewhere; one that does not is read nowhere."""
    text = "\n".join(sources().values())
    by_others = {"CUDAHOSTCXX", "PYTORCH_CUDA_ALLOC_CONF", "EXLLAMA_NOCOMPILE"}  # CMake, PyTorch, scikit-build-core by pyproject.toml
    read = {n for n in settings.TABLE if re.search(rf"""(get|getenv|environ\[|env|setdefault)\(?\s*["']{re.escape(n)}["']""", text)}
    read |= {n for n in settings.TABLE if re.search(rf"""settings\.\w+\(\s*["']{re.escape(n)}["']""", text)}
    read |= {n for n in settings.TABLE if re.search(rf"""\$ENV{{{re.escape(n)}}}|exl3_from_environment\({re.escape(n)} """, text)}  # CMake
    if re.search(r"\bdebug_log\(", text):
        read.add("EXLLAMA_DEBUGLOG_<CATEGORY>")
    works = {n for n, s in settings.TABLE.items() if s.status == "works"} - by_others
    assert sorted(works - read) == [], "said to work, but nothing reads them"
    assert sorted(read - works) == [], "read by code, but not said to work"


def test_every_variable_the_code_reads_has_a_row():
    for path, text in sources().items():
        for name in re.findall(r"""(?:getenv|environ\.get|environ|settings\.get)[(\[]\s*["']((?:EXL3|EXLLAMA)\w+)["']""", text):
            assert name in settings.TABLE or name.startswith("EXL3_TEST_"), f"{path} reads {name}"


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("EXL3_GRAPHS", "0", False),
        ("EXL3_GRAPHS", "1", True),
        ("EXL3_GRAPHS", "off", True),  # as documented: anything but 0
        ("EXL3_GRAPHS", " 0 ", False),
        ("EXL3_MOE_CPU_FRACTIONAL_SWIZZLE", "1", True),
        ("EXL3_MOE_CPU_FRACTIONAL_SWIZZLE", "2", False),
        ("EXL3_MOE_CPU_FRACTIONAL_SWIZZLE", "yes", False),
        ("EXL3_DSA_DEBUG_BOUNDS", "true", False),
        ("EXLLAMA_NO_P2P_COPY", "0", False),
        ("EXLLAMA_NO_P2P_COPY", "1", True),
        ("EXL3_HGEMM_F16ACC", "auto", None),
        ("EXL3_MOE_HANDOFF_PROF", "0", True),
        ("EXL3_MOE_HANDOFF_PROF", "", True),
        ("EXL3_HOST_MEM_RESERVE_MB", "512", 512),
        ("EXL3_HOST_MEM_RESERVE_MB", "0", 0),
        ("EXL3_HOST_MEM_RESERVE_MB", "-5", 0),
        ("EXL3_QC_STAGING_PAGES", "0", 1),  # clamps to one page
        ("EXL3_MOE_RECON_PAD", "1.25", 1.25),
        ("EXL3_CPU_MAX_ISA", "AVX2", "avx2"),
        ("TORCH_CUDA_ARCH_LIST", "8.0, 9.0a,", ["8.0", "9.0a"]),
        ("EXLLAMA_MASTER_ADDR", "10.0.0.1", "10.0.0.1"),
        ("EXL3_GRAPHS", "", True),  # empty is unset
        ("EXL3_HOST_MEM_RESERVE_MB", "", 2048),
    ],
)
def test_values(name, text, value):
    got = settings.get(name, "cuda", {name: text})
    assert got == value and type(got) is type(value)


def test_defaults_without_environment():
    assert settings.get("EXL3_GRAPHS", "cuda", {}) is True
    assert settings.get("EXL3_GRAPHS", "rocm", {}) is False
    assert settings.get("EXL3_GRAPHS", environ={}) is False
    assert settings.get("EXL3_STEP", environ={}) is None


def test_reads_the_environment_of_now(monkeypatch):
    monkeypatch.setenv("EXL3_HOST_MEM_RESERVE_MB", "17")
    assert settings.get("EXL3_HOST_MEM_RESERVE_MB") == 17
    assert settings.changed()["EXL3_HOST_MEM_RESERVE_MB"] == "17"
    monkeypatch.delenv("EXL3_HOST_MEM_RESERVE_MB")
    assert settings.get("EXL3_HOST_MEM_RESERVE_MB") == 2048


@pytest.mark.parametrize(
    "name, text, says",
    [
        ("EXL3_HOST_MEM_RESERVE_MB", "2GB", "EXL3_HOST_MEM_RESERVE_MB='2GB': not a whole number"),
        ("EXL3_MOE_RECON_PAD", "x", "not a number"),
        ("EXL3_CPU_MAX_ISA", "sse", "scalar, avx2"),
        ("EXL3_STEP", "fast", "tape, graph, eager"),
    ],
)
def test_bad_texts(name, text, says):
    with pytest.raises(ArgumentError, match=says):
        settings.get(name, environ={name: text})


def test_unknown_names():
    with pytest.raises(ArgumentError, match="did you mean EXL3_GRAPHS"):
        settings.get("EXL3_GRAPH")
    with pytest.raises(ArgumentError, match="tpu"):
        settings.get("EXL3_GRAPHS", "tpu")


def test_unused():
    environ = {"EXL3_GRAPHS": "0", "EXL3_BC_ATTN": "1", "EXL3_HOST_MEM_RESERVE": "1", "EXLLAMA_DEBUGLOG_TP": "", "EXLLAMA_OTHER": "1"}
    environ |= {"TORCH_CUDA_ARCH_LIST": "9.0", "XDG_CACHE_HOME": "/x", "HOME": "/"}
    found = settings.unused(environ)
    assert sorted(found) == ["EXL3_BC_ATTN", "EXL3_HOST_MEM_RESERVE", "EXLLAMA_OTHER"]
    assert "not applicable" in found["EXL3_BC_ATTN"] and "EXL3_GRAPHS" in found["EXL3_BC_ATTN"]
    assert "did you mean EXL3_HOST_MEM_RESERVE_MB" in found["EXL3_HOST_MEM_RESERVE"]


def test_warns_once_by_name(monkeypatch):
    monkeypatch.setattr(settings, "_warned", set())
    monkeypatch.setenv("EXL3_MLA_PREFILL", "absorbed")
    with pytest.warns(RuntimeWarning, match="EXL3_MLA_PREFILL has no effect: not yet"):
        settings.warn_unused()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.warn_unused()


def test_first_import_of_a_room_warns_and_import_exl3_does_not():
    quiet = python("import exl3", EXL3_QC_ATTN="1")
    assert quiet.returncode == 0 and quiet.stderr == ""
    loud = python("import exl3.ops, exl3.files, exl3.settings", EXL3_QC_ATTN="1")
    assert loud.returncode == 0, loud.stderr
    assert loud.stderr.count("EXL3_QC_ATTN has no effect") == 1
    assert python("import exl3.ops").stderr == ""


def test_loads_no_torch():
    done = python("import sys, exl3.settings; assert not {'torch', 'numpy', 'exl3._native'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_module_prints_the_document():
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-m", "exl3.settings"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == settings.markdown() and done.stderr == ""


def test_debug_log(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    settings.debug_log("quiet").debug("nothing")
    assert stream.getvalue() == ""
    monkeypatch.setenv("EXLLAMA_DEBUGLOG_LOADER", "")
    for _ in range(2):
        settings.debug_log("loader").debug("read %d tensors", 5)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2, lines
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} exl3\.debug\.loader: read 5 tensors", lines[0])
