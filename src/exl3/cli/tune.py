"""`exl3 tune -i QUANT -r REFERENCE -o DIR`."""

from __future__ import annotations

from typing import Any

import click

from exl3.cli.common import device_option, progress, table


def _folder(*names: str, **attributes: Any) -> Any:
    return click.option(*names, required=True, type=click.Path(exists=True, file_okay=False), **attributes)


@click.command("tune")
@_folder("-i", "--in-dir", "--in_dir", "quantized", help="a finished EXL3 model")
@_folder("-r", "--ref-dir", "--ref_dir", "original", help="the unquantized model")
@click.option("-o", "--out-dir", "--out_dir", "output", required=True, type=click.Path(), help="where the tuned model goes")
@click.option("-cd", "--cal-data", "--cal_data", metavar="FILE", help="your own text: .safetensors with input_ids, or UTF-8 text")
@click.option("-cr", "--cal-rows", "--cal_rows", type=click.IntRange(min=2), help="rows of text (default: by device)")
@click.option("-cc", "--cal-cols", "--cal_cols", type=click.IntRange(min=2), help="tokens in a row (default: by device)")
@click.option("--steps", type=click.IntRange(min=1), help="training steps (default: 48)")
@click.option("--seed", type=int, default=0, show_default=True, help="of the order of the rows")
@device_option
def command(
    quantized: str, original: str, output: str, cal_data: str | None, cal_rows: int | None, cal_cols: int | None, steps: int | None,
    seed: int, device: str | None,
) -> None:  # fmt: skip
    """Distil the original into the scales, biases and norms of a finished quantization; the codes stay. For 3 bits and below."""
    from exl3.quantize.retune import tune_directory
    from exl3.quantize.tune import TuneSettings

    settings = TuneSettings(steps=steps or TuneSettings.steps, seed=seed)
    with progress("tuning") as step:
        tuned = tune_directory(
            quantized, original, output, settings=settings, cal_data=cal_data, cal_rows=cal_rows, cal_cols=cal_cols, device=device,
            progress=step,
        )  # fmt: skip
    where = output if tuned.tensors else "nowhere: no gain on the rows held back"
    table([("mean KL on rows held back", f"{tuned.before:.5f} before, {tuned.after:.5f} after"), ("written to", where)])
