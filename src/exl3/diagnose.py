"""Why exl3 cannot run here, or not on this machine's GPU: one sentence and the line that mends it.

Looks at files only (torch/version.py, the package's own folder, the C library), so that `import exl3` can afford it; neither
torch nor a kernel library is loaded. `exl3 doctor` adds what takes a look at the driver.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exl3.errors import BackendError

PACKAGE = Path(__file__).resolve().parent
INDEX = "https://exl3-project.github.io/exl3/whl"  # of exl3's labelled wheels; .github/matrix.toml has the same
TORCH_INDEX = "https://download.pytorch.org/whl"
TORCH_FLOOR = (2, 6)
GLIBC_FLOOR = (2, 28)
# rows of the release matrix with GPU code: label, lowest CUDA or ROCm version of torch it serves, lowest Linux driver's CUDA version
ROWS = {"cu126": (12, 6), "cu128": (12, 8), "cu130": (13, 0), "rocm6.4": (6, 4), "rocm7": (7, 0)}

KFD = Path("/dev/kfd")  # AMD's driver

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """`error`: exl3 cannot work; `warning`: a GPU stays unused; `note`: worth knowing, shown by doctor alone."""

    level: Level
    text: str


@dataclass(frozen=True)
class Facts:
    """What was found. Versions are None where there is none; `torch_cuda` and `torch_hip` are what torch was built for."""

    version: str
    torch: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    label: str = ""  # local label of the installed wheel: cpu, cu130 ...; empty: PyPI's or a build of one's own
    libraries: frozenset[str] = frozenset()  # of cpu, cuda, rocm
    native: bool = True  # a native module for this Python lies in the package
    natives: tuple[str, ...] = ()  # all native modules there, whatever their Python
    glibc: tuple[int, int] | None = None
    card: Literal["nvidia", "amd", ""] = ""
    card_open: bool = True  # this user may open an AMD card
    driver_cuda: tuple[int, int] | None = None  # newest CUDA the driver serves; (0, 0): no driver library


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


def _torch() -> tuple[str | None, str | None, str | None]:
    """(version, cuda, hip) of the torch that `import torch` would find, read from its version.py."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:  # a stray folder named torch has no origin
        return None, None, None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(errors="replace")
    except OSError:
        return "unknown", None, None
    found = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return found.get("__version__", "unknown"), found.get("cuda"), found.get("hip")


def _glibc() -> tuple[int, int] | None:
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (AttributeError, ValueError, OSError):
        return None
    numbers = _numbers(version)
    return (numbers[0], numbers[1]) if name == "glibc" and len(numbers) == 2 else None


def _card() -> Literal["nvidia", "amd", ""]:
    if Path("/proc/driver/nvidia/gpus").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists():
        return "nvidia"
    return "amd" if KFD.exists() else ""


def _driver() -> tuple[int, int]:
    """The newest CUDA version NVIDIA's driver serves; loads the driver's library."""
    import ctypes  # heavier than the rest of this file

    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int(0)
        if library.cuDriverGetVersion(ctypes.byref(version)) or version.value <= 0:
            return 0, 0
    except (OSError, AttributeError):
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _package_folders() -> list[Path]:
    """Where native files of exl3 may lie: beside the Python files, or in site-packages (editable installs)."""
    return [PACKAGE, *(p for p in (Path(entry) / "exl3" for entry in sys.path if entry) if p.is_dir() and p != PACKAGE)]


def _label() -> str:
    names = [p.name for p in PACKAGE.parent.glob("exl3-*+*.dist-info")]
    return names[0].removesuffix(".dist-info").split("+", 1)[1] if names else ""


def facts(driver: bool = False) -> Facts:
    """What this machine and Python have; `driver=True` asks NVIDIA's driver too."""
    import exl3

    torch, cuda, hip = _torch()
    folders = _package_folders()
    names = {f.name for folder in folders for f in folder.iterdir()}
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    return Facts(
        version=exl3.__version__,
        torch=torch,
        torch_cuda=cuda,
        torch_hip=hip,
        label=_label(),
        libraries=frozenset(b for b in ("cpu", "cuda", "rocm") if names & {f"libexl3_{b}.so", f"libexl3_{b}.dylib", f"exl3_{b}.dll"}),
        native=f"_native{suffix}" in names,
        natives=tuple(sorted(n for n in names if n.startswith("_native."))),
        glibc=_glibc(),
        card=_card(),
        card_open=not KFD.exists() or os.access(KFD, os.R_OK | os.W_OK),
        driver_cuda=_driver() if driver else None,
    )


def _row_for(torch_cuda: str | None, torch_hip: str | None) -> str | None:
    """The row of the matrix that fits a torch build, None where there is none."""
    wanted = _numbers(torch_hip or torch_cuda or "")
    kind = "rocm" if torch_hip else "cu"
    fitting = (
        [(low, label) for label, low in ROWS.items() if label.startswith(kind) and low[0] == wanted[0] and low <= wanted] if wanted else []
    )
    return max(fitting)[1] if fitting else None


def pip_line(f: Facts, label: str) -> str:
    """The command that installs this version's wheel of one row."""
    return f"pip install --force-reinstall --no-deps 'exl3=={f.version}+{label}' --extra-index-url {INDEX}/{label}"


def _reinstall(f: Facts) -> str:
    """The command that installs the same wheel again."""
    return pip_line(f, f.label) if f.label else "pip install --force-reinstall --no-deps exl3"


def _about_torch(f: Facts) -> list[Finding]:
    if f.torch is None:
        return [Finding("error", "exl3 needs torch, which is not installed in this Python: pip install 'torch>=2.6'")]
    numbers = _numbers(f.torch)
    if len(numbers) == 2 and numbers < TORCH_FLOOR:
        return [Finding("error", f"exl3 needs torch 2.6 or newer and found {f.torch}: pip install --upgrade 'torch>=2.6'")]
    return []


def _about_native(f: Facts) -> list[Finding]:
    if f.glibc and f.glibc < GLIBC_FLOOR and f.natives:
        return [Finding(
            "error",
            f"this system's glibc {f.glibc[0]}.{f.glibc[1]} is older than 2.28, which exl3's wheels need: use a newer distribution, "
            "or build for this one: pip install --no-binary exl3 exl3",
        )]  # fmt: skip
    if f.natives and not f.native:
        made = ", ".join(f.natives)
        text = f"exl3's native module ({made}) is for another Python than {sys.version.split()[0]}: {_reinstall(f)}"
        return [Finding("error", text)]
    if not f.natives:
        return [Finding("note", f"exl3 was installed without native code and runs in plain torch, slowly: {_reinstall(f)}")]
    return []


def _torch_line(index: str) -> str:
    return f"pip install --force-reinstall torch --index-url {TORCH_INDEX}/{index}"


def _made_for_amd(f: Facts) -> bool:
    """Whether a build of one's own was meant for an AMD card."""
    return "rocm" in f.libraries and (f.card == "amd" or (f.card == "" and "cuda" not in f.libraries))


def _about_amd(f: Facts) -> list[Finding]:
    if f.torch_hip and "rocm" not in f.libraries:
        row = _row_for(None, f.torch_hip)
        cure = pip_line(f, row) if row else _torch_line("rocm7.0")
        return [Finding("warning", f"torch is built for ROCm {f.torch_hip}, but this exl3 has no AMD kernels: {cure}")]
    if f.torch_hip and not f.card:
        return [Finding("note", "no AMD card is visible (/dev/kfd is missing): install the amdgpu driver; in a container, start it with "
                                "--device /dev/kfd --device /dev/dri")]  # fmt: skip
    if f.torch_hip and not f.card_open:
        text = "this user may not open /dev/kfd, so no AMD card is used: sudo usermod -aG render,video $USER, then log in again"
        return [Finding("warning", f"{text}; in a container, start it with --group-add render")]
    if f.torch_hip:
        return []
    built = f"CUDA {f.torch_cuda}" if f.torch_cuda else "the CPU alone"
    cure = _torch_line("rocm6.4" if f.label == "rocm6.4" else "rocm7.0")
    if f.label.startswith("rocm"):
        return [Finding("warning", f"this is exl3's wheel for AMD cards (+{f.label}), but torch is built for {built}: {cure}")]
    if _made_for_amd(f):
        text = f"this exl3 has AMD kernels, but torch is built for {built} and uses no AMD card: {cure}"
        return [Finding("warning" if f.card == "amd" else "note", text)]
    if f.card == "amd":  # many a processor's own graphics, so no more than a note
        text = f"an AMD card is here and torch is built for {built}; for RDNA2 and newer: {cure}, then {pip_line(f, 'rocm7')}"
        return [Finding("note", text)]
    return []


def _about_nvidia(f: Facts) -> list[Finding]:
    if f.torch_cuda is None:
        if f.label.startswith("cu"):
            why = f"this is exl3's wheel for NVIDIA cards (+{f.label})"
        elif "cuda" in f.libraries and f.card == "nvidia":  # PyPI's wheel has CUDA kernels for everyone: silent without a card
            why = "this machine has an NVIDIA card"
        else:
            return []
        return [Finding("warning", f"{why}, but torch is built for the CPU alone: {_torch_line(f.label or 'cu130')}")]
    if "cuda" not in f.libraries:  # torch from PyPI is a CUDA build on every Linux: a note unless there is a card
        row = _row_for(f.torch_cuda, None)
        cure = pip_line(f, row) if row else f"{_torch_line('cu126')}, then exl3's +cu126 wheel"
        text = f"torch is built for CUDA {f.torch_cuda}, but this exl3 has CPU kernels only: {cure}"
        return [Finding("warning" if f.card == "nvidia" else "note", text)]
    if f.driver_cuda == (0, 0):
        text = "no NVIDIA driver can be loaded (libcuda): install it, or in a container start that with --gpus all"
        return [Finding("warning" if f.card == "nvidia" else "note", text)]
    kernels = ROWS.get(f.label, (13, 0))
    if f.driver_cuda and f.driver_cuda[0] < kernels[0]:  # within one major version an older driver runs newer code
        have, cure = f"{f.driver_cuda[0]}.{f.driver_cuda[1]}", pip_line(f, "cu126")
        return [
            Finding(
                "warning", f"the NVIDIA driver serves CUDA {have} and exl3's kernels are of CUDA {kernels[0]}: update the driver, or {cure}"
            )
        ]
    return []


def findings(f: Facts) -> list[Finding]:
    """All that stands in the way, the gravest first; a function of the facts alone."""
    fatal = _about_torch(f) + _about_native(f)
    if any(x.level == "error" and "torch" in x.text for x in fatal):
        return fatal
    amd = f.torch_hip or f.card == "amd" or f.label.startswith("rocm") or _made_for_amd(f)
    return fatal + _about_amd(f) + ([] if amd else _about_nvidia(f))


def at_import() -> None:
    """Warns in one sentence each about what keeps exl3 or a GPU from working; never raises."""
    try:
        found = findings(facts())
    except Exception:  # a diagnosis must not be the fault itself
        return
    for finding in found:
        if finding.level != "note":
            warnings.warn(finding.text, RuntimeWarning, stacklevel=3)


def require() -> None:
    """Raises BackendError with the first finding that makes exl3 unusable in this Python."""
    for finding in findings(facts()):
        if finding.level == "error":
            raise BackendError(finding.text)


def again() -> str:
    """The command that installs this exl3 again."""
    import exl3

    return _reinstall(Facts(version=exl3.__version__, label=_label()))


def native_failure(message: str) -> str:
    """One sentence for what the dynamic linker said about _native or a kernel library."""
    found = re.search(r"GLIBC_(\d+\.\d+)", message)
    if found:
        have = _glibc()
        mine = f"{have[0]}.{have[1]}" if have else "unknown"
        return (f"exl3's native code needs glibc {found[1]} and this system has {mine}: use a newer distribution, or build for this one: "
                "pip install --no-binary exl3 exl3")  # fmt: skip
    if "GLIBCXX_" in message or "CXXABI_" in message:
        return f"exl3's native code was built with a newer C++ library than this system's: {again()}"
    if "undefined symbol" in message or "procedure" in message.lower():
        return f"exl3's native files are of different versions: {again()}"
    if re.search(r"No module named '?exl3\._native|cannot import name '_native'", message):
        return f"exl3's native module is missing for this Python: {again()}"
    return f"exl3's native code cannot be loaded ({message}): {again()}"
