"""Accuracy over rounds as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedsap.methods import METHODS
from fedsap.runs import metrics, read_json

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by colour-blind people


def curves(folders: Sequence[Path], path: Path) -> None:
    """Head and prototype accuracy of each run, side by side."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    methods = list(dict.fromkeys(read_json(f / "config.json")["method"]["name"] for f in folders))
    for ax, measure, title in zip(axes, ("head", "proto"), ("Head", "Nearest prototype (L2)"), strict=True):
        for folder in folders:
            name = read_json(folder / "config.json")["method"]["name"]
            rows = [r for r in metrics(folder) if "accuracy" in r]
            means = [
                100 * sum(v for v in r["accuracy"][measure] if v is not None) / len(r["accuracy"][measure])
                for r in rows
            ]
            colour = COLOURS[methods.index(name) % len(COLOURS)]
            ax.plot([r["round"] for r in rows], means, color=colour, label=METHODS[name].title)
        ax.set(title=title, xlabel="round")
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy on own classes, %")
    handles, labels = axes[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    axes[1].legend(unique.values(), unique.keys(), loc="lower right")
    figure.savefig(path, dpi=120)
