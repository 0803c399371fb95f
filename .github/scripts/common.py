"""What the packaging scripts share: commands that are shown, environments of their own, the zig compiler as a manylinux toolchain."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".whl"  # everything the scripts make, but for finished wheels


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Runs a command, showing it; a failure ends the script with the command's status."""
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, env=env, cwd=cwd or ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed with status {done.returncode}")


def platform() -> str:
    """This machine in the words of matrix.toml."""
    return {"linux": "linux", "win32": "windows"}.get(sys.platform, sys.platform) + "_" + sysconfig.get_platform().rsplit("-", 1)[-1]


def library_name(backend: str) -> str:
    return f"exl3_{backend}.dll" if sys.platform == "win32" else f"libexl3_{backend}.so"


def tools(requirements: str) -> Path:
    """The Python of a virtual environment under .whl with the hashed packages of .github/requirements/<requirements>.txt."""
    listed = ROOT / ".github/requirements" / f"{requirements}.txt"
    folder = WORK / f"{requirements}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != listed.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes", "-r", str(listed)])
        stamp.write_text(listed.read_text())
    return python


def zig_compilers(python: Path, glibc: str) -> dict[str, str]:
    """CC and CXX that compile and link for glibc `glibc` ("2.28") whatever this machine has: wrappers around PyPI's ziglang."""
    folder = WORK / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    machine = platform().split("_", 1)[1]
    out = {}
    for variable, verb in (("CC", "cc"), ("CXX", "c++")):
        wrapper = folder / f"zig-{verb}"
        # zig turns evex512 off for its baseline processor, and -mavx512f does not bring it back
        avx512 = 'case " $* " in *" -mavx512f "*) set -- "$@" -mevex512;; esac'
        wrapper.write_text(f'#!/bin/sh\n{avx512}\nexec "{python}" -m ziglang {verb} -target {machine}-linux-gnu.{glibc} "$@"\n')
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        out[variable] = str(wrapper)
    return out


def environment(python: Path, **more: str) -> dict[str, str]:
    """The environment of a build: the tools' scripts first on the path, a fixed date in archives."""
    env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if "SOURCE_DATE_EPOCH" not in env:
        done = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
        env["SOURCE_DATE_EPOCH"] = done.stdout.strip() or "1735689600"
    return env | more
