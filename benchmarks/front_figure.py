"""Draw the README's figure from the grid of 648 networks (docs/study.md): python benchmarks/front_figure.py."""

import json
from pathlib import Path

from matplotlib.figure import Figure

import pyflatness as pf

DOCS = Path(__file__).resolve().parent.parent / "docs"
SETTINGS = ["width", "depth", "batch_size", "optimizer", "learning_rate", "weight_decay"]


def main() -> None:
    """Write docs/front.png."""
    table = json.loads((DOCS / "papers" / "grid-paper.json").read_text(encoding="utf-8"))["table"]
    columns = {name: table[name] for name in ("name", "relative_flatness", *SETTINGS)} | {"gap": table["test gap"]}
    found = pf.statistics.correlations(columns, settings=SETTINGS)
    wanted = "relative_flatness", "Kendall"
    kendall = next(row for row in found.rows if (row.measure, row.statistic) == wanted)
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for width in sorted(set(table["width"])):
        rows = [place for place, value in enumerate(table["width"]) if value == width]
        points = ([columns[name][place] for place in rows] for name in ("relative_flatness", "gap"))
        axes.scatter(*points, s=10, label=f"{width} neurons a layer")
    axes.set(xscale="log", xlabel="relative flatness κ, sum over layers", ylabel="test loss − training loss")
    axes.minorticks_off()
    axes.set_xticks([100, 200, 500, 1000, 2000], ["100", "200", "500", "1000", "2000"])
    said = f"Kendall's τ {kendall.value:.2f} [{kendall.low:.2f}, {kendall.high:.2f}]"
    axes.set_title(f"{found.points} networks at one training loss: {said}", size=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / "front.png", dpi=110)


if __name__ == "__main__":
    main()
