"""Installs exl3 from the checkout into this Python and runs the CPU tests: a test job, or by hand in a fresh virtual environment.

python .github/scripts/run_tests.py [--torch 2.13] [--torch-index https://...] [pytest's own arguments]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import common

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", help="minor version")
    parser.add_argument("--torch-index", default=CPU_INDEX, help="empty: pip's own")
    options, more = parser.parse_known_args()
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    requirements = common.ROOT / ".github/requirements"
    common.run([*pip, "--require-hashes", "-r", str(requirements / "test.txt")])
    common.run([*pip, "--require-hashes", "-r", str(requirements / "build.txt")])
    torch = f"torch=={options.torch}.*" if options.torch else "torch"
    common.run([*pip, torch, *(["--extra-index-url", options.torch_index] if options.torch_index else [])])
    common.run([*pip, "--no-build-isolation", "--no-deps", str(common.ROOT)], common.environment(Path(sys.executable)))
    with tempfile.TemporaryDirectory() as elsewhere:  # the installed package is tested, not src/
        env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "2"))
        common.run(
            [sys.executable, "-m", "pytest", str(common.ROOT / "tests"), "-q", "-p", "no:cacheprovider", *more], env, Path(elsewhere)
        )


if __name__ == "__main__":
    main()
