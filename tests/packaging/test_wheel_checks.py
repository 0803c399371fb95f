"""The content check, the labels and the index, on wheels made here: a good one passes, each fault is found by name."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = "exl3-0.1.0.dist-info"
METADATA = "Metadata-Version: 2.4\nName: exl3\nVersion: 0.1.0\nRequires-Dist: torch>=2.6\nRequires-Dist: numpy>=1.26\n"
NAME = "exl3-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl"


def elf(needed: list[str], versions: list[str]) -> bytes:
    """A 64-bit ELF file with a dynamic section and version needs, enough for readers of those."""
    strings = b"\0"
    at = {}
    for text in [*needed, *versions, "libc.so.6"]:
        at[text] = len(strings)
        strings += text.encode() + b"\0"
    dynamic = b"".join(struct.pack("<qQ", 1, at[n]) for n in needed) + struct.pack("<qQ", 0, 0)
    auxes = b"".join(struct.pack("<IHHII", 0, 0, 2, at[v], 16 if i + 1 < len(versions) else 0) for i, v in enumerate(versions))
    needs = struct.pack("<HHIII", 1, len(versions), at["libc.so.6"], 16, 0) + auxes
    parts = [strings, dynamic, needs]
    offsets = [64 + sum(len(p) for p in parts[:i]) for i in range(3)]
    table = 64 + sum(map(len, parts))
    head = b"\x7fELF\x02\x01\x01" + b"\0" * 9 + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 4, 0)

    def section(kind: int, i: int, link: int, info: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offsets[i], len(parts[i]), link, info, 1, 0)

    return head + b"".join(parts) + bytes(64) + section(3, 0, 0, 0) + section(6, 1, 1, 0) + section(0x6FFFFFFE, 2, 1, 1)


def fatbin(*entries: tuple[int, int]) -> bytes:
    """An NVIDIA fat binary of (kind, architecture) entries: 2 code, 1 PTX."""
    body = b""
    for kind, number in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, 8) + bytes(12) + struct.pack("<I", number)
        body += header.ljust(64, b"\0") + bytes(8)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


GOOD = elf(["libc.so.6"], ["GLIBC_2.17", "GLIBC_2.28"])


def content(**changes: bytes | None) -> dict[str, bytes]:
    files = {
        "exl3/__init__.py": b"", "exl3/py.typed": b"", "exl3/errors.py": b"", "exl3/quantize/data/LICENSES.txt": b"x",
        "exl3/quantize/data/prose.txt.xz": b"x", "exl3/_native.cpython-311-x86_64-linux-gnu.so": GOOD, "exl3/libexl3_cpu.so": GOOD,
        f"{FOLDER}/METADATA": METADATA.encode(), f"{FOLDER}/WHEEL": b"Wheel-Version: 1.0\n", f"{FOLDER}/entry_points.txt": b"",
        f"{FOLDER}/licenses/LICENSE": b"", f"{FOLDER}/licenses/cmake/NOTICES.txt": b"",
    }  # fmt: skip
    files |= {k: v for k, v in changes.items() if v is not None}
    return {k: v for k, v in files.items() if k not in changes or changes[k] is not None}


def write(folder: Path, files: dict[str, bytes], name: str = NAME, record: str | None = None) -> Path:
    path = folder / name
    rows = []
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{file},sha256={digest},{len(data)}")
        archive.writestr(f"{FOLDER}/RECORD", "\n".join([*rows, f"{FOLDER}/RECORD,,"]) if record is None else record)
    return path


@pytest.fixture
def check(script):
    return script("check_wheel")


def test_a_good_wheel_passes(check, tmp_path):
    assert check.check(write(tmp_path, content())) == []


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"exl3/_native.cpython-311-x86_64-linux-gnu.so": None}, "one native module"),
        ({"exl3/_native.cpython-312-x86_64-linux-gnu.so": GOOD}, "one native module"),
        ({"exl3/libexl3_cpu.so": None}, "no CPU kernels"),
        ({"exl3/extra.so": GOOD}, "binary without a place"),
        ({"exl3.libs/libgomp.so.1": GOOD}, "stray file"),
        ({"tests/test_x.py": b""}, "stray file"),
        ({"exl3/__pycache__/a.py": b""}, "stray file"),
        ({"exl3/kernel.cu": b""}, "stray file"),
        ({"exl3/py.typed": None}, "no exl3/py.typed"),
        ({"exl3/quantize/data/prose.txt.xz": None}, "prose"),
        ({f"{FOLDER}/licenses/cmake/NOTICES.txt": None}, "NOTICES"),
        ({f"{FOLDER}/METADATA": METADATA.replace("torch>=2.6", "torch<2.9,>=2.6").encode()}, "floor alone"),
        ({f"{FOLDER}/METADATA": METADATA.replace("Requires-Dist: torch>=2.6\n", "").encode()}, "floor alone"),
        ({f"{FOLDER}/METADATA": METADATA.replace("0.1.0", "0.2.0").encode()}, "METADATA 0.2.0"),
        ({"exl3/libexl3_cpu.so": elf(["libc.so.6"], ["GLIBC_2.34"])}, "needs glibc 2.34"),
        ({"exl3/libexl3_cpu.so": elf(["libc.so.6", "libtorch.so"], ["GLIBC_2.17"])}, "needs libtorch.so"),
        ({"exl3/libexl3_cpu.so": GOOD + b"/home/x/.whl/y"}, "path of the build machine"),
    ],
)
def test_faults_are_found(check, tmp_path, changes, word):
    found = check.check(write(tmp_path, content(**changes)))
    assert any(word in line for line in found), found


def test_generic_and_plain_tags(check, tmp_path):
    assert any("under the tag any" in line for line in check.check(write(tmp_path, content(), "exl3-0.1.0-py3-none-any.whl")))
    abi3 = write(tmp_path, content(), "exl3-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl")
    assert any("needs that Python's tag" in x for x in check.check(abi3))
    assert any("hides the glibc floor" in x for x in check.check(write(tmp_path, content(), "exl3-0.1.0-cp311-cp311-linux_x86_64.whl")))
    pure = {k: v for k, v in content().items() if not k.endswith(".so")}
    assert check.check(write(tmp_path, pure, "exl3-0.1.0-py3-none-any.whl")) == []


def test_records(check, tmp_path):
    assert any("not in RECORD" in line for line in check.check(write(tmp_path, content(), record="")))
    rows = "exl3/__init__.py,sha256=AAAA,0\nexl3/gone.py,sha256=AAAA,0\n"
    found = check.check(write(tmp_path, content(), record=rows))
    assert any("differs from its digest" in line for line in found) and any("exl3/gone.py, which is not there" in line for line in found)


def test_size_limit(check, tmp_path):
    big = content(**{"exl3/quantize/data/prose.txt.xz": bytes(8_100_000)})
    assert any("the limit of a cpu wheel is 8" in line for line in check.check(write(tmp_path, big)))


def test_architectures_are_as_claimed(check, tmp_path):
    code = fatbin((2, 80), (2, 90), (1, 120))
    assert check.fatbin_archs(code) == {"80", "90", "120-PTX"}
    library = GOOD + b"nvcc 13.0, architectures 80 90a 120-PTX\0" + code
    wheel = write(tmp_path, content(**{"exl3/libexl3_cuda.so": library}))
    assert check.check(wheel, {"80", "90a", "120-virtual"}) == []
    assert any("wanted" in line for line in check.check(wheel, {"80", "90a", "100"}))
    lying = write(tmp_path, content(**{"exl3/libexl3_cuda.so": library.replace(b"80 90a", b"80 86 90a")}))
    assert any("inside are" in line for line in check.check(lying))


def test_labels(check, script, tmp_path):
    label = script("label")
    wheel = label.relabel(write(tmp_path, content()), "cu130", tmp_path / "out")
    assert wheel.name == "exl3-0.1.0+cu130-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert check.check(wheel) == []
    long = label.relabel(wheel, "cu130.torch2.13.0", tmp_path / "out")
    assert long.name.startswith("exl3-0.1.0+cu130.torch2.13.0-") and check.check(long) == []
    again = label.relabel(write(tmp_path, content()), "cu130", tmp_path / "again")
    assert again.read_bytes() == wheel.read_bytes()
    with pytest.raises(SystemExit, match="small letters"):
        label.relabel(wheel, "Cu_130", tmp_path)


def test_pip_reads_the_index(script, tmp_path):
    """A labelled wheel, its long name and PyPI's form, found by pip itself through file: links."""
    index, label = script("index"), script("label")
    pure = {k: v for k, v in content().items() if not k.endswith(".so")}
    pure[f"{FOLDER}/METADATA"] = METADATA.split("Requires")[0].encode()
    pure[f"{FOLDER}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    plain = write(tmp_path, pure, "exl3-0.1.0-py3-none-any.whl")
    files = [plain] + [label.relabel(plain, x, tmp_path / "dist") for x in ("cu130", "cu130.torch2.13.0", "rocm6.4")]
    index.build(files, tmp_path / "site")
    sums = (tmp_path / "site/SHA256SUMS").read_text().splitlines()
    assert len(sums) == 4 and all(re.fullmatch(r"[0-9a-f]{64}  exl3-\S+", s) for s in sums)
    page = (tmp_path / "site/whl/cu130/exl3/index.html").read_text()
    assert page.count("<a ") == 2 and "rocm" not in page
    assert (tmp_path / "site/whl/exl3/index.html").read_text().count("<a ") == 4
    pip = [sys.executable, "-m", "pip", "--isolated", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    pip += ["-d", str(tmp_path / "got")]
    where = ["--index-url", (tmp_path / "site/whl/rocm6.4").as_uri()]
    done = subprocess.run([*pip, *where, "exl3"], capture_output=True, text=True, timeout=120)
    if "No module named pip" in done.stderr:
        pytest.skip("no pip in this Python")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "got").iterdir()] == ["exl3-0.1.0+rocm6.4-py3-none-any.whl"]


def test_tags_and_changelog_of_a_release(script):
    release = script("release_version")
    assert release.problems("v1.2.3", "1.2.3", "# Changelog\n\n## 1.2.3 (2026-01-01)\n") == []
    assert "says 1.2.3" in release.problems("v1.2.4", "1.2.3", "## 1.2.3\n")[0]
    assert "no entry" in release.problems("v1.2.3", "1.2.3", "## 1.2.30\n")[0]
    assert "unreleased" in release.problems("v1.2.3", "1.2.3", "## 1.2.3 (unreleased)\n")[0]


def test_sdist_check(script, tmp_path):
    import tarfile

    sdist = script("sdist")
    path = tmp_path / "exl3-0.1.0.tar.gz"
    (tmp_path / "x").write_text("x")
    with tarfile.open(path, "w:gz") as archive:
        for name in [*sdist.REQUIRED, "src/exl3/libexl3_cpu.so", "build/x.txt", "tests/test_x.py"]:
            if name != "cmake/exports.map":
                archive.add(tmp_path / "x", f"exl3-0.1.0/{name}")
    assert sdist.check(path) == [
        "no cmake/exports.map", "stray file src/exl3/libexl3_cpu.so", "stray file build/x.txt", "stray file tests/test_x.py",
    ]  # fmt: skip
