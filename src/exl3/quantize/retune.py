"""`exl3 tune`: the scales of a finished EXL3 directory, whoever made it, distilled against its original; the trellis stays."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError, MissingTensorError, ResourceError
from exl3.files import Checkpoint, ShardWriter, Tokenizer
from exl3.files.config import check_target, copy_companions
from exl3.files.shards import make_output
from exl3.models.loading import locate
from exl3.models.registry import build
from exl3.quantize import calibration as cal
from exl3.quantize.devices import choose_devices
from exl3.quantize.options import ConvertOptions
from exl3.quantize.plan import check_memory, tuning_bytes
from exl3.quantize.tune import LEAST_ROWS, Tuned, TuneSettings, tune

_PARTS = ("trellis", "suh", "svh", "bias", "mul1", "mcg")


def tune_directory(
    quantized: str | os.PathLike[str], original: str | os.PathLike[str], output: str | os.PathLike[str], *,
    settings: TuneSettings | None = None, cal_data: str | None = None, cal_rows: int | None = None, cal_cols: int | None = None,
    device: str | None = None, shard_size: float = 8192, progress: Callable[[int, int], None] | None = None,
) -> Tuned:  # fmt: skip
    """Writes `output`: the model in `quantized` with scales, biases and norms trained towards `original`. Nothing is written where the
    rows held back see no gain. Calibration as in `exl3.convert`."""
    settings = settings or TuneSettings()
    source, finished = Checkpoint.open(original), Checkpoint.open(quantized)
    if source.is_exl3:
        raise ArgumentError(f"{original}: is an EXL3 model; give the unquantized one to learn from")
    if not finished.is_exl3:
        raise ArgumentError(f"{quantized}: is not an EXL3 model; give a finished quantization")
    folder = Path(output)
    if folder.resolve() in (Path(original).resolve(), Path(quantized).resolve()):
        raise ArgumentError(f"output {folder}: is one of the two models; choose another directory")
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"output {folder}: is a file; give a directory, there or yet to be made")
    check_target(folder, "output")
    model = _same_model(source, finished)
    place = choose_devices(device)[0]
    options = ConvertOptions(bits=4, cal_data=cal_data, cal_rows=cal_rows, cal_cols=cal_cols, seed=settings.seed).checked()
    sized = options.with_calibration(place.type)
    assert sized.cal_rows is not None and sized.cal_cols is not None
    weights = sum(math.prod(t.shape) for t in source.tensors.values())
    need = {"tuning, original and quantized model": tuning_bytes(weights, model, place, sized.cal_cols)}
    check_memory(need, place, "Use fewer --cal-cols, a smaller model or another device", "tuning")
    check_memory({"calibration rows": 16 * sized.cal_rows * sized.cal_cols}, torch.device("cpu"), what="tuning")
    rows = _rows(sized, source, model.config.vocab_size, all_rows=cal_rows is not None)
    model.config.warn_beyond_context(rows.cols, "--cal-cols")
    if rows.rows < LEAST_ROWS:
        raise ArgumentError(f"tune needs at least {LEAST_ROWS} calibration rows, one to judge by; there are {rows.rows}")
    made = _make(folder)
    keys = [[key for group in block.quant_groups() for key, _ in group] for block in model.blocks] + [[model.head_key]]

    def tensors(i: int) -> dict[str, Tensor]:
        names = [f"{key}.{part}" for key in keys[i] for part in _PARTS if f"{key}.trellis" in finished.tensors]
        return finished.read([n for n in names if n in finished.tensors])

    try:
        with torch.no_grad():
            tuned = tune(source, tensors, rows.ids, place, settings, quantized=finished, progress=progress)
        if tuned.tensors:
            _write(finished, model, tuned.tensors, folder, shard_size)
    except torch.OutOfMemoryError as e:
        raise ResourceError(f"tuning: not enough memory on {place} ({str(e).splitlines()[0]}); free it, or use -d cpu") from e
    finally:
        for path in made:  # whatever is empty: nothing was written
            with suppress(OSError):
                path.rmdir()
    return tuned


def _make(folder: Path) -> list[Path]:
    """Makes the output directory before the work, so that a place that cannot be written to is told first; returns what was made, the
    innermost first."""
    made = [p for p in (folder, *folder.parents) if not p.exists()]
    make_output(folder)
    return made


def _same_model(source: Checkpoint, finished: Checkpoint) -> Any:
    """An empty model of the quantization; ArgumentError unless the original is the same model."""
    model, other = build(finished.config), build(source.config)
    locate(other, source)
    locate(model, finished)
    sizes = [(type(m), len(m.blocks), m.config.hidden_size, m.config.vocab_size) for m in (model, other)]
    if sizes[0] != sizes[1]:
        raise ArgumentError(f"{finished.path}: is another model than {source.path}; give the original it was made from")
    return model


def _rows(options: ConvertOptions, source: Checkpoint, vocab: int, *, all_rows: bool) -> cal.Calibration:
    assert options.cal_rows is not None and options.cal_cols is not None
    try:
        tokenizer = Tokenizer.from_directory(source.path)
    except MissingTensorError:
        tokenizer = None
    if options.cal_data:
        return cal.from_file(options.cal_data, options.cal_rows, options.cal_cols, vocab, tokenizer, all_rows=all_rows)
    return cal.bundled(tokenizer, options.cal_rows, options.cal_cols, vocab, options.seed)


def _write(finished: Checkpoint, model: Any, replaced: dict[str, Tensor], output: Path, shard_size: float) -> None:
    """The directory with some tensors replaced, by others of the same size; config.json comes last."""
    output.mkdir(parents=True, exist_ok=True)
    left = set(finished.tensors)
    with ShardWriter(output, shard_size) as out:
        for block in model.blocks:
            names = sorted(n for n in left if n.startswith(f"{block.key}."))
            left.difference_update(names)
            out.add({n: replaced.get(n, t) for n, t in finished.read(names).items()})
        out.add({n: replaced.get(n, t) for n, t in finished.read(sorted(left)).items()})
        out.settle()
    copy_companions(finished.path, output)
    for name in ("quantization_config.json", "config.json"):
        if (finished.path / name).exists():
            shutil.copyfile(finished.path / name, output / name)
    locate(model, Checkpoint.open(output))
