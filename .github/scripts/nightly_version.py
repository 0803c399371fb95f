"""Gives the checkout a version of the day: 0.1.0 becomes 0.1.0.dev20260131 in src/exl3/__init__.py, where the one version stands.

python .github/scripts/nightly_version.py
"""

from __future__ import annotations

import datetime
import re

import common

if __name__ == "__main__":
    path = common.ROOT / "src/exl3/__init__.py"
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")
    text, count = re.subn(r'(?m)^__version__ = "(\d+\.\d+\.\d+)[^"]*"', rf'__version__ = "\1.dev{today}"', path.read_text())
    if count != 1:
        raise SystemExit(f"{path}: no version to change")
    path.write_text(text)
