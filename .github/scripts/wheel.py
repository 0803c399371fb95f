"""`make wheel`: a release wheel on this very machine, no container: kernels, sdist, wheel, auditwheel, content check, install test.

    python .github/scripts/wheel.py cpu --out dist                       # for this Python
    python .github/scripts/wheel.py cuda --kernel cu130 --archs "80 90a"
    python .github/scripts/wheel.py cpu --label cpu --no-test

Linux: zig links everything for the glibc floor. CUDA needs nvcc of the kernel's toolkit and g++, ROCm clang 22. Without --label the wheel
carries no local version, as on PyPI. The folder .whl keeps tools and objects; a second run compiles what changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import build_kernels
import common
import label as labels
import matrix

NEWEST = {"cpu": "cpu", "cuda": "cu130", "rocm": "rocm"}


def build_sdist(python: Path, out: Path) -> Path:
    """The sdist of the working tree. Wheels are made from it, so that a file it lacks is noticed and a stray one stays out."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("exl3-*.tar.gz"):
        old.unlink()
    common.run([str(python), "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), "."], common.environment(python))
    return next(out.glob("exl3-*.tar.gz"))


def build_wheel(sdist: Path, backends: str, prebuilt: Path, out: Path) -> Path:
    """The untagged wheel for this Python, native module linked for the glibc floor."""
    table = matrix.load()
    python = common.tools("wheel")
    env = common.environment(python, EXL3_BACKENDS=backends, EXL3_PREBUILT=str(prebuilt.resolve()))
    env |= common.zig_compilers(python, table["manylinux"].replace("_", "."))
    source = common.WORK / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    shutil.unpack_archive(str(sdist), source, filter="data")
    shutil.rmtree(out, ignore_errors=True)
    common.run([
        str(python), "-m", "build", "--wheel", "--no-isolation", "-Cinstall.strip=true",
        f"-Cbuild-dir={common.WORK / 'bind'}/{{wheel_tag}}",
        "--outdir", str(out), str(next(source.iterdir())),
    ], env)  # fmt: skip
    return next(out.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=list(NEWEST))
    parser.add_argument("--kernel", default="", help="kernel library of the matrix (default: cpu, cu130, rocm)")
    parser.add_argument("--archs", default="", help="other GPU architectures than the matrix says")
    parser.add_argument("--label", default="", help="local version label, such as cu130")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--prebuilt", type=Path, default=None, help="finished kernel libraries: compile none")
    parser.add_argument("--torch", default="", help="torch version of the install test (default: the newest pip finds)")
    parser.add_argument("--no-test", action="store_true", help="leave out the install test")
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("make wheel works on Linux; elsewhere `pip wheel .` builds with the machine's own compiler")
    started = time.monotonic()
    kernels = ["cpu"] if options.backend == "cpu" else ["cpu", options.kernel or NEWEST[options.backend]]
    prebuilt = options.prebuilt or common.WORK / ("prebuilt-" + "-".join(kernels))
    if options.prebuilt is None:
        shutil.rmtree(prebuilt, ignore_errors=True)
        for kernel in kernels:
            build_kernels.build(kernel, prebuilt, zig=True, archs=options.archs if kernel != "cpu" else "")
    backends = matrix.backends(matrix.load(), kernels)
    sdist = build_sdist(common.tools("build"), common.WORK / "sdist")
    raw = build_wheel(sdist, backends, prebuilt, common.WORK / "raw")
    if options.label:
        raw = labels.relabel(raw, options.label, common.WORK / "labelled")
    tagged = common.WORK / "tagged"
    shutil.rmtree(tagged, ignore_errors=True)
    common.run([str(common.tools("wheel")), str(Path(__file__).with_name("repair.py")), str(raw), str(tagged)])
    options.out.mkdir(parents=True, exist_ok=True)
    wheel = Path(shutil.copy(next(tagged.glob("*.whl")), options.out))
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB, built in {time.monotonic() - started:.0f} s")
    if not options.no_test:
        command = [sys.executable, str(Path(__file__).with_name("install_test.py")), str(wheel)]
        done = subprocess.run(command + (["--torch", options.torch] if options.torch else []), env=os.environ, check=False)
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
