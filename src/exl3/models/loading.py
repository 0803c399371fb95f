"""`exl3.load`: a model directory on a device, checked before anything is allocated."""

from __future__ import annotations

import functools
import os
import warnings

import torch

from exl3.cache import PAGE
from exl3.errors import ArgumentError, UnsupportedError
from exl3.files import Checkpoint
from exl3.models import memory
from exl3.models.model import Model
from exl3.models.registry import build
from exl3.models.tensors import PIECE, Found, find_tensors


def load(path: str | os.PathLike[str], device: torch.device | str | None = None, max_tokens: int | None = None) -> Model:
    """Load the model in directory `path`, EXL3 or unquantized.

    device      "cpu", "cuda", "cuda:1"; default: "cuda" where there is a card and kernels for it, else "cpu"
    max_tokens  longest context to make room for, in tokens; default: the model's own, or what fits if that is less

    Missing tensors raise MissingTensorError naming all of them; tensors the model does not use are named in one warning; what
    does not fit into memory raises ResourceError before anything is allocated. Without tokenizer files the model works
    with token ids only and a warning says so.
    """
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ArgumentError(f"max_tokens is {max_tokens!r}; a whole number of at least 1 is needed")
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path is {path!r}; the path of a model directory is needed")
    device = _device(device)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    found = locate(model, checkpoint)
    check_device(str(device))
    warn_unused(model, checkpoint, found)
    weights = resident_bytes(model, found, device)
    need = memory.Need(weights, 0, max(memory.workspace_bytes(model), min(weights, PIECE)))
    memory.check(need, device, str(path))
    model.max_tokens = context(model, need, device, max_tokens)
    model.place(device)
    found.load(device, None if device.type == "cpu" else model.dtype)
    model.eval()
    model.path = str(path)
    if not (checkpoint.path / "tokenizer.json").exists():
        warnings.warn(f"{checkpoint.path}: no tokenizer.json, so text is not available; token ids are", stacklevel=2)
    return model


def _device(device: torch.device | str | None) -> torch.device:
    """The device meant, cards with their number. Raises ArgumentError for a name torch doesn't know."""
    if device is None:
        device = default_device()
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device is {device!r}; use cpu, cuda or cuda:N ({str(error).splitlines()[0][:80]})") from None
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return found


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


def resident_bytes(model: Model, found: Found, device: torch.device) -> int:
    """Bytes the weights take on `device`: as stored; dense matrices on a card in the model's dtype."""
    if device.type == "cpu":
        return found.nbytes
    total = found.nbytes
    for _, files in found.linears.values():
        if files.kind == "dense" and not files.tied:
            total += 2 * files.in_features * files.out_features - files.nbytes
    return total


def context(model: Model, need: memory.Need, device: torch.device, max_tokens: int | None) -> int:
    """Tokens of context to allow: what was asked, if its fp16 cache fits, or the model's own limit cut down to what fits."""
    per_token = memory.cache_bytes_per_token(model)
    if max_tokens is not None:
        with_cache = memory.Need(need.weights_bytes, per_token * max_tokens, need.workspace_bytes)
        memory.check(with_cache, device, f"{max_tokens} tokens of context")
        return max_tokens
    room = memory.available_bytes(device) - memory.reserve_bytes(device) - need.total_bytes
    fits = max(PAGE, room // max(per_token, 1) // PAGE * PAGE)
    return int(min(model.config.max_position_embeddings, fits))
