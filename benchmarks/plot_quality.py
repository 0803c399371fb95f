"""The README's picture of quality against bits, from benchmarks/results/smollm2_ablation.json.

    python benchmarks/plot_quality.py [--out docs/quality.png]

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"incumbent": ("settings of exllamav3", "#718096"), "default": ("default", "#2b6cb0")}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "smollm2_ablation.json")
    ap.add_argument("--out", type=Path, default=ROOT / "docs" / "quality.png")
    args = ap.parse_args()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in json.loads(args.results.read_text())["rows"] if "model" not in r]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for variant, (name, color) in NAMES.items():
        own = sorted((r for r in rows if r["variant"] == variant), key=lambda r: r["bits"])
        bits = [r["bits"] for r in own]
        axes[0].plot(bits, [r["kl"]["mean"] for r in own], "o-", color=color, label=name)
        axes[1].plot(bits, [100 * r["top1"] for r in own], "o-", color=color, label=name)
    for ax, label in zip(axes, ("mean KL to the original (nats)", "same most likely token (%)"), strict=True):
        ax.set_xlabel("bits per weight of the decoder's matrices")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
        ax.legend()
    axes[0].set_yscale("log")
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
