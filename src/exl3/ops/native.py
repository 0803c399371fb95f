"""The door to the kernel libraries: finds the one that serves a device, opens it once, launches its operations."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3 import diagnose
from exl3.errors import ArgumentError, BackendError
from exl3.ops import blocks
from exl3.settings import debug_log

Operation = Callable[[bytes, int], None]


class NotInstalled(BackendError):
    """No kernel library, or no native module: then reference.py serves."""


class Backend:
    """One opened kernel library: `name`, `build`, `ops` (name -> operation, absent where it has none) and its size queries."""

    def __init__(self, path: Path) -> None:
        try:
            from exl3 import _native
        except ImportError as e:
            raise NotInstalled(diagnose.native_failure(str(e))) from None
        if missing := _missing_bytes(path):
            raise BackendError(f"{path} is cut short by {missing} bytes: {diagnose.again()}")
        try:
            library = _native.open(str(path))
        except BackendError as e:
            text = str(e)
            raise BackendError(diagnose.native_failure(text) if "cannot load" in text else text) from None
        for name, size in _native.block_bytes().items():
            if blocks.SIZES[name] != size:
                raise BackendError(
                    f"exl3's native module and Python files disagree on '{name}' ({size} and {blocks.SIZES[name]} bytes): reinstall exl3"
                )
        self.path = path
        self.name: str = library.name
        self.build: str = library.build
        self.ops: dict[str, Operation] = library.ops
        self.describe: Callable[[int], str] = library.describe
        self.repack_bytes: Callable[[int], int] = library.repack_bytes
        self.workspace: Callable[[str, bytes], int] = library.workspace
        debug_log("backend").debug("opened %s: %s, %s", path, self.name, self.build)


def _missing_bytes(path: Path) -> int:
    """What an ELF file lacks up to its section headers, which stand at its end: the linker does not look, and the process would die."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = file.seek(0, 2)
    except OSError:
        return 0
    if len(head) < 64 or head[:6] != b"\x7fELF\2\1":  # 64 bits, little-endian; of all else the linker tells
        return 0
    at, each, count = (int.from_bytes(head[start : start + n], "little") for start, n in ((40, 8), (58, 2), (60, 2)))
    return max(0, at + each * count - size)


_lock = threading.Lock()
_backends: dict[str, Backend | None] = {}


def library_name(device_type: str) -> str | None:
    """Which backend serves a torch device type: cpu, cuda or rocm (torch calls ROCm cards cuda too); None for others."""
    if device_type == "cuda":
        return "rocm" if torch.version.hip else "cuda"
    return "cpu" if device_type == "cpu" else None


def _candidates(name: str) -> list[Path]:
    """Where a library may lie: beside the package's Python files, or beside _native (editable installs)."""
    places = [Path(__file__).resolve().parent.parent]
    with contextlib.suppress(ImportError):
        from exl3 import _native

        places.append(Path(_native.__file__).resolve().parent)
    return [p / f"{prefix}exl3_{name}.{suffix}" for p in places for prefix, suffix in (("lib", "so"), ("lib", "dylib"), ("", "dll"))]


def backend(device: torch.device | str) -> Backend:
    """The library that serves `device`. Raises BackendError in one line where it is missing or stale."""
    kind = torch.device(device).type
    name = library_name(kind)
    if name is None:
        raise NotInstalled(f"no kernel library serves devices of type {kind!r}: use cpu or cuda")
    with _lock:
        found = _backends.get(kind)
        if found is None:
            path = next((p for p in _candidates(name) if p.exists()), None)
            if path is None:
                backends = "cpu" if name == "cpu" else f"cpu,{name}"
                raise NotInstalled(f"libexl3_{name} is not installed: build it with `EXL3_BACKENDS={backends} pip install .`")
            found = _backends[kind] = Backend(path)
        return found


def find(device: torch.device) -> Backend | None:
    """The library that serves `device`, or None (said once per kind) where there is none: then reference.py runs."""
    try:
        return _backends[device.type]
    except KeyError:
        pass
    if device.type == "meta":
        raise ArgumentError("a tensor on the meta device has no data: load the weights first")
    try:
        return backend(device)
    except NotInstalled as e:
        warnings.warn(f"exl3 runs slowly on {device.type}: {e}", RuntimeWarning, stacklevel=3)
        _backends[device.type] = None
        return None


def serving(op: str, first: Tensor, *others: Tensor | None) -> Operation | None:
    """The native operation for these tensors; None where reference.py must run: no library, no such operation, or a gradient is wanted.
    Raises ArgumentError for fake and meta tensors and for tensors on two devices."""
    device = first.device
    library = find(device)
    grad = torch.is_grad_enabled()
    for t in (first, *others):
        if t is None:
            continue
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            _refuse_fake(op, t)
        if t.device != device:
            raise ArgumentError(f"{op}: tensors on {device} and {t.device}; move them to one device")
        if grad and t.requires_grad:
            return None
    return None if library is None else library.ops.get(op)


def _refuse_fake(op: str, t: Tensor) -> None:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(t, FakeTensor) or torch._is_functional_tensor(t):
        raise ArgumentError(f"{op}: got a {type(t).__name__}, which has no data; exl3.integrations registers operations for torch.compile")


class Recording(threading.local):
    """The tape this thread records on, if any; see ops.tape."""

    keep: list[Any] | None = None


recording = Recording()


def launch(op: Operation, device: torch.device, block: bytes, *keep: Any) -> None:
    """Runs one native operation on the device's current stream (CPU: on torch's threads); on a tape, records it and keeps `keep` alive."""
    if recording.keep is not None:
        recording.keep.extend(keep)
    if device.type == "cpu":
        op(block, torch.get_num_threads())
    elif device.index == torch.cuda.current_device():
        op(block, torch._C._cuda_getCurrentRawStream(device.index))
    else:
        with torch.cuda.device(device):
            op(block, torch._C._cuda_getCurrentRawStream(device.index))


@contextlib.contextmanager
def on(device: torch.device) -> Iterator[int]:
    """Makes `device` current and yields its stream (CPU: the number of threads) as operations take it."""
    if device.type == "cpu":
        yield torch.get_num_threads()
    else:
        with torch.cuda.device(device):
            yield torch.cuda.current_stream(device).cuda_stream


def finish(device: torch.device) -> None:
    """Waits for the device's current stream; nothing on the CPU."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).synchronize()


class _Workspaces(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.device], Tensor] = {}


_workspaces = _Workspaces()


def workspaces(device: torch.device) -> list[Tensor]:
    """This thread's buffers on a device as they are now; a device graph that was recorded with them has to keep them alive."""
    return [buffer for (_, where), buffer in _workspaces.buffers.items() if where == device]


def workspace(kind: str, device: torch.device, nbytes: int) -> Tensor | None:
    """This thread's persistent buffer on a device, zero when new, at least `nbytes` bytes. A tape that used one keeps it alive."""
    if nbytes <= 0:
        return None
    buffer = _workspaces.buffers.get((kind, device))
    if buffer is None or buffer.numel() < nbytes:
        size = max(nbytes, 1 << 20, 2 * buffer.numel() if buffer is not None else 0)
        # a tape's guard allows no torch computation; the buffer is made outside it
        with torch.utils._python_dispatch._disable_current_modes():
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        _workspaces.buffers[(kind, device)] = buffer
    return buffer
