"""From finished modules to a model directory: shards, configuration, companions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from exl3.errors import JobError
from exl3.files import Checkpoint, ShardWriter
from exl3.files.config import copy_companions, quantization_config, tensor_storage, write_config, write_quantization_config
from exl3.models.loading import locate
from exl3.models.registry import build
from exl3.models.tensors import find_tensors


def plain_tensors(model: Any, key: str, part: Any, source: Checkpoint) -> list[str]:
    """Names of the source tensors of one part that are not matrices: norms, biases of norms, sinks, the embedding."""
    found = find_tensors(model, {key: part}, source)
    matrices = {name for _, files in found.linears.values() for name in files.covers}
    return sorted(found.used - matrices)


def write_model(
    model: Any,
    source: Checkpoint,
    output_dir: str | os.PathLike[str],
    finished: Callable[[int], dict[str, Tensor]],
    quantization: dict[str, Any],
    *,
    shard_size: float,
    embedding: dict[str, Tensor] | None = None,
    replaced: dict[str, Tensor] | None = None,
) -> Checkpoint:
    """Writes everything and returns the new directory, opened and checked.

    `finished(i)`: tensors of block i, the head last. `embedding` replaces the source's table, `replaced` any
    tensor by name. A block is never split over shards.
    config.json comes last: a directory without it is not yet a model.
    """
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    other = replaced or {}

    def latest(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: other.get(name, t) for name, t in tensors.items()}

    with ShardWriter(output, shard_size) as out:
        first = source.read(plain_tensors(model, model.embed_key, model.model.embed_tokens, source)) if embedding is None else embedding
        out.add(first)
        for i, block in enumerate(model.blocks):
            out.add(latest(source.read(plain_tensors(model, block.key, block, source)) | finished(i)))
        out.add(latest(source.read(plain_tensors(model, f"{model.decoder_key}norm", model.model.norm, source))))
        head = finished(len(model.blocks))
        if head:  # none: it stays tied to the embedding
            out.add(latest(head))
        for name in sorted(n for n in source.tensors if model.other_parts and n.startswith(model.other_parts)):
            out.add(source.read([name]))  # parts of the source that are not quantized (vision) travel along
        out.settle()
    copy_companions(source.path, output)
    write_config(output, source.config, quantization, has_head=bool(head))
    result = Checkpoint.open(output)
    write_quantization_config(output, quantization, tensor_storage(result.tensors, result.multipliers()))
    _verify(result)
    return result


def _verify(result: Checkpoint) -> None:
    """Every tensor the model needs is there and fits: what was written loads."""
    try:
        locate(build(result.config), result)
    except Exception as e:
        raise JobError(f"{result.path}: the written model does not load: {e}; the work folder is kept, report this") from e


def config_block(source: Checkpoint, **fields: Any) -> dict[str, Any]:
    """The quantization_config of the result, the source's own kept inside if it had one."""
    original = source.config.get("quantization_config")
    keep = original if isinstance(original, dict) and original.get("quant_method") != "exl3" else None
    return quantization_config(original=keep, **fields)
