"""From the tensors of a checkpoint to the modules that hold them: what each module needs, what is missing, reading it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from exl3 import ops
from exl3.errors import FormatError, MissingTensorError, NumericalError
from exl3.files import Checkpoint, EmbeddingFiles, LinearFiles, load_linears
from exl3.files.config import tie_flag
from exl3.nn import Embedding, Linear

PIECE = 256 << 20  # bytes of matrices read at a time


@dataclass
class Found:
    """Where the tensors of some modules lie. Nothing is read before `load`."""

    checkpoint: Checkpoint
    linears: dict[str, tuple[Linear, LinearFiles]] = field(default_factory=dict)
    embeddings: list[tuple[Embedding, EmbeddingFiles]] = field(default_factory=list)
    small: list[tuple[Any, dict[str, str]]] = field(default_factory=list)  # module, argument of its `set` -> tensor name
    missing: list[str] = field(default_factory=list)

    @property
    def used(self) -> set[str]:
        """Names of all tensors hereby accounted for."""
        names = {name for _, files in self.linears.values() for name in files.covers}
        names.update(name for _, files in self.embeddings for name in files.names)
        names.update(name for _, tensors in self.small for name in tensors.values())
        return names

    @property
    def nbytes(self) -> int:
        """Bytes of these tensors as stored; a head that is the embedding's table counts once."""
        tensors = self.checkpoint.tensors
        total = sum(files.nbytes for _, files in self.linears.values() if not (files.tied and self.embeddings))
        total += sum(tensors[name].nbytes for _, files in self.embeddings for name in files.names)
        return total + sum(tensors[name].nbytes for _, names in self.small for name in names.values())

    def raise_missing(self, checkpoint: Checkpoint) -> None:
        """Raise MissingTensorError naming all that is missing, if anything is."""
        if self.missing:
            raise MissingTensorError(
                f"{checkpoint.path}: {len(self.missing)} tensors the model needs are in none of the {checkpoint.file_count} files: "
                + ", ".join(self.missing)
            )

    def load(self, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
        """Read everything to `device` and hand it to the modules; dense matrices in `dtype`, default as stored."""
        names = {name for _, files in self.embeddings for name in files.names}
        names.update(name for _, tensors in self.small for name in tensors.values())
        raw = self.checkpoint.read(sorted(names), device)
        for module, tensors in self.small:
            for name in tensors.values():
                _finite(raw[name], name, self.checkpoint)
            module.set(**{argument: raw[name] for argument, name in tensors.items()})
        for embedding, files in self.embeddings:
            if files.kind == "dense":
                _finite(raw[files.names[0]][: embedding.vocab_size], files.names[0], self.checkpoint)
            _fill_embedding(embedding, files, raw)
        self._load_linears(device, dtype)

    def _load_linears(self, device: torch.device | str, dtype: torch.dtype | None) -> None:
        shared = {files.key: module for module, files in self.embeddings}
        apart = {}
        for key, (linear, files) in self.linears.items():
            table = shared.get(files.key)
            if files.tied and table is not None and table.weight is not None:
                linear.set_dense(table.weight.data)
            else:
                apart[key] = files
        for piece in _pieces(apart):
            for key, tensors in load_linears(piece, device, dtype).items():
                linear, files = self.linears[key]
                if files.kind == "dense":
                    for role, tensor in tensors.items():
                        _finite(tensor, f"{key}.{role}", self.checkpoint)
                    linear.set_dense(tensors["weight"], tensors.get("bias"))
                else:
                    linear.set_exl3(_weight(linear, files, tensors))


def _finite(tensor: Tensor, name: str, checkpoint: Checkpoint) -> None:
    """NumericalError naming tensor, row and value unless all is finite. The extremes tell: one pass at the speed of memory."""
    if not tensor.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor)):
        return
    place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    where = f"in row {place[0]}, column {place[1]}" if len(place) == 2 else f"at index {place}"
    raise NumericalError(f"{checkpoint.path}: {name}: {float(tensor[tuple(place)])} {where}; the source file is damaged, download it again")


def _pieces(linears: dict[str, LinearFiles]) -> Iterator[dict[str, LinearFiles]]:
    """`linears` in pieces of about PIECE bytes, EXL3 and dense ones apart: what a piece is read into is let go when its trellises have
    been put into the backend's own layout."""
    for kind in ("dense", "exl3"):
        piece: dict[str, LinearFiles] = {}
        size = 0
        for key, files in linears.items():
            if files.kind != kind:
                continue
            piece[key] = files
            size += files.nbytes
            if size >= PIECE:
                yield piece
                piece, size = {}, 0
        if piece:
            yield piece


def _weight(linear: Linear, files: LinearFiles, tensors: dict[str, Tensor]) -> ops.Weight:
    small = (tensors["suh"], tensors["svh"], tensors.get("bias"))
    if tensors["trellis"].device.type == "cpu":  # copies, so that the scales don't hold on to what was read with them
        small = tuple(None if t is None else t.clone() for t in small)  # type: ignore[assignment]
    return ops.Weight(tensors["trellis"], *small, linear.in_features, linear.out_features, str(files.codebook), files.multiplier)


def find_tensors(model: Any, parts: dict[str, nn.Module], checkpoint: Checkpoint) -> Found:
    """Look up what `parts` (checkpoint key -> module of `model`) need. Missing tensors are collected, wrong ones raise FormatError."""
    found = Found(checkpoint)
    for part_key, part in parts.items():
        for name, module in part.named_modules():
            key = f"{part_key}.{name}" if name else part_key
            if isinstance(module, Linear):
                _try(found, key, _find_linear, model, found, key, module)
            elif isinstance(module, Embedding):
                _try(found, key, _find_embedding, found, key, module)
            elif getattr(module, "tensor_names", ()):
                _find_small(found, key, module)
    return found


def _try(found: Found, key: str, find: Callable[..., None], *args: Any) -> None:
    try:
        find(*args)
    except MissingTensorError:
        found.missing.append(f"{key}.weight")


def _find_linear(model: Any, found: Found, key: str, linear: Linear) -> None:
    checkpoint, shape = found.checkpoint, (linear.out_features, linear.in_features)
    if linear is model.lm_head:
        found.linears[key] = (linear, _find_head(model, checkpoint, key, shape))
        return
    fused = None
    if linear.fused is not None:
        name, start = linear.fused
        fused = [(f"{key.rpartition('.')[0]}.{name}", start, linear.out_features)]
    found.linears[key] = (linear, checkpoint.linear(key, fused=fused, shape=shape))


def _find_head(model: Any, checkpoint: Checkpoint, key: str, shape: tuple[int, int]) -> LinearFiles:
    """The head; one wider than the vocabulary is cropped to it."""
    said = tie_flag(checkpoint.config)  # nested or not; where nobody says, the family's default
    files = checkpoint.head(key, model.embed_key, tied=model.config.tie_word_embeddings if said is None else said)
    if files.in_features not in (shape[1], -(-shape[1] // 128) * 128) or files.out_features < shape[0]:
        raise FormatError(
            f"{checkpoint.path}: {files.key} is stored as {files.out_features} x {files.in_features} (out x in), "
            f"config.json says vocab_size {shape[0]} x hidden_size {shape[1]}"
        )
    return replace(files, out_features=shape[0], in_features=shape[1])


def _find_embedding(found: Found, key: str, module: Embedding) -> None:
    files = found.checkpoint.embedding(key)
    wide = module.hidden_size if files.kind == "dense" else -(-module.hidden_size // 256) * 256
    if files.hidden != wide or files.rows < module.vocab_size:
        raise FormatError(
            f"{found.checkpoint.path}: {key} is stored as {files.rows} x {files.hidden}, "
            f"config.json says vocab_size {module.vocab_size} x hidden_size {module.hidden_size}"
        )
    found.embeddings.append((module, files))


def _fill_embedding(module: Embedding, files: EmbeddingFiles, raw: dict[str, Tensor]) -> None:
    """Rows beyond the vocabulary are dropped."""
    if files.kind == "dense":
        module.set_dense(raw[files.names[0]][: module.vocab_size])
        return
    shards = [raw[name] for name in files.names[:-1]]
    trellis = shards[0] if len(shards) == 1 else torch.cat(shards)
    module.set_rings(ops.RingTable(trellis[: module.vocab_size], raw[files.names[-1]], module.hidden_size))


def _find_small(found: Found, key: str, module: Any) -> None:
    names = {}
    for argument in (*module.tensor_names, *getattr(module, "optional_names", ())):
        name = f"{key}.{argument}"
        if name in found.checkpoint.tensors:
            names[argument] = name
        elif argument in module.tensor_names:
            found.missing.append(name)
    for name in names.values():
        info = found.checkpoint.tensors[name]
        if not info.dtype.is_floating_point:
            raise FormatError(f"{info.file}: {name} is of dtype {info.dtype}, floating-point numbers are needed; the file is damaged")
    size = getattr(module, "size", None)  # of a norm
    if size is not None and "weight" in names and found.checkpoint.tensors[names["weight"]].shape != (size,):
        info = found.checkpoint.tensors[names["weight"]]
        raise FormatError(f"{info.file}: {names['weight']} has shape {list(info.shape)}, config.json says [{size}]")
    found.small.append((module, names))
