"""Draw the records of a history over the steps of the training."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..errors import InputError
from ..options import check_names
from ..report import Estimate, views
from .budget import CLOCK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .history import Record

_COLOURS = 10  # of matplotlib's cycle; more layers are coloured by their place
_WIDE = 3.0  # times as large as the smallest: values are drawn on a logarithmic axis then
_INSIDE = 8  # labels that a legend has room for inside of its axes


def draw(
    records: "Sequence[Record]",
    measures: str | Sequence[str] | None,
    layers: str | Sequence[str] | None,
    x: str | None,
    axes: "Axes | Iterable[Axes] | None",
) -> "tuple[Figure, list[Axes]]":
    """See :meth:`.History.plot`."""
    if not records:
        raise InputError("history: nothing was recorded yet; call history.record() first")
    reports = [report for record in records for report in record.reports.values()]
    held = dict.fromkeys(name for report in reports for name in report.measures)
    numbers = dict.fromkeys(name for record in records for name in record.numbers)
    wanted = (
        [*held, *(name for name in numbers if name != CLOCK)] if measures is None else check_names("measures", measures)
    )
    if not wanted:
        raise InputError("measures: an empty list; pass None for all that were recorded")
    known = [*dict.fromkeys([*(layer for report in reports for layer in report.layers), ""])]
    chosen = known if layers is None else check_names("layers", layers)
    _check_known("measure or number", wanted, [*held, *numbers])
    _check_known("layer", chosen, known)
    if axes is None:
        figure, drawn = views.panels(len(wanted))
    else:
        figure, drawn = views.onto_each(axes, wanted)
    along, where = places(records, x)
    colours = _colours([layer for layer in known if layer])
    for name, panel in zip(wanted, drawn, strict=True):
        if name in held:
            _draw_measure(panel, records, where, name, chosen, colours)
        else:
            points = [
                (place, record.numbers[name])
                for place, record in zip(where, records, strict=True)
                if name in record.numbers
            ]
            panel.plot(*zip(*points, strict=True), marker=".", color="black")
        _finish(panel, along, name)
    return figure, drawn


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            listed = ", ".join(map(repr, known))
            raise InputError(f"history: no {what} {name!r} was recorded; there are {listed}")


def places(records: "Sequence[Record]", x: str | None) -> tuple[str, list[float]]:
    """Return what the records are drawn along, and where each of them is."""
    if x not in (None, "step", "epoch"):
        raise InputError(f"x={x!r}: 'step' or 'epoch' is wanted, or None")
    for along in ("step", "epoch") if x is None else (x,):
        found = [getattr(record, along) for record in records]
        if None not in found:
            return along, found
    if x is not None:
        raise InputError(f"x={x!r}: record {found.index(None)} has no {x}")
    return "record", [*range(len(records))]


def _colours(layers: Sequence[str]) -> dict[str, Any]:
    """Return the colour of each layer, and of the network."""
    if len(layers) <= _COLOURS:
        return {"": "black", **{layer: f"C{place}" for place, layer in enumerate(layers)}}
    from matplotlib import colormaps

    return {
        "": "black",
        **{layer: colormaps["viridis"](place / (len(layers) - 1)) for place, layer in enumerate(layers)},
    }


def _draw_measure(
    panel: "Axes",
    records: "Sequence[Record]",
    places: Sequence[float],
    measure: str,
    layers: Sequence[str],
    colours: dict[str, Any],
) -> None:
    for weights in dict.fromkeys(weights for record in records for weights in record.reports):
        found: dict[str, list[tuple[float, Estimate]]] = {}
        for place, record in zip(places, records, strict=True):
            held = record.reports[weights].by_measure().get(measure, {}) if weights in record.reports else {}
            for layer in layers:
                if layer in held:
                    found.setdefault(layer, []).append((place, held[layer]))
        for layer, points in found.items():
            label = (layer or "network") + ("" if weights == "live" else f", {weights}")
            x, y = [place for place, _ in points], [estimate.value for _, estimate in points]
            style = "-" if weights == "live" else "--"
            panel.plot(x, y, style, marker=".", color=colours[layer], label=label)
            if any(estimate.stderr for _, estimate in points):
                ends = [estimate.interval() or (math.nan, math.nan) for _, estimate in points]
                low, high = zip(*ends, strict=True)
                panel.fill_between(x, low, high, color=colours[layer], alpha=0.2, linewidth=0)


def _finish(panel: "Axes", along: str, name: str) -> None:
    values = [value for line in panel.get_lines() for value in cast("Sequence[float]", line.get_ydata())]
    if values and all(value > 0 for value in values) and max(values) > _WIDE * min(values):
        panel.set_yscale("log")
    panel.set_xlabel(along)
    panel.set_ylabel(name)
    panel.grid(alpha=0.3)
    labels = panel.get_legend_handles_labels()[1]
    if labels:
        outside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        title = "bands: 95 % intervals" if panel.collections else None
        panel.legend(fontsize=8, title=title, title_fontsize=8, **({} if len(labels) <= _INSIDE else outside))
