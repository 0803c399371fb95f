"""What may be in an exl3 wheel, and what must.

    python .github/scripts/check_wheel.py WHEEL... [--archs "75 80 90a"]

Tags against the native module's Python, stray files, records, metadata, licences, sizes, GPU architectures, and on Linux the libraries
needed and the glibc floor of each binary. Uses the standard library alone.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email.parser
import hashlib
import io
import re
import struct
import sys
import zipfile
from pathlib import Path

import matrix

SUFFIXES = {".py", ".so", ".dll", ".pyd", ".xz", ".txt", ".md", ".typed", ".json", ".jinja", ".html"}
REQUIRED = ["__init__.py", "py.typed", "errors.py", "quantize/data/LICENSES.txt", "quantize/data/prose.txt.xz"]
# what every Linux with the glibc floor has; the C++ library too where a container's own compiler was used
NEEDED = re.compile(
    r"^(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|librt\.so\.1|libstdc\+\+\.so\.6|libgcc_s\.so\.1|ld-linux-[\w-]+\.so\.\d)$"
)


def fatbin_archs(data: bytes) -> set[str]:
    """The architectures of NVIDIA's fat binaries inside a library: "80", "90" (for 90a too); "120-PTX" for PTX.

    A fat binary is a 16-byte header (magic ba55ed50, version, header size, size of all) and entries: kind (1 PTX, 2 code), version,
    header size, payload size, ..., the architecture's number at byte 28.
    """
    found = set()
    start = data.find(b"\x50\xed\x55\xba")
    while start >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, start + 4)
        at, end = start + header, start + header + size
        if version == 1 and header == 16 and end <= len(data):
            while at + 48 <= end:
                kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, at)
                if kind not in (1, 2) or entry_header < 48:
                    break
                number = struct.unpack_from("<I", data, at + 28)[0]
                found.add(f"{number}{'-PTX' if kind == 1 else ''}")
                at += entry_header + payload
        start = data.find(b"\x50\xed\x55\xba", start + 4)
    return found


def claimed_archs(data: bytes) -> set[str]:
    """The architectures a kernel library says it was built for, in its build text."""
    found = re.search(rb"architectures ([\w \-,:]+)\0", data)
    return set(found[1].decode().replace(",", " ").split()) if found else set()


def elf_versions(data: bytes) -> tuple[set[str], set[str]]:
    """(needed libraries, symbol versions asked for) of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    section_offset = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * size) for i in range(count)]

    def text(table: int, at: int) -> str:
        start = sections[table][4] + at
        return data[start : data.index(b"\0", start)].decode()

    needed, versions = set(), set()
    for _, kind, _, _, offset, length, link, info, _, _ in sections:
        if kind == 6:  # dynamic
            for i in range(length // 16):
                tag, value = struct.unpack_from("<qQ", data, offset + 16 * i)
                if tag == 1:
                    needed.add(text(link, value))
        elif kind == 0x6FFFFFFE:  # version needs
            at = offset
            for _ in range(info):
                _, n, _, aux, following = struct.unpack_from("<HHIII", data, at)
                entry = at + aux
                for _ in range(n):
                    _, _, _, name, after = struct.unpack_from("<IHHII", data, entry)
                    versions.add(text(link, name))
                    entry += after
                at += following
    return needed, versions


def _files(names: list[str], tags: list[str]) -> list[str]:
    wrong = []
    python, _, platform = tags
    natives = [n for n in names if re.fullmatch(r"exl3/_native\..*", n)]
    for name in names:
        folder, base = name.split("/", 1)[0], name.rsplit("/", 1)[-1]
        if folder != "exl3" and not re.fullmatch(r"exl3-[^/]+\.dist-info", folder):
            wrong.append(f"stray file {name}")
        elif folder == "exl3" and (Path(base).suffix not in SUFFIXES or "__pycache__" in name or "/tests/" in name):
            wrong.append(f"stray file {name}")
        elif Path(base).suffix in (".so", ".dll", ".pyd") and not re.fullmatch(
            r"exl3/(_native\..*|(lib)?exl3_(cpu|cuda|rocm)\.(so|dll))", name
        ):
            wrong.append(f"binary without a place: {name}")
    if platform == "any":
        if [n for n in names if n.endswith((".so", ".dll", ".pyd"))]:
            wrong.append("binaries under the tag any")
        return wrong
    if len(natives) != 1:
        wrong.append(f"one native module wanted, found {natives}")
    for native in natives:
        made_for = re.search(r"\.cpython-(\d+)-|\.cp(\d+)-win", native)
        if made_for is None or f"cp{made_for[1] or made_for[2]}" != python:
            wrong.append(f"{native} under the tag {python}: a module of one Python needs that Python's tag")
    if not [n for n in names if re.fullmatch(r"exl3/(lib)?exl3_cpu\.(so|dll)", n)]:
        wrong.append("no CPU kernels")
    return wrong


def _records(archive: zipfile.ZipFile, names: list[str]) -> list[str]:
    wrong = []
    record = next((n for n in names if n.endswith(".dist-info/RECORD")), None)
    if record is None:
        return ["no RECORD"]
    rows = {row[0]: row for row in csv.reader(io.StringIO(archive.read(record).decode())) if row}
    for name in names:
        if name == record:
            continue
        if name not in rows:
            wrong.append(f"{name} is not in RECORD")
            continue
        digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
        if rows[name][1] != f"sha256={digest}":
            wrong.append(f"{name} differs from its digest in RECORD")
    return wrong + [f"RECORD names {n}, which is not there" for n in rows.keys() - set(names)]


def _metadata(archive: zipfile.ZipFile, names: list[str], version: str) -> list[str]:
    wrong = []
    folder = next(n for n in names if n.endswith("/METADATA")).rsplit("/", 1)[0]
    head = email.parser.BytesParser().parsebytes(archive.read(f"{folder}/METADATA"))
    if head["Version"] != version or folder != f"exl3-{version}.dist-info":
        wrong.append(f"file name says {version}, METADATA {head['Version']}, folder {folder}")
    torch = [r for r in head.get_all("Requires-Dist", []) if re.match(r"torch\b", r)]
    if len(torch) != 1 or not re.fullmatch(rf"torch *>= *{re.escape(matrix.load()['torch_floor'])}", torch[0]):
        wrong.append(f"Requires-Dist of torch must be a floor alone, found {torch}")
    for required in ("licenses/LICENSE", "licenses/cmake/NOTICES.txt", "entry_points.txt"):
        if f"{folder}/{required}" not in names:
            wrong.append(f"no {folder}/{required}")
    return wrong + [f"no exl3/{r}" for r in REQUIRED if f"exl3/{r}" not in names]


def _binaries(archive: zipfile.ZipFile, names: list[str], platform: str, archs: set[str] | None) -> list[str]:
    wrong = []
    floor = (
        tuple(int(x) for x in re.findall(r"\d+", platform.removeprefix("manylinux_"))[:2]) if platform.startswith("manylinux_") else None
    )
    for name in (n for n in names if n.endswith((".so", ".dll", ".pyd"))):
        data = archive.read(name)
        if name.endswith(".so"):
            needed, versions = elf_versions(data)
            wrong += [f"{name} needs {library}" for library in sorted(needed) if not NEEDED.match(library)]
            glibc = [tuple(map(int, v.removeprefix("GLIBC_").split("."))) for v in versions if re.fullmatch(r"GLIBC_[\d.]+", v)]
            if floor and glibc and max(glibc) > floor:
                wrong.append(f"{name} needs glibc {'.'.join(map(str, max(glibc)))}, the tag says {floor[0]}.{floor[1]}")
            if re.search(rb"exl3_rocm", name.encode()) is None and b"/.whl/" in data:
                wrong.append(f"{name} holds a path of the build machine")
        if "exl3_cuda" in name:
            claims, inside = claimed_archs(data), fatbin_archs(data)
            if {re.sub(r"[af]$", "", c) for c in claims} != inside:
                wrong.append(f"{name} says architectures {sorted(claims)}, inside are {sorted(inside)}")
            if archs is not None and claims != {a.replace("-virtual", "-PTX") for a in archs}:
                wrong.append(f"{name} has {sorted(claims)}, wanted {sorted(archs)}")
        if "exl3_rocm" in name:
            claims = claimed_archs(data)
            if not claims or (archs is not None and claims != archs):
                wrong.append(f"{name} says architectures {sorted(claims)}, wanted {sorted(archs or [])}")
    return wrong


def check(wheel: Path, archs: set[str] | None = None) -> list[str]:
    """What is wrong with a wheel; `archs`: the GPU architectures it must hold."""
    parts = wheel.stem.split("-")
    if len(parts) != 5 or parts[0] != "exl3":
        return [f"{wheel.name}: not the name of a wheel of exl3"]
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if not n.endswith("/")]
        wrong = _files(names, parts[2:]) + _records(archive, names) + _metadata(archive, names, parts[1])
        wrong += _binaries(archive, names, parts[4], archs)
    kind = next((k for k in ("rocm", "cuda") if any(f"exl3_{k}." in n for n in names)), "cpu")
    limit, size = matrix.load()["size_limit_mb"][kind], wheel.stat().st_size / 1e6
    if size > limit:
        wrong.append(f"{size:.1f} MB, the limit of a {kind} wheel is {limit}")
    if parts[4].startswith("linux_"):
        wrong.append(f"tag {parts[4]} hides the glibc floor: tag it manylinux")
    return [f"{wheel.name}: {w}" for w in wrong]


def report(wheel: Path, archs: set[str] | None = None) -> None:
    """Ends the script with what is wrong, or prints one line."""
    if wrong := check(wheel, archs):
        raise SystemExit("\n".join(wrong))
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, as it should be")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--archs", default="")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    for path in options.wheels:
        report(path, set(options.archs.replace(",", " ").split()) or None)
