"""Reads back what a build of libexl3_cuda holds: architectures, compression, size, and per kernel registers, stack and shared memory.

    python cuda/check_build.py LIBRARY [--archs "80 90a"] [--uncompressed]

Ends with status 1 and one line a finding where something is beyond cuda/limits.json, or a kernel has no limits there. The resources need
cuobjdump: the CUDA toolkit's, or that of PyPI's nvidia-cuda-cuobjdump in this Python; without one that part is skipped, and said so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

MAGIC = b"\x50\xed\x55\xba"  # a fat binary: header, then entries for architectures
PTX, ELF = 1, 2


def fat_binary_entries(data: bytes) -> list[dict[str, int]]:
    """kind (1 PTX, 2 machine code), architecture, stored and unpacked bytes of every entry."""
    entries = []
    at = data.find(MAGIC)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        end = at + header + size
        if version != 1 or end > len(data):
            at = data.find(MAGIC, at + 4)
            continue
        entry = at + header
        while entry + 64 <= end:
            kind, _, entry_header, stored = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            (unpacked,) = struct.unpack_from("<Q", data, entry + 56)
            entries.append({"kind": kind, "arch": arch, "stored": stored, "unpacked": unpacked})
            entry += entry_header + stored
        at = data.find(MAGIC, end)
    return entries


def cuobjdump() -> str | None:
    in_packages = (Path(p) / "nvidia/cu13/bin/cuobjdump" for p in sys.path if p)
    return shutil.which("cuobjdump") or next((str(p) for p in in_packages if p.is_file() and os.access(p, os.X_OK)), None)


def resources(library: Path) -> list[tuple[str, int, int, int]] | None:
    """(kernel, registers, stack, shared) of all machine code, or None without cuobjdump."""
    tool = cuobjdump()
    if tool is None:
        return None
    text = subprocess.run([tool, "--dump-resource-usage", str(library)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"Function (\S+?):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return [(name, int(r), int(st), int(sh)) for name, r, st, sh in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--archs", default="", help="architectures that must be inside, e.g. '80 90'")
    parser.add_argument("--uncompressed", action="store_true", help="built with EXLLAMA_EXT_COMPRESS=0")
    options = parser.parse_args()
    limits = json.loads((Path(__file__).parent / "limits.json").read_text())
    data = options.library.read_bytes()
    entries = fat_binary_entries(data)
    findings = []
    if not entries:
        findings.append("no GPU code found")
    code = sorted({e["arch"] for e in entries if e["kind"] == ELF})
    ptx = sorted({e["arch"] for e in entries if e["kind"] == PTX})
    packed = sum(e["unpacked"] > 0 for e in entries)
    print(f"{options.library.name}: {len(data) / 1e6:.1f} MB, machine code for {code}, PTX for {ptx}")
    print(f"{packed} of {len(entries)} parts compressed")
    for arch in options.archs.split():
        if int(re.sub(r"\D", "", arch)) not in code:
            findings.append(f"no machine code for {arch}")
    if not options.uncompressed and packed < len(entries):
        findings.append(f"{len(entries) - packed} of {len(entries)} parts are not compressed")
    most = min(limits["bytes"], limits["bytes_per_architecture"] * max(1, len(code) + len(ptx)))
    if len(data) > most and not options.uncompressed:
        findings.append(f"{len(data)} bytes, at most {most} are allowed")
    used = resources(options.library)
    if used is None:
        print("no cuobjdump: registers and stack not checked")
    for name, registers, stack, shared in used or []:
        kind = next((k for k in limits["kernels"] if k in name), None)
        if kind is None:
            findings.append(f"{name}: no limits for this kernel in limits.json")
            continue
        for what, have in (("registers", registers), ("stack", stack), ("shared", shared)):
            if have > limits["kernels"][kind][what]:
                findings.append(f"{name}: {have} {what}, at most {limits['kernels'][kind][what]} are allowed")
    for finding in findings:
        print(f"check_build: {finding}", file=sys.stderr)
    if not findings:
        print("within limits" if used is None else f"within limits, {len(used)} kernels checked")
    return bool(findings)


if __name__ == "__main__":
    raise SystemExit(main())
