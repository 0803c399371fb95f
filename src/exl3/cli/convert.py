"""`exl3 convert -i DIR -o DIR -b BPW`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

from exl3.cli.common import check_json_path, emit_json, table


def _option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """A click option whose long spelling is accepted with dashes and with underscores."""
    both = [*names, *("--" + n[2:].replace("-", "_") for n in names if n.startswith("--") and "-" in n[2:] and "/" not in n)]
    return click.option(*both, **attributes)


OPTIONS = [
    _option("-i", "--in-dir", "--input-dir", "input_dir", metavar="DIR", help="Hugging Face model directory"),
    _option("-o", "--out-dir", "--output-dir", "output_dir", metavar="DIR", help="where the EXL3 model goes"),
    _option("-w", "--work-dir", "work_dir", metavar="DIR", help="checkpoints (default: OUT.work)"),
    _option("-b", "--bits", "bits", type=float, help="mean bits per weight of the decoder's matrices, head apart"),
    _option("--total-bits", "total_bits", type=float, help="instead: bits of everything stored, per weight of the source"),
    _option("-rcp", "--recipe", "recipe", metavar="FILE", help="instead: a rate for each tensor (YAML)"),
    _option("-hb", "--head-bits", "head_bits", type=float, help="bits of lm_head: 1-8, half rates, 16 to leave it (default: 6)"),
    _option(
        "-eb",
        "--embed-bits",
        "embed_bits",
        type=int,
        help="bits of the token embedding: 1-8, 16: as it is (default: the recipe's, else 16)",
    ),
    _option("-hq", "--hq", "hq", is_flag=False, flag_value=1, type=int, help="raise the rates of selected layers; N multiplies the raise"),
    _option("-cb", "--codebook", "codebook", help="mul1 (default), mcg or 3inst"),
    _option("--half-rates", "half_rates", help="auto (default) and always: 1.5, 2.5 and 3.5 bits may be chosen; never: whole rates"),
    _option("-ss", "--shard-size", "shard_size", type=int, help="largest shard in MiB, 0: one file (default: 8192)"),
    _option("--quality", "quality", help="fast, default or best: the time budget"),
    _option("--preset", "preset", help="incumbent: the settings of exllamav3"),
    _option("-cd", "--cal-data", "cal_data", metavar="FILE", help="your own calibration: .safetensors with input_ids, or UTF-8 text"),
    _option("-cr", "--cal-rows", "cal_rows", type=int, help="calibration rows (default: by device)"),
    _option("-cc", "--cal-cols", "cal_cols", type=int, help="tokens in a calibration row (default: by device)"),
    _option("--self-text", "self_text", type=float, help="share of the calibration rows that the model writes itself, 0-1 (default: 0)"),
    _option("--allocation", "allocation", help="bits by measured sensitivity (default) or by place: kind of matrix and depth"),
    _option(
        "--channel-weighting/--no-channel-weighting",
        "--channel_weighting/--no_channel_weighting",
        "channel_weighting",
        default=None,
        help="output scales by measured importance of the channels (default: yes)",
    ),
    _option(
        "--two-sided/--no-two-sided",
        "--two_sided/--no_two_sided",
        "two_sided",
        default=None,
        help="feed errors back over the outputs, too (default: on a GPU, for models with at most 4096 outputs a matrix)",
    ),
    _option("--out-scales", "out_scales", help="output channel scales: auto (default), always, never"),
    _option(
        "-sh/--no-sh",
        "--scaled-hessian/--no-scaled-hessian",
        "--scaled_hessian/--no_scaled_hessian",
        "scaled_hessian",
        default=None,
        help="the LDL factor sees the row scales (default: yes)",
    ),
    _option("--damping", "damping", type=float, help="share of the Hessian's mean diagonal added to it (default: 0.025)"),
    _option(
        "--choose-damping/--no-choose-damping",
        "--choose_damping/--no_choose_damping",
        "choose_damping",
        default=None,
        help="multiples of the damping are tried on calibration rows held back (default: no)",
    ),
    _option("--recapture/--no-recapture", "recapture", default=None, help="capture inputs anew after each quantized group of a block"),
    _option("--correction", "correction", type=float, help="share of upstream error that targets make up for, 0-1"),
    _option(
        "--token-weighting/--no-token-weighting",
        "--token_weighting/--no_token_weighting",
        "token_weighting",
        default=None,
        help="outlier tokens count less in the statistics",
    ),
    _option("--seam-window", "seam_window", type=int, help="positions of the search's first pass, 0: all"),
    _option("--tune", "tune", is_flag=True, help="distil the original into scales and norms afterwards; for 3 bits and below"),
    _option("--tune-steps", "tune_steps", type=int, help="steps of --tune (default: 48)"),
    _option("--seed", "seed", type=int, help="of random signs and calibration order (default: 0)"),
    _option("-r", "--resume", "resume", is_flag=True, help="go on with the job in the work folder; its settings are kept"),
    _option("-d", "--devices", "--device", "devices", help="cpu, cuda:N or GPU numbers: 0,1 (default: a GPU if one is usable, else cpu)"),
    _option("-dr", "--device-ratios", "device_ratios", help="work shares of several GPUs: 1,3 (default: measured)"),
    _option("-pm", "--parallel-mode", "parallel_mode", is_flag=True, help="accepted for exllamav3's sake, changes nothing"),
    _option("-cpi", "--checkpoint-interval", "checkpoint_interval", type=float, help="least seconds between checkpoints (default: 120)"),
    _option("-lcpi", "--last-checkpoint-index", "last_checkpoint_index", type=int, help="no checkpoints behind this block (for tests)"),
    _option("--max-module", "max_module", type=int, help="stop behind this block (for tests)"),
    _option("-v", "--verbose", "verbose", is_flag=True, help="a line for every tensor"),
    _option("-mb", "--mtp-bits", "mtp_bits", type=float, help="multi-token prediction layers (not yet)"),
    _option("-vb", "--vision-bits", "vision_bits", type=int, help="vision tower (not yet)"),
    _option("-ngb", "--ngram-bits", "ngram_bits", type=int, help="n-gram tables (not yet)"),
    _option("-ngf", "--ngram-file", "ngram_file", metavar="FILE", help="a quantized n-gram table (not yet)"),
    _option("-hess", "--hessians", "hessians", metavar="DIR", help="external Hessian factors (not yet)"),
    _option("-h1", "--hessians-one-sided", "hessians_one_sided", is_flag=True, help="only with --hessians"),
    _option("-hreg", "--hessians-reg", "hessians_reg", type=float, help="only with --hessians"),
    _option("-img", "--image-dump", "image_dump", is_flag=True, help="dump tensors as images (not there)"),
    _option("--override-anyway", "override_anyway", is_flag=True, help="accepted, changes nothing: a resumed job keeps its settings"),
]


@click.command("convert")
@click.option("--json", "json_path", default=None, metavar="OUT", help="write the report as JSON to OUT ('-': stdout)")
@click.pass_context
def command(ctx: click.Context, /, json_path: str | None, **options: Any) -> None:
    """Quantize the Hugging Face model in DIR to EXL3."""
    check_json_path(json_path)
    from exl3.quantize.convert import convert

    given = {name: value for name, value in options.items() if ctx.get_parameter_source(name) == ParameterSource.COMMANDLINE}
    quiet = json_path == "-"
    with _display(quiet) as (progress, log):
        report = convert(progress=progress, log=log, **given)
    if json_path:
        emit_json(report.as_dict(), json_path)
    if not quiet:
        table(report.summary())


for _decorate in OPTIONS:
    command = _decorate(command)


@contextmanager
def _display(quiet: bool) -> Any:
    """(progress callback, line callback): a bar with ETA on a terminal, else a line now and then on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("converting", total=None)
            yield (
                lambda done, total, text: bar.update(task, completed=done, total=total, description=text),
                (lambda line: None) if quiet else lambda line: bar.console.print(line, markup=False, highlight=False),
            )
        return
    yield _plain_progress(), (lambda line: None) if quiet else (lambda line: click.echo(line, err=True))


def _plain_progress() -> Callable[[int, int, str], None]:
    started, shown = time.monotonic(), time.monotonic()

    def step(done: int, total: int, text: str) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < 30 and done < total:
            return
        shown = now
        rate = done / max(now - started, 1e-9)
        click.echo(
            f"{100 * done / max(total, 1):5.1f} %  {text}  {rate / 1e6:.2f} M weights/s  eta {(total - done) / max(rate, 1e-9):.0f} s",
            err=True,
        )

    return step
