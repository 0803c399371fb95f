"""Reading tensors: few large reads into few large buffers, every tensor at a 256-byte aligned place.

Tensors are sorted by file and offset, each gets a slot in a *slab*, and consecutive ones are read together by `preadv`, which
scatters one contiguous piece of a file over many slots. For the CPU the slots are the final places; for a GPU each reader
thread owns a pinned buffer laid out like a piece of the slab, so that thousands of small tensors need one transfer.
No file is mapped: a view of a mapping would carry the file's odd addresses into kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3 import settings
from exl3.errors import FormatError, ResourceError
from exl3.files.safetensors import TensorInfo, paused_gc
from exl3.settings import debug_log

ALIGNMENT = 256  # bytes; what the kernels ask of every tensor
SLAB = 512 << 20  # bytes; a larger tensor gets a slab of its own
PIECE = 16 << 20  # bytes of slab filled by one read
_GAP = 64 << 10  # bytes between two tensors of a file that are read along rather than skipped
_PARTS = 1000  # the kernel takes at most 1024 buffers in one call
_THREADS = 4


@dataclass
class _Read:
    """One read: a contiguous piece of a file, scattered over [start, stop) of a slab. A part with start < 0 is thrown away."""

    file: Path
    offset: int
    slab: int
    start: int
    stop: int = 0
    nbytes: int = 0
    parts: list[tuple[int, int]] = field(default_factory=list)  # (start in the slab, bytes)

    def add(self, start: int, nbytes: int) -> None:
        self.parts.append((start, nbytes))
        self.nbytes += nbytes
        if start >= 0:
            self.stop = max(self.stop, start + nbytes)


def read_tensors(infos: Mapping[str, TensorInfo], device: str | torch.device = "cpu", *, staged: bool | None = None) -> dict[str, Tensor]:
    """Read `infos` to `device`: name -> tensor in its stored dtype and shape, 256-byte aligned, in the order of `infos`.

    Tensors read together share slabs of up to 512 MiB (EXL3_LOAD_ARENA): a slab is freed when the last tensor in it is. `staged` reads
    through staging buffers (default: only for devices other than the CPU). Raises `FormatError` when a file has shrunk or gone since
    its header was checked.
    """
    device = torch.device(device)
    if device.type == "meta":
        return {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in infos.items()}
    begin = time.perf_counter()
    with paused_gc():
        places, sizes, reads = _plan(infos, SLAB if settings.get("EXL3_LOAD_ARENA") else 0)
    slabs = [_aligned_empty(size, device) for size in sizes]
    if staged or (staged is None and device.type != "cpu"):
        current = torch.cuda.current_stream(device) if device.type == "cuda" else None  # of this thread, not of the readers
        _run(reads, lambda: _Staging(slabs, device, current))
    else:
        views = [_bytes(slab) for slab in slabs]
        _run(reads, lambda: lambda fd, read: _fill(fd, read, views[read.slab], 0))
    result = {}
    with paused_gc():
        for name, info in infos.items():
            slab, start = places[name]
            result[name] = slabs[slab][start : start + info.nbytes].view(info.dtype).view(info.shape)
    seconds = time.perf_counter() - begin
    debug_log("loader").debug("%d tensors, %d bytes in %d reads to %s: %.3f s", len(infos), sum(sizes), len(reads), device, seconds)
    return result


def _plan(infos: Mapping[str, TensorInfo], most: int = SLAB) -> tuple[dict[str, tuple[int, int]], list[int], list[_Read]]:
    """(name -> (slab, start), sizes of the slabs, reads), in order of file and offset. A slab of several tensors has up to `most` bytes."""
    places: dict[str, tuple[int, int]] = {}
    sizes: list[int] = []
    reads: list[_Read] = []
    for name, info in sorted(infos.items(), key=lambda item: (str(item[1].file), item[1].offset)):
        room = -(-info.nbytes // ALIGNMENT) * ALIGNMENT
        if not sizes or sizes[-1] + room > most:
            sizes.append(0)
        slab, start = len(sizes) - 1, sizes[-1]
        places[name] = slab, start
        sizes[slab] += room
        done = 0
        while done < info.nbytes:
            last = reads[-1] if reads else None
            gap = info.offset + done - (last.offset + last.nbytes) if last else 0
            if not (
                last
                and last.file == info.file
                and last.slab == slab
                and 0 <= gap <= _GAP
                and len(last.parts) < _PARTS
                and start + done - last.start < PIECE
            ):
                last = _Read(info.file, info.offset + done, slab, start + done)
                reads.append(last)
            elif gap:
                last.add(-1, gap)
            count = min(info.nbytes - done, PIECE - (start + done - last.start))
            last.add(start + done, count)
            done += count
    return places, sizes, reads


def _aligned_empty(size: int, device: torch.device) -> Tensor:
    try:
        raw = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    except RuntimeError as e:  # torch.OutOfMemoryError is one; so is the CPU allocator's
        raise ResourceError(f"{size} bytes for weights on {device} are not to be had: {str(e).splitlines()[0]}") from None
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + size]


def _bytes(t: Tensor) -> memoryview:
    return memoryview(t.numpy())  # type: ignore[arg-type]  # an array is a buffer, whatever the stubs of before Python 3.12 say


def _run(reads: list[_Read], make_reader: Any) -> None:
    """Do all reads, on several threads where there is enough to read (preadv releases the GIL). One reader per thread."""
    files: dict[Path, int] = {}
    try:
        for read in reads:
            if read.file not in files:
                try:
                    files[read.file] = os.open(read.file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
                except OSError as e:
                    raise FormatError(f"{read.file}: cannot be read ({e.strerror})") from None
        threads = min(_THREADS, len(reads), os.cpu_count() or 1) if hasattr(os, "preadv") else 1
        queue = iter(reads)  # next() of a list iterator is atomic under the GIL

        def work() -> None:
            reader = make_reader()
            for read in queue:
                reader(files[read.file], read)
            if hasattr(reader, "finish"):
                reader.finish()

        if threads <= 1 or sum(r.nbytes for r in reads) < PIECE:
            work()
        else:
            with ThreadPoolExecutor(threads) as pool:
                for done in [pool.submit(work) for _ in range(threads)]:
                    done.result()
    finally:
        for fd in files.values():
            os.close(fd)


def _fill(fd: int, read: _Read, target: memoryview, base: int) -> None:
    """Read into `target`, whose byte 0 is byte `base` of the slab."""
    waste = memoryview(bytearray(max((n for s, n in read.parts if s < 0), default=0)))
    buffers = [waste[:n] if s < 0 else target[s - base : s - base + n] for s, n in read.parts]
    offset = read.offset
    while buffers:
        got = _preadv(fd, buffers, offset)
        if got <= 0:
            raise FormatError(f"{read.file}: ends at byte {offset}; it has been changed since its header was read")
        offset += got
        while buffers and got >= len(buffers[0]):  # a read may stop short: drop what is full, go on with the rest
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows: one buffer at a time, one thread (see _run)
    data = os.read(fd, len(buffers[0]))
    buffers[0][: len(data)] = data
    return len(data)


class _Staging:
    """Reader of one thread for a device: two pinned buffers in turn, filled like the slab, copied on a stream of its own."""

    def __init__(self, slabs: list[Tensor], device: torch.device, current: torch.cuda.Stream | None) -> None:
        self.slabs = slabs
        self.cuda = device.type == "cuda"
        self.buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=self.cuda) for _ in range(2)]
        self.turn = 0
        if current is not None:
            self.stream = torch.cuda.Stream(device)
            self.stream.wait_stream(current)  # the slab's memory may still be in use there
            self.free = [torch.cuda.Event(), torch.cuda.Event()]

    def __call__(self, fd: int, read: _Read) -> None:
        self.turn ^= 1
        buffer = self.buffers[self.turn]
        if self.cuda:
            self.free[self.turn].synchronize()  # returns at once for an event never recorded
        _fill(fd, read, _bytes(buffer), read.start)
        target = self.slabs[read.slab][read.start : read.stop]
        if self.cuda:
            with torch.cuda.stream(self.stream):
                target.copy_(buffer[: read.stop - read.start], non_blocking=True)
                self.free[self.turn].record(self.stream)
        else:
            target.copy_(buffer[: read.stop - read.start])

    def finish(self) -> None:
        if self.cuda:
            self.stream.synchronize()
