"""What a compiled AMD code object says of its kernels: the metadata note (registers, shared memory, spills) and the instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
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
