"""The release matrix (.github/matrix.toml) as workflows, scripts and documentation read it.

python .github/scripts/matrix.py check            # is it sound, and does cibuildwheel know its builds?
python .github/scripts/matrix.py jobs kernels     # JSON for a workflow's strategy.matrix; also: wheels, install, pypi, tests
python .github/scripts/matrix.py table            # the table of docs/install.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
RUNNERS = {"linux_x86_64": "ubuntu-24.04", "linux_aarch64": "ubuntu-24.04-arm", "windows_amd64": "windows-2022"}
MANYLINUX = "quay.io/pypa/manylinux_2_28_"
# platform -> the tag in cibuildwheel's build identifiers
BUILD_TAGS = {"linux_x86_64": "manylinux_x86_64", "linux_aarch64": "manylinux_aarch64", "windows_amd64": "win_amd64"}


def load() -> dict[str, Any]:
    return tomllib.loads((ROOT / ".github/matrix.toml").read_text())


def platforms(matrix: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """Where a row's wheel is built: wherever all its kernel libraries are."""
    return [p for p in RUNNERS if all(p in matrix["kernels"][k]["platforms"] for k in row["kernels"])]


def identifiers(matrix: dict[str, Any], platform: str) -> list[str]:
    """cibuildwheel's build identifiers of one platform."""
    return [f"cp{python.replace('.', '')}-{BUILD_TAGS[platform]}" for python in matrix["pythons"]]


def backends(matrix: dict[str, Any], kernels: list[str]) -> str:
    return ";".join(matrix["kernels"][k]["backend"] for k in kernels)


def jobs(matrix: dict[str, Any], kind: str) -> list[dict[str, str]]:
    """One object a job. kinds: kernels (a library on a platform), wheels (a row on a platform, all Pythons), install (a row on a
    platform, its own torch), pypi (a platform's unlabelled wheels), tests (a Python on an operating system)."""
    out: list[dict[str, str]] = []
    if kind == "kernels":
        for name, kernel in matrix["kernels"].items():
            for platform in kernel["platforms"]:
                container = "debian:bookworm" if kernel["backend"] == "rocm" else MANYLINUX + platform.removeprefix("linux_")
                out.append({
                    "kernel": name, "backend": kernel["backend"], "platform": platform, "runner": RUNNERS[platform],
                    "container": container if platform.startswith("linux") else "",
                    "toolkit": kernel.get("toolkit", ""), "archs": ";".join(kernel.get("archs", [])),
                    "compress": kernel.get("compress", ""),
                })  # fmt: skip
    elif kind in ("wheels", "install"):
        for row in matrix["rows"]:
            for platform in platforms(matrix, row):
                job = {"label": row["label"], "platform": platform, "runner": RUNNERS[platform], "torch": row["torch"]}
                if kind == "wheels":
                    job |= {"kernels": " ".join(row["kernels"]), "backends": backends(matrix, row["kernels"])}
                    job |= {"build": " ".join(identifiers(matrix, platform))}
                else:
                    job |= {"torch_index": row["torch_index"]}
                out.append(job)
    elif kind == "pypi":
        for platform, kernels in matrix["pypi"].items():
            out.append({
                "platform": platform, "runner": RUNNERS[platform], "kernels": " ".join(kernels),
                "backends": backends(matrix, kernels), "build": " ".join(identifiers(matrix, platform)),
            })  # fmt: skip
    elif kind == "tests":
        out = [{"python": python, "runner": RUNNERS[p]} for p in ("linux_x86_64", "windows_amd64") for python in matrix["pythons"]]
    else:
        raise SystemExit(f"jobs of kind '{kind}': use kernels, wheels, install, pypi or tests")
    return out


def table(matrix: dict[str, Any]) -> str:
    """Markdown: which wheel for which machine."""
    lines = ["| wheel | for | with torch of | platforms | GPU code inside | driver |", "|---|---|---|---|---|---|"]
    names = {"linux_x86_64": "Linux x86-64", "linux_aarch64": "Linux aarch64", "windows_amd64": "Windows x86-64"}
    for row in matrix["rows"]:
        kernel = matrix["kernels"][row["kernels"][-1]]
        purpose = {"cpu": "no GPU", "cuda": "NVIDIA", "rocm": "AMD RDNA"}[kernel["backend"]]
        index = "CPU" if row["torch_index"] == "cpu" else row["torch_index"]
        where = ", ".join(names[p] for p in platforms(matrix, row))
        archs = ", ".join(kernel.get("archs", ["none"]))
        driver = f"{kernel['driver']} or newer" if "driver" in kernel else "-"
        lines.append(f"| `+{row['label']}` | {purpose} | {index}, tested with {row['torch']} | {where} | {archs} | {driver} |")
    return "\n".join(lines) + "\n"


def check(matrix: dict[str, Any], known: list[str] | None = None) -> list[str]:
    """What is wrong with the matrix; `known`: cibuildwheel's identifiers, all platforms."""
    wrong = []
    for name, kernel in matrix["kernels"].items():
        if not set(kernel["platforms"]) <= set(RUNNERS):
            wrong.append(f"kernels.{name}: unknown platform in {kernel['platforms']}")
        if kernel["backend"] == "cuda":
            toolkit = tuple(int(part) for part in kernel["toolkit"].split("."))
            new = [a for a in kernel["archs"] if int("".join(c for c in a.split("-")[0] if c.isdigit())) >= 100]
            if toolkit < (12, 8) and (new or kernel["compress"] == "require"):
                wrong.append(f"kernels.{name}: CUDA {kernel['toolkit']} has neither {new} nor size compression (12.8 brings both)")
            if toolkit >= (12, 8) and kernel["compress"] != "require":
                wrong.append(f"kernels.{name}: release builds of CUDA {kernel['toolkit']} are compressed by size, compress = 'require'")
            if toolkit < (12, 6):
                wrong.append(f"kernels.{name}: CUDA {kernel['toolkit']} is below the floor, 12.6")
    labels = [row["label"] for row in matrix["rows"]]
    if len(labels) != len(set(labels)):
        wrong.append(f"rows: a label twice in {labels}")
    for row in matrix["rows"]:
        if missing := [k for k in row["kernels"] if k not in matrix["kernels"]]:
            wrong.append(f"row {row['label']}: no kernels {missing}")
        elif not platforms(matrix, row):
            wrong.append(f"row {row['label']}: its kernels share no platform")
        if tuple(map(int, row["torch"].split("."))) < tuple(map(int, matrix["torch_floor"].split("."))):
            wrong.append(f"row {row['label']}: torch {row['torch']} is older than the floor, {matrix['torch_floor']}")
    for platform, kernels in matrix["pypi"].items():
        for kernel in kernels:
            if platform not in matrix["kernels"][kernel]["platforms"]:
                wrong.append(f"pypi.{platform}: {kernel} is not built there")
    if known is not None:
        for platform in RUNNERS:
            if unknown := sorted(set(identifiers(matrix, platform)) - set(known)):
                wrong.append(f"cibuildwheel with pyproject.toml does not build {unknown}")
    return wrong


def known_identifiers(matrix: dict[str, Any]) -> list[str]:
    """What cibuildwheel would build here with pyproject.toml's settings, on every platform."""
    found: list[str] = []
    for platform in RUNNERS:
        system, arch = platform.split("_", 1)
        command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", system]
        command += ["--archs", arch.upper() if system == "windows" else arch, str(ROOT)]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("CIBW_")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        if done.returncode:
            raise SystemExit(f"cibuildwheel --print-build-identifiers: {done.stderr.strip()}")
        found += done.stdout.split()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["check", "jobs", "table"])
    parser.add_argument("kind", nargs="?", default="wheels")
    options = parser.parse_args()
    matrix = load()
    if options.verb == "jobs":
        text = json.dumps({"include": jobs(matrix, options.kind)}, separators=(",", ":"))
        if "GITHUB_OUTPUT" in os.environ:
            with open(os.environ["GITHUB_OUTPUT"], "a") as output:
                output.write(f"{options.kind}={text}\n")
        print(text)
    elif options.verb == "table":
        print(table(matrix), end="")
    elif options.verb == "check":
        wrong = check(matrix, known_identifiers(matrix))
        print("\n".join(wrong) or f"matrix.toml: {len(jobs(matrix, 'wheels'))} rows and platforms, all builds known to cibuildwheel")
        raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
