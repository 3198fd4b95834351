"""Describe charts of which a reader chooses what they show: one of several spectra, landscapes or layers.

Of a row of the data with lists the chart draws as many points, once it is chosen: so the data of those that are not
chosen cost nothing.
"""

from collections.abc import Sequence
from typing import Any

from .charts import DATA, Axis, Spec, altair, colour, finished, position, scale
from .tables import NETWORK

_CHOSEN = "chosen"  # the name of the parameter
_LEVELS = 12


def density(names: Sequence[str], linear: float) -> Spec:
    """Return a chart of a spectrum's density, with its standard error, and its eigenvalues as ticks.

    Rows have the lists ``x``, ``p``, ``low`` and ``high`` of the density, and ``number``, ``value`` and ``residual`` of
    the eigenvalues.

    Args:
        names: of the spectra.
        linear: up to where the axis of the density is linear; it is logarithmic beyond, since the bulk would hide all
            else.
    """
    alt = altair()
    across = alt.X("x:Q", title="eigenvalue", scale=alt.Scale(zero=False, nice=False))
    upward = {
        "title": "density",
        "scale": alt.Scale(type="symlog", constant=linear, nice=False),
        "axis": alt.Axis(format=".2~g"),
    }
    base, chosen = _of_chosen(names)
    curve = base.transform_flatten(["x", "p", "low", "high"]).encode(x=across)
    drawn = alt.layer(
        curve.mark_area(opacity=0.3).encode(y=alt.Y("low:Q", **upward), y2="high:Q"),
        curve.mark_line().encode(y=alt.Y("p:Q", **upward)),
        base.transform_flatten(["number", "value", "residual"])
        .mark_tick(thickness=2, size=14, color="#d6541d")
        .encode(
            x="value:Q",
            y=alt.YDatum(0),
            tooltip=["name:N", "number:Q", alt.Tooltip("value:Q", title="eigenvalue"), "residual:Q"],
        ),
    )
    lines = ["ticks: eigenvalues that were found"]
    described = f"density of the eigenvalues of {len(names)} spectra"
    return finished(drawn, "density of the eigenvalues", lines, described, chosen)


def eigenvalues(value: Axis, spectra: int) -> Spec:
    """Return a chart of the eigenvalues of all spectra by their number; rows have lists as for :func:`density`."""
    alt = altair()
    drawn = (
        alt.Chart(alt.NamedData(name=DATA))
        .transform_flatten(["number", "value", "residual"])
        .mark_line(point=True, opacity=0.8)
        .encode(
            x=alt.X("number:Q", title="number, from the largest", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y(**position(value)),
            color=colour("name", spectra),
            tooltip=["name:N", "number:Q", alt.Tooltip("value:Q", title="eigenvalue"), "residual:Q"],
        )
    )
    return finished(drawn, "eigenvalues", [], f"eigenvalues of {spectra} spectra")


def curve(names: Sequence[str], loss: Axis) -> Spec:
    """Return a chart of the loss along one direction (``a``, ``loss``), and dashed its quadratic model (``model``)."""
    alt = altair()
    base, chosen = _of_chosen(names)
    base = base.transform_flatten(["a", "loss", "model"]).encode(x=alt.X("a:Q", title="coefficient of the direction"))
    tooltip = ["name:N", *(alt.Tooltip(f"{name}:Q", format=".6g") for name in ("a", "loss", "model"))]
    drawn = alt.layer(
        base.transform_filter("isValid(datum.model)")
        .mark_line(strokeDash=[4, 4], color="#888888", clip=True)
        .encode(y=alt.Y("model:Q", **scale(loss))),
        base.transform_filter("isValid(datum.loss)")
        .mark_line(point=True)
        .encode(y=alt.Y(**position(loss)), tooltip=tooltip),
    )
    lines = ["dashed: the quadratic model, where there is one"]
    return finished(drawn, "loss along a direction", lines, f"{len(names)} losses along a direction", chosen)


def surface(names: Sequence[str], *, log: bool) -> Spec:
    """Return a chart of the loss along two directions in colours, of its levels unless they are logarithmic.

    A row is a line of the grid, with the coefficient ``a`` of the first direction, and the lists ``b``, those of the
    second, and ``loss``; ``da`` and ``db`` are how far points are apart.

    Args:
        names: of the landscapes.
        log: whether colours are logarithmic.
    """
    alt = altair()
    base, chosen = _of_chosen(names)
    colours = {"type": "log"} if log else {"type": "quantize"}
    scheme = alt.SchemeParams(name="viridis") if log else alt.SchemeParams(name="viridis", count=_LEVELS)
    whole = alt.Scale(zero=False, nice=False, padding=0)
    losses = (  # neighbours overlap, so that nothing shines through between them
        base.transform_flatten(["b", "loss"])
        .transform_filter("isValid(datum.loss)")
        .transform_calculate(a0="datum.a - datum.da * 0.51", a1="datum.a + datum.da * 0.51")
        .transform_calculate(b0="datum.b - datum.db * 0.51", b1="datum.b + datum.db * 0.51")
        .mark_rect()
        .encode(
            x=alt.X("a0:Q", title="coefficient of the first direction", scale=whole),
            x2="a1:Q",
            y=alt.Y("b0:Q", title="of the second", scale=whole),
            y2="b1:Q",
            color=alt.Color("loss:Q", title="loss", scale=alt.Scale(**colours, scheme=scheme)),
            tooltip=["name:N", *(alt.Tooltip(f"{name}:Q", format=".6g") for name in ("a", "b", "loss"))],
        )
    )
    cross = alt.Chart(alt.InlineData(values=[{}])).mark_point(
        shape="cross", size=120, fill="white", stroke="black", opacity=1
    )
    drawn = losses + cross.encode(x=alt.XDatum(0), y=alt.YDatum(0), tooltip=alt.value("the network's weights"))
    lines = ["cross: the network's weights"]
    return finished(drawn, "loss along two directions", lines, f"{len(names)} losses along two directions", chosen)


def over_training(
    x: str, number: Axis, trainings: Sequence[str], *, layers: Sequence[str] = (), weights: Sequence[str] = ()
) -> Spec:
    """Return a chart of a number over the steps of trainings, dashed for averaged weights.

    Of one training there is a line for each layer. Of several each has a line, of a layer that the reader chooses.

    Args:
        x: the title of what it is over, the field ``x``.
        number: upward; the fields ``…_low`` and ``…_high`` hold the ends of a band.
        trainings: their names, the field ``training``.
        layers: in the model's order, ``"network"`` among them; none of a number that is of no layer.
        weights: sets of weights.
    """
    alt = altair()
    several = len(trainings) > 1
    first = NETWORK if NETWORK in layers else None
    base, chosen = _of_chosen(layers if several else (), "layer", first)
    base = base.transform_filter(f"isValid(datum.{number.field})")
    base = base.encode(x=alt.X("x:Q", title=x, scale=alt.Scale(zero=False, nice=False)), detail="weights:N")
    if several or layers:
        field, shown = ("training", trainings) if several else ("layer", layers)
        base = base.encode(color=colour(field, len(shown), [*shown]))
    names = [*(["training:N"] if several else []), *(["layer:N", "weights:N"] if layers else [])]
    tooltip = [alt.Tooltip("x:Q", title=x), alt.Tooltip(number.field, type="quantitative", title=number.title)]
    band = base.transform_filter(f"isValid(datum.{number.field}_low)").mark_area(opacity=0.2)
    band = band.encode(y=alt.Y(f"{number.field}_low:Q", **scale(number)), y2=f"{number.field}_high:Q")
    lines = base.mark_line(point=True).encode(y=alt.Y(**position(number)), tooltip=[*names, *tooltip])
    if weights:
        lines = lines.encode(strokeDash=alt.StrokeDash("weights:N", sort=[*weights], legend=None))
    return finished(band + lines, number.title, [], f"{number.title} over {x}", chosen)


def _of_chosen(names: Sequence[str], field: str = "name", first: str | None = None) -> tuple[Any, Any]:
    """Return a chart of the rows that are chosen, and the parameter that says which; None where nothing is to choose.

    Args:
        names: to choose from, what the field holds.
        field: of the rows.
        first: what is shown until something is chosen; None: the first name.
    """
    alt = altair()
    base = alt.Chart(alt.NamedData(name=DATA))
    if len(names) < 2:
        return base, None
    title = "Show " if field == "name" else f"{field.capitalize()} "
    chosen = alt.param(name=_CHOSEN, value=first or names[0], bind=alt.binding_select(options=[*names], name=title))
    return base.transform_filter(f"datum.{field} == {_CHOSEN}"), chosen
