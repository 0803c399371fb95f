"""A static package index (PEP 503) of a folder of wheels, with checksums: what the release workflow publishes.

    python .github/scripts/index.py dist --out site [--base-url URL]

One folder per row label (whl/cu130/exl3/index.html) and whl/exl3/ with all; pip takes either as --extra-index-url. Wheels with a long
label (+cu130.torch2.13.0) are listed under their row's folder. SHA256SUMS lists every file. With --base-url links point to where the
files lie (a release's download folder), else the files are copied beside the pages.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import shutil
import urllib.parse
from pathlib import Path


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest()
        )


def row_of(wheel: Path) -> str:
    """The row label in a wheel's name: cu130 for +cu130 and +cu130.torch2.13.0, rocm6.4 for +rocm6.4; empty for PyPI's own."""
    version = wheel.name.split("-")[1]
    label = version.split("+", 1)[1] if "+" in version else ""
    return label.split(".torch")[0]


def page(title: str, links: list[str]) -> str:
    lines = ["<!DOCTYPE html>", '<html><head><meta charset="utf-8"><meta name="pypi:repository-version" content="1.0">']
    return "\n".join([*lines, f"<title>{title}</title></head><body>", *links, "</body></html>", ""])


def build(files: list[Path], out: Path, base_url: str = "") -> None:
    """Writes the index below `out`/whl; every wheel must be of exl3."""
    out.mkdir(parents=True, exist_ok=True)
    sums = {path.name: digest(path) for path in sorted(files)}
    if len(sums) != len(files):
        raise SystemExit("two files of one name")
    (out / "SHA256SUMS").write_text("".join(f"{d}  {n}\n" for n, d in sums.items()))
    wheels = [p for p in sorted(files) if p.suffix == ".whl"]
    rows = {row_of(p) for p in wheels} - {""}
    if not base_url:
        (out / "whl/files").mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy(path, out / "whl/files" / path.name)
    for row in ["", *sorted(rows)]:
        folder = out / "whl" / row / "exl3"
        folder.mkdir(parents=True, exist_ok=True)
        up = "../" * (3 if row else 2)
        where = base_url.rstrip("/") + "/" if base_url else f"{up}whl/files/"
        links = []
        for path in files if not row else wheels:
            if path.suffix == ".whl" and row and row_of(path) != row:
                continue
            href = html.escape(f"{where}{urllib.parse.quote(path.name)}#sha256={sums[path.name]}")
            links.append(f'<a href="{href}" data-requires-python="&gt;=3.10">{html.escape(path.name)}</a><br>')
        (folder / "index.html").write_text(page("exl3", links))
        (folder.parent / "index.html").write_text(page("exl3 wheels", ['<a href="exl3/">exl3</a>']))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-url", default="")
    options = parser.parse_args()
    build([*options.dist.glob("*.whl"), *options.dist.glob("*.tar.gz")], options.out, options.base_url)
