"""Static limits on the real AMD machine code: no spills or scratch, registers, shared memory, the instructions each kernel is about."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from code_objects import Kernel, read, tables, tool
from harness import ROOT, Library

FOLDER = Path(os.environ.get("EXL3_TEST_ROCM_BUILD", ROOT / "build" / "rocm" / "rocm"))
OBJECTS = sorted(FOLDER.glob("kernels.*.co"))
RATES = [("mul1", k2) for k2 in (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)] + [("pair", k2) for k2 in (2, 4, 6, 8, 10, 12, 14, 16)]

pytestmark = pytest.mark.skipif(not OBJECTS or tool("llvm-readelf") is None, reason="needs a ROCm build in build/rocm and llvm-22")
every = pytest.mark.parametrize("path", OBJECTS or [Path("none.none.co")], ids=lambda p: p.name.split(".")[1])


@cache
def kernels(path: Path) -> dict[str, Kernel]:
    return read(path)


@every
def test_limits(path: Path) -> None:
    found = kernels(path)
    assert len(found) == 15 + 5 + 3 + 5 * len(RATES)
    for k in found.values():
        assert (k.spills, k.scratch, k.wave) == (0, 0, 32), k.name
        assert k.shared <= 64 * 1024, k.name
        # waves a SIMD that hide the latency of memory (of 1024 registers a lane): eight for products of few rows, four for prefill
        assert k.vgprs <= (128 if "gemv" in k.name else 256 if "prefill" in k.name else 192), k.name
        if k.name != "k_sample":  # its scans name lanes at run time, a few times a row
            assert not k.count("ds_bpermute"), f"{k.name}: an exchange of lanes goes through shared memory"


@every
def test_instructions_needed(path: Path) -> None:
    found = kernels(path)
    matrix = "gfx10" not in path.name
    for dim in (64, 128, 256):
        assert matrix == bool(found[f"k_prefill_{dim}"].count("v_wmma_f32_16x16x16_f16"))
    for kind, k2 in RATES:
        gemm, gemv = found[f"k_gemm_{kind}_{k2}"], found[f"k_gemv_{kind}_{k2}_1"]
        if matrix:
            assert gemm.count("v_wmma_f32_16x16x16_f16") == 8 and gemm.count("ds_load_b128") >= 4
        else:
            assert gemm.count("v_dot2") >= 64 * 8
        loop = gemv.hot_loop("dot2")
        assert not any(t.startswith(("v_mul_lo_u32", "ds_", "flat_", "scratch_")) for t in loop)
        # rotated activations come once a wave, weights in pieces of 16 bytes where a lane has that many
        assert any(t.startswith("s_load") for t in loop) and not any("u16" in t and t.startswith("global") for t in loop)
        if kind == "mul1":
            assert sum(t.startswith("v_sad") for t in loop) == sum(t.startswith("v_mad_u32_u16") for t in loop)


# vector instructions a weight of the inner loop for one row, counted by hand (docs/rocm.md): window 1, hash 2, byte sum 1, dot product 1/2;
# 3inst and mcg: mask and xor 2 and packed sum about 1.5 in place of the byte sum. The rest aligns words and steps addresses.
@every
@pytest.mark.parametrize("kind,k2", RATES, ids=str)
def test_instructions_a_weight(path: Path, kind: str, k2: int) -> None:
    loop = kernels(path)[f"k_gemv_{kind}_{k2}_1"].hot_loop("dot2")
    weights = 2 * sum(t.count("dot2") for t in loop)
    vector = sum(t.startswith("v_") for t in loop)
    assert weights and vector / weights < (5.8 if kind == "mul1" else 8.8)


def test_documented_counts() -> None:
    """The tables of docs/rocm.md, within what another minor version of the compiler may change."""
    if not all((FOLDER / f"kernels.{name}-generic.co").exists() for name in ("gfx10-3", "gfx11", "gfx12")):
        pytest.skip("needs the three families")

    def numbers(lines: list[str]) -> dict[str, list[float]]:
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line.count("|") == 5]
        return {c[0]: [float(x) for x in c[1:]] for c in cells if c[1].replace(".", "").isdigit()}

    documented = numbers((ROOT / "docs" / "rocm.md").read_text().splitlines())
    found = numbers(tables(FOLDER, kernels))
    assert len(found) == 2 * 6 + len(RATES) + 2 * 3
    for label, counts in found.items():
        assert documented[label] == pytest.approx(counts, abs=0.15), label


def test_size() -> None:
    """Compressed as wheels carry it, or left as it is (EXLLAMA_EXT_COMPRESS=0)."""
    bundle = FOLDER / "kernels.hipfb"
    start = bundle.read_bytes()[:24]
    assert start == b"__CLANG_OFFLOAD_BUNDLE__" or (start[:4] == b"CCOB" and bundle.stat().st_size < 20e6)


def test_the_library_knows_its_code(mock_file: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The finished library finds its bundle whole, and hands it to the runtime."""
    monkeypatch.setenv("EXL3_HIP_LIB", str(mock_file(11)))
    table = Library(FOLDER / "libexl3_rocm.so", "cpu").table
    text = table.describe(0)
    assert text and b"mock card" in text, table.last_error()
    named = {path.name.removeprefix("kernels.").removesuffix(".co") for path in OBJECTS}
    assert set(table.build.decode().split("architectures ")[1].split()) <= named
