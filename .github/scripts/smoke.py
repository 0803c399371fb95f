"""What every installed wheel must do at least, standard library alone: its tag's native module opens, `import exl3` says nothing wrong.

python .github/scripts/smoke.py          # with the Python the wheel is installed in; torch need not be there
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import warnings
from pathlib import Path

import exl3


def main() -> None:
    folder = Path(exl3.__file__).parent
    native = [
        p for p in folder.iterdir() if p.name.startswith("_native") and p.name.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
    ]
    assert len(native) == 1, f"native modules: {native}"
    spec = importlib.util.spec_from_file_location("exl3._native", native[0])
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    opened = [module.open(str(p)).name for p in sorted(folder.iterdir()) if p.stem in ("libexl3_cpu", "exl3_cpu")]
    assert opened == ["cpu"], opened
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if importlib.util.find_spec("torch"):
            exl3.diagnose.require()
    assert "torch" not in sys.modules
    print(f"exl3 {exl3.__version__} on Python {sys.version.split()[0]}: native module and CPU kernels open")


if __name__ == "__main__":
    main()
