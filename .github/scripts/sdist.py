"""The sdist, checked: what must be inside, what must not, and with --test a build from it with this machine's C++ compiler.

python .github/scripts/sdist.py --out dist [--test]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import common
import wheel as wheels

REQUIRED = ["pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "PKG-INFO", "cmake/NOTICES.txt", "cmake/exports.map",
            "cpp/include/exl3/ops.h", "cpp/cpu/CMakeLists.txt", "cpp/bindings/native.cpp", "cuda/CMakeLists.txt", "src/exl3/__init__.py",
            "src/exl3/quantize/data/prose.txt.xz"]  # fmt: skip
STRAY = re.compile(r"\.(so|o|pyc|whl|safetensors|egg-info)$|(^|/)(build|tests|benchmarks|__pycache__|\.git\w*|\.ci|\.whl|\.venv)(/|$)")
LIMIT_MB = 15


def check(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = [m.name.split("/", 1)[1] for m in archive.getmembers() if "/" in m.name and m.isfile()]
    wrong = [f"no {name}" for name in REQUIRED if name not in names] + [f"stray file {n}" for n in names if STRAY.search(n)]
    if sdist.stat().st_size > LIMIT_MB * 1e6:
        wrong.append(f"{sdist.stat().st_size / 1e6:.1f} MB, the limit is {LIMIT_MB}")
    return wrong


def build_from(sdist: Path) -> None:
    """What `pip install exl3` does where no wheel fits: the CPU backend with whatever compiler is there."""
    python = common.tools("build")
    with tempfile.TemporaryDirectory() as folder:
        pip = [str(python), "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder, str(sdist.resolve())]
        common.run(pip, common.environment(python))
        made = next(Path(folder).glob("exl3-*.whl"))
        venv = Path(folder) / "venv"
        common.run([sys.executable, "-m", "venv", str(venv)])
        inside = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        common.run([str(inside), "-m", "pip", "install", "-q", "--no-deps", str(made)])
        done = subprocess.run([str(inside), str(Path(__file__).with_name("smoke.py"))], cwd=folder, check=False)
        if done.returncode:
            raise SystemExit("the build from the sdist does not work")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--test", action="store_true")
    options = parser.parse_args()
    made = wheels.build_sdist(common.tools("build"), options.out)
    if wrong := check(made):
        raise SystemExit("\n".join(wrong))
    print(f"{made}: {made.stat().st_size / 1e6:.2f} MB, as it should be")
    if options.test:
        build_from(made)
