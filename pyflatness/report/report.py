"""Hold what a measurement returns: numbers with everything needed to read them."""

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from ..errors import InputError
from ..messages import check_choice, shown
from . import html, intervals, page, views
from .constant import Measured
from .result import Readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TENSORS = ("per_sample", "per_neuron")  # of an Estimate
# Beside the measures of a report as a dict.
_BESIDE = ("skipped", "uncovered", "why_uncovered", "network_of")
_WIDTH = 100  # of a table
_BETWEEN = 2  # of columns
_EXACT = {frozenset({True}): "yes", frozenset({False}): "no", frozenset({True, False}): "partly"}
_BESIDE_NUMBERS = len("partly") + 3 * _BETWEEN + 1
_LEAST = 68  # for the numbers beside long names of layers: two measures with their intervals
_MANY = 40  # layers, above which a table has a row for each block of them
_BLOCKS = r"(?:[^.]+\.)*\d+(?=\.)", r"(?:[^.]+\.)*?\d+(?=\.)"  # a name up to its last number, or its first


@dataclass(frozen=True, repr=False, eq=False)
class Estimate(Readable, Measured):
    """Hold a measured value and how it came about; an estimate is that value wherever a number is wanted.

    It is a ``float``: it can be formatted (``f"{estimate:.3g}"``), ordered, compared with numbers, taken into arrays
    and tensors and calculated with, which gives floats. It has no gradient: a warning says so where it is added to a
    tensor with a graph, such as a loss. Two estimates are equal only if all their facts are, NaN
    being equal to NaN; ``estimate.value == other.value`` compares the values alone. So it has no hash.

    Attributes:
        value: the measure, in units of the loss where it is one of its second derivatives.
        stderr: standard error of ``value`` given the data; None when nothing was drawn at random. NaN where it is not
            known: probes that agree up to rounding, by chance or because there is nothing to sample, tell of no error.
        samples: samples (entries of dimension 0 of the batches) that the value is over; 0 if it is of no data.
        method: ``"head"``, ``"ggn"``, ``"hessian"``, ``"ggn-sampled"``, ``"hessian-sampled"`` or ``"definition"``; of
            measures without second derivatives ``"forward-mode"``, ``"monte-carlo"`` or ``"weights"``, of Jacobians
            ``"jacobian"`` or ``"ascent"``.
        exact: True only if the value is the definition's up to rounding (that of the loss Hessian, where it is of one);
            False of NaN.
        backend: ``"compiled"``, ``"triton"`` or ``"reference"``.
        per_sample: (n,) float64, ``n`` times each sample's contribution, so that the mean is ``value``; None unless
            asked for. Under ``nan_policy="omit"`` an omitted sample holds NaN, and the mean over the others is
            ``value``.
        per_neuron: (neurons,) float64, a layer's values by neuron for measures that have them; else None.
        layer: qualified name of the measured layer; empty for bare tensors.
        omitted: samples left out by ``nan_policy="omit"``.
        notes: what a reader of the value should know (tied weights, dropped features, …).
        max_error: what ``value`` is off by at most, besides rounding, where ``rtol=`` let a head leave out what matters
            little; None where nothing was left out.
        dof: degrees of freedom of ``stderr``, not always a whole number: how well it is known. None without one, and
            where it cannot be known, as from one sample.
    """

    value: float
    stderr: float | None
    samples: int
    method: str
    exact: bool
    backend: str
    per_sample: Tensor | None = None
    layer: str = ""
    omitted: int = 0
    notes: tuple[str, ...] = field(default=())
    per_neuron: Tensor | None = None
    max_error: float | None = None
    dof: float | None = None

    def __new__(cls, value: float, *_: Any, **__: Any) -> "Estimate":
        """Make the number; the facts are set by ``__init__``."""
        return super().__new__(cls, value)

    def __post_init__(self) -> None:
        """Correct claims that a value cannot make: that NaN is exact, or that probes which agree have no error."""
        if math.isnan(self.value):
            object.__setattr__(self, "exact", False)
        if self.stderr is not None and self.stderr <= intervals.AGREEING * abs(self.value):
            object.__setattr__(self, "stderr", math.nan)
            object.__setattr__(self, "dof", None)

    def interval(self, level: float = 0.95, *, of: str = "data") -> tuple[float, float] | None:
        """Return the interval that holds the value of the definition with probability ``level``, given the data.

        It is value ± t ``stderr``, with t the quantile of Student's t distribution with ``dof`` degrees of freedom: a
        fraction ``level`` of intervals from other probes holds the value of exact computation. Samples are not redrawn.
        One probe (``probes=1``) gives an upper bound of its error, so that its intervals are rather too wide.

        Args:
            level: in (0, 1).
            of: ``"data"``: of the value over these data. ``"distribution"``: of the value that is expected over the
                distribution that the samples were drawn from, independently. It is value ± t s / √n, with s the
                standard deviation of ``per_sample`` (which has to be there), which contains that of probes, and
                (Σ e²)² / Σ e⁴ degrees of freedom for deviations e of samples. Exact values have one too.

        Returns:
            Both ends; (value, value) of an exact value; None where nothing is known of the error: a standard error
            that is NaN (draws that agree) or without degrees of freedom (one sample alone, few groups of
            ``probes="adaptive"``), or a value that is neither exact nor drawn at random.

        Raises:
            InputError: a level that is not between 0 and 1; ``"distribution"`` without the values of samples.

        Example:
            >>> import pyflatness as pf
            >>> sampled = pf.results.Estimate(2.0, 0.1, 100, "ggn-sampled", exact=False, backend="reference", dof=5.0)
            >>> [round(end, 4) for end in sampled.interval()]
            [1.7429, 2.2571]
        """
        check_choice("of", of, ("data", "distribution"))
        if of == "distribution":
            return self._of_distribution(level)
        if self.stderr is None:
            ends = intervals.interval(self.value, 0.0, math.inf, level)  # for the check of level
            return ends if self.exact else None
        return intervals.interval(self.value, self.stderr, self.dof, level)

    def _of_distribution(self, level: float) -> tuple[float, float] | None:
        if self.per_sample is None:
            raise InputError("of='distribution' is by the values of samples: pass per_sample=True to the measurement")
        values = self.per_sample[~self.per_sample.isnan()] if self.omitted else self.per_sample
        n, squares = len(values), (values - values.mean()).square()
        if n < 2 or not bool(squares.any()):
            return None
        dof = float(squares.sum() ** 2 / squares.square().sum())
        return intervals.interval(self.value, float(squares.sum() / (n * (n - 1))) ** 0.5, dof, level)

    def __repr__(self) -> str:
        number = _number(self)
        how_sure = "" if self.stderr is None else "95 % interval" if self.interval() else "no interval"
        if self.stderr is not None and math.isnan(self.stderr):
            how_sure = "standard error unknown" + (" since every probe gave 0" if self.value == 0 else "")
        facts = [
            "exact" if self.exact else "not exact",
            how_sure,
            "" if self.max_error is None else f"off by at most {self.max_error:.2g}",
            f"method {self.method}",
            f"layer {self.layer!r}" if self.layer else "",
            _counted(self.samples),
            f"{self.omitted} omitted" if self.omitted else "",
            f"{self.backend} backend",
            *self.notes,
        ]
        return f"Estimate({number}: {', '.join(filter(None, facts))})"

    def _repr_html_(self) -> str:
        return html.of_estimate(self)

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Estimate":
        """Return what :meth:`to_dict` was made from.

        Raises:
            InputError: not such a dict.
        """
        known = {entry.name: entry.default is MISSING and entry.default_factory is MISSING for entry in fields(cls)}
        try:
            held = {name: facts[name] for name in _TENSORS if facts.get(name) is not None}
            tensors = {name: torch.tensor(values, dtype=torch.float64, device="cpu") for name, values in held.items()}
            return cls(**{**facts, "notes": tuple(facts.get("notes", ())), **tensors})
        except (AttributeError, TypeError, ValueError):
            needed = {name for name, required in known.items() if required}
            given = {*facts} if isinstance(facts, Mapping) else set()
            odd = sorted((needed - given) | (given - {*known}))
            raise InputError(
                f"estimate: a dict as of Estimate.to_dict() is wanted; missing or unknown: {odd}"
            ) from None

    def __eq__(self, other: object) -> bool:
        return _facts(self) == _facts(other) if isinstance(other, Estimate) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return _facts(self) != _facts(other) if isinstance(other, Estimate) else super().__ne__(other)


@dataclass(frozen=True, repr=False, eq=False)
class Report(Readable):
    """Hold measures of a network's layers, and of the network. ``str(report)`` is a table.

    ``report.to_frame()`` has a row per estimate, its facts as columns; the network's rows have the layer ``""``.

    ``report[layer, measure]`` is one layer's :class:`Estimate`, ``report[measure]`` the network's: the sum over the
    measured layers, or one value of its own, and ``report[layer]`` a dict of a layer's estimates by measure. A measure
    may have values of layers, of the network, or both.

    A network's value that is of its measured layers leaves out the weights in :attr:`uncovered`. Where these were left
    out for want of support (``layers=None``: all that can be measured) the value has a note and is not ``exact``. Where
    the layers were chosen it is the value of the chosen layers, and exact if theirs are.

    Attributes:
        layers: names of the measured layers, in the model's order.
        measures: names of the measures that have values.
        skipped: measures that were left out, and why; also of one with values of layers that has none of the network.
        uncovered: weights of the model that no measured layer has, by the name of the parameter, each with its share of
            all weights' entries. A weight is a parameter of two or more dimensions (matrices, kernels, embeddings),
            not a bias or the scale of a normalisation; one that several modules share is a weight of each. A frozen
            one that no layer has counts only if all parameters are frozen. A layer that did not run counts, since its
            weight may be used without it. Empty where no layer was measured.
        why_uncovered: for some of these the reason, where it is not that other layers were chosen: what the weight is
            used in besides, that it is used in nothing, or a kernel that it goes into.
        network_of: by measure, what the network's value is, in words: ``"the sum over layers"``, ``"the largest of the
            layers"``, ``"of the layers' joint Hessian"``, …, or ``"of the whole model"``: of all its parameters, or of
            its input, whatever layers were chosen.
    """

    layers: tuple[str, ...]
    measures: tuple[str, ...]
    _estimates: Mapping[tuple[str, str], Estimate]
    skipped: Mapping[str, str] = field(default_factory=dict)
    uncovered: Mapping[str, float] = field(default_factory=dict)
    why_uncovered: Mapping[str, str] = field(default_factory=dict)
    network_of: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of estimates."""
        return len(self._estimates)

    def __iter__(self) -> Iterator[tuple[str, str, Estimate]]:
        """Yield (layer, measure, estimate), measure after measure; the network's layer is ``""``."""
        for measure, held in self.by_measure().items():
            for layer, estimate in held.items():
                yield layer, measure, estimate

    @overload
    def __getitem__(self, key: tuple[str, str]) -> Estimate: ...

    @overload
    def __getitem__(self, key: str) -> Any: ...  # an estimate by a measure's name, a dict of them by a layer's

    def __getitem__(self, key: str | tuple[str, str]) -> Estimate | dict[str, Estimate]:
        if isinstance(key, str) and key in self.layers and key not in (*self.measures, *self.skipped):
            return {measure: held[key] for measure, held in self.by_measure().items() if key in held}
        names = ("", key) if isinstance(key, str) else key
        if not isinstance(names, tuple) or len(names) != 2 or not all(isinstance(name, str) for name in names):
            number = isinstance(names, tuple) and any(isinstance(name, int) for name in names)
            hint = "; a layer's name is text, as in report['0', 'trace']" if number else ""
            raise InputError(f"report: report[measure] or report[layer, measure] is wanted, got {shown(key)}{hint}")
        layer, measure = names
        if measure in self.layers and layer in self.measures:
            raise InputError(f"report: the layer is first, report[{measure!r}, {layer!r}]")
        if measure in self.skipped and (not layer or measure not in self.measures):
            raise InputError(f"report: no value of {measure!r}: {self.skipped[measure]}")
        if measure not in self.measures:
            raise InputError(f"report: no measure {measure!r}; there are {', '.join(self.measures)}")
        if layer and layer not in self.layers:
            raise InputError(f"report: no layer {layer!r}; there are {', '.join(self.layers)}, and '' for the network")
        if (layer, measure) not in self._estimates:
            raise InputError(f"report: {measure!r} has no value of {f'layer {layer!r}' if layer else 'the network'}")
        return self._estimates[layer, measure]

    def top(self, count: int = 5, measure: str | None = None) -> "Report":
        """Return the report of the layers with the largest values of a measure, largest first, without the network.

        A layer whose value is NaN is none of them.

        Args:
            count: how many layers.
            measure: its name; None: the first one that has values of layers.

        Raises:
            InputError: no such measure, one whose values of layers are NaN or not there, or no number of layers.
        """
        if isinstance(count, bool) or not hasattr(count, "__index__") or count < 1:
            raise InputError(f"count: a number of layers from 1 on is wanted, got {shown(count)}")
        by_layer = {
            name: {layer: found for layer, found in held.items() if layer} for name, held in self.by_measure().items()
        }
        name = next((name for name, held in by_layer.items() if held), None) if measure is None else measure
        if not by_layer.get(name or ""):
            of_layers = [name for name, held in by_layer.items() if held]
            raise InputError(f"report: {measure!r} has no values of layers here; of {', '.join(of_layers)} there are")
        values = [(layer, found) for layer, found in by_layer[name or ""].items() if not math.isnan(found.value)]
        if not values:
            raise InputError(f"report: {name!r} is NaN in all layers")
        layers = tuple(layer for layer, _ in sorted(values, key=lambda item: -item[1].value)[:count])
        held = {key: estimate for key, estimate in self._estimates.items() if key[0] in layers}
        return Report(layers, tuple(m for m in self.measures if any((layer, m) in held for layer in layers)), held)

    def by_measure(self) -> dict[str, dict[str, Estimate]]:
        """Return the estimates by measure, then layer (``""`` is the network)."""
        held, places = self._estimates, (*self.layers, "")
        return {name: {layer: held[layer, name] for layer in places if (layer, name) in held} for name in self.measures}

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return :meth:`by_measure` with dicts for estimates, and what there is of the other attributes."""
        facts: dict[str, dict[str, Any]] = {
            measure: {layer: estimate.to_dict() for layer, estimate in held.items()}
            for measure, held in self.by_measure().items()
        }
        beside: dict[str, dict[str, Any]] = {name: dict(getattr(self, name)) for name in _BESIDE}
        return {**facts, **{key: held for key, held in beside.items() if held}}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Mapping[str, Any]]) -> "Report":
        """Return what :meth:`to_dict` was made from.

        Raises:
            InputError: not such a dict.
        """
        if not isinstance(facts, Mapping) or not all(isinstance(held, Mapping) for held in facts.values()):
            raise InputError("report: a dict as of Report.to_dict() is wanted: measure -> layer -> estimate")
        facts = dict(facts)
        beside = [dict(facts.pop(key, {})) for key in _BESIDE]
        found = {
            (layer, measure): Estimate.from_dict(estimate)
            for measure, held in facts.items()
            for layer, estimate in held.items()
        }
        fullest = sorted(facts.values(), key=len, reverse=True)  # the one with most layers says their order
        layers = dict.fromkeys(layer for held in fullest for layer in held if layer)
        return cls(tuple(layers), tuple(facts), found, *beside)

    def _rows(self) -> list[dict[str, Any]]:
        return views.rows(self)

    def to_csv(self, path: str | Path) -> None:
        """Write a table as CSV: one row per estimate, the columns of :meth:`to_frame` without those of tensors.

        Numbers are written so that reading them gives every bit; ``notes`` are joined by ``"; "``, and what is unknown
        is an empty cell.

        Args:
            path: of the file, which is replaced.

        Raises:
            OSError: it cannot be written.
        """
        views.write_csv(self._rows(), path)

    def to_html(self, path: str | Path | None = None, *, title: str = "Flatness of a network") -> str:
        """Return a page of the values and their profiles over the layers, as one file that loads nothing.

        Args:
            path: where the page is written too.
            title: its heading.

        Raises:
            MissingExtraError: without Altair.
        """
        return page.written(html.page(self, title), path)

    def plot(
        self, path: str | Path | None = None, *, axes: "Axes | Sequence[Axes] | None" = None
    ) -> "tuple[Figure, list[Axes]]":
        """Draw the layers' values as profiles from the first layer to the last, an axis for each measure.

        Args:
            path: where the figure is written too; its ending is its format.
            axes: matplotlib's, to draw into, one for each measure; None: those of a new figure.

        Returns:
            Figure and axes of matplotlib, outside of pyplot.

        Raises:
            MissingExtraError: without matplotlib.
            InputError: no measure has values of layers, or ``axes`` are not as many as measures that have.
        """
        figure, drawn = views.profile(self, axes)
        views.save(figure, path)
        return figure, drawn

    def __eq__(self, other: object) -> bool:
        return _facts(self) == _facts(other) if isinstance(other, Report) else NotImplemented

    def __str__(self) -> str:
        rows = self._folded()
        first = max(self._estimates.values(), key=lambda estimate: estimate.samples)
        lines = [line for measures in self._side_by_side(rows) for line in ("", *self._table(measures, rows))]
        omitted = f", {first.omitted} omitted" if first.omitted else ""
        samples = _counted(first.samples)
        sampled = any(estimate.stderr is not None for estimate in self._estimates.values())
        brackets = ", [95 % intervals]" if sampled else ""
        ends = [f"{samples}{omitted}, {first.backend} backend{brackets}", *self._of_blocks(rows)]
        return "\n".join([*lines[1:], *ends, *views.footnotes(self)])

    def _folded(self) -> "_Rows":
        """Return the estimates of each row by its name: layers, or blocks of them where there are many, the network."""
        blocks = {layer: [layer] for layer in self.layers}
        for pattern in _BLOCKS:
            if len(blocks) > _MANY:
                blocks = {}
                for layer in self.layers:
                    found = re.match(pattern, layer)
                    blocks.setdefault(found[0] if found else layer, []).append(layer)
        rows: _Rows = {}
        for block, layers in blocks.items():
            name = layers[0] if len(layers) == 1 else f"{block}.* ({len(layers)})"
            rows[name] = {m: held for m in self.measures if (held := self._of_block(layers, m)) is not None}
        rows["network"] = {m: self._estimates["", m] for m in self.measures if ("", m) in self._estimates}
        return {name: estimates for name, estimates in rows.items() if estimates}

    def _of_block(self, layers: Sequence[str], measure: str) -> Estimate | None:
        """Return the sum of a measure over layers, or the largest where sums mean nothing; None without values."""
        found = [self._estimates[layer, measure] for layer in layers if (layer, measure) in self._estimates]
        if len(found) < 2:
            return found[0] if found else None
        if not self._is_sum(measure):
            return max(found, key=lambda estimate: math.inf if math.isnan(estimate.value) else estimate.value)
        stderr, dof = intervals.together(found)
        exact = all(estimate.exact for estimate in found)
        return replace(found[0], value=sum(e.value for e in found), stderr=stderr, dof=dof, exact=exact)

    def _is_sum(self, measure: str) -> bool:
        return self.network_of.get(measure, "").startswith("the sum")

    def _of_blocks(self, rows: "_Rows") -> list[str]:
        """Return lines that explain the rows of blocks."""
        if len(rows) >= len(self.layers):
            return []
        of_layers = dict.fromkeys(measure for layer, measure in self._estimates if layer)
        largest = [measure for measure in of_layers if not self._is_sum(measure)]
        also = f", of {', '.join(largest)} the largest" if largest else ""
        said = f"NAME.* (n): the sum over n layers{also}; report.top() and report.to_frame() have each layer"
        return textwrap.wrap(said, _WIDTH)

    def _side_by_side(self, rows: "_Rows") -> list[dict[str, str]]:
        """Return the measures in each table with their headers, as many to a table as there is room for.

        Headers of several words take two lines where that makes one table of several.
        """
        room = max(_WIDTH - max(map(len, rows)) - self._longest_method() - _BESIDE_NUMBERS, _LEAST)
        widths = {measure: len(aligned([of.get(measure) for of in rows.values()])[0]) for measure in self.measures}
        for headers in ({name: name for name in widths}, {name: _in_two_lines(name) for name in widths}):
            if sum(_width(headers[name], width) for name, width in widths.items()) <= room:
                return [headers]
        tables: list[dict[str, str]] = []
        left = -1
        for name, width in widths.items():
            if _width(name, width) > left:
                tables, left = [*tables, {}], room
            tables[-1][name] = name
            left -= _width(name, width)
        return tables

    def _table(self, headers: Mapping[str, str], rows: "_Rows") -> list[str]:
        from rich import box  # which takes as long to load as the first measurement
        from rich.table import Table

        held = {name: [of[m] for m in headers if m in of] for name, of in rows.items()}
        rows = {name: rows[name] for name, row in held.items() if row}
        columns = {measure: aligned([of.get(measure) for of in rows.values()]) for measure in headers}
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("layer", no_wrap=True)
        widths = [_width(header, len(columns[measure][0])) - _BETWEEN for measure, header in headers.items()]
        for header, width in zip(headers.values(), widths, strict=True):
            lines = (line.rjust(width) for line in header.splitlines())  # rich would take spaces behind numbers away
            table.add_column("\n".join(lines), no_wrap=True)
        methods = {name: ", ".join(dict.fromkeys(e.method for e in held[name])) for name in rows}
        alike = len(rows) > 2 and len({*methods.values()}) == 1 and ", " in methods[next(iter(rows))]
        if not alike:
            table.add_column("value of", min_width=self._longest_method())
        table.add_column("exact", no_wrap=True)
        for name, *cells in zip(rows, *columns.values(), strict=True):
            if name == "network":
                table.add_section()
            numbers = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
            of = () if alike else (methods[name],)
            table.add_row(name, *numbers, *of, _EXACT[frozenset(e.exact for e in held[name])])
        said = [f"value of, in every row: {methods[next(iter(rows))]}"] if alike else []
        return [*views.text(table, _WIDTH), *said]

    def _longest_method(self) -> int:
        several = len({estimate.method for estimate in self._estimates.values()}) > 1  # with a comma behind it
        return max(len("value of"), *(len(estimate.method) + several for estimate in self._estimates.values()))

    def _repr_html_(self) -> str:
        return html.of_report(self)


def _facts(held: Estimate | Report) -> str:
    """Return an estimate or report as text, in which NaN equals NaN."""
    return json.dumps(held.to_dict(), sort_keys=True)


def _counted(samples: int) -> str:
    return f"{samples} sample{'s' if samples > 1 else ''}" if samples else "no data read"


def _number(estimate: Estimate) -> str:
    if estimate.stderr is None:
        return f"{estimate.value:.6g}"
    return intervals.shown(estimate.value, estimate.interval())


def aligned(column: Sequence[Estimate | None]) -> list[str]:
    """Return a column's cells: numbers of four digits or with their intervals, their points below each other."""
    cells = []
    for estimate in column:
        if estimate is None or estimate.stderr is not None:
            cells.append("–" if estimate is None else _number(estimate))
        else:
            size = abs(estimate.value)
            places = max(0, 3 - math.floor(math.log10(size))) if 1e-4 <= size < 1e7 else None
            cells.append(f"{estimate.value:.4g}" if places is None else f"{estimate.value:.{places}f}")
    whole = [len(re.match(r"[^.\[ ]*", cell)[0]) for cell in cells]  # type: ignore[index]
    padded = [" " * (max(whole) - in_front) + cell for in_front, cell in zip(whole, cells, strict=True)]
    return [cell.ljust(max(map(len, padded))) for cell in padded]


def _in_two_lines(name: str) -> str:
    """Return a name of several words in two lines, broken near its middle."""
    middles = [place + 1 for place, letter in enumerate(name) if letter == "_"]
    if not middles:
        return name
    middle = min(middles, key=lambda place: max(place, len(name) - place))
    return f"{name[:middle]}\n{name[middle:]}"


def _width(header: str, width: int) -> int:
    """Return the width of a column whose cells have one, with the space in front of it."""
    return max(width, *map(len, header.splitlines())) + _BETWEEN


_Rows = dict[str, dict[str, Estimate]]  # estimates by the name of a row, and measure
