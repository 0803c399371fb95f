"""Compiles one kernel library of the matrix: no Python, no torch in it.

    python .github/scripts/build_kernels.py cpu --out prebuilt           # in a manylinux container, or on Windows: the machine's compiler
    python .github/scripts/build_kernels.py cu130 --out prebuilt --zig   # on any Linux: zig links for the glibc floor
    ... --archs "80 90a"                                                 # other architectures than the matrix says

The folder then goes to EXL3_PREBUILT. CUDA needs nvcc of the row's toolkit, ROCm clang 22. Under --zig nvcc compiles with g++, and zig
links.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import common
import matrix


def build(kernel: str, out: Path, zig: bool = False, archs: str = "") -> Path:
    """Path of the finished library."""
    table = matrix.load()
    entry = table["kernels"][kernel]
    backend = entry["backend"]
    python = common.tools("build")
    env = common.environment(python)
    options = [f"-DEXL3_BACKENDS={backend}", "-DEXL3_BINDINGS=OFF", "-DCMAKE_BUILD_TYPE=Release", "-DEXL3_PREBUILT="]
    if zig:
        env |= common.zig_compilers(common.tools("wheel"), table["manylinux"].replace("_", "."))
        env.setdefault("CUDAHOSTCXX", "g++")
    wanted = archs.replace(",", " ").split() or entry.get("archs", [])
    if backend == "cuda":
        options.append(f"-DEXL3_CUDA_ARCHS={';'.join(wanted)}")
        env["EXLLAMA_EXT_COMPRESS"] = env.get("EXLLAMA_EXT_COMPRESS") or entry["compress"]
        if zig:
            options.append("-DEXL3_CUDA_LINKER=CXX")
    elif backend == "rocm":
        options.append(f"-DEXL3_ROCM_ARCHS={';'.join(wanted)}")
    folder = common.WORK / f"kernels-{kernel}{'-zig' if zig else ''}"
    started = time.monotonic()
    common.run(["cmake", "-S", str(common.ROOT), "-B", str(folder), "-G", "Ninja", *options], env)
    common.run(["cmake", "--build", str(folder), "--parallel", os.environ.get("MAX_JOBS") or str(os.cpu_count())], env)
    common.run(["cmake", "--install", str(folder), "--component", "runtime", "--prefix", str(out.resolve()), "--strip"], env)
    library = out / common.library_name(backend)
    print(f"{library}: {library.stat().st_size / 1e6:.2f} MB, built in {time.monotonic() - started:.0f} s")
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", choices=list(matrix.load()["kernels"]))
    parser.add_argument("--out", type=Path, default=Path("prebuilt"))
    parser.add_argument("--zig", action="store_true")
    parser.add_argument("--archs", default="")
    options = parser.parse_args()
    build(options.kernel, options.out, options.zig, options.archs)


if __name__ == "__main__":
    main()
