"""Two model directories over the same text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exl3.errors import ArgumentError
from exl3.evaluate.metrics import Accumulator, Summary
from exl3.evaluate.rows import read_text, text_rows
from exl3.files import Checkpoint, Tokenizer
from exl3.models import load

# model types that answer nonsense to a text without BOS, whatever their tokenizer's settings say
DEMANDS_BOS = {"gemma", "gemma2", "gemma3", "gemma3_text"}


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`. Sizes in bytes of all weight files, rates in bits per weight."""

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
    kind = model_type(reference)  # opens the directory: what is wrong with it is told first
    tokenizer = Tokenizer.from_directory(reference)
    if tokenizer is None:
        raise ArgumentError(f"{reference}: no tokenizer.json, and evaluation starts from text; add the tokenizer's files")
    demands = kind in DEMANDS_BOS if bos is None else bos
    ids = text_rows(tokenizer, read_text(text), row_len, rows, bos=demands)
    a, b = load(reference, device=device, max_tokens=row_len), load(quantized, device=device, max_tokens=row_len)
    acc = Accumulator()
    with torch.inference_mode():
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
    )


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
