"""`Tape`: one step's native calls, recorded once and replayed in a single call with new contents in the same buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from exl3.errors import ArgumentError, BackendError
from exl3.ops import native

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.split.Tensor, _aten.split_with_sizes.default, _aten.unsqueeze.default,
    _aten.squeeze.dim, _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.alias.default, _aten.detach.default,
    _aten._unsafe_view.default, _aten.expand.default, _aten.as_strided.default, _aten.unbind.int, _aten.narrow.default, _aten.view.dtype,
    _aten.chunk.default, _aten._reshape_alias.default,
}  # fmt: skip
_EMPTY = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default, _aten.empty_strided.default}


class _Guard(TorchDispatchMode):
    """Lets views and empty through, keeps what empty makes alive, refuses every other torch operation by name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__ and import its whole compiler at the first call: 3 s

    def __init__(self, keep: list[Any]) -> None:
        super().__init__()
        self.keep = keep

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _VIEWS:
            return func(*args, **(kwargs or {}))
        if func in _EMPTY:
            made = func(*args, **(kwargs or {}))
            self.keep.append(made)
            return made
        raise ArgumentError(f"{func} is a torch computation: a recorded step may call exl3.ops, views and empty only")


class Tape:
    """Records the operations called inside `with tape:` on this thread, running them as it goes; `replay()` repeats them.

    The argument blocks are copied and every tensor involved is kept alive. Whatever must change from replay to replay is read from the
    same device buffers: ids, positions, lengths, block tables, sampling parameters. A change of weights or cache needs a new tape.

        tape = Tape()
        with tape:
            logits = model(batch)
        batch.ids.copy_(new_ids); tape.replay()     # logits now hold the new step's
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        native.backend(self.device)
        from exl3 import _native

        self._tape = _native.Tape()
        self._keep: list[Any] = []
        self._guard: _Guard | None = None
        self._recorded = False

    def __enter__(self) -> Tape:
        if self._recorded:
            raise ArgumentError("a tape records once: make a new one")
        if native.recording.keep is not None:
            raise ArgumentError("another tape is recording on this thread")
        native.recording.keep = self._keep
        self._guard = _Guard(self._keep)
        self._guard.__enter__()
        self._tape.begin()
        return self

    def __exit__(self, *error: Any) -> None:
        self._tape.end()
        assert self._guard is not None
        self._guard.__exit__(*error)
        native.recording.keep = None
        self._recorded = True
        # one entry per object: a step names the same weights and buffers many times
        self._keep = list({id(k): k for k in self._keep if k is not None}.values())
        if error and error[0] is not None:
            self._tape.clear()

    def replay(self, threads: int | None = None) -> None:
        """Repeats the recorded calls on the device's current stream; on the CPU with `threads` threads, default torch's own number.
        Raises BackendError naming the operation that failed."""
        if not self._recorded or not len(self._tape):
            raise BackendError("the tape holds no step: record one with `with tape:` first")
        if self.device.type == "cpu":
            self._tape.replay(torch.get_num_threads() if threads is None else threads)
        else:
            with native.on(self.device) as stream:
                self._tape.replay(stream)

    def __len__(self) -> int:
        return len(self._tape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors made while recording."""
        return sum(t.nbytes for t in self._keep if isinstance(t, Tensor))
