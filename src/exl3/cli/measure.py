"""`exl3 measure -i QUANT -i QUANT ... -r REFERENCE -o FILE`."""

from __future__ import annotations

from typing import Any

import click

from exl3.cli.common import check_json_path, device_option, progress, table

LEVELS = "what is exchanged together: 0 blocks, 1 attention and MLP, 2 matrices that share an input, 3 single ones"


def _option(*names: str, **attributes: Any) -> Any:
    return click.option(*names, show_default="default" in attributes, **attributes)


@click.command("measure")
@_option(
    *("-i", "--in-dir", "--in_dir", "quants"),
    multiple=True,
    required=True,
    type=click.Path(exists=True, file_okay=False),
    help="finished quantizations of one model, fewest bits first; repeat",
)
@_option(
    *("-r", "--ref-dir", "--ref_dir", "reference"),
    required=True,
    type=click.Path(exists=True, file_okay=False),
    help="the unquantized model",
)
@_option("-o", "--out-file", "--out_file", "output", required=True, metavar="FILE", help="where the measurement goes (JSON)")
@_option("-l", "--level", type=int, default=2, help=LEVELS)
@_option("--text", "text", type=click.Path(exists=True, dir_okay=False), help="UTF-8 text to measure on (default: calibration text)")
@_option("-cr", "--rows", type=click.IntRange(min=1), default=10, help="rows of text")
@_option("-cc", "--cols", type=click.IntRange(min=2), default=1024, help="tokens in a row")
@_option("-ms", "--memory", "memory_gb", type=float, default=4.0, help="GB for candidates that travel together")
@device_option
def command(
    quants: tuple[str, ...],
    reference: str,
    output: str,
    level: int,
    text: str | None,
    rows: int,
    cols: int,
    memory_gb: float,
    device: str | None,
) -> None:
    """Measure what each part of one quantization would gain from another's version of it; `exl3 optimize` mixes by the result.

    Quantizations calibrated on few rows look better on the calibration text than they are: give --text then.
    """
    check_json_path(output, "-o")
    from exl3.errors import ArgumentError
    from exl3.evaluate.compare import DEMANDS_BOS, model_type
    from exl3.evaluate.mix import measure
    from exl3.evaluate.rows import read_text, text_rows
    from exl3.files import Checkpoint, Tokenizer
    from exl3.models.registry import build
    from exl3.quantize.calibration import bundled

    vocab = build(Checkpoint.open(reference).config).vocab_size
    tokenizer = Tokenizer.from_directory(reference)
    if text is None:
        ids = bundled(tokenizer, rows, cols, vocab, seed=1).ids
    elif tokenizer is None:
        raise ArgumentError(f"{reference}: no tokenizer.json, and --text needs one; add the tokenizer's files")
    else:
        ids = text_rows(tokenizer, read_text(text), cols, rows, bos=model_type(reference) in DEMANDS_BOS)
    with progress("measuring") as step:
        found = measure(reference, quants, ids, level=level, device=device, memory_gb=memory_gb, progress=step)
    found.write(output)
    table(
        [
            ("base", found.quants[0]),
            ("mean KL of the base", f"{found.base_kl:.6f}"),
            ("groups", str(len(found.groups))),
            ("written to", output),
        ]
    )
