"""The work folder of a conversion: who may use it, what was decided, what is finished, where to go on.

    lock                    held by the running process
    job.json                options, source fingerprint, rates; written once, before the first block
    calibration.safetensors token ids
    importance/<block>.safetensors  importance of the outputs of its matrices, where measured
    modules/<name>.safetensors  finished tensors of one module, its report in the metadata
    state.safetensors       the streams behind the last block that is safely done, shard by shard, and its number
    report.json, recipe.yaml    when all is done

Every file appears by one rename, so a crash at any moment leaves the one before or the one after.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from exl3 import __version__
from exl3.errors import JobError, ResourceError
from exl3.files import write_tensors
from exl3.files.shards import write_json
from exl3.quantize.streams import Shard

_ENTRIES = {"options": dict, "fingerprint": str, "rates": dict, "calibration": dict}  # of job.json
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class Job:
    """A locked work folder; use as a context manager."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._lock: Any = None
        self._saved_at = time.monotonic()

    def __enter__(self) -> Job:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "a+")
            if not _try_lock(self._lock):
                self._lock.seek(0)
                owner = self._lock.read().strip() or "unknown"
                self._lock.close()
                raise JobError(
                    f"{self.folder}: another conversion works in this folder (process {owner}); wait for it or use another work folder"
                )
            self._lock.truncate(0)
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        except OSError as e:
            raise ResourceError(f"work folder {self.folder}: cannot be written to ({e.strerror or e}); choose another with -w") from None
        return self

    def __exit__(self, *_: Any) -> None:
        self._lock.close()

    # what was decided

    @property
    def plan_path(self) -> Path:
        return self.folder / "job.json"

    def stored(self) -> dict[str, Any] | None:
        """The plan of an unfinished job, or None."""
        try:
            plan: dict[str, Any] = json.loads(self.plan_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as e:
            raise JobError(f"{self.plan_path}: not readable ({e}); remove the folder to start anew") from None
        if isinstance(plan, dict) and plan.get("finished"):
            return None
        if not isinstance(plan, dict) or "version" not in plan:
            raise _damaged(self.plan_path)
        if plan["version"] != __version__:
            raise JobError(f"{self.folder}: begun by exl3 {plan['version']}, this is {__version__}; finish it there or remove the folder")
        if not all(isinstance(plan.get(name), kind) for name, kind in _ENTRIES.items()):
            raise _damaged(self.plan_path)
        return plan

    def begin(self, plan: dict[str, Any], calibration: Tensor) -> None:
        """A fresh job, in a folder that `clean` has cleared and `save_importance` may have written to."""
        (self.folder / "modules").mkdir(exist_ok=True)
        write_tensors(self.folder / "calibration.safetensors", {"input_ids": calibration})
        write_json(self.plan_path, {"version": __version__, **plan})

    def clean(self) -> None:
        """Removes everything that this program writes here, but the lock."""
        for name in ("job.json", "calibration.safetensors", "state.safetensors", "report.json", "recipe.yaml"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("modules", "importance"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def update(self, **changes: Any) -> None:
        """Rewrites entries of the plan (where things lie, `finished`)."""
        write_json(self.plan_path, {**json.loads(self.plan_path.read_text(encoding="utf-8")), **changes})

    def finish(self) -> None:
        """Marks the job as done and removes the bulk."""
        self.update(finished=True)
        for name in ("state.safetensors", "calibration.safetensors"):
            (self.folder / name).unlink(missing_ok=True)
        for name in ("modules", "importance"):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def calibration(self) -> Tensor:
        return _read(self.folder / "calibration.safetensors")[0]["input_ids"]

    def save_importance(self, index: int, tensors: dict[str, Tensor]) -> None:
        """What was measured of the outputs of block `index`."""
        (self.folder / "importance").mkdir(exist_ok=True)
        write_tensors(self.folder / "importance" / f"{index:05d}.safetensors", tensors)

    def importance(self, index: int) -> dict[str, Tensor]:
        path = self.folder / "importance" / f"{index:05d}.safetensors"
        return _read(path)[0] if path.exists() else {}

    # finished modules

    def module_path(self, index: int) -> Path:
        return self.folder / "modules" / f"{index:05d}.safetensors"

    def save_module(self, index: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        write_tensors(self.module_path(index), tensors, {"format": "pt", "report": json.dumps(record)})

    def module(self, index: int) -> dict[str, Tensor]:
        return _read(self.module_path(index))[0]

    def record(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(_read(self.module_path(index), tensors=False)[1]["report"])
        return record

    def check_modules(self, indices: Iterable[int]) -> None:
        """JobError unless the modules a checkpoint counts on are there and whole: not to be found out when all the others are done."""
        for index in indices:
            _read(self.module_path(index), tensors=False)

    # the streams

    def due(self, interval: float) -> bool:
        """Whether the last checkpoint was `interval` seconds ago or more."""
        return time.monotonic() - self._saved_at >= interval

    def save_state(self, done: int, streams: dict[str, Tensor]) -> None:
        """Remembers that modules below `done` are finished."""
        write_tensors(self.folder / "state.safetensors", streams, {"format": "pt", "done": str(done)})
        self._saved_at = time.monotonic()

    def state(self) -> tuple[int, dict[str, Tensor]]:
        """(number of finished modules, streams); (0, {}) before the first checkpoint."""
        path = self.folder / "state.safetensors"
        if not path.exists():
            return 0, {}
        try:
            with safe_open(path, "pt") as f:
                return int(f.metadata()["done"]), {name: _joined(f, name) for name in dict.fromkeys(n.split(".")[0] for n in f.keys())}
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as e:
            raise _unreadable(path, e) from None


def _read(path: Path, tensors: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as f:
            return ({name: f.get_tensor(name) for name in f.keys()} if tensors else {}), f.metadata() or {}
    except (OSError, SafetensorError) as e:
        raise _unreadable(path, e) from None


def _damaged(path: Path) -> JobError:
    return JobError(f"{path}: is not the plan of a conversion, or damaged; remove the folder to start anew")


def _unreadable(path: Path, why: Exception) -> JobError:
    return JobError(f"{path}: not readable ({why}); remove the work folder to start anew")


def _joined(f: Any, name: str) -> Tensor:
    """The parts of a stream in one tensor, read one after the other: no second copy of all."""
    parts = sorted(n for n in f.keys() if n.split(".")[0] == name)
    shapes = [f.get_slice(n).get_shape() for n in parts]
    whole = torch.empty(sum(s[0] for s in shapes), *shapes[0][1:])
    start = 0
    for part, shape in zip(parts, shapes):
        whole[start : start + shape[0]] = f.get_tensor(part)
        start += shape[0]
    return whole


def _try_lock(file: Any) -> bool:
    """An exclusive lock that ends with the process."""
    try:
        if os.name == "nt":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def fingerprint(directory: str | os.PathLike[str]) -> str:
    """Tells one source model from another: config.json, and of each weight file its size, header and 64 samples spread over it."""
    digest = hashlib.sha256()
    folder = Path(directory)
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with open(path, "rb") as f:
            head = f.read(8)
            digest.update(head)
            if path.suffix == ".safetensors":
                digest.update(f.read(min(int.from_bytes(head, "little"), 1 << 27)))
            for i in range(_SAMPLES):
                f.seek(max(0, (size - _SAMPLE_BYTES) * i // (_SAMPLES - 1)))
                digest.update(f.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def changed_settings(stored: dict[str, Any], given: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """name -> (stored, given) of options that were given now and say something else."""
    return {name: (stored[name], value) for name, value in given.items() if name in stored and stored[name] != value}


def stream_tensors(shards: list[Shard]) -> dict[str, Tensor]:
    """The streams of all shards as they are stored: themselves where they lie in host memory, which may not hold them twice."""
    tensors = {f"quantized.{i:05d}": s.quantized.cpu() for i, s in enumerate(shards)}
    return tensors | {f"original.{i:05d}": s.original.cpu() for i, s in enumerate(shards) if s.original is not None}


def check_streams(streams: dict[str, Tensor], shape: tuple[int, int, int], where: Path) -> None:
    """JobError unless a checkpoint's streams fit the calibration rows and the model."""
    for name, t in streams.items():
        if tuple(t.shape) != shape or t.dtype != torch.float32:
            raise JobError(
                f"{where}: stream {name} is {t.dtype} {tuple(t.shape)}, expected float32 {shape}; remove the work folder to start anew"
            )
