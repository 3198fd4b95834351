"""Measures of any layers of a model: a sweep, its totals, and what is said about them."""

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import capture, layers
from .data import Batches
from .errors import NotYetError
from .losses import Loss
from .measures import Measure
from .options import Options
from .report import Estimate
from .runner import Runner
from .selectors import Selection
from .sweep import Sweep
from .totals import Totals

_LARGEST_MATRIX = 2**30  # bytes of block traces


class LayerValues:
    """The chosen layers of a model, measured together.

    Args:
        model: inside :func:`.capture.observing`.
        selection: the layers.
        loss: from :func:`.losses.resolve`.
        batches: the data.
        forward: see :func:`.capture.run`.
        options: of the user.

    Raises:
        NotYetError: what was asked for needs second derivatives of the model, or sampling.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        loss: Loss,
        batches: Batches,
        forward: capture.Forward | None,
        options: Options,
    ) -> None:
        options.check_not_sampled()
        self._model, self._loss, self._options = model, loss, options
        order = options.per_sample or options.nan_policy == "omit" or not loss.convex
        self._runner = Runner(
            model, selection, batches, forward, options.memory, self._check_linear, order_matters=order
        )

    def estimates(self, measures: Sequence[Measure]) -> dict[tuple[str, str], Estimate]:
        """(layer, measure) -> value, for every layer that ran, and for the network under the name ``""``."""
        quantities = tuple(dict.fromkeys(measure.quantity for measure in measures if measure.quantity))
        sweep = Sweep(self._runner, self._loss, self._options, quantities)
        totals = Totals(self._loss.reduction, self._options.nan_policy, per_sample=self._options.per_sample)
        with contextlib.closing(sweep.values()) as parts:  # hooks go with an error, not at some later time
            for part in parts:
                totals.add(part, self._runner.selected)
        values, shares = totals.values(), totals.per_sample()
        found = {}
        selected, names = [*self._runner.selected], [*self._runner.modules]
        for measure in measures:
            place = quantities.index(str(measure.quantity))
            rows = [([selected.index(name)], name, self._notes(name, sweep)) for name in names]
            for which, name, notes in [*rows, ([*range(len(selected))], "", ())]:
                found[name, measure.name] = Estimate(
                    value=float(values[which, place].sum()),
                    stderr=None,
                    samples=totals.samples,
                    method="ggn",
                    exact=all(self._runner.is_linear(selected[layer]) for layer in which),
                    backend=sweep.backend,
                    per_sample=None if shares is None else shares[which, place].sum(dim=0),
                    layer=name,
                    omitted=totals.omitted,
                    notes=notes,
                )
        return found

    def block_traces(self) -> Tensor:
        """(d, d) of the one layer."""
        sweep = Sweep(self._runner, self._loss, self._options, ("squares",))
        totals = Totals(self._loss.reduction, self._options.nan_policy)
        blocks: Tensor | None = None
        with contextlib.closing(sweep.block_traces(_LARGEST_MATRIX)) as parts:
            for part, values in parts:
                totals.add(values, self._runner.selected)
                blocks = part if blocks is None else blocks + part
        assert blocks is not None, "data without samples is refused where it is read"
        matrix: Tensor = torch.block_diag(*(blocks / totals.divisor))
        return matrix

    def _check_linear(self, linear: dict[str, bool]) -> None:
        """Raise where the GGN would be another number than the Hessian value that was asked for."""
        bent = [name for name, is_linear in linear.items() if not is_linear]
        if self._options.curvature == "ggn" or not bent:
            return
        listed = ", ".join(map(repr, bent[:6])) + (f" and {len(bent) - 6} more" if len(bent) > 6 else "")
        raise NotYetError(
            f"the model is not locally linear in the weight of layer {listed} (smooth activations, normalisation or "
            "attention behind it, or a recurrence): the Hessian value there needs second derivatives and is not there "
            "yet; curvature='ggn' gives the GGN value, another number"
        )

    def _notes(self, name: str, sweep: Sweep) -> tuple[str, ...]:
        others = layers.ties(self._model, self._runner.modules[name])
        tied = (f"weight tied with {', '.join(others)}: derivative through this use only",) if others else ()
        return (*tied, *sweep.notes(name))
