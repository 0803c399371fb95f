"""Faults planted in the AMD kernels' own source: the checks that pass on the right source must find each of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, Library, exact_weight, random_weight, relative
from test_portable import make_batch, make_cache

from exl3.ops import reference

STAGED = r"    shared_sync\(\);\n"
# what is wrong: (file, pattern, its first match's replacement, layout)
FAULTS = {
    "product: no barrier behind the first stage": ("product.h", r"  shared_sync\(\);\n", "", 11),
    "product: no barrier between stages": ("product.h", STAGED, "", 12),
    "product: halves of a wave not exchanged": ("product.h", r"v\[4 \+ i\] = half \? mine\[i\] : other", "v[4 + i] = mine[i]", 11),
    "product: rows of RDNA4 on RDNA3": ("rdna.h", r"return GPU_WMMA == 12 \? \(lane_id", "return GPU_WMMA == 11 ? (lane_id", 11),
    "product: rows of RDNA3 on RDNA4": ("rdna.h", r"return GPU_WMMA == 12 \? \(lane_id", "return GPU_WMMA == 11 ? (lane_id", 12),
    "product: another order of rows in a tile": ("decode.h", r"4 \* \(\(r & 7\) >> 1\)", "4 * (3 - ((r & 7) >> 1))", 11),
    "product: counter not cleared": ("product.h", r"if \(thread_id\(\) == 0\) \*counter = 0;", "", 11),
    "prefill: no barrier behind the staging": ("prefill.h", STAGED, "", 11),
    "prefill: no barrier before the staging": ("prefill.h", r"    shared_sync\(\);  //[^\n]*\n", "", 12),
    "prefill: weights read before other lanes wrote them": ("prefill.h", r"    wave_sync\(\);\n", "", 11),
    "attention: no barrier before the merge": ("attention.h", r"  shared_sync\(\);\n", "", 11),
    "attention: exchange in half of a warp": ("attention.h", r"float s = warp_sum", "float s = lane >= 16 ? score[q][j] : warp_sum", 11),
    "rotation: a barrier that one warp leaves out": (
        "product.h",
        r"  block_sync\(\);\n  if \(lane",
        "  if (warp_id()) block_sync();\n  if (lane",
        11,
    ),
}


def few_kernels(folder: Path, layout: int, host: Path) -> Path:
    """A library of five kernels from the source in `folder`/rocm, and its runtime beside it."""
    runtime = folder / "mock.so"
    flags = [
        "g++",
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-shared",
        "-w",
        "-fvisibility=hidden",
        "-fno-gnu-unique",
        f"-DGPU_WMMA={layout}",
        "-DMOCK_FEW",
    ]
    includes = [f"-I{ROOT / 'cpp' / 'include'}", f"-I{ROOT / 'cpp'}", f"-I{folder / 'rocm'}"]
    subprocess.run([*flags, *includes, str(ROOT / "tests" / "emulator" / "mock_hip.cpp"), "-o", str(runtime)], check=True)
    shutil.copy(host, folder / "library.so")
    return folder / "library.so"


def check(library: Path) -> None:
    """Products of few and many rows, attention of few and many tokens; raises where one is wrong."""
    lib = Library(library, "cpu")
    torch.manual_seed(0)
    w = random_weight(256, 128, 4, "mul1", "cpu")
    for rows in (2, 20):
        x = torch.randn(rows, 256)
        assert relative(lib.linear(x, [w], dtype=torch.float32)[0], x.double() @ exact_weight(w)) < 1e-3
        assert lib.clean("linear")
    c = make_cache(lib, 1, 64, 16, 4)
    full = make_batch(lib, [(0, 70), (0, 40)], padding=0)
    k, v = (torch.randn(len(full.positions), 1, 64).half() for _ in range(2))
    reference.cache_append(c, k, v, full)
    for rows in ([(69, 1), (39, 1)], [(6, 64), (39, 1)]):
        b = make_batch(lib, rows, padding=0)
        q = torch.randn(len(b.positions), 2, 64).half()
        assert relative(lib.attention(q, c, b, scale=0.125), reference.attention(q.float(), c, b, scale=0.125)) < 2e-3


def checked(folder: Path, layout: int, host: Path) -> subprocess.CompletedProcess[str]:
    """`check` in a process of its own: the emulator ends the program at a divergent barrier or exchange."""
    library = few_kernels(folder, layout, host)
    paths = [str(ROOT / "tests" / "rocm"), str(ROOT / "tests" / "gpu"), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}\nfrom pathlib import Path\nimport test_rocm_faults as t\nt.check(Path({str(library)!r}))"
    environment = {"EXL3_HIP_LIB": str(folder / "mock.so"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("layout", [11, 12])
def test_right_source_passes(layout: int, tmp_path: Path, rocm_file: Path) -> None:
    shutil.copytree(ROOT / "rocm", tmp_path / "rocm")
    done = checked(tmp_path, layout, rocm_file)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: str, tmp_path: Path, rocm_file: Path) -> None:
    name, pattern, replacement, layout = FAULTS[fault]
    shutil.copytree(ROOT / "rocm", tmp_path / "rocm")
    source = (tmp_path / "rocm" / name).read_text()
    changed, count = re.subn(pattern, replacement, source, count=1)
    assert count == 1, f"the source no longer holds {pattern}"
    (tmp_path / "rocm" / name).write_text(changed)
    done = checked(tmp_path, layout, rocm_file)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr or "emulator:" in done.stderr, done.stderr
