"""Two model directories over the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.evaluate.metrics import Accumulator, Summary
from exl3.evaluate.rows import read_text, text_rows
from exl3.files import Checkpoint, Tokenizer
from exl3.models import build, load, locate

# model types that answer nonsense to a text without BOS, whatever their tokenizer's settings say
DEMANDS_BOS = {"gemma", "gemma2", "gemma3", "gemma3_text"}


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`. Sizes in bytes of all weight files; bits per weight of the decoder's matrices, or of a whole GGUF file."""

    reference: str
    quantized: str
    text: str
    rows: int
    row_len: int
    summary: Summary
    bytes_reference: int
    bytes_quantized: int
    bits_per_weight: float
    head_bits: float | None
    layer_errors: list[float] = field(default_factory=list)  # ||q - o|| / ||o|| of the residual stream behind each block, first row
    calibration: dict[str, Any] | None = None  # rows and cols the quantized directory was calibrated with

    def as_dict(self) -> dict[str, Any]:
        """Plain object for JSON: keys kl.mean, kl.median, kl.p99, top1, perplexity.reference, perplexity.quantized, bytes."""
        s = self.summary
        return {
            "reference": self.reference,
            "quantized": self.quantized,
            "text": self.text,
            "rows": self.rows,
            "row_len": self.row_len,
            "positions": s.positions,
            "kl": {"mean": s.kl_mean, "median": s.kl_median, "p99": s.kl_p99},
            "top1": s.top1,
            "perplexity": {"reference": s.perplexity_reference, "quantized": s.perplexity_quantized},
            "bytes": self.bytes_quantized,
            "bytes_reference": self.bytes_reference,
            "bits_per_weight": self.bits_per_weight,
            "head_bits": self.head_bits,
            "layer_errors": self.layer_errors,
            "calibration": self.calibration,
        }


def compare(
    reference: str | Path,
    quantized: str | Path,
    text: str | Path,
    *,
    rows: int | None = None,
    row_len: int = 512,
    device: str | None = None,
    bos: bool | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """KL(reference || quantized), top-1 agreement and perplexities over the text file `text`.

    Rows are consecutive pieces of `row_len` tokens without BOS unless the model demands one (`bos=None`: the
    families in DEMANDS_BOS). Works for unquantized and EXL3 directories alike. Raises `ArgumentError` when the text is
    too short or the vocabularies differ, `NumericalError` on NaN or Inf logits.
    """
    vocabulary = check_pair(reference, quantized)  # opens the directories: what is wrong with them is told first
    kind = model_type(reference)
    tokenizer = Tokenizer.from_directory(reference)
    if tokenizer is None:
        raise ArgumentError(f"{reference}: no tokenizer.json, and evaluation starts from text; add the tokenizer's files")
    demands = kind in DEMANDS_BOS if bos is None else bos
    ids = text_rows(tokenizer, read_text(text), row_len, rows, bos=demands)
    if int(ids.max()) >= vocabulary:
        raise ArgumentError(
            f"{reference}: the tokenizer produces id {int(ids.max())}, the model's vocabulary has {vocabulary}; "
            "the files don't belong together"
        )
    if is_gguf(quantized):
        return _compare_gguf(reference, quantized, text, ids, device, progress)
    a, b = load(reference, device=device, max_tokens=row_len), load(quantized, device=device, max_tokens=row_len)
    a.config.warn_beyond_context(row_len, "--row-len")
    acc = Accumulator()
    with torch.inference_mode():
        errors = layer_errors(a, b, ids[0])
        for i, row in enumerate(ids):
            if progress:
                progress(i, len(ids))
            acc.add(_logits(a, row), _logits(b, row), row)
    if progress:
        progress(len(ids), len(ids))
    size = storage(quantized)
    return Comparison(
        reference=str(reference),
        quantized=str(quantized),
        text=str(text),
        rows=len(ids),
        row_len=row_len,
        summary=acc.summary(),
        bytes_reference=storage(reference)["bytes"],
        bytes_quantized=size["bytes"],
        bits_per_weight=size["bits_per_weight"],
        head_bits=size["head_bits"],
        layer_errors=errors,
        calibration=(Checkpoint.open(quantized).config.get("quantization_config") or {}).get("calibration"),
    )


def check_pair(reference: str | Path, quantized: str | Path) -> int:
    """Size of the vocabulary. What the files' headers say against a comparison is raised, before hours of work for other directories."""
    sizes = [_vocabulary(reference)]
    if is_gguf(quantized):
        if not Path(quantized).is_file():
            raise ArgumentError(f"{quantized}: no such file")
        _llama(quantized)
    else:
        sizes.append(_vocabulary(quantized))
    if len(set(sizes)) > 1:
        raise ArgumentError(f"{quantized}: has a vocabulary of {sizes[1]}, {reference} one of {sizes[0]}; these cannot be compared")
    return sizes[0]


def _vocabulary(directory: str | Path) -> int:
    checkpoint = Checkpoint.open(directory)
    model = build(checkpoint.config)
    locate(model, checkpoint)
    return model.vocab_size


def _llama(file: str | Path) -> Any:
    """llama-cpp-python's model class; ArgumentError where it is not installed."""
    try:
        from llama_cpp import Llama
    except ImportError:
        raise ArgumentError(
            f"{file}: GGUF files are evaluated by llama-cpp-python, which is not installed; pip install exl3[gguf]"
        ) from None
    return Llama


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(".gguf")


def _compare_gguf(
    reference: str | Path, file: str | Path, text: str | Path, ids: Tensor, device: str | None, progress: Callable[[int, int], None] | None
) -> Comparison:
    """A GGUF file run by llama-cpp-python (optional) on the same tokens."""
    other = gguf_logits(file, ids.shape[1])
    a = load(reference, device=device, max_tokens=ids.shape[1])
    a.config.warn_beyond_context(ids.shape[1], "--row-len")
    acc = Accumulator()
    with torch.inference_mode():
        for i, row in enumerate(ids):
            if progress:
                progress(i, len(ids))
            acc.add(_logits(a, row).cpu(), other(row), row)
    if progress:
        progress(len(ids), len(ids))
    size, original = Path(file).stat().st_size, storage(reference)
    weights = sum(t.numel for t in Checkpoint.open(reference).tensors.values())
    return Comparison(
        *(str(reference), str(file), str(text), len(ids), ids.shape[1], acc.summary(), original["bytes"], size, 8 * size / weights, None)
    )


def gguf_logits(file: str | Path, row_len: int) -> Callable[[Tensor], Tensor]:
    """row (tokens,) -> logits (tokens, vocab) fp32 of a GGUF file. ArgumentError where llama-cpp-python is missing or refuses the file."""
    try:
        model = _llama(file)(model_path=str(file), n_ctx=row_len, n_batch=row_len, logits_all=True, verbose=False)
    except (ValueError, RuntimeError) as e:
        raise ArgumentError(f"{file}: llama-cpp-python cannot load it ({e})") from None

    def logits(row: Tensor) -> Tensor:
        model.reset()
        model.eval([int(i) for i in row])
        return torch.tensor(model.scores[: len(row)], dtype=torch.float32)

    return logits


def layer_errors(reference: Any, quantized: Any, row: Tensor) -> list[float]:
    """Relative error of the residual stream behind each block, for one row of ids; none where the blocks are not alike."""
    shapes = [(len(m.blocks), m.config.hidden_size) for m in (reference, quantized)]
    if shapes[0] != shapes[1]:
        return []
    streams = [_streams(model, row) for model in (reference, quantized)]
    return [float((b - a).norm() / a.norm().clamp_min(1e-30)) for a, b in zip(*streams)]


def _streams(model: Any, row: Tensor) -> list[Tensor]:
    """The residual stream behind each block, wherever the blocks lie; copies, for it goes on changing in place."""
    seen: list[Tensor] = []

    def note(_: Any, __: Any, x: Tensor) -> None:
        seen.append(x.to("cpu", torch.float32, copy=True))

    handles = [block.register_forward_hook(note) for block in model.blocks]
    try:
        _logits(model, row)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _logits(model: Any, row: Tensor) -> Tensor:
    return model.logits(row[None])[0]


def model_type(directory: str | Path) -> str:
    """`model_type` of a directory's config."""
    return str(Checkpoint.open(directory).config.get("model_type", ""))


def storage(directory: str | Path | Checkpoint) -> dict[str, Any]:
    """What a directory stores: bytes of all tensors, bits per weight of the decoder's linears (padded sizes), bits of the head."""
    ckpt = directory if isinstance(directory, Checkpoint) else Checkpoint.open(directory)
    total = sum(t.nbytes for t in ckpt.tensors.values())
    bits = weights = 0.0
    head: float | None = None
    for key in ckpt.linear_keys():
        info = ckpt.linear(key)
        rate = float(info.bits)
        if key.split(".")[-1] in ("lm_head", "head"):
            head = rate
        else:
            count = info.in_padded * info.out_padded
            bits += rate * count
            weights += count
    return {"bytes": total, "bits_per_weight": bits / weights if weights else 0.0, "head_bits": head}
