"""Show estimates and reports as HTML: small tables for a notebook, and a page with charts."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from . import views
from .page import charts, tables
from .page.page import Page, Section

if TYPE_CHECKING:
    from . import Estimate, Report


def record(estimate: "Estimate", measure: str) -> dict[str, Any]:
    """Return an estimate as a row of a page's tables."""
    low, high = (estimate.interval() if estimate.stderr is not None else None) or (None, None)
    facts = {name: getattr(estimate, name) for name in ("layer", "value", "stderr", "exact", "method", "samples")}
    return {**facts, "checkpoint": "", "measure": measure, "low": low, "high": high, "error": ""}


def of_estimate(estimate: "Estimate") -> str:
    """Return an estimate as a table for a notebook's cell."""
    own = record(estimate, "")
    facts: list[tuple[str, Any]] = [
        ("value", tables.value(own).text),
        ("exact", "yes" if estimate.exact else "no"),
        ("standard error", "–" if estimate.stderr is None else tables.standard_error(estimate.stderr)),
        ("95 % interval", "–" if own["low"] is None else f"[{own['low']:.6g}, {own['high']:.6g}]"),
        ("off by at most", "" if estimate.max_error is None else f"{estimate.max_error:.3g}"),
        ("layer", estimate.layer),
        ("method", estimate.method),
        ("samples", f"{estimate.samples}{f', {estimate.omitted} omitted' if estimate.omitted else ''}"),
    ]
    return tables.fragment(tables.facts("Estimate", [fact for fact in facts if fact[1] != ""]), estimate.notes)


def of_report(report: "Report") -> str:
    """Return a report's values as a table for a notebook's cell."""
    return tables.fragment(_values(report), [tables.LEGEND, *views.footnotes(report)])


def page(report: "Report", title: str) -> Page:
    """Return a page of a report: the answer, the values, their profile over the layers, and how they came about."""
    own = _records(report)
    sections = [Section("Values", (tables.LEGEND,), charts.profiles(own), (_values(report),))]
    sections.append(Section("How the values came about", tuple(views.footnotes(report)), tables=(tables.summary(own),)))
    return Page(title, tuple(_answer(report)), tuple(sections))


def _answer(report: "Report") -> Iterator[str]:
    """Yield the value of the network, and the layer with the largest, of the first measure."""
    measure, held = next(iter(report.by_measure().items()))
    if "" in held:
        of = f", {report.network_of[measure]}" if measure in report.network_of else ""
        yield f"{measure} of the network{of}: {tables.value(record(held[''], measure)).text}"
    layers = {layer: estimate for layer, estimate in held.items() if layer}
    if len(layers) > 1:
        most = max(layers, key=lambda layer: layers[layer].value)
        yield f"Largest in layer {most}: {tables.value(record(layers[most], measure)).text}"


def _values(report: "Report") -> tables.Table:
    """Return the report's values; the column of the model is empty, and left out."""
    return tables.values(_records(report), "Values by layer")


def _records(report: "Report") -> list[dict[str, Any]]:
    places: Iterable[str] = (*report.layers, "")
    by_measure = report.by_measure()
    return [
        {**record(held[place], measure), "layer": place}
        for place in places
        for measure, held in by_measure.items()
        if place in held
    ]
