"""The README's picture of quality against size, from benchmarks/results/smollm2_quality.json.

    python benchmarks/plot_quality.py [--out docs/quality.png]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "smollm2_quality.json")
    ap.add_argument("--out", type=Path, default=ROOT / "docs" / "quality.png")
    args = ap.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = json.loads(args.results.read_text())["rows"]
    size = [r["bytes"] / 2**20 for r in rows]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for ax, label, values in (
        (axes[0], "mean KL to the original (nats)", [r["kl"]["mean"] for r in rows]),
        (axes[1], "perplexity", [r["perplexity"]["quantized"] for r in rows]),
    ):
        ax.plot(size, values, "o-", color="#2b6cb0")
        for r, x, y in zip(rows, size, values, strict=True):
            ax.annotate(f"{r['bits_per_weight']:g} bpw", (x, y), textcoords="offset points", xytext=(6, 5), fontsize=9)
        ax.set_xlabel("tensors stored (MiB; the original has 257)")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
        ax.set_xlim(min(size) - 3, max(size) + 7)
    axes[0].set_yscale("log")
    axes[1].axhline(rows[0]["perplexity"]["reference"], color="#718096", linestyle="--", linewidth=1, label="original")
    axes[1].legend()
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
