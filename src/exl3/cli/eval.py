"""`exl3 eval REFERENCE QUANTIZED --text FILE`."""

from __future__ import annotations

from pathlib import Path

import click

from exl3.cli.common import check_json_path, device_option, emit_json, human_bytes, progress, table


@click.command("eval")
@click.argument("reference", type=click.Path(exists=True, file_okay=False))
@click.argument("quantized", nargs=-1, required=True, type=click.Path(exists=True))
@click.option("--text", "text", required=True, type=click.Path(exists=True, dir_okay=False), help="UTF-8 text that calibration never saw")
@click.option("--rows", type=click.IntRange(min=1), default=None, help="pieces of text to use (default: all)")
@click.option("--row-len", "--row_len", type=click.IntRange(min=2), default=512, show_default=True, help="tokens in a piece")
@click.option("--json", "json_path", default=None, metavar="OUT", help="write the result as JSON to OUT ('-': stdout)")
@click.option(
    "--report", "report_dir", default=None, type=click.Path(file_okay=False), help="write report.md and report.png into this folder"
)
@device_option
def command(
    reference: str,
    quantized: tuple[str, ...],
    text: str,
    rows: int | None,
    row_len: int,
    json_path: str | None,
    report_dir: str | None,
    device: str | None,
) -> None:
    """Measure QUANTIZED against REFERENCE: KL divergence, top-1 agreement, perplexities, size.

    Both may be unquantized or EXL3 directories, QUANTIZED also GGUF files (with llama-cpp-python); several make a table and, with --report,
    a page.
    """
    check_json_path(json_path)
    if report_dir:
        Path(report_dir).mkdir(parents=True, exist_ok=True)  # what cannot be made is told before the work
        check_json_path(str(Path(report_dir) / "report.md"), "--report")
    from exl3.evaluate import compare
    from exl3.evaluate.compare import check_pair

    for directory in quantized:  # a wrong one would lose what was measured before it
        check_pair(reference, directory)
    results = []
    for directory in quantized:
        with progress(f"evaluating {directory}") as step:
            results.append(compare(reference, directory, text, rows=rows, row_len=row_len, device=device, progress=step))
    objects = [r.as_dict() for r in results]
    if json_path:
        emit_json(objects[0] if len(objects) == 1 else objects, json_path)
    if report_dir:
        from exl3.evaluate.report import write_report

        click.echo(f"wrote {write_report(results, report_dir)}", err=True)
    if json_path == "-":
        return
    for r in results:
        s = r.summary
        table(
            [
                ("quantized", r.quantized),
                ("mean KL", f"{s.kl_mean:.6f}   (median {s.kl_median:.6f}, 99th percentile {s.kl_p99:.6f})"),
                ("top-1 agreement", f"{100 * s.top1:.2f} %"),
                ("perplexity", f"{s.perplexity_quantized:.3f}   (reference {s.perplexity_reference:.3f})"),
                ("size", f"{human_bytes(r.bytes_quantized)}   (reference {human_bytes(r.bytes_reference)})"),
                ("bits per weight", f"{r.bits_per_weight:.3f}" + (f", head {r.head_bits:g}" if r.head_bits else "")),
                ("positions", f"{s.positions} in {r.rows} rows of {r.row_len}"),
            ]
        )
