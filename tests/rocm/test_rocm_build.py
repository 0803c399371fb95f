"""The AMD part of the build, as plain `cmake` configures it without pip, Python packages or ROCm: cards, compression, refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import ROOT

CMAKE = next((found for path in ("/usr/bin", os.environ.get("PATH", "")) if (found := shutil.which("cmake", path=path))), None)
pytestmark = pytest.mark.skipif(
    CMAKE is None or shutil.which("ninja") is None or shutil.which("clang++-22") is None, reason="needs cmake, ninja and clang-22"
)


def configure(folder: Path, archs: str | None, *options: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, output, build.ninja) of a configuration in a bare environment."""
    ninja = shutil.which("ninja")
    assert CMAKE and ninja
    command = [CMAKE, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-DEXL3_BACKENDS=rocm"]
    command += [f"-DEXL3_ROCM_ARCHS={archs}", *options] if archs else [*options]
    bare = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder), **environment}
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    plan = folder / "build.ninja"
    return done.returncode, " ".join((done.stdout + done.stderr).split()), plan.read_text() if plan.exists() else ""


SETS = {
    None: (3, "gfx10-3-generic gfx11-generic gfx12-generic"),
    "quick": (4, "gfx1030 gfx1100 gfx1151 gfx1201"),
    "all": (17, "gfx1153 gfx1200 gfx1201"),
    "quick,gfx11-generic": (5, "gfx1030 gfx1100 gfx1151 gfx1201 gfx11-generic"),
}


@pytest.mark.parametrize("archs", SETS, ids=str)
def test_architectures(archs: str | None, tmp_path: Path) -> None:
    status, output, plan = configure(tmp_path, archs)
    count, names = SETS[archs]
    assert status == 0, output
    assert names in output
    assert plan.count("COMMAND = ") and plan.count("--offload-arch=") == count
    assert plan.count("-compress") > 0 and "COMPRESSED_BUNDLE_FORMAT_VERSION=2" in plan


def test_without_compression(tmp_path: Path) -> None:
    status, output, plan = configure(tmp_path, "gfx1100", EXLLAMA_EXT_COMPRESS="0")
    assert status == 0, output
    assert "-compress" not in plan


REFUSED = {
    "gfx906": "gfx906 runs waves of 64 lanes; exl3's AMD kernels are for RDNA2",
    "gfx1010": "'gfx1010' is none of family, quick, all, gfx1030-1036",
    "gfx1100 rx7900": "'rx7900' is none of family, quick, all",
}


@pytest.mark.parametrize("archs", REFUSED)
def test_refusals(archs: str, tmp_path: Path) -> None:
    status, output, _ = configure(tmp_path, archs)
    assert status != 0 and REFUSED[archs] in output


COMPILERS = {
    "too old": (
        "[ $1 = -dumpversion ] && echo 14.0.6 || { echo \"clang: error: invalid target ID '$3'\" >&2; exit 1; }",
        "14.0.6 can't compile",
    ),
    "no linker": ('exec clang++-22 --ld-path=/nonexistent/ld.lld "$@"', "/nonexistent/ld.lld"),
    "broken": ("exit 3", "does not run"),
}


@pytest.mark.parametrize("kind", COMPILERS)
def test_a_compiler_that_will_not_do(kind: str, tmp_path: Path) -> None:
    """Told at configuration, with what to install; a compiler installed later is found by the next one."""
    script, said = COMPILERS[kind]
    compiler = tmp_path / "clang"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    status, output, _ = configure(tmp_path / "build", "gfx1100", f"-DEXL3_HIP_CLANG={compiler}")
    assert status != 0 and said in output and "apt-get install clang-22 lld-22" in output
    assert str(compiler) not in (tmp_path / "build" / "CMakeCache.txt").read_text()
