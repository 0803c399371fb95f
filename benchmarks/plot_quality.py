"""The README's picture of quality against bits, one panel a model, from files that benchmarks/ablation.py writes.

    python benchmarks/plot_quality.py [--results FILE ...] [--out docs/quality.png]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = {"incumbent": ("settings of exllamav3", "#718096"), "default": ("default", "#2b6cb0"), "tune": ("default and --tune", "#c05621")}


def draw(ax: Any, data: dict[str, Any]) -> None:
    """Mean KL over slices and seeds; bars from the least to the largest seed."""
    for variant, (name, color) in NAMES.items():
        by_rate: dict[float, list[float]] = {}
        for r in data["rows"]:
            if r["variant"] == variant and "slices" in r:
                by_rate.setdefault(r["bits"], []).append(sum(s["kl"] for s in r["slices"].values()) / len(r["slices"]))
        bits = sorted(by_rate)
        if not bits:
            continue
        means = [sum(by_rate[b]) / len(by_rate[b]) for b in bits]
        below = [m - min(by_rate[b]) for b, m in zip(bits, means, strict=True)]
        above = [max(by_rate[b]) - m for b, m in zip(bits, means, strict=True)]
        ax.errorbar(bits, means, yerr=[below, above], fmt="o-", capsize=3, color=color, label=name)
    ax.set_title(data["model"], fontsize=10)
    ax.set_xlabel("bits per weight of the decoder's matrices")
    ax.set_ylabel("mean KL to the original (nats)")
    ax.set_yscale("log")
    ax.grid(alpha=0.3, which="both")
    ax.legend()


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--results", type=Path, nargs="+", default=[RESULTS / "quality_smollm2.json", RESULTS / "quality_gemma3.json"])
    ap.add_argument("--out", type=Path, default=ROOT / "docs" / "quality.png")
    args = ap.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = [json.loads(path.read_text()) for path in args.results if path.exists()]
    figure, axes = plt.subplots(1, len(found), figsize=(4.5 * len(found), 3.4), constrained_layout=True, squeeze=False)
    for ax, data in zip(axes[0], found, strict=True):
        draw(ax, data)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
