"""What a conversion does beside the search: writing what is finished, reading the next block."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from exl3.errors import ResourceError


class Writer:
    """Does things one after another in a thread. An error in one of them is raised by the next call; as a context manager it ends with
    all done."""

    def __init__(self, most: int = 2) -> None:
        self._pool = ThreadPoolExecutor(1, "exl3-writer")
        self._pending: deque[Future[Any]] = deque()
        self._most = most  # waiting: each holds a block's tensors

    def submit(self, work: Callable[..., Any], *args: Any) -> None:
        while self._pending and (self._pending[0].done() or len(self._pending) >= self._most):
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(work, *args))

    def flush(self) -> None:
        """Waits until all is done."""
        while self._pending:
            self._pending.popleft().result()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self.flush()


class Reader:
    """Loads one thing ahead of its use: `load(index)` gives a module on `device`, in a thread and, on a card, a stream of its own."""

    def __init__(self, load: Callable[[int], Any], device: torch.device) -> None:
        self._load, self._device = load, device
        self._pool = ThreadPoolExecutor(1, "exl3-reader")
        self._ahead: dict[int, Future[Any]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def ahead(self, index: int) -> None:
        """Starts loading `index`."""
        self._ahead[index] = self._pool.submit(self._read, index)

    def _read(self, index: int) -> Any:
        with torch.no_grad():
            if self._stream is None:
                return self._load(index)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                module = self._load(index)
                self._stream.synchronize()
            return module

    def take(self, index: int) -> Any:
        """The loaded module, to be used on the current stream."""
        future = self._ahead.pop(index, None)
        try:
            module = future.result() if future is not None else None
        except (torch.OutOfMemoryError, ResourceError):  # no room beside the present block: later there is
            module = None
        if module is None:
            return self._load(index)
        if self._stream is not None:
            for t in itertools.chain(module.parameters(), module.buffers()):
                if t.device.type == "cuda":
                    t.record_stream(torch.cuda.current_stream(self._device))
        return module

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
