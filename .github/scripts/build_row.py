"""All Pythons' wheels of one row on this platform, through cibuildwheel, from finished kernel libraries.

    python .github/scripts/build_row.py --prebuilt prebuilt --kernels "cpu cu130" --label cu130 --out wheelhouse
    python .github/scripts/build_row.py --prebuilt prebuilt --kernels cpu --out wheelhouse --only cp312-manylinux_x86_64

--label "" leaves PyPI's form, without a local version. A labelled row's wheels are also written under their long names
(+cu130.torch2.13.0) with --alias, for scripts that look for them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import check_wheel
import common
import label as labels
import matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prebuilt", type=Path, help="folder with the libraries")
    parser.add_argument("--prebuilt-tree", type=Path, help="instead: a folder of kernels-NAME-PLATFORM folders, as jobs hand them over")
    parser.add_argument("--platform", default=common.platform())
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--label", default="")
    parser.add_argument("--alias", default="", help="torch version of the long name, such as 2.13.0")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path("wheelhouse"))
    options = parser.parse_args()
    table = matrix.load()
    kernels = options.kernels.split()
    here = options.platform
    wanted = options.only or " ".join(matrix.identifiers(table, here))
    inside = common.ROOT / "prebuilt-row"  # cibuildwheel's container sees the project's folder alone
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    for kernel in kernels:
        folder = options.prebuilt or options.prebuilt_tree / f"kernels-{kernel}-{options.platform}"
        shutil.copy(folder / common.library_name(table["kernels"][kernel]["backend"]), inside)
    env = common.environment(Path(sys.executable)) | {
        "CIBW_BUILD": wanted,
        "EXL3_BACKENDS": matrix.backends(table, kernels),
        "EXL3_PREBUILT": "/project/prebuilt-row" if here.startswith("linux") else str(inside),
    }
    raw = common.WORK / "row"
    shutil.rmtree(raw, ignore_errors=True)
    common.run([sys.executable, "-m", "cibuildwheel", "--output-dir", str(raw), str(common.ROOT)], env)
    options.out.mkdir(parents=True, exist_ok=True)
    archs = {a for k in kernels for a in table["kernels"][k].get("archs", [])} or None
    version = options.alias + ".0" * (options.alias.count(".") == 1)
    for wheel in sorted(raw.glob("*.whl")):
        made = [labels.relabel(wheel, options.label, options.out)] if options.label else [Path(shutil.copy(wheel, options.out))]
        if options.label and options.alias:
            made.append(labels.relabel(wheel, f"{options.label}.torch{version}", options.out))
        for path in made:
            check_wheel.report(path, archs)
    built = len(list(raw.glob("*.whl")))
    if built != len(wanted.split()):
        raise SystemExit(f"{built} wheels of {len(wanted.split())}: {os.listdir(raw)}")


if __name__ == "__main__":
    main()
