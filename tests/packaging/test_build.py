"""What a build reads from its environment. CMake only configures here: finished (empty) libraries stand in for kernels."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("EXL3_", "EXLLAMA", "TORCH_NO", "MAX_JOBS", "CMAKE_")


def environment(**changes: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(OURS)} | changes


@pytest.fixture
def configure(tmp_path):
    if not (shutil.which("cmake") and shutil.which("ninja") and (shutil.which("c++") or os.environ.get("CXX"))):
        pytest.skip("no cmake, ninja or C++ compiler")
    if sys.platform != "linux":
        pytest.skip("library names of Linux")
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    (prebuilt / "libexl3_cpu.so").write_bytes(b"cpu kernels")

    def run(*options: str, **changes: str) -> subprocess.CompletedProcess[str]:
        command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-G", "Ninja", "-DEXL3_BINDINGS=OFF", *options]
        env = environment(**{"EXL3_PREBUILT": str(prebuilt)} | changes)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    return run


def test_prebuilt_libraries_are_taken(configure, tmp_path):
    """No kernel is compiled, the library is installed as it is; the version comes from the package."""
    done = configure("-DCMAKE_INSTALL_PREFIX=" + str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "cpp/cpu" not in (tmp_path / "build/build.ninja").read_text()
    subprocess.run(["cmake", "--install", str(tmp_path / "build"), "--component", "runtime"], check=True, capture_output=True)
    assert (tmp_path / "out/libexl3_cpu.so").read_bytes() == b"cpu kernels"
    version = (ROOT / "src/exl3/__init__.py").read_text().split('__version__ = "')[1].split('"')[0]
    assert f"CMAKE_PROJECT_VERSION:STATIC={version.split('.dev')[0]}" in (tmp_path / "build/CMakeCache.txt").read_text()


def test_the_same_folder_with_another_environment(configure, tmp_path):
    """`pip install .` keeps its folder: what it was told first must not hold for good. Paths may hold spaces."""
    place = tmp_path / "pre built, all"
    place.mkdir()
    for name in ("cpu", "rocm"):
        (place / f"libexl3_{name}.so").write_bytes(b"kernels")
    for backends in ("cpu", "cpu,rocm"):
        done = configure(EXL3_BACKENDS=backends, EXL3_PREBUILT=str(place))
        assert done.returncode == 0, done.stderr
        installed = (tmp_path / "build/cmake_install.cmake").read_text()
        assert ("libexl3_rocm.so" in installed) == ("rocm" in backends) and "libexl3_cpu.so" in installed
    done = configure("-DEXL3_BACKENDS=rocm cpu", EXL3_BACKENDS="cuda", EXL3_PREBUILT=str(place))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"EXL3_BACKENDS": "cpu, cuda"}, "has no libexl3_cuda.so"),
        ({"EXL3_BACKENDS": "cpu;tpu"}, "'tpu' is none of cpu, cuda, rocm"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS='many'"),
        ({"MAX_JOBS": "0"}, "MAX_JOBS='0'"),
    ],
)
def test_the_environment_is_checked(configure, changes, words):
    done = configure(**changes)
    assert done.returncode and words in " ".join(done.stderr.split()), done.stderr


def ninja_files(build: Path) -> str:
    return (build / "CMakeFiles/rules.ninja").read_text() + (build / "build.ninja").read_text()


def test_jobs_and_compiler_cache(configure, tmp_path):
    """MAX_JOBS bounds Ninja's compile pool; ccache on the path stands before the compiler unless TORCH_NO_COMPILER_WRAPPER is set."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    (tools / "ccache").chmod(0o755)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    done = configure("-DEXL3_PREBUILT=", "-DEXL3_BACKENDS=cpu", PATH=path, MAX_JOBS="3")
    assert done.returncode == 0, done.stderr
    rules = ninja_files(tmp_path / "build")
    assert "pool exl3_compile" in rules and "depth = 3" in rules
    cache = "sccache" if shutil.which("sccache", path=path) else str(tools / "ccache")
    assert cache in rules
    shutil.rmtree(tmp_path / "build")
    done = configure("-DEXL3_PREBUILT=", "-DEXL3_BACKENDS=cpu", PATH=path, TORCH_NO_COMPILER_WRAPPER="1")
    assert done.returncode == 0, done.stderr
    assert "ccache" not in ninja_files(tmp_path / "build").replace(str(tools), "")


def test_nocompile(tmp_path):
    """EXLLAMA_NOCOMPILE: a wheel for any Python and platform, with no binary inside, and no compiler called."""
    if importlib.util.find_spec("scikit_build_core") is None or not (ROOT / "README.md").exists():
        pytest.skip("no scikit-build-core here")
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "cmake", copy / "cmake")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "*.dll", "*.pyd", "__pycache__"))
    code = "import sys, scikit_build_core.build as b; print(b.build_wheel(sys.argv[1]))"
    env = environment(EXLLAMA_NOCOMPILE="1", CXX="no-compiler", CC="no-compiler")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=copy, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert wheel.name.endswith("-py3-none-any.whl"), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert "exl3/__init__.py" in names and not [n for n in names if n.endswith((".so", ".pyd", ".dll"))]
