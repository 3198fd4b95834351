"""Describe charts as Vega-Lite, by Altair.

Names of models, layers and measures are data, titles or labels of a chart, which are drawn as text. Expressions, and
the fields of the data, have names of this module's own: nothing that comes from outside is evaluated.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

from ...errors import MissingExtraError
from .tables import Record, finite

DATA = "points"  # the name of the data in a specification

Rows = list[dict[str, Any]]
Spec = dict[str, Any]

_WIDE = 100  # a measure whose largest value is so many times the smallest is drawn logarithmically
NAMED = 10  # models that a legend has room for
_LINES = 50  # models of which each has a line; of more the median is drawn, with a band
_SIZE: dict[str, Any] = {"width": "container", "height": 340}
_ENDING = re.compile(r"\.(safetensors|ckpt|pth?|bin)$")
_NUMBER = re.compile(r"([A-Za-z]+)[=_-]?(\d+(?:\.\d+)?(?:e-?\d+)?)")
_SHORT = 24  # letters of all layers' names that fit side by side
_APART = 8  # pixels between labels of an axis, and between points and the frame


@dataclass(frozen=True)
class Axis:
    """Hold what is drawn along an axis: the field of the data, its title, whether it is logarithmic, and its ends."""

    field: str
    title: str
    log: bool = False
    ends: tuple[float, float] | None = None  # None: those of all that is drawn

    @classmethod
    def of(cls, field: str, title: str, values: Sequence[float | None]) -> "Axis":
        """Return an axis that is logarithmic where values of very different sizes are all positive."""
        there = [value for value in values if value is not None and math.isfinite(value)]
        return cls(field, title, bool(there) and min(there) > 0 and max(there) > _WIDE * min(there))

    @classmethod
    def over(cls, field: str, title: str, values: Sequence[float]) -> "Axis":
        """Return such an axis that ends with the values."""
        there = [value for value in values if math.isfinite(value)]
        ends = (min(there), max(there)) if len({*there}) > 1 else None
        return replace(cls.of(field, title, there), ends=ends)

    def holds(self) -> str:
        """Return the expression for whether a point has a value that is between the ends."""
        value = f"datum.{self.field}"
        return f"isValid({value})" if self.ends is None else f"inrange({value}, {[*self.ends]})"


@dataclass(frozen=True)
class Charts:
    """Hold charts of the same data."""

    data: Rows
    specs: tuple[Spec, ...]


def altair() -> Any:
    """Return the module.

    Raises:
        MissingExtraError: without it, or without what has the JavaScript of its charts.
    """
    try:
        import altair
        import vl_convert  # noqa: F401
    except ImportError:
        raise MissingExtraError("a page needs altair and vl-convert: pip install 'pyflatness[html]'") from None
    return altair


def short(names: Sequence[str]) -> dict[str, str]:
    """Return names without their folders and the endings of checkpoints, or as they are where these tell them apart."""
    cut = [_ENDING.sub("", PurePath(name).name) for name in names]
    return dict(zip(names, cut if len({*cut}) == len({*names}) else names, strict=True))


def settings(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings that all names have a number of, such as lr0.1_batch16, each with its value in each name."""
    found = [dict(_NUMBER.findall(name)) for name in short(names).values()]
    return (
        {word: [one[word] for one in found] for word in found[0] if all(word in one for one in found)} if found else {}
    )


def scatter(x: Axis, y: Axis, lines: Sequence[str], values: Sequence[str], setting: str) -> Spec:
    """Return a chart of one field against another: a point for each model, with an interval where x has one.

    Models that do not count (the field ``out``) are hollow; those without x are hollow at the left edge, those without
    y at the lower one. Those outside of an axis's ends are not drawn.

    Args:
        x: across; the fields ``…_low`` and ``…_high`` hold its interval.
        y: upward.
        lines: below the title.
        values: of the models, which give them colours and shapes: those of a setting, or few models' own names.
        setting: the title of what the field ``setting`` holds; "": values are the names in the field ``name``.
    """
    alt = altair()
    told = [alt.Tooltip("setting:N", title=setting)] if setting else []
    base = alt.Chart(alt.NamedData(name=DATA)).encode(tooltip=["model:N", *told, *(_told(axis) for axis in (x, y))])
    across, upward = alt.X(**position(x)), alt.Y(**position(y))
    base = base.encode(**_apart(values, setting))
    has_x, has_y = x.holds(), y.holds()
    left, bottom = alt.value(0), alt.value(_SIZE["height"])

    def points(which: str, x: Any, y: Any, *, filled: bool = False) -> Any:
        return base.transform_filter(which).mark_point(filled=filled, size=80, clip=False, opacity=1).encode(x=x, y=y)

    layers = [
        base.transform_filter(f"{has_x} && {has_y} && isValid(datum.{x.field}_low)")
        .mark_rule(opacity=0.4)
        .encode(x=alt.X(f"{x.field}_low:Q"), x2=f"{x.field}_high:Q", y=upward),
        points(f"{has_x} && {has_y} && !datum.out", across, upward, filled=True),
        points(f"{has_x} && {has_y} && datum.out", across, upward),
        points(f"!isValid(datum.{x.field}) && {has_y}", left, upward),
        points(f"{has_x} && !isValid(datum.{y.field})", across, bottom),
    ]
    return finished(alt.layer(*layers), x.title, lines, f"{x.title} against {y.title}: {'; '.join(lines)}")


def profile(measure: Axis, layers: Sequence[str], values: Sequence[str], setting: str) -> Spec:
    """Return a chart of a measure over the layers, from the first to the last: a line for each model.

    Args:
        measure: upward; the fields ``…_low`` and ``…_high`` hold its interval.
        layers: in the model's order.
        values: of the models, as for :func:`scatter`; of many models the median is drawn, with a band from the lower
            quartile to the upper one.
        setting: as for :func:`scatter`.
    """
    alt = altair()
    base = alt.Chart(alt.NamedData(name=DATA)).transform_filter(f"isValid(datum.{measure.field})")
    base = base.encode(
        x=alt.X(
            "layer:N",
            sort=[*layers],
            title="layer, in the model's order",
            axis=alt.Axis(
                labelLimit=90, labelOverlap="greedy", labelAngle=0 if sum(map(len, layers)) < _SHORT else -90
            ),
        ),
        y=alt.Y(**position(measure)),
    )
    if len(values) > _LINES:
        lines = ["median and quartiles of the models"]
        drawn = base.mark_errorband(extent="iqr") + base.mark_line(point=True).encode(
            y=alt.Y(f"median({measure.field}):Q", **scale(measure))
        )
    else:
        lines = []
        tooltip = ["model:N", "layer:N", _told(measure)]
        told = _apart(values, setting)
        own = {"color": told.get("color", alt.Color("name:N", legend=None))} if len(values) > 1 else {}
        one = base.encode(**own, detail="model:N", tooltip=tooltip)
        ends = one.transform_filter(f"isValid(datum.{measure.field}_low)").mark_rule()
        ends = ends.encode(y=alt.Y(f"{measure.field}_low:Q"), y2=f"{measure.field}_high:Q")
        drawn = ends + one.mark_line(opacity=0.8) + one.encode(**told).mark_point(filled=True, opacity=1)
    return finished(drawn, measure.title, lines, f"{measure.title} over {len(layers)} layers of {len(values)} models")


def _told(axis: Axis) -> Any:
    return altair().Tooltip(axis.field, type="quantitative", title=axis.title, format=".6~g")


def colour(field: str, count: int, sort: Sequence[str] | None = None) -> Any:
    """Return a colour for each name in a field, with a legend below the chart where it has room for all of them."""
    alt = altair()
    legend = alt.Legend(title=None, orient="bottom", columns=1, labelLimit=380, symbolOpacity=1)
    return alt.Color(f"{field}:N", sort=sort, legend=legend if 1 < count <= NAMED else None)


def _apart(values: Sequence[str], setting: str) -> dict[str, Any]:
    """Return colours and shapes that tell the values of a setting apart, or the models where these are few.

    Shapes do so without colours. The domain is given, since channels of different ones have a legend each.
    """
    alt = altair()
    field, shown = "setting:N" if setting else "name:N", [*dict.fromkeys(values)]
    if not setting and not 1 < len(shown) <= NAMED:
        return {}
    how = {"columns": 1, "labelLimit": 380} if not setting else {"symbolFillColor": None}
    legend = alt.Legend(title=setting or None, orient="bottom", symbolOpacity=1, **how)
    colours = alt.Scale(domain=shown, scheme="category10")
    return {
        "color": alt.Color(field, legend=legend, scale=colours),
        "shape": alt.Shape(field, legend=legend, scale=alt.Scale(domain=shown)),
    }


def profiles(records: Sequence[Record], setting: str = "", values: Mapping[str, Any] = MappingProxyType({})) -> Charts:
    """Return a chart over the layers of each measure that has values of several.

    Args:
        records: of models and their layers.
        setting: what gives lines their colours; "": each model has its own.
        values: those of the setting, by model.
    """
    measures = [*dict.fromkeys(record["measure"] for record in records)]
    of_layers = [record for record in records if record["layer"] and record["value"] is not None]
    layers = [*dict.fromkeys(record["layer"] for record in of_layers)]
    names = short([*dict.fromkeys(record["checkpoint"] for record in records)])
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for record in of_layers:
        place = model, layer = record["checkpoint"], record["layer"]
        own = {"setting": values[model]} if setting else {}
        row = rows.setdefault(place, {"model": model, "name": names[model], "layer": layer} | own)
        row |= numbers(f"m{measures.index(record['measure'])}", record)
    specs = []
    for number, name in enumerate(measures):
        held = [record for record in of_layers if record["measure"] == name]
        if len({record["layer"] for record in held}) > 1:
            axis = Axis.of(f"m{number}", name, [record["value"] for record in held])
            models = [*dict.fromkeys(record["checkpoint"] for record in held)]
            specs.append(profile(axis, layers, [(values if setting else names)[model] for model in models], setting))
    return Charts([*rows.values()] if specs else [], tuple(specs))


def numbers(field: str, record: Record) -> dict[str, float]:
    """Return a value and the ends of its interval as fields; those that there are."""
    named = {field: record["value"]}
    if record["stderr"] is not None:
        named |= {f"{field}_low": record["low"], f"{field}_high": record["high"]}
    return {name: number for name, given in named.items() if (number := finite(given)) is not None}


def position(axis: Axis) -> dict[str, Any]:
    """Return what a channel of a chart is: the field of an axis, with its scale."""
    return {"field": axis.field, "type": "quantitative", **scale(axis)}


def scale(axis: Axis) -> dict[str, Any]:
    """Return how an axis is drawn, for several fields along it."""
    alt = altair()
    ends = {"domain": [*axis.ends]} if axis.ends else {}
    kind = alt.Scale(type="log", nice=False, **ends) if axis.log else alt.Scale(zero=False, nice=False, **ends)
    return {"title": axis.title, "scale": kind, "axis": alt.Axis(titleLimit=_SIZE["height"])}


def finished(chart: Any, title: str, lines: Sequence[str], description: str, chosen: Any = None) -> Spec:
    """Return a chart with its title, lines below it, a description for screen readers, and what a reader chooses."""
    alt = altair()
    chart = chart if chosen is None else chart.add_params(chosen)
    heading = alt.TitleParams(text=title, subtitle=[*lines], anchor="start", limit=420)
    fit = alt.AutoSizeParams(type="fit-x", contains="padding")
    chart = chart.properties(title=heading, description=description, autosize=fit, **_SIZE)
    chart = chart.configure_axisQuantitative(labelOverlap="greedy", labelSeparation=_APART, tickCount=8)
    finished: Spec = chart.configure_scale(continuousPadding=_APART).to_dict()  # no point on the frame
    return finished
