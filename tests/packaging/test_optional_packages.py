"""exl3 without each optional package: every public name and every verb's module still imports (users.md: one missing package broke all)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import exl3  # noqa: F401  its place tells whether the installed package or src is tested

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["transformers", "llguidance", "huggingface_hub", "matplotlib", "starlette", "gguf", "triton", "scipy"])
def test_hidden(script, name):
    code = script("install_test").HIDE
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if "site-packages" not in str(sys.modules["exl3"].__file__):
        env["PYTHONPATH"] = str(ROOT / "src")
    done = subprocess.run([sys.executable, "-c", code, name], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr
