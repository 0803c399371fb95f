"""The portable tier answers as the fast one does: a part of these tests run again under EXL3_CPU_MAX_ISA=scalar."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_scalar_tier_passes_the_same_tests():
    picked = "known_codes or codecs_codes or all_options or any_head_dim or replay_with or draws_equal or ends or rings or self_test"
    files = [str(HERE / f"test_{name}.py") for name in ("attention", "tape", "sample", "pointwise", "native")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", picked, *files],
        env={**os.environ, "EXL3_CPU_MAX_ISA": "scalar"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:]


def test_the_cap_is_obeyed():
    code = "from exl3 import ops; print(ops.backend('cpu').describe(0))"
    scalar = {**os.environ, "EXL3_CPU_MAX_ISA": "scalar"}
    run = subprocess.run([sys.executable, "-c", code], env=scalar, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("scalar")
