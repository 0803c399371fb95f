"""Writing model directories: safetensors shards, atomic, with an index when there is more than one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from exl3.errors import ArgumentError, ResourceError

SHARD_SIZE = 8192  # MiB; the field's usual limit
_SLACK = 16 << 20  # bytes left free on the disk


def check_disk(directory: str | os.PathLike[str], nbytes: int, what: str = "the output") -> None:
    """Raise `ResourceError` unless the disk that holds `directory` (or will) has room for `nbytes` more."""
    at = Path(directory).absolute()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    if free < nbytes + _SLACK:
        raise ResourceError(
            f"{what} needs {nbytes / 2**20:.0f} MiB in {directory} and {_SLACK >> 20} MiB to spare, but the disk has "
            f"{free / 2**20:.0f} MiB free; make room or use another disk"
        )


def make_output(folder: Path) -> None:
    """Makes the output directory before the work begins: ResourceError where it could not be written to in the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as e:
        raise ResourceError(f"output_dir {folder}: cannot be made ({e.strerror or e}); choose another with -o") from None
    if not writable:
        raise ResourceError(f"output_dir {folder}: not writable; choose another with -o")


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a small file so that either the old or the new one is there, whatever happens. ResourceError where the disk refuses."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _told(path), open(temporary, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the disk refuses, a full one say, as ResourceError with the file's name."""
    try:
        yield
    except (OSError, SafetensorError) as e:
        raise ResourceError(f"{path}: cannot be written ({getattr(e, 'strerror', None) or e}); make room or use another disk") from None


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """`value` as indented JSON, keys in the order given, atomic."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """One safetensors file, atomic; tensors may lie on any device. The disk is checked first."""
    path = Path(path)
    check_disk(path.parent, sum(t.numel() * t.element_size() for t in tensors.values()), path.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        _save(temporary, tensors, metadata)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _save(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None) -> None:
    with _told(path):
        save_file(_apart(tensors), path, metadata=metadata or {"format": "pt"})
        os.chmod(path, 0o644)  # the library writes 0600
        with open(path, "rb+") as f:
            os.fsync(f.fileno())


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All contiguous on the CPU, and a copy of each that overlaps another in memory (the library refuses those)."""
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    end = 0
    for name, t in sorted(plain.items(), key=lambda item: item[1].data_ptr()):
        size = t.numel() * t.element_size()
        if size and t.data_ptr() < end:
            plain[name] = t.clone()
        end = max(end, t.data_ptr() + size)
    return plain


def _remove_leftovers(directory: Path) -> None:
    """Shards of a writer that was killed: it could not take them away itself, and they are as large as a model."""
    for path in directory.glob(".shard-?????.*.tmp"):
        writer = path.name.split(".")[2]
        if writer.isdigit() and not _runs(int(writer)):
            path.unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name != "posix":  # elsewhere a signal 0 is one
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or no number of a process
        return True
    return True


class ShardWriter:
    """Writes groups of tensors to `model-0000i-of-0000n.safetensors`, or to `model.safetensors` if one shard is enough.

    A group (a transformer block, say) is never split over shards. Shards lie under hidden names until `close`, which renames
    them and writes the index; a crash before leaves no file that a loader would take for a model.

        with ShardWriter(directory, shard_size=8192) as out:
            out.add({"model.embed_tokens.weight": table})
    """

    def __init__(self, directory: str | os.PathLike[str], shard_size: float = SHARD_SIZE, metadata: dict[str, str] | None = None) -> None:
        """`shard_size` in MiB, 0: everything in one file."""
        if not shard_size >= 0:  # also NaN
            raise ArgumentError(f"shard_size is {shard_size}; it is a size in MiB, or 0 for a single file")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(self.directory)
        self.limit = shard_size * 2**20 if shard_size else float("inf")
        self.metadata = metadata
        self.shards: list[tuple[Path, list[str]]] = []
        self.total = 0  # bytes of tensors so far
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._names: set[str] = set()

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Append one group. Keeps references until its shard is written."""
        for name in tensors:
            if name in self._names:
                raise ArgumentError(f"tensor {name!r} is written twice")
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if self._pending and self._pending_bytes + size > self.limit:
            self._flush()
        self._names.update(tensors)
        self._pending.update(tensors)
        self._pending_bytes += size
        self.total += size

    def _flush(self) -> None:
        path = self.directory / f".shard-{len(self.shards) + 1:05d}.{os.getpid()}.tmp"
        check_disk(self.directory, self._pending_bytes, "the next shard")
        self.shards.append((path, list(self._pending)))
        _save(path, self._pending, self.metadata)
        self._pending, self._pending_bytes = {}, 0

    def _flush_rest(self) -> None:
        if self._pending or not self.shards:
            self._flush()

    def settle(self) -> None:
        """Write what is left, under hidden names still, and only then take away the configuration of a model that was here: all that a
        full disk can stop is done. The new model's config.json comes last; a directory without one is none."""
        self._flush_rest()
        for name in ("config.json", "quantization_config.json"):
            (self.directory / name).unlink(missing_ok=True)

    def close(self) -> list[Path]:
        """Write what is left, give the shards their names, remove model files of an earlier run; returns the files."""
        self._flush_rest()
        n = len(self.shards)
        names = ["model.safetensors"] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
        index = self.directory / "model.safetensors.index.json"
        index.unlink(missing_ok=True)
        files = [self.directory / name for name in names]
        for (temporary, _), file in zip(self.shards, files):
            os.replace(temporary, file)
        for old in [*self.directory.glob("model.safetensors"), *self.directory.glob("model-?????-of-?????.safetensors")]:
            if old not in files:  # only now: a crash between two steps loses nothing, and the loader refuses names that are there twice
                old.unlink()
        if n > 1:
            weight_map = {tensor: name for (_, tensors), name in zip(self.shards, names) for tensor in tensors}
            write_json(index, {"metadata": {"total_size": self.total}, "weight_map": weight_map})
        self.shards = []
        return files

    def abort(self) -> None:
        """Remove what has been written so far."""
        for path, _ in self.shards:
            path.unlink(missing_ok=True)
        self.shards, self._pending = [], {}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self.close() if kind is None else self.abort()


def write_shards(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]],
    shard_size: float = SHARD_SIZE,
    metadata: dict[str, str] | None = None,
) -> list[Path]:
    """Write `tensors` (one mapping, or groups that are to stay together, e.g. from a generator) to shards of `shard_size` MiB.

    A single mapping is split anywhere between tensors. Returns the files. Raises `ResourceError` when the disk is too small:
    before the first byte for a mapping, before each shard for groups.
    """
    if isinstance(tensors, Mapping):
        check_disk(directory, sum(t.numel() * t.element_size() for t in tensors.values()))
        tensors = [{name: t} for name, t in tensors.items()]
    out = ShardWriter(directory, shard_size, metadata)
    try:
        for group in tensors:
            out.add(group)
        return out.close()
    except BaseException:
        out.abort()
        raise
