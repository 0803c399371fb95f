"""`exl3 measure`, `exl3 optimize` and `exl3 tune` from the command line: errors are one line and exit status 1 or 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def exl3(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "exl3", *map(str, words)], capture_output=True, text=True, timeout=300)


def test_both_spellings_and_help():
    verbs = {
        "measure": ("--in-dir", "--ref_dir", "--out-file", "-ms"),
        "optimize": ("--measurement", "--out_dir", "-b"),
        "tune": ("--in-dir", "--ref_dir", "--out-dir", "--cal_rows", "--steps"),
    }
    for verb, names in verbs.items():
        done = exl3(verb, "--help")
        assert done.returncode == 0 and all(name in done.stdout for name in names)


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path):
    (tmp_path / "m.json").write_text(json.dumps({"reference": "r"}))
    done = exl3("optimize", "-m", tmp_path / "m.json", "-b", 3, "-o", tmp_path / "out")
    assert done.returncode == 1 and "not a measurement" in done.stderr and "Traceback" not in done.stderr
    assert exl3("optimize", "-m", tmp_path / "none.json", "-b", 3, "-o", tmp_path / "out").returncode == 2
    done = exl3("measure", "-i", tmp_path, "-r", tmp_path, "-o", tmp_path / "no" / "m.json")
    assert done.returncode == 1 and done.stderr.startswith("exl3: -o ") and "not a file that can be written" in done.stderr
    done = exl3("measure", "-i", tmp_path, "-r", tmp_path, "-o", tmp_path / "m2.json")
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
    done = exl3("tune", "-i", tmp_path, "-r", tmp_path, "-o", tmp_path / "out")
    assert done.returncode == 1 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr and not (tmp_path / "out").exists()
    assert exl3("tune", "-i", tmp_path, "-r", tmp_path / "none", "-o", tmp_path / "out").returncode == 2
