"""Sweep once over the data for all layers and quantities: forward, square-root factors backward, contractions.

for x, y in batches:                              # cut to the memory budget
    f, φ, edges = model(x)                        # recorded: layer inputs, gradient edges of layer outputs
    for each column s of the square-root factor:  # a cotangent: C - 1 for cross-entropy, for each term of a sample
        δ = autograd.grad(f, edges, s)            # for all layers at once
        for each layer: value_i += σ q(M_i)       # contractions of M_i = Σ_p δ_ip φ_ipᵀ

For a layer in whose weight the model is not linear, exact values come from its own Hessian products; see
:mod:`.block_traces`. Sampled values are those of the GGN by cotangents, and the rest of the Hessian by products that
such layers share; see :mod:`.probes`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from .. import contractions
from ..contractions.quantities import QUANTITIES, Contribution
from ..errors import InputError
from ..hessian import block_traces, probes
from ..hessian.block_traces import BlockTraces, Value
from ..losses import Loss
from ..model import layers, spread
from ..numerics.accumulate import counting, finite_samples, underflow
from ..numerics.signs import Signs
from ..options import Options
from ..passes import cotangents, linearity, normalize
from ..passes.dry_run import Findings
from ..passes.layer_form import Gathered, LayerForm
from ..passes.limit import MANY
from ..passes.runner import Run, Runner
from . import output_directions, residuals
from .activations import ACTIVATIONS, Activations
from .contracted import Contracted
from .head_formula import HeadFormula

Summands = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Values:
    """Hold the values of some samples."""

    values: Tensor  # (probes or 1, selected layers, quantities, n) float64, not yet divided; 0 for a layer not run
    sample_weights: Tensor  # (n,) float64, each sample's weight in a mean
    number: int  # of the user's batch
    variances: Tensor | None = None  # (3, layers + 1, quantities, n), see :meth:`.Grouped.variances`
    sizes: Tensor | None = None  # (n,), to which values are about proportional, if that is needed
    summands: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)  # further sums over samples
    lost: Tensor | None = None  # (n,), samples without a loss
    by_hessian: frozenset[str] = frozenset()  # layers whose values come from second derivatives


class Sweep:
    """Sweep with a runner for some quantities; ``quantities`` are in the order of values, those of activations last.

    ``by_hessian`` are the layers for which second derivatives were computed. ``columns`` is the most columns of a
    sample's factor so far, and ``sent`` the most cotangents of a micro-batch for exact values.
    """

    def __init__(self, runner: Runner, loss: Loss, options: Options, quantities: Sequence[str]) -> None:
        self._runner, self._loss, self._options = runner, loss, options
        self._budget = runner.budget
        self._head_formula = HeadFormula(
            runner, loss, self._budget, [name for name in quantities if name not in ACTIVATIONS]
        )
        self._of_weights = self._head_formula.quantities
        self._of_activations = [name for name in quantities if name in ACTIVATIONS]
        self.quantities = [*self._of_weights, *self._of_activations]
        self._forms: dict[str, LayerForm] = {}
        self._scales: Mapping[str, Tensor] = {}
        self._in_part = options.fraction is not None
        self.backend = ""
        self.by_hessian: set[str] = set()
        self.columns = self.sent = 0
        runner.reserve = self._reserve
        if options.normalize:
            self._scales = normalize.feature_scales(runner, loss, options.nan_policy)
            self._forms.clear()  # the first look at the data made them without scales

    def _reserve(self, found: Findings) -> int:
        """Return the bytes per sample that values take beside the graph: per-sample weights and Gram matrices."""
        needed = 0
        for name, places in found.places.items():
            form = self._form(name)
            needed += form.weight_bytes if form.by_weight else 0
            needed += form.kept(places) if self._of_weights else 0
        return needed

    def work(self, draws: Sequence[int] | None = None) -> Callable[[Run], Values]:
        """Return a function that computes a run's quantities by layer and sample: exact, or for probes ``draws``."""
        signs = None if draws is None else Signs(self._options.seed, draws)
        return partial(self._values, signs=signs)

    def block_traces(self, most_bytes: int, take: Callable[[tuple[Tensor, Values]], None]) -> None:
        """Pass one layer's block traces, summed over samples, (G, d, d) float64, and the samples' values to ``take``.

        A matrix of more than ``most_bytes`` bytes is an error.
        """
        self._runner.each(partial(self._block_traces, most_bytes=most_bytes), take)

    def unite(self) -> None:
        """Exchange how values were computed with other ranks, at the end of a read of the data."""
        shard = self._runner.batches.shard
        if shard.ranks.alone:
            return
        facts = {"hessian": dict.fromkeys(self.by_hessian, True)}
        counts = {"columns": self.columns, "sent": self.sent}
        facts |= {what: {str(count): True} for what, count in counts.items()}
        united = shard.united("how values came about", facts | self._head_formula.seen)
        self.by_hessian.update(united["hessian"])
        self.columns, self.sent = (max(map(int, united[what])) for what in counts)
        self._head_formula.seen = {what: united[what] for what in self._head_formula.seen}
        self._make_forms()  # of layers that ran on other ranks alone

    @property
    def fewer(self) -> str:
        """Return a note on what fewer passes would give if exact values take many; otherwise nothing."""
        if self.sent <= MANY or not self._loss.convex or self._options.probes == "adaptive":
            return ""
        return f"{self.sent} backward passes a batch; rtol=0.01 takes about ten, for an error of 1 %"

    def draws(self, names: Sequence[str], quantity: str) -> bool:
        """Return whether probes differ; those of one column, exact with any sign, and of some heads do not."""
        method = self.method(names, quantity)
        several = method == "ggn" and self.columns > 1
        return method == "hessian" or (several and not self._head_formula.agree(names, quantity))

    def method(self, names: Iterable[str], quantity: str) -> str:
        """Return how exact values of layers are computed: "head", "ggn" or "hessian"; of several ways the last."""
        if self.by_hessian.intersection(names):
            return "hessian"
        return "head" if quantity in QUANTITIES and self._head_formula.always(names, quantity) else "ggn"

    def notes(self, name: str) -> tuple[str, ...]:
        """Return notes for the reader of a layer's value."""
        dropped = int((self._scales[name] == 0).sum()) if name in self._scales else 0
        return (f"{dropped} features that are zero throughout dropped",) if dropped else ()

    def weight(self, name: str) -> Tensor:
        """Return the weight (G, d, m) of a layer that ran."""
        return self._forms[name].matrix

    def _values(self, run: Run, signs: Signs | None = None) -> Values:
        """Return the values of a run's samples in every layer.

        Heads have a formula; values of other layers come from directions or cotangents, whichever are fewer, or from
        second derivatives.
        """
        linear, nonlinear = self._ran(run)
        sent = cotangents.of_run(run, self._loss)
        heads, forms = self._head_formula.split(run, sent, linear)
        draws = 1 if signs is None else len(signs.draws)
        self.columns = max(self.columns, sent.passes)
        if signs is not None:
            self._head_formula.compare(run, sent, linear)
        places = self._runner.places
        values = torch.zeros(draws, len(places), len(self.quantities), run.samples, dtype=torch.float64, device="cpu")
        values = values.to(run.outputs.device)
        summands: Summands = {}
        forms = forms if self._of_weights else {}
        active = linear if self._of_activations else {}
        split = signs is not None and self._loss.known  # into the GGN and the rest
        if split and self._of_weights:
            forms = forms | {name: self._forms[name] for name in nonlinear if name not in run.differentiated}
        by_directions = self._by_directions(run, sent, forms) if forms and signs is None and not active else None
        for name, value in (by_directions or {}).items():
            values[0, places[name], : len(value)] += value
        if (forms or active) and by_directions is None:
            found = {name: values[:, places[name]] for name in {**forms, **active}}
            self._add_cotangents(run, sent, signs if sent.passes > 1 else None, forms, active, found, summands)
            if sent.passes == 1:
                for name in found:
                    values[1:, places[name]] = values[0, places[name]]
        for name, value in heads.items():
            values[:, places[name], self._head_formula.columns] = value
        if nonlinear:
            with block_traces.differentiable(nonlinear), contractions.full_precision(run.outputs):
                for whole in (False, True):  # the GGN by cotangents does not count uses that are differentiated
                    names = [name for name in nonlinear if (name in run.differentiated) == whole]
                    found = {name: values[:, places[name]] for name in names}
                    if found:
                        self._add_hessian(run, signs, found, summands, split and not whole)
        self.by_hessian.update(nonlinear)
        self._mark_underflow(run, values[:, :, : len(self._of_weights)])
        values = self._marked(values, sent, self._left_out(run, sent), run.number)
        summands = self._summed(summands, values) if summands else summands
        return Values(
            values,
            sent.sample_weights,
            run.number,
            sizes=sent.sizes() if (signs is not None and draws == 1) or self._in_part else None,
            summands=summands,
            lost=sent.bad,
            by_hessian=frozenset(nonlinear),
        )

    def _summed(self, summands: Summands, values: Tensor) -> Summands:
        """Return summands, of neurons summed over the samples that count; NaN if such a sample has no value."""
        counted = counting(self._options.nan_policy, values)
        neurons = {key for key in summands if key[1] in ACTIVATIONS or QUANTITIES[key[1]].neurons}
        summands = {key: part[counted].sum(dim=0) if key in neurons else part for key, part in summands.items()}
        bad = (values.isnan().any(dim=0).any(dim=1) & counted).any(dim=1)
        for name, without in zip(self._runner.selected, bad.tolist(), strict=True):
            if without:  # summands may be finite without a loss, or if squares underflow
                summands |= {key: torch.full_like(part, torch.nan) for key, part in summands.items() if key[0] == name}
        return summands

    def _add_cotangents(
        self,
        run: Run,
        sent: cotangents.Cotangents,
        signs: Signs | None,
        forms: Mapping[str, LayerForm],
        active: Collection[str],
        found: Mapping[str, Tensor],
        summands: Summands,
    ) -> None:
        """Add the values (probes, quantities, n) of layers by cotangents to ``found``, and their ``summands``."""
        count = sent.passes if signs is None else len(signs.draws)
        self.sent = self.sent if signs is not None else max(self.sent, count)
        activations = self._activations(run)
        # A held weight is gathered only in a backward pass of the model itself, so cotangents then go one by one.
        held_back = self._budget.held_back if signs is None and not spread.is_held() else 0
        edges = activations.input_edges(active)
        contracted = Contracted(run, forms, forms, count, hold=held_back, whole=active, input_edges=edges)
        if sent.passes == 0:
            none = [(name, form.contraction(run).nothing(run.samples)) for name, form in forms.items()]
            for name, contribution in (*none, *activations.nothing(active)):
                _add(summands, name, contribution)
        send = partial(run.recorder.gradients, run.outputs, names=found)
        for draw, cotangent, sign in sent.sent(signs, run.numbers, self._options.max_passes, send, run.tell):
            for name, contribution in contracted.of(cotangent, sign):
                found[name][draw, : contribution.values.shape[0]] += contribution.values
                _add(summands, name, contribution)
            if active:
                arrived = {name: contracted.gradients[name] for name in active}
                share = 1.0 if signs is None else 1 / len(signs.draws)
                for name, contribution in activations.of(arrived, contracted.at_inputs, sign, share):
                    found[name][draw, len(self._of_weights) :] += contribution.values
                    _add(summands, name, contribution)
        for name, contribution in contracted.rest():
            found[name][0, : len(contribution.values)] += contribution.values
            _add(summands, name, contribution)

    def _activations(self, run: Run) -> Activations:
        return Activations(run, self._runner.selected, self._of_activations, self._scales)

    def _by_directions(
        self, run: Run, sent: cotangents.Cotangents, forms: Mapping[str, LayerForm]
    ) -> dict[str, Tensor] | None:
        """Return the values of all layers by :mod:`.output_directions`; None if cotangents are better."""
        if spread.is_held() or not output_directions.are_fewer(run, sent, forms, self._options.max_passes):
            return None
        if any(self._runner.why_not_linear(name) in (linearity.CUSTOM, linearity.UNASKED) for name in forms):
            return None  # the second derivative of a custom autograd function may be wrong without an error
        return output_directions.values(run, sent, forms)

    def _add_hessian(
        self, run: Run, signs: Signs | None, found: Mapping[str, Tensor], summands: Summands, split: bool
    ) -> None:
        """Add the values (probes, quantities, n) of layers by second derivatives; if ``split``, without the GGN."""
        first = len(self._of_weights)
        if self._of_weights:
            for name, value in self._by_hessian(run, signs, found, summands, split):
                found[name][:, :first] += value
        if not self._of_activations:
            return
        activations, gradients = self._activations(run), self._gradients(run, found)
        for name, values in found.items():
            for draw, contribution in activations.by_hessian(
                name, gradients[name], signs, self._stream(name), self._options.max_passes
            ):
                values[draw, first:] += contribution.values
                _add(summands, name, contribution)

    def _by_hessian(
        self, run: Run, signs: Signs | None, names: Iterable[str], summands: Summands, split: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the values (probes, quantities, n) that :meth:`_add_hessian` adds, of the layers' weights."""
        if split:
            _, traces = self._residuals(run, names)
        else:
            traces = self._all_traces(run, self._loss.value, self._gradients(run, names))
        if signs is None:
            for name, each in traces.items():
                contribution = each.exact()
                _add(summands, name, contribution)
                yield name, contribution.values.unsqueeze(0)
            return
        alone = [[name] for name, each in traces.items() if each.in_weight]  # each by a run of its own
        for group in filter(None, ([name for name in traces if [name] not in alone], *alone)):
            streams = [self._stream(name) for name in group]
            values = probes.sampled([traces[name] for name in group], streams, self._of_weights, signs)
            yield from zip(group, values.unbind(1), strict=True)

    def _stream(self, name: str) -> int:
        """Return the stream of a layer's signs."""
        return cotangents.STREAM + 1 + self._runner.places[name]

    def _residuals(self, run: Run, names: Iterable[str]) -> tuple[Tensor, dict[str, BlockTraces]]:
        """Return |r_i|, (n,), and the block traces of some layers' residuals, the Hessian without the GGN."""
        custom = [name for name in names if self._runner.why_not_linear(name) == linearity.CUSTOM]
        if custom:
            self._gradients(run, custom)  # for its check
        value, sizes = residuals.of_run(run, self._loss)
        return sizes, self._all_traces(run, value, block_traces.gradients(run, value, names))

    def _gradients(self, run: Run, names: Iterable[str]) -> dict[str, list[Tensor]]:
        gradients = block_traces.gradients(run, self._loss.value, names)
        for name, gradient in gradients.items():
            if self._runner.why_not_linear(name) == linearity.CUSTOM:
                linearity.check_complete(f"layer {name!r}", gradient)
        return gradients

    def _all_traces(self, run: Run, value: Value, gradients: Mapping[str, Sequence[Tensor]]) -> dict[str, BlockTraces]:
        return {name: self._traces(run, name, value, found, self._of_weights) for name, found in gradients.items()}

    def _traces(
        self, run: Run, name: str, value: Value, gradient: Sequence[Tensor], quantities: Sequence[str]
    ) -> BlockTraces:
        most = self._options.max_passes
        return BlockTraces(run, self._forms[name], self._runner.selected[name], value, gradient, quantities, most)

    def _block_traces(self, run: Run, most_bytes: int) -> tuple[Tensor, Values]:
        ((name, module),) = self._runner.selected.items()
        rows = len(layers.matrix(module)[0])
        if self._options.conv == "affine" and layers.is_convolution(module) and run.calls(name):
            rows = max(call.output.numel() for call in run.calls(name)) // run.samples
        if most_bytes < 8 * rows**2:
            raise InputError(
                f"layer {name!r}: its block traces are a matrix of {rows} x {rows}, more than {most_bytes >> 20} MiB; "
                "relative_flatness and measure need no such matrix"
            )
        linear, nonlinear = self._ran(run)
        sent = cotangents.of_run(run, self._loss)
        kept = torch.ones_like(sent.sample_weights, dtype=torch.bool)
        traced = self._traced_by_hessian if nonlinear else self._traced_by_factors
        total, traces = torch.zeros_like(sent.sample_weights.sum()), torch.zeros_like(sent.sample_weights)
        if linear or nonlinear:
            total, traces = traced(run, sent, name, kept)
        traces = traces[None, None, None]
        self._mark_underflow(run, traces)
        traces = self._marked(traces, sent, self._left_out(run, sent), run.number)
        left = counting(self._options.nan_policy, traces)
        if not bool(left.all()):
            total, _ = traced(run, sent, name, left)
        elif bool(traces.isnan().any()):
            total = torch.full_like(total, torch.nan)
        if (linear or nonlinear) and total.ndim == 0:  # the loss has no curvature, and so no factors, as with one class
            total = total.new_zeros(1, rows, rows)
        return total, Values(traces, sent.sample_weights, run.number, lost=sent.bad, by_hessian=frozenset(nonlinear))

    def _traced_by_factors(
        self, run: Run, sent: cotangents.Cotangents, name: str, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return Σ_i T_i (G, d, d) of one layer over the kept samples, and Tr T_i, (n,), by square-root factors."""
        form = self._forms[name]
        layer, inputs = form.contraction(run), [_masked(part, kept) for part in form.inputs(run)]
        assert not isinstance(layer, Gathered)  # such models are refused
        with contractions.full_precision(run.outputs):
            contraction = layer.at(inputs, sent.passes)
        total, traces = torch.zeros_like(sent.sample_weights.sum()), torch.zeros_like(sent.sample_weights)
        send = partial(run.recorder.gradients, run.outputs)
        for cotangent, signs in sent.exact(self._options.max_passes, send):
            with contractions.full_precision(run.outputs):
                delta = form.cotangent(run, send(cotangent)[name])
                delta = [_masked(part, kept) for part in delta]
                traces = traces + contraction.of(delta, signs).values[0]
                coefficients = kept.double() if signs is None else signs.where(kept, 0.0)
                total = total + layer.traces(inputs, delta, coefficients)
        return total, traces

    def _traced_by_hessian(
        self, run: Run, sent: cotangents.Cotangents, name: str, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the result of :meth:`_traced_by_factors` by second derivatives."""
        with block_traces.differentiable([name]), contractions.full_precision(run.outputs):
            gradients = self._gradients(run, [name])
            return self._traces(run, name, self._loss.value, gradients[name], ()).matrix(kept)

    def _mark_underflow(self, run: Run, values: Tensor) -> None:
        """Replace values (probes, layers, quantities, n) of weights that are lost to underflow by NaN."""
        if values.shape[2] == 0:
            return
        totals = values.abs().sum(dim=(0, 3)).amin(dim=1).tolist()
        for name, of_layer, total in zip(self._runner.selected, values.unbind(dim=1), totals, strict=True):
            inputs = (run.samples_first(name, call.inputs.detach()) for call in run.calls(name))
            lost = underflow(self._options.nan_policy, run.number, total, inputs, name)
            if lost is not None:
                of_layer.masked_fill_(lost, torch.nan)

    def _left_out(self, run: Run, sent: cotangents.Cotangents) -> Tensor:
        """Return the samples, (n,) bool, left out whatever their values: without a loss, or without deviations."""
        policy = self._options.nan_policy
        return normalize.left_out(self._runner, run, sent, policy) if self._options.normalize else sent.bad

    def _marked(self, values: Tensor, sent: cotangents.Cotangents, left_out: Tensor, number: int) -> Tensor:
        """Return values (…, n), NaN for samples that are left out."""
        if self._options.normalize:
            late = ~finite_samples(values) & ~left_out
            check_weights = partial(layers.check_finite, self._runner.modules)
            normalize.check_in_time(self._options.nan_policy, late, number, "samples", check_weights)
        return values.masked_fill(left_out, torch.nan)

    def _ran(self, run: Run) -> tuple[dict[str, LayerForm], list[str]]:
        """Return the layers that ran: forms of those without second derivatives, and the names of the others."""
        self._make_forms()
        names = [name for name in self._runner.selected if run.calls(name)]
        nonlinear = [] if self._options.by_ggn else [name for name in names if name in run.nonlinear]
        return {name: self._forms[name] for name in names if name not in nonlinear}, nonlinear

    def _make_forms(self) -> None:
        """Make the forms of the layers that ran."""
        for name in self._runner.modules:
            self.backend = self._form(name).backend.name

    def _form(self, name: str) -> LayerForm:
        """Return a layer's form, made once."""
        form = self._forms.get(name)
        if form is None:
            module, scale = self._runner.selected[name], self._scales.get(name)
            form = self._forms[name] = LayerForm(name, module, self._of_weights, self._options, scale)
        return form


def _add(summands: Summands, name: str, contribution: Contribution) -> None:
    for quantity, part in contribution.summands.items():
        held = summands.get((name, quantity))
        summands[name, quantity] = part if held is None else held + part


def _masked(part: Tensor, kept: Tensor) -> Tensor:
    """Return a tensor with zeros for samples that are not kept."""
    return part if bool(kept.all()) else torch.where(kept.view(-1, *(1,) * (part.ndim - 1)), part, 0.0)
