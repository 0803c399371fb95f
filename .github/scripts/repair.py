"""The last step of a wheel's build: the manylinux tag after auditwheel's check (nothing is bundled), then the content check.

python .github/scripts/repair.py WHEEL DEST_DIR
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import check_wheel
import matrix


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {re.sub(r"^exl3-[^/]*\.dist-info/", "dist-info/", n) for n in archive.namelist() if not n.endswith("/")}


def repair(wheel: Path, dest: Path) -> Path:
    """The tagged wheel in `dest`. Fails where auditwheel would bundle a library or the glibc floor is not met."""
    dest.mkdir(parents=True, exist_ok=True)
    if sys.platform != "linux":
        target = dest / wheel.name
        target.write_bytes(wheel.read_bytes())
    else:
        machine = wheel.stem.split("-")[-1].split("_", 1)[1]
        tag = f"manylinux_{matrix.load()['manylinux']}_{machine}"
        before = set(dest.glob("*.whl"))
        environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", tag, "--only-plat", "-w", str(dest), str(wheel)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
        if done.returncode:
            raise SystemExit(f"auditwheel refuses {wheel.name} as {tag}: {done.stdout}{done.stderr}")
        target = next(iter(set(dest.glob("*.whl")) - before), dest / wheel.name.replace(f"linux_{machine}", tag))
        if added := names(target) - names(wheel):
            raise SystemExit(f"auditwheel put {sorted(added)} into {target.name}: exl3's wheels bundle nothing")
    check_wheel.report(target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("dest", type=Path)
    options = parser.parse_args()
    repair(options.wheel, options.dest)
