"""Does a tag fit the sources? Version in src/exl3/__init__.py, an entry of CHANGELOG.md.

python .github/scripts/release_version.py v0.1.0
"""

from __future__ import annotations

import re
import sys

import common


def version() -> str:
    found = re.search(r'^__version__ = "([^"]+)"', (common.ROOT / "src/exl3/__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise SystemExit("src/exl3/__init__.py has no __version__")
    return found[1]


def problems(tag: str, mine: str, changelog: str) -> list[str]:
    wrong = []
    if tag != f"v{mine}":
        wrong.append(f"tag {tag}, but src/exl3/__init__.py says {mine}")
    entry = re.search(rf"^## {re.escape(mine)}\b(.*)$", changelog, re.MULTILINE)
    if not entry:
        wrong.append(f"CHANGELOG.md has no entry {mine}")
    elif "unreleased" in entry[1]:
        wrong.append(f"CHANGELOG.md still calls {mine} unreleased")
    return wrong


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    if wrong := problems(sys.argv[1], version(), (common.ROOT / "CHANGELOG.md").read_text()):
        raise SystemExit("; ".join(wrong))
