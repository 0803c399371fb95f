"""One page about several quantized directories: a table, and a picture of KL and perplexity against size.

The picture needs matplotlib (`pip install exl3[plot]`); without it the page says so and carries the table alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exl3.evaluate.compare import Comparison, is_gguf


def write_report(results: Sequence[Comparison], directory: str | Path) -> Path:
    """Writes report.md, report.png (with matplotlib) and report.json into `directory`; returns the page's path."""
    import json

    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    ordered = sorted(results, key=lambda r: r.bytes_quantized)
    (folder / "report.json").write_text(json.dumps([r.as_dict() for r in ordered], indent=2) + "\n", encoding="utf-8")
    picture = _plot(ordered, folder / "report.png")
    page = folder / "report.md"
    page.write_text(_markdown(ordered, picture), encoding="utf-8")
    return page


def _markdown(results: Sequence[Comparison], picture: bool) -> str:
    first = results[0]
    lines = [
        f"# Quantized against {os.path.basename(first.reference.rstrip('/'))}",
        "",
        f"Held-out text: `{os.path.basename(first.text)}`, {first.rows} rows of {first.row_len} tokens. "
        f"Reference perplexity {first.summary.perplexity_reference:.3f}, {first.bytes_reference / 2**20:.1f} MiB.",
        *_calibrations(results),
        "",
        "| directory | bits per weight | head bits | MiB | mean KL | median KL | 99 % KL | top-1 | perplexity |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        s = r.summary
        lines.append(
            f"| {os.path.basename(r.quantized.rstrip('/'))} | {r.bits_per_weight:.3f} | {r.head_bits or '-'} "
            f"| {r.bytes_quantized / 2**20:.1f} "
            f"| {s.kl_mean:.5f} | {s.kl_median:.5f} | {s.kl_p99:.4f} | {100 * s.top1:.2f} % | {s.perplexity_quantized:.3f} |"
        )
    lines += _rates(results) + _layers(results)
    lines += ["", "![KL and perplexity against size](report.png)" if picture else "(No picture: matplotlib is not installed.)", ""]
    return "\n".join(lines)


def _name(result: Comparison) -> str:
    return os.path.basename(result.quantized.rstrip("/"))


def _calibrations(results: Sequence[Comparison]) -> list[str]:
    found = [(_name(r), r.calibration) for r in results if isinstance(r.calibration, dict)]
    known = [f"{name} {c['rows']} rows of {c['cols']} tokens{_texts(c)}" for name, c in found if "rows" in c and "cols" in c]
    return ["", f"Calibration: {'; '.join(known)}."] if known else []


def _texts(calibration: dict[str, Any]) -> str:
    """The rows of each text, of a directory that says so."""
    sources = calibration.get("sources")
    return f" ({', '.join(f'{name} {rows}' for name, rows in sources.items())})" if isinstance(sources, dict) and sources else ""


def _rates(results: Sequence[Comparison]) -> list[str]:
    """Two kinds of rates in one table."""
    if not any(is_gguf(r.quantized) for r in results):
        return []
    return [
        "",
        "Bits per weight of a GGUF file are those of the whole file, of a directory those of the decoder's matrices: compare sizes.",
    ]


def _layers(results: Sequence[Comparison]) -> list[str]:
    """Error of the residual stream behind each block."""
    known = [r for r in results if r.layer_errors]
    if not known:
        return []
    lines = [
        "",
        "Relative error of the residual stream behind each block, first row:",
        "",
        "| block | " + " | ".join(map(_name, known)) + " |",
    ]
    lines.append("|---" * (len(known) + 1) + "|")
    depth = max(len(r.layer_errors) for r in known)
    return lines + [
        f"| {i} | " + " | ".join(f"{r.layer_errors[i]:.4f}" for r in known if i < len(r.layer_errors)) + " |" for i in range(depth)
    ]


def _plot(results: Sequence[Comparison], path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = [r.bytes_quantized / 2**20 for r in results]
    series: list[tuple[str, list[float], Any]] = [
        ("mean KL (nats)", [r.summary.kl_mean for r in results], None),
        ("perplexity", [r.summary.perplexity_quantized for r in results], results[0].summary.perplexity_reference),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for ax, (label, values, reference) in zip(axes, series, strict=True):
        ax.plot(size, values, "o-", color="#2b6cb0")
        for r, x, y in zip(results, size, values, strict=True):
            ax.annotate(f"{r.bits_per_weight:.2f} bpw", (x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
        if reference is not None:
            ax.axhline(reference, color="#718096", linestyle="--", linewidth=1, label="reference")
            ax.legend()
        else:
            ax.set_yscale("log")
        ax.set_xlabel("size (MiB)")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
