"""`python -m exl3.integrations.exllamav3 program.py ...`: runs a program with `exllamav3` replaced by exl3."""

from __future__ import annotations

import os
import runpy
import sys

from exl3.integrations.exllamav3 import install


def main() -> None:
    """Runs the program named by the first argument; `-m module` works too."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print("usage: python -m exl3.integrations.exllamav3 [-m module | program.py] [arguments]")
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    install()
    if sys.argv[1] == "-m":
        if len(sys.argv) < 3:
            raise SystemExit("-m needs the name of a module")
        sys.argv = sys.argv[2:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
