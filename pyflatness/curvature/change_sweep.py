"""Sum what changes of layers' weights do to the loss, to first and second order, in one sweep over the data.

    ⟨∇E, Δ_a⟩        Δ_aᵀ G Δ_b = (1 / Σ_i ω_i) Σ_i Σ_c σ_ic ⟨M_i^(c), Δ_a⟩ ⟨M_i^(c), Δ_b⟩        for all pairs a, b

With M_i = Σ_p δ_ip φ_ipᵀ, the gradient in a layer's weight w (d, m) that a cotangent gives for sample i, a change Δ of
that weight enters through

    ⟨M_i, Δ⟩ = Σ_p ⟨δ_ip, Δ φ_ip⟩

The products Δ φ do not depend on the cotangent. They are computed once a micro-batch, and each cotangent then takes a
scalar product with them; M is never written out. With random signs over the columns there are as many cotangents as
probes. The second order is then unbiased, and its values by probe give its standard error. With folds of the samples
the sums are kept for each fold, and show how they would differ for other data.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import contractions
from ..contractions import promoted
from ..errors import InputError, NonFiniteError
from ..losses import risk
from ..losses.divergence import Divergence
from ..model import calling, data, layers, parameters, uses
from ..numerics.accumulate import Accumulator, counting
from ..numerics.signs import Signs
from ..numerics.variances import standard_error
from ..passes import cotangents, linearity
from ..passes.cotangents import Cotangents
from ..passes.layer_form import LayerForm
from ..passes.runner import Run, Runner
from ..passes.task import Risk, Task
from ..sweep.layer_sweep import Values
from ..sweep.totals import Sums, Totals, layer_error
from . import whole_weights

FIRST, SECOND = 0, 1  # columns of the values by sample: ⟨∇E, Δ⟩, and ½⟨Δ, G Δ⟩ of each change by itself
_GRAM, _ROWS = ("", "gram"), "rows"
_LOSS, _FIRST_OF_FOLDS, _SHARES = ("", "loss"), ("", "first order of folds"), ("", "shares of folds")
_TOKENS = ("", "tokens")
_PER_PRODUCT = 3  # backward passes that take about as long as a Hessian product


def as_called(name: str, module: nn.Module, change: Tensor) -> Tensor:
    """Return a change of a parameter as the view that the layer's operation took of the parameter when it ran."""
    found = layers.as_called(module, change)
    if found is None:
        assert isinstance(module.weight, Tensor)
        raise InputError(
            f"changes[{name!r}]: the weight is used as a tensor of shape {tuple(module.weight.shape)} that is no view "
            f"of one of the shape {tuple(change.shape)}; its change has no such form"
        )
    return found


def risk_at(task: Task, changes: Mapping[str, Tensor]) -> Risk:
    """Return the loss with changes added to the weights of some layers, by one read of the data."""
    with _at(task, changes):
        (found,) = task.risks([{}], task.options.nan_policy)
    return found


class FoldLosses(NamedTuple):
    """Hold the losses of folds of the samples before and after several changes of the weights."""

    shares: Tensor  # (folds,) of the samples
    before: Tensor  # (folds,), each the mean over its samples
    changes: Tensor  # (changes, folds), how much larger each is after each change
    errors: Tensor  # (changes,) standard errors over samples of how much larger the loss of all is
    samples: int


def fold_losses(task: Task, changes: Sequence[Mapping[str, Tensor]], folds: int) -> FoldLosses:
    """Return the losses of folds of the samples before and after several changes, by one read of the data."""
    over, done, loss = Accumulator(task.options.nan_policy, task.loss.reduction), 0, task.loss
    sums = torch.zeros(2 + len(changes), folds, dtype=torch.float64, device="cpu")  # of the weights ω, and of losses
    squares = torch.zeros(3, 1 + len(changes), dtype=torch.float64, device="cpu")  # of ω, of differences, products
    for number, part in task.cut_batches().numbered(task.batches):
        samples = data.size(part)
        fold = task.batches.shard.numbers(done, samples).cpu() % folds
        done += samples
        for place, each in enumerate(({}, *changes)):
            with _at(task, each):
                outputs, targets = task.run(part)
                if place == 0 and isinstance(loss, Divergence):
                    loss = replace(loss, reference=outputs)
                losses = loss.each(outputs, targets).reshape(samples, -1).sum(dim=1).cpu()
            risk.finite(losses.sum(), task.options.nan_policy, number)
            sums[1 + place].index_add_(0, fold, losses)
            if place == 0:
                terms = risk.rows(outputs, targets, task.loss, number).terms
                weights, before = terms.weights.reshape(samples, -1).sum(dim=1).cpu(), losses
                over.add(samples, weights.sum())
                sums[0].index_add_(0, fold, weights)
                squares[0, 0] += (weights > 0).sum()
                squares[0, 1:] += weights.square().sum()
            else:
                more = losses - before
                squares[1:, place] += torch.stack([more.square().sum(), (more * weights).sum()])
    found = over.together(task.batches.shard, {"sums": sums, "squares": squares})
    sums, squares = found["sums"], found["squares"]
    total, count = sums[0].sum(), squares[0, 0]
    means = (sums[2:] - sums[1]).sum(dim=1) / total
    off = squares[1, 1:] - 2 * means * squares[2, 1:] + means.square() * squares[0, 1:]
    errors = (off.clamp_min(0) * count / (count - 1)).sqrt() / over.normaliser  # NaN of one sample
    shares = sums[0] / total
    some = shares > 0
    before, *after = sums[1:, some] / over.normaliser / shares[some]
    return FoldLosses(shares[some], before, torch.stack([one - before for one in after]), errors, over.samples)


@contextlib.contextmanager
def _at(task: Task, changes: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the model with changes added to weights inside: to parameters, and to computed weights at each call."""
    modules, moved, computed = task.selection.modules, dict[str, Tensor](), list[str]()
    names = {id(parameter): name for name, parameter in task.model.named_parameters()}
    for name, change in changes.items():
        own = whole_weights.parameter(modules[name])
        if own is None:
            computed.append(name)
            continue
        key = names[id(own)]
        if key not in moved:
            moved[key] = own.detach().clone()
        part = layers.rows_of(modules[name], moved[key])
        part += change.reshape(part.shape)
    with contextlib.ExitStack() as stack:
        stack.enter_context(calling.dry_run())
        stack.enter_context(torch.no_grad())
        stack.enter_context(parameters.inside(task.model, moved))
        for name in computed:
            forward = layers.with_weight(modules[name], partial(_changed, changes[name]))
            stack.enter_context(calling.replaced_forward(modules[name], forward))
        yield


def _changed(change: Tensor, own: Tensor) -> Tensor:
    return (own + change).to(own.dtype)


@dataclass(frozen=True)
class ChangeCosts:
    """Hold the sums over the data."""

    loss: float  # E
    sums: Sums  # a row for each change, whose column FIRST is ⟨∇E, Δ⟩
    gram: Tensor  # (probes or folds, changes, changes), Δ_aᵀ G Δ_b of all pairs; one matrix if they are exact
    folds: tuple[Tensor, Tensor] | None  # the share of the data of each fold, and its ⟨∇E, Δ_a⟩ (folds, changes)
    sampled: bool  # whether cotangents are random
    places: Mapping[str, range]  # of each layer's changes among all of them
    tokens: Mapping[str, int]  # how many are routed to each expert of a mixture
    by_factors: frozenset[str]  # layers whose second order is in the Gram matrix
    together: bool  # whether the second order of all changes together is, as the GGN's
    linear: frozenset[str]  # layers in whose weight the model is certified to be locally linear; all if not checked
    differentiated: frozenset[str]  # layers whose weight acts in a derivative of the model, which FIRST leaves out

    def first(self, chosen: Sequence[int]) -> float:
        """Return ⟨∇E, Δ⟩ of the sum Δ of some changes."""
        return float(self.sums.values[[*chosen], FIRST].sum())

    def second(self, chosen: Sequence[int]) -> tuple[float, float | None, float | None]:
        """Return ½⟨Δ, G Δ⟩ of the sum Δ of some changes, its standard error, and the error's degrees of freedom."""
        draws = 0.5 * self.gram[:, [*chosen]][:, :, [*chosen]].sum(dim=(1, 2))
        if not self.sampled:
            return float(draws[0]), None, None
        if len(draws) == 1:
            return float(draws[0]), math.nan, None
        return float(draws.mean()), float(standard_error(draws)), len(draws) - 1

    def rows(self, name: str) -> Tensor | None:
        """Return the second order of each row of a layer's changes, (changes, d); None if it was not computed."""
        return self.sums.further.get((name, _ROWS)) if name in self.by_factors else None


class ChangeSweep:
    """Sweep once over a task's data, for changes of its layers.

    ``counts`` is the number of changes of each layer; ``made`` returns them once the layer has run. With ``probes=``
    cotangents are random signs over a sample's columns, unless it has no more columns than probes. With ``products``
    the second order is left to Hessian products where the model is not certified to be linear, and where these are
    less work than all cotangents. With ``folds`` sample i belongs to fold i modulo their number. ``first`` is called
    before the first backward pass, with the layers that a dry run showed to run.
    """

    def __init__(
        self,
        task: Task,
        counts: Mapping[str, int],
        made: Callable[[str], Sequence[Tensor]],
        *,
        products: bool = False,
        folds: int = 0,
        first: Callable[[Collection[str]], None] = lambda ran: None,
    ) -> None:
        self._task, self._made, self._options, self._folds = task, made, task.options, folds
        self._forms: dict[str, LayerForm] = {}
        self._first = first
        ends = [0, *itertools.accumulate(counts.get(name, 0) for name in task.selection.modules)]
        self._places = {name: range(*ends[i : i + 2]) for i, name in enumerate(task.selection.modules)}
        self._count, draws = ends[-1], task.options.draws
        self._signs = None if draws is None else Signs(task.options.seed, draws)
        self._most = _PER_PRODUCT * (self._count + 1) if products and draws is None else None
        self._by_products = products
        self._many = self._sampled = False
        several = max(counts.values())
        self._runner = Runner(
            task,
            self._approve,
            order_matters=folds > 0 or task.options.by_sample or not task.loss.convex,
            certify=products,
            # The outputs of each change, about as large as inputs, and their products with cotangents in float64.
            reserve=lambda found: 7 * several * found.inputs,
        )

    def _approve(self, nonlinear: Mapping[str, str]) -> None:
        """Raise for weights whose cost cannot be computed."""
        linearity.refuse_custom_functions(self._options, nonlinear)
        if self._by_products:
            linearity.refuse_ggn_of_derivatives(self._options, nonlinear)
        else:
            what = "the cost of all pairs of changes"
            linearity.refuse_ggn_of_derivatives(replace(self._options, curvature="ggn"), nonlinear, what)

    def found(self) -> ChangeCosts:
        """Return the sums."""
        task, shard = self._task, self._task.batches.shard
        totals = Totals(task.loss.reduction, task.options, self._error, shard=shard)
        self._runner.each(self._values, totals.add, first=lambda: self._first(self._runner.modules))
        names = frozenset(self._runner.modules)
        facts = {
            "many": self._many,
            "sampled": self._sampled,
            "linear": {name: self._runner.is_linear(name) for name in names},
            "differentiated": {name for name in names if self._runner.why_not_linear(name) == linearity.DIFFERENTIATED},
        }
        every = shard.every("what changes take", facts)
        many = any(fact["many"] for fact in every)
        linear = frozenset(name for name in names if all(fact["linear"].get(name, True) for fact in every))
        by_factors = frozenset() if many else names if self._options.by_ggn else linear
        together = not many and (self._options.by_ggn or (len(names) == 1 and by_factors == names))
        sums, sampled = totals.sums(), any(fact["sampled"] for fact in every)
        places = {name: place for name, place in self._places.items() if name in names}
        gram, folds = sums.further[_GRAM], None
        if self._folds:
            shares = sums.further[_SHARES] / sums.further[_SHARES].sum()
            some = shares > 0
            shares, gram = shares[some], gram[some] / shares[some, None, None]
            folds = shares, sums.further[_FIRST_OF_FOLDS][some] / shares[:, None]
        kinds = by_factors, together, linear, frozenset().union(*(fact["differentiated"] for fact in every))
        counted = zip(self._runner.selected.items(), (sums.normaliser * sums.further[_TOKENS]).tolist(), strict=True)
        tokens = {n: round(count) for (n, each), count in counted if isinstance(each, uses.Use) and each.routed}
        return ChangeCosts(float(sums.further[_LOSS]), sums, gram, folds, sampled, places, tokens, *kinds)

    def _values(self, run: Run) -> Values:
        sent = cotangents.of_run(run, self._task.loss)
        changed = {name: self._changed(run, name) for name, each in self._places.items() if each and run.calls(name)}
        values = sent.sample_weights.new_zeros(1, self._count, 2, run.samples)
        value, gradient = self._loss(run)
        for name, along in self._along(run, gradient, changed).items() if changed else ():
            values[0, self._places[name].start : self._places[name].stop, FIRST] = along.sum(dim=2)
        self._many = self._many or (self._most is not None and sent.passes > self._most)
        tokens = [sum(len(call.route.sample) for call in run.calls(name) if call.route) for name in self._places]
        summands = {_LOSS: values.new_tensor(value), _GRAM: values.new_zeros(self._groups, self._count, self._count)}
        summands[_TOKENS] = values.new_tensor(tokens)
        if changed and not self._many:
            summands |= self._second_order(run, sent, changed, values)
        values = sent.marked(values)
        if self._folds:
            kept = counting(self._options.nan_policy, values)
            of_fold = self._fold_of(run)[kept]
            first = values.new_zeros(self._folds, self._count).index_add_(0, of_fold, values[0, :, FIRST, kept].t())
            weights = sent.sample_weights[kept].to(first)
            summands |= {_FIRST_OF_FOLDS: first, _SHARES: first.new_zeros(self._folds).index_add_(0, of_fold, weights)}
        return Values(values, sent.sample_weights, run.number, summands=summands, lost=sent.bad)

    def _second_order(
        self, run: Run, sent: Cotangents, changed: Mapping[str, Sequence[Tensor]], values: Tensor
    ) -> dict[tuple[str, str], Tensor]:
        """Return the Gram matrices, and if they are exact the cost of each row; add their diagonal to ``values``."""
        signs = self._signs if self._signs is not None and sent.passes > len(self._signs.draws) else None
        self._sampled = self._sampled or signs is not None
        draws = 1 if signs is None else len(signs.draws)
        found: list[tuple[int, Tensor, Tensor]] = []
        of_rows: dict[str, Tensor] = {}
        send = partial(run.recorder.gradients, run.outputs, names=changed)
        for draw, cotangent, sign in sent.sent(signs, run.numbers, self._most or self._options.max_passes, send):
            whole, half = values.new_zeros(self._count, run.samples), 0.5 * values.new_ones(run.samples)
            half = half if sign is None else half * sign
            for name, along in self._along(run, cotangent, changed).items():
                whole[self._places[name].start : self._places[name].stop] = along.sum(dim=2)
                if signs is None and not layers.kind_of(self._runner.selected[name]).by_weight:
                    of_rows[name] = of_rows.get(name, 0) + along.square() * half.unsqueeze(1)
            values[0, :, SECOND] += half * whole.square() / draws
            found.append((draw, whole, half))
        kept = counting(self._options.nan_policy, sent.marked(values))
        gram = values.new_zeros(self._groups, self._count, self._count)
        if self._folds:
            of_fold = self._fold_of(run)
            for fold in of_fold.unique().tolist():
                own = kept & (of_fold == fold)
                for _, whole, half in found:
                    gram[fold] += (2 / draws * half[own] * whole[:, own]) @ whole[:, own].t()
        else:
            for draw, whole, half in found:
                gram[draw] += (2 * half[kept] * whole[:, kept]) @ whole[:, kept].t()
            gram = gram if draws == len(gram) else gram[:1].expand_as(gram)
        return {**{(name, _ROWS): each[:, kept].sum(dim=1) for name, each in of_rows.items()}, _GRAM: gram}

    @property
    def _groups(self) -> int:
        """Return how many Gram matrices are kept: one for each draw, or for each fold."""
        return self._folds or (1 if self._signs is None else len(self._signs.draws))

    def _fold_of(self, run: Run) -> Tensor:
        return run.numbers.to(run.outputs.device) % self._folds

    def _along(self, run: Run, cotangent: Tensor, changed: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Return Σ_p δ_p ∘ (Δ φ_p) of each layer's changes for a cotangent, (changes, n, G d) float64."""
        gradients = run.recorder.gradients(run.outputs, cotangent, changed)
        found = {}
        for name, each in changed.items():
            delta = self._by_position(run, name, gradients[name])
            found[name] = torch.stack([(delta * one).sum(dim=2, dtype=torch.float64).flatten(1) for one in each])
        return found

    def _changed(self, run: Run, name: str) -> list[Tensor]:
        """Return Δ φ of all calls by position, (n, G, P, d), for each of a layer's changes."""
        module = self._runner.selected[name]
        if name not in self._forms:
            self._forms[name] = LayerForm(name, module, (), self._options)
        found = []
        for change in self._made(name):
            delta = promoted(as_called(name, module, change))
            with contractions.full_precision(run.outputs):
                outputs = [
                    call.kind.varied(call.inputs.detach(), delta, call.output, call.coefficients)
                    for call in run.calls(name)
                ]
            found.append(self._by_position(run, name, outputs))
        return found

    def _by_position(self, run: Run, name: str, outputs: Sequence[Tensor]) -> Tensor:
        """Return outputs of all calls, or gradients in these, by position, (n, G, P, d).

        For a weight in all of its uses it is (n, 1, P, 1), since the rows of one use need not be those of another.
        """
        if layers.kind_of(self._runner.selected[name]).by_weight:
            flat = [promoted(run.samples_first(name, output)).flatten(1) for output in outputs]
            return torch.cat(flat, dim=1)[:, None, :, None]
        if not layers.kind_of(self._runner.selected[name]).tokens:
            return self._forms[name].rows(run, outputs)
        calls = [promoted(run.samples_first(name, output)) for output in outputs]
        return torch.cat([rows.reshape(len(rows), 1, -1, rows.shape[-1]) for rows in calls], dim=2)

    def _error(self, part: Values, fine: Tensor) -> NonFiniteError:
        by_layer = part.values.split([*map(len, self._places.values())], dim=1)
        values = torch.stack([each.sum(dim=1) for each in by_layer], dim=1)  # NaN where one is
        return layer_error(self._runner.selected, replace(part, values=values), fine)

    def _loss(self, run: Run) -> tuple[float, Tensor]:
        """Return the sum of the loss terms, and its gradient in the outputs."""
        outputs = run.outputs.detach().requires_grad_()
        with torch.enable_grad():
            value = self._task.loss.value(outputs, run.targets.detach())
        (gradient,) = torch.autograd.grad(value, outputs)
        return float(value), gradient
