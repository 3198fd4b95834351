"""Draw a measure against the generalisation gap, and the correlations of all measures with each other."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..messages import check_choice
from ..report import views
from .coefficients import STATISTICS, cosines, products, whole
from .correlation import correlations
from .tables import Vector, listed, one_name, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 100  # ratio of a measure's largest to its smallest value from which its axis is logarithmic
_NAMED = 12  # clusters that a legend has room for
_WRITTEN = 15  # columns up to which the cells of a matrix have room for a number


def plot_correlation(
    table: Any,
    x: str,
    y: str = "gap",
    *,
    path: str | Path | None = None,
    axes: "Axes | None" = None,
    title: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    log: bool | None = None,
    exclude: Collection[str] = (),
    max_loss: float | None = None,
    test: Any = None,
    seed: int = 0,
    interval: str = "bootstrap",
    settings: str | Sequence[str] | None = None,
    given: str | Sequence[str] = (),
    permutations: int = 0,
    within: bool = False,
    strata: str | Sequence[str] = (),
    seeds: str | None = None,
) -> "tuple[Figure, Axes]":
    """Draw a measure against the generalisation gap as a scatter plot, with the correlations and intervals above it.

    Networks that are left out of the correlations are drawn hollow and counted in the legend; only the others set the
    scale. Each cluster has its colour. Points show the values themselves, also where columns are held fixed.

    Args:
        table: a pandas data frame or dict of lists with a column for each measure, or the path of a CSV file.
        x: a column.
        y: a column.
        path: where the figure is written too; its ending is its format.
        axes: matplotlib's, to draw into; None: those of a new figure.
        title: above the figure; None: the correlations.
        xlabel: below it; None: the name of the column.
        ylabel: beside it; None: the name of the column.
        log: whether the measure's axis is logarithmic; None: if its values differ a hundredfold.
        exclude: names of rows to leave out.
        max_loss: networks with a larger loss are left out; None: those that are not trained as the others are.
        test: a table of the same networks on test data, for the gap.
        seed: of the resampling and the permutations.
        interval: ``"bootstrap"`` or ``"fisher"``; this and what follows is as for
            :func:`pyflatness.statistics.correlations`.
        settings: columns whose equal networks are a cluster.
        given: columns that are held fixed in partial correlations.
        permutations: how many the p-values are made with; 0: none.
        within: permute inside of clusters alone.
        strata: columns in which networks that are compared are equal.
        seeds: the column of the seeds that networks were trained with.

    Returns:
        Figure and axes of matplotlib, outside of pyplot.

    Raises:
        InputError: as :func:`pyflatness.statistics.correlations`.
        MissingExtraError: without matplotlib.

    Example:
        >>> import pyflatness as pf
        >>> figure, axes = pf.statistics.plot_correlation({"kappa": [1, 2, 3, 4, 5], "gap": [1, 3, 2, 5, 4]}, x="kappa")
        >>> axes.get_title().splitlines()[0].startswith("Pearson 0.80")
        True
    """
    x, y = one_name("x", x), one_name("y", y)
    how: dict[str, Any] = {"interval": interval, "settings": settings, "given": given, "strata": strata, "seeds": seeds}
    how |= {"exclude": exclude, "max_loss": max_loss, "test": test, "seed": seed}
    how |= {"permutations": permutations, "within": within}
    found = correlations(table, x, y, **how)
    networks = read(table, test)
    kept = np.array([not why for why in networks.left_out(exclude, max_loss)])
    values, against = networks.column(x), networks.column(y)
    figure, axes = views.onto(axes)
    grouping = listed("settings", settings or ())
    if not grouping:
        axes.plot(values[kept], against[kept], "o", color="C0", label=f"{found.points} networks")
    else:
        groups, labels = networks.groups(grouping, kept)
        _draw_clusters(axes, values[kept], against[kept], groups, labels)
    drawn = values[kept]
    if log or (log is None and drawn.min() > 0 and drawn.max() > _WIDE * drawn.min()):
        axes.set_xscale("log")
    if found.excluded:
        axes.autoscale_view()
        axes.autoscale(False)
        label = f"{len(found.excluded)} left out of the correlations"
        color = "gray" if grouping else "C0"
        axes.plot(values[~kept], against[~kept], "o", color=color, fillstyle="none", label=label)
    held = [f"given {', '.join(found.given)}"] if found.given else []
    axes.set_title("\n".join([*held, *map(str, found.rows)]) if title is None else title, fontsize=10)
    axes.set_xlabel(x if xlabel is None else xlabel)
    axes.set_ylabel(("generalisation gap" if y == "gap" else y) if ylabel is None else ylabel)
    axes.grid(alpha=0.3)
    beside = {"fontsize": 7, "loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
    axes.legend(**(beside | {"title": ", ".join(grouping), "title_fontsize": 7} if grouping else {}))
    views.save(figure, path)
    return figure, axes


def plot_correlation_matrix(
    table: Any,
    columns: Sequence[str] | None = None,
    *,
    statistic: str = "Kendall",
    exclude: Collection[str] = (),
    test: Any = None,
    path: str | Path | None = None,
    axes: "Axes | None" = None,
) -> "tuple[Figure, Axes]":
    """Draw the correlations of measures with each other, as a matrix of colours.

    Args:
        table: a pandas data frame or dict of lists with a row for each network, or the path of a CSV file of
            ``pyflatness score`` or ``store export``.
        columns: from left to right; None: the gap, if there is one, and all measures.
        statistic: ``"Pearson"``, ``"Spearman"`` or ``"Kendall"`` (τ_b).
        exclude: names of rows to leave out.
        test: a table of the same networks on test data, for the gap.
        path: where the figure is written too; its ending is its format.
        axes: matplotlib's, to draw into; None: those of a new figure.

    Returns:
        Figure and axes of matplotlib, outside of pyplot. The matrix is ``axes.images[0].get_array()``; NaN for a column
        that is constant.

    Raises:
        InputError: as :func:`pyflatness.statistics.correlations`, or another statistic.
        MissingExtraError: without matplotlib.

    Example:
        >>> import pyflatness as pf
        >>> table = {"kappa": [1, 2, 3, 4, 5], "trace": [2, 1, 3, 4, 5], "gap": [1, 3, 2, 5, 4]}
        >>> figure, axes = pf.statistics.plot_correlation_matrix(table)
        >>> [label.get_text() for label in axes.get_xticklabels()]
        ['gap', 'kappa', 'trace']
        >>> axes.images[0].get_array()[0].round(1).tolist()
        [1.0, 0.6, 0.4]
    """
    check_choice("statistic", statistic, STATISTICS)
    networks = read(table, test)
    kept = networks.kept(exclude)
    gap = ["gap"] if "gap" in networks.columns else []
    own = [*gap, *(name for name in networks.measures if name != "gap")]
    names = own if columns is None else listed("columns", columns)
    values, sample = [networks.finite(name, kept) for name in names], whole(int(kept.sum()))
    found = cosines(products(statistic, values, sample))[0]
    figure, drawn_into = views.onto(axes)
    if axes is None:
        figure.set_size_inches(3.5 + 0.4 * len(names), 2.5 + 0.4 * len(names))
    axes = drawn_into
    image = axes.imshow(found, cmap="RdBu_r", vmin=-1, vmax=1)
    if len(names) <= _WRITTEN:
        for i, row in enumerate(found):
            for j, value in enumerate(row):
                color = "white" if abs(value) > 0.6 else "black"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, ax=axes, label=f"{statistic}, {int(kept.sum())} networks")
    views.save(figure, path)
    return figure, axes


def _draw_clusters(axes: "Axes", x: Vector, y: Vector, groups: NDArray[np.intp], labels: tuple[str, ...]) -> None:
    """Draw each cluster in its own colour and marker, with its name in the legend if there is room for all names."""
    for group, label in enumerate(labels):
        here = groups == group
        marker = "os^Dv"[group // 10 % 5]
        axes.plot(x[here], y[here], marker, color=f"C{group % 10}", label=label if len(labels) <= _NAMED else None)
    if len(labels) > _NAMED:
        axes.plot([], [], "o", color="gray", label=f"{len(x)} networks in {len(labels)} clusters")
