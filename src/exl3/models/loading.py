"""`exl3.load`: a model directory on a device, checked before anything is allocated."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from exl3 import settings
from exl3.errors import ArgumentError, ResourceError, UnsupportedError
from exl3.files import Checkpoint
from exl3.models import memory
from exl3.models.model import Model
from exl3.models.placement import Share, by_device, context, parse_devices, place, shares
from exl3.models.registry import build
from exl3.models.tensors import Found, find_tensors
from exl3.ops.memory import check_present
from exl3.settings import debug_log


def load(path: str | os.PathLike[str], device: Any = None, max_tokens: int | None = None, *, split: Sequence[int] | None = None) -> Model:
    """Load the model in directory `path`, EXL3 or unquantized.

    device      "cpu", "cuda", "cuda:1"; default: "cuda" where there is a card and kernels for it, else "cpu". Several, "cuda:0,cuda:1" or
                "cuda:0,cpu" or a list: consecutive layers on each, shared out by free memory, cards filled before the CPU. "auto": as
                many cards as it takes
    max_tokens  longest context to make room for, in tokens; default: the model's own, or what fits if that is less
    split       number of layers on each of several devices

    Missing tensors raise MissingTensorError naming all of them; tensors the model does not use are named in one warning; what
    does not fit into memory raises ResourceError before anything is allocated, and memory that runs out all the same gives everything
    back. Without tokenizer files the model works with token ids only and a warning says so.
    """
    check_arguments(path, max_tokens)
    device = default_device() if device is None else device
    devices = parse_devices(device)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    warn_unused(model, checkpoint, found)
    for each in devices:
        check_device(str(each))
    if any(each.type == "cuda" for each in devices):
        _expandable_segments()
    place(model, checkpoint, device, max_tokens, split)
    placed = shares(model, checkpoint, found)
    together = by_device(placed)
    for share in together:
        memory.check(share.need(), share.device, str(path))
    model.max_tokens = context(model, together, max_tokens)
    model.place(model.device, split=model.split)  # the rotary tables depend on it
    _read(model, placed)
    model.eval()
    model.path = str(path)
    if not (checkpoint.path / "tokenizer.json").exists():
        warnings.warn(f"{checkpoint.path}: no tokenizer.json, so text is not available; token ids are", stacklevel=2)
    return model


def check_arguments(path: Any, max_tokens: Any) -> None:
    """ArgumentError for what can be neither a path nor a number of tokens."""
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ArgumentError(f"max_tokens is {max_tokens!r}; a whole number of at least 1 is needed")
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path is {path!r}; the path of a model directory is needed")


@functools.cache
def _expandable_segments() -> None:
    """Once a process: torch's allocator grows its blocks in place, so that a model and its cache leave fewer gaps."""
    own = {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ)
    if own or sys.platform == "win32" or torch.version.hip or not settings.get("EXL3_EXPANDABLE_SEGMENTS", "cuda"):
        return
    try:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    except (AttributeError, RuntimeError) as error:  # another torch
        debug_log("loader").debug("no expandable segments: %s", error)


def _read(model: Model, placed: Sequence[Share]) -> None:
    """Read all tensors. Where memory runs out, ResourceError with the largest consumers, and nothing stays behind."""
    try:
        for share in placed:
            share.found.load(share.device, None if share.device.type == "cpu" else model.dtype_on(share.device))
        return
    except (ResourceError, torch.OutOfMemoryError) as error:
        text = str(error).splitlines()[0]
    model.unload()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    sizes = [(files.nbytes, key) for share in placed for key, (_, files) in share.found.linears.items()]
    largest = ", ".join(f"{key} {size / 2**20:.0f} MiB" for size, key in sorted(sizes, reverse=True)[:3])
    needs = ", ".join(f"{share.weights_bytes / 2**20:.0f} MiB on {share.device}" for share in placed)
    raise ResourceError(
        f"memory ran out while the weights were read, all of it is given back: {text}. They need {needs}; the largest are {largest}. "
        "Use a lower bitrate, more devices, or end what else uses this one"
    )


def default_device() -> torch.device:
    """The card where there is one that kernels serve, else the CPU."""
    if torch.cuda.is_available():
        from exl3 import ops
        from exl3.errors import BackendError

        try:
            ops.backend("cuda")
            return torch.device("cuda")
        except BackendError as error:
            warnings.warn(f"running on the CPU: {error}", stacklevel=3)
    return torch.device("cpu")


@functools.cache
def check_device(device: str) -> None:
    """Once a process and device: the kernels' self-test on the very device. Raises BackendError on a mismatch; a CPU without
    kernels runs in torch (a warning says so), a card without kernels is refused."""
    from exl3 import ops
    from exl3.errors import BackendError

    try:
        ops.backend(device)
    except BackendError:
        if torch.device(device).type != "cpu":
            raise
        return
    check_present(torch.device(device))
    ops.self_test(device)


def locate(model: Model, checkpoint: Checkpoint) -> Found:
    """Find every tensor of `model` in `checkpoint`, reading none. Raises MissingTensorError naming all that is missing."""
    model.bind(checkpoint)
    found = find_tensors(model, model.parts, checkpoint)
    found.raise_missing(checkpoint)
    _refuse_biases(model, checkpoint, found)
    return found


def _refuse_biases(model: Model, checkpoint: Checkpoint, found: Found) -> None:
    """UnsupportedError for the bias of a module whose weight is used: without it the model would answer, but wrongly."""
    used = found.used
    for name in checkpoint.unused(used):
        key = name.removesuffix(".bias")
        if key != name and (f"{key}.weight" in used or f"{key}.trellis" in used):
            raise UnsupportedError(
                f"{checkpoint.tensors[name].file}: {name} is a bias that {type(model).__name__} has no place for; "
                "the directory is of another architecture than config.json says"
            )


def warn_unused(model: Model, checkpoint: Checkpoint, found: Found) -> list[str]:
    """Name, in one warning, the tensors this model does not use; returns them. Other parts of a checkpoint (vision) don't count."""
    unused = [name for name in checkpoint.unused(found.used) if not name.startswith(model.other_parts)]
    if unused:
        named = ", ".join(unused[:20]) + (f" and {len(unused) - 20} more" if len(unused) > 20 else "")
        warnings.warn(f"{checkpoint.path}: {len(unused)} tensors are not used by {type(model).__name__}: {named}", stacklevel=3)
    return unused
