"""Gives a finished wheel a local version label: exl3-0.1.0-... becomes exl3-0.1.0+cu130-... in name, metadata and records.

    python .github/scripts/label.py WHEEL cu130 --out DIR
    python .github/scripts/label.py WHEEL cu130.torch2.13.0 --out DIR     # the long form some scripts look for

Nothing else in the wheel changes; a wheel that has a label gets the new one instead.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import re
import zipfile
from pathlib import Path

FIXED_DATE = (2025, 1, 1, 0, 0, 0)


def relabel(wheel: Path, label: str, out: Path) -> Path:
    """The labelled wheel in `out`."""
    if not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label):
        raise SystemExit(f"label '{label}': small letters, digits and dots only (PEP 440)")
    name, version, *tags = wheel.name.split("-")
    new = f"{version.split('+')[0]}+{label}"
    out.mkdir(parents=True, exist_ok=True)
    target = out / "-".join([name, new, *tags])
    old_folder, new_folder = f"{name}-{version}.dist-info", f"{name}-{new}.dist-info"
    rows: list[tuple[str, str, str]] = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for entry in source.infolist():
            if entry.is_dir() or entry.filename == f"{old_folder}/RECORD":
                continue
            data = source.read(entry)
            path = entry.filename.replace(old_folder, new_folder, 1)
            if path == f"{new_folder}/METADATA":
                data, count = re.subn(rb"(?m)^Version: .*$", b"Version: " + new.encode(), data, count=1)
                if count != 1:
                    raise SystemExit(f"{wheel.name}: METADATA has no Version")
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((path, f"sha256={digest}", str(len(data))))
            _write(archive, path, data, entry.external_attr)
        record = io.StringIO()
        csv.writer(record, lineterminator="\n").writerows([*rows, (f"{new_folder}/RECORD", "", "")])
        _write(archive, f"{new_folder}/RECORD", record.getvalue().encode(), 0o100664 << 16)
    return target


def _write(archive: zipfile.ZipFile, path: str, data: bytes, attributes: int) -> None:
    info = zipfile.ZipInfo(path, FIXED_DATE)
    info.external_attr = attributes
    info.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(info, data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="+")
    parser.add_argument("label")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for path in options.wheel:
        print(relabel(path, options.label, options.out))
