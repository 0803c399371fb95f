"""What a compiled AMD code object says of its kernels: the metadata note (registers, shared memory, spills) and the instructions.

python tests/rocm/code_objects.py build/rocm/rocm     prints the tables of docs/rocm.md: instructions a weight
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def tool(name: str) -> str | None:
    """An LLVM tool that knows AMD code, or None."""
    return next((found for version in ("-22", "-23", "-21", "-20", "-19", "") if (found := shutil.which(name + version))), None)


@dataclass
class Kernel:
    name: str
    vgprs: int
    sgprs: int
    spills: int
    scratch: int
    shared: int
    wave: int
    lines: list[tuple[int, str]]  # (address, instruction)

    def count(self, *starts: str) -> int:
        """Instructions that start with one of `starts`."""
        return sum(text.startswith(starts) for _, text in self.lines)

    def hot_loop(self, marker: str) -> list[str]:
        """The body of the loop without inner loops that holds the most instructions with `marker` in them."""
        loops = []
        for i, (address, text) in enumerate(self.lines):
            jump = re.match(r"s_c?branch\w* (\d+)", text)
            if jump and int(jump[1]) >= 32768:  # backwards
                target = address + 4 + 4 * (int(jump[1]) - 65536)
                loops.append((next(n for n, (a, _) in enumerate(self.lines) if a >= target), i))
        inner = [(a, b) for a, b in loops if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)]
        bodies = [[t for _, t in self.lines[a : b + 1]] for a, b in inner]
        return max(bodies, key=lambda body: sum(marker in t for t in body), default=[])


def read(path: Path) -> dict[str, Kernel]:
    """The kernels of a code object, by name."""
    readelf, objdump = tool("llvm-readelf"), tool("llvm-objdump")
    assert readelf and objdump
    note = subprocess.run([readelf, "--notes", str(path)], capture_output=True, text=True, check=True).stdout
    text = subprocess.run([objdump, "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True).stdout
    code = {m[1]: m[2] for m in re.finditer(r"^[0-9a-f]+ <(\w+)>:\n(.*?)(?=^[0-9a-f]+ <|\Z)", text, re.S | re.M)}
    kernels = {}
    for part in re.split(r"^  - \.args", note, flags=re.M)[1:]:

        def number(field: str, part: str = part) -> int:
            found = re.search(rf"^\s*\.{field}:\s*(\d+)", part, re.M)
            assert found is not None, field
            return int(found[1])

        named = re.search(r"^    \.name:\s*(\S+)", part, re.M)
        assert named is not None
        lines = [(int(m[2], 16), m[1].strip()) for m in re.finditer(r"^\t(.+?)\s*// ([0-9A-F]+):", code[named[1]], re.M)]
        kernels[named[1]] = Kernel(
            named[1], number("vgpr_count"), number("sgpr_count"), number("vgpr_spill_count") + number("sgpr_spill_count"),
            number("private_segment_fixed_size"), number("group_segment_fixed_size"), number("wavefront_size"), lines,
        )  # fmt: skip
    return kernels


# vector instructions of the few-row products' inner loop by what they are for; all others align words and step addresses
PARTS = {
    "window": ("v_alignbit", "v_lshrrev", "v_bfe"),
    "hash": ("v_pk_mul_lo_u16", "v_pk_mad_u16", "v_mad_u32_u16"),
    "value": ("v_sad_", "v_and_b32", "v_xor_b32", "v_perm_b32", "v_mov_b16", "v_pk_add_f16", "v_bfi_b32", "v_and_or", "v_pack"),
    "product": ("v_dot2",),
}


def instructions_a_weight(kernel: Kernel, rows: int = 1) -> dict[str, float]:
    """Vector instructions a weight of the inner loop for so many rows: the parts above, `rest`, and `sum`. Two that are issued as one
    (v_dual) count as one in the sum, and in the part of the first."""
    loop = kernel.hot_loop("dot2")
    weights = 2 * sum(text.count("dot2") for text in loop) / rows
    counts: Counter[str] = Counter()
    for text in loop:
        if text.startswith("v_"):
            name = text.replace("v_dual_", "v_", 1)
            counts[next((part for part, starts in PARTS.items() if name.startswith(starts)), "rest")] += 1
    return {part: counts[part] / weights for part in (*PARTS, "rest")} | {"sum": sum(counts.values()) / weights}


def tables(folder: Path, read: Callable[[Path], dict[str, Kernel]] = read) -> list[str]:
    """The lines of docs/rocm.md that code objects in `folder` back: by part at 4 bits, then sums for every rate, and for more rows."""
    families = [read(folder / f"kernels.{name}-generic.co") for name in ("gfx10-3", "gfx11", "gfx12")]
    lines = []
    for kind, label in (("mul1", "mul1"), ("pair", "3inst, mcg")):
        found = [instructions_a_weight(f[f"k_gemv_{kind}_8_1"]) for f in families]
        lines += [f"| {label}: {part} | {' | '.join(f'{one[part]:.2f}' for one in found)} |" for part in found[0]]
    for kind, label, rates in (
        ("mul1", "mul1", (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)),
        ("pair", "3inst, mcg", (2, 4, 6, 8, 10, 12, 14, 16)),
    ):
        for k2 in rates:
            sums = [instructions_a_weight(f[f"k_gemv_{kind}_{k2}_1"])["sum"] for f in families]
            lines.append(f"| {label}, {k2 / 2:g} bits | {' | '.join(f'{s:.1f}' for s in sums)} |")
        for rows in (2, 4, 8):
            sums = [instructions_a_weight(f[f"k_gemv_{kind}_8_{rows}"], rows)["sum"] for f in families]
            lines.append(f"| {label}, 4 bits, {rows} rows | {' | '.join(f'{s:.1f}' for s in sums)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(tables(Path(sys.argv[1]))))
