"""Compute what a change of a network's weights costs to second order, and measure what it costs.

For a change Δ_l of the weights of some layers l, such as quantised or pruned weights less the weights,

    E(w + Δ) = E(w) + ⟨∇E, Δ⟩ + ½⟨Δ, H Δ⟩ + …

At a minimum the gradient is zero, and the second-order term is the price of the change. It is computed exactly with the
whole block of the Hessian, and not bounded by a trace. In the GGN

    ½⟨Δ, G Δ⟩ = (1 / 2 Σ_i ω_i) Σ_i Σ_c σ_ic (Σ_l ⟨M_il^(c), Δ_l⟩)²

takes the cotangents of one sweep, for each layer and for all of them together; see :mod:`.change_sweep`. This is the
Hessian's value for a layer in whose weight the model is locally linear. Other layers, all layers together, and cases in
which cotangents would be more work take a Hessian product H Δ each. So do weights that act in a derivative that the
model takes, whose ⟨∇E, Δ⟩ comes from the gradient in the weights. With probes there are as many random cotangents.

The trace's estimate beside it is that of HAWQ-V2 (Dong et al. 2020, Eq. 5): Tr(H_l) / (d m) · |Δ_l|², what the
change would cost on average if its direction were random; half of that is the expectation of the second-order term.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..contractions import promoted_dtype
from ..errors import InputError
from ..hessian.products import Products
from ..measures.layer_values import LayerValues
from ..measures.trace import TRACE
from ..messages import shown
from ..model import layers, uses
from ..model.selectors import Selection
from ..options import CALL, MeasureHow, Options, check_flag
from ..passes.task import Task
from ..report import Estimate, Report
from ..report.intervals import together
from ..session import public, session
from . import whole_weights
from .change_sweep import ChangeCosts, ChangeSweep, as_called, risk_at

COST, GRADIENT, PREDICTED = "cost_of_change", "gradient_of_change", "predicted"
MEASURED, BY_TRACE = "loss_change", "cost_by_trace"


@public(*CALL, "curvature", "probes", "rtol", "nan_policy", "memory", "seed", "max_passes")
def cost_of_change(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    changes: Mapping[str, Tensor] = ...,  # type: ignore[assignment]
    *,
    measured: bool = True,
    by_trace: bool = False,
    **how: Unpack[MeasureHow],
) -> Report:
    """Return what a change Δ of the weights of some layers costs: ½⟨Δ, H Δ⟩, and beside it what the loss does.

    E(w + Δ) - E(w) = ⟨∇E, Δ⟩ + ½⟨Δ, H Δ⟩ + …, each layer's change by itself, and all of them together.

    Args:
        model: …
        loss: …
        data: … They are read twice for the second order, and with ``measured`` once for each change and twice
            more.
        changes: by the name of a layer the change of its weight, of the weight's shape; ``pf.changes`` makes them by
            quantisation, pruning, lower ranks or another checkpoint. A weight changes in all of its uses, also where
            other layers share it, or the model uses it outside of layers.
        measured: also evaluate the loss at the changed weights.
        by_trace: also return Tr(H) |Δ|² / (d m) of each layer, what the change would cost twice over if its direction
            were random.
        curvature: ``"auto"`` and ``"hessian"`` for the Hessian, ``"ggn"`` for the GGN.
        probes: random cotangents of a sample for second orders that are no Hessian products (with ``curvature="ggn"``
            those of all layers), which then have a standard error, and for the traces of ``by_trace``. None: both are
            exact.
        rtol: the standard error that the trace of each layer has at most, relative to the trace, by as many probes as
            that takes. The second order is exact then.
        nan_policy: ``"raise"`` or ``"propagate"``; ``"omit"`` only where no Hessian product and no loss is needed.

    Returns:
        ``report[layer, measure]`` of each change by itself and ``report[measure]`` of all together, in units of the
        loss: ``"cost_of_change"`` is ½⟨Δ, H Δ⟩, with ``per_neuron`` what each row of the change costs by itself where
        all cotangents were sent; ``"gradient_of_change"`` is ⟨∇E, Δ⟩; ``"predicted"`` is the sum of both, and
        ``report.top(5, "predicted")`` are the layers that cost most; ``"loss_change"`` is E(w + Δ) - E(w);
        ``"cost_by_trace"`` is of layers, and their sum, whose standard error is a bound: layers share their probes.

    Raises:
        InputError: a change of no layer, of another shape or dtype, or not finite; an operation without a second
            derivative, where one is needed; see :func:`pyflatness.relative_flatness`.
        NonFiniteError: NaN or infinity in the data's values, by the policy.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double().eval()
        >>> data = torch.randn(100, 4).double(), torch.randint(3, (100,))
        >>> report = pf.cost_of_change(model, torch.nn.CrossEntropyLoss(), data, pf.changes.rounded(model, bits=6))
        >>> abs(report["predicted"] - report["loss_change"]) < 0.01 * abs(report["loss_change"])
        True
    """
    measured, by_trace = check_flag("measured", measured), check_flag("by_trace", by_trace)
    options = Options.of(how)
    if not isinstance(changes, Mapping) or not changes:
        raise InputError(
            f"changes={shown(changes)}: a mapping from names of layers to changes of their weights is wanted"
        )
    if options.probes is not None and options.draws is None:
        raise InputError(f"probes={shown(options.probes)}: a number of probes, or None, is wanted here")
    reads = 3 + bool(by_trace) + (len(changes) + 2 if measured else 0)
    with session(model, loss, data, options, how, reads=reads) as task:
        task = task.of([*changes])
        made = _checked(task.selection.modules, changes)
        task, names = whole_weights.taken(replace(task, selection=Selection(task.selection.modules, frozenset())))
        whole_weights.refuse_computed(task)
        costs = Costs(task, _united(made, names, task.model))
        found = costs.second_order()
        if measured:
            found |= costs.measured()
        if by_trace:
            found |= costs.by_trace()
        task.unite()
        found = {key: task.noted(estimate) for key, estimate in found.items()}
    rows = {name: own for name, own in names.items() if (own, PREDICTED) in found} | {"": ""}
    measures = tuple(dict.fromkeys(measure for _, measure in found))
    values = {
        (name, measure): replace(found[own, measure], layer=name)
        for measure in measures
        for name, own in rows.items()
        if (own, measure) in found
    }
    idle = dict.fromkeys(names.keys() - rows.keys(), "it did not run, and its change changes nothing")
    return Report(tuple(name for name in rows if name), measures, values, why_uncovered=idle)


def _united(made: Mapping[str, Tensor], names: Mapping[str, str], model: nn.Module) -> dict[str, Tensor]:
    """Return the changes by the names that weights have in all of their uses."""
    found: dict[str, str] = {}
    for name in made:
        if name not in names:
            use = uses.layer(model, name)
            raise InputError(f"changes: {name!r} is no layer here: {getattr(use, 'refusal', '')}")
        other = found.setdefault(names[name], name)
        if not torch.equal(made[other], made[name]):
            raise InputError(
                f"changes: {other!r} and {name!r} are one weight, and have two changes; give one, which is of all uses"
            )
    return {own: made[name] for own, name in found.items()}


def _checked(modules: Mapping[str, nn.Module], changes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the changes of layers by name, checked, on the weights' devices and in at least float32."""
    found = {}
    for name, change in changes.items():
        if name not in modules:
            raise InputError(f"changes: {name!r} is not the name of one layer; here these are {', '.join(modules)}")
        weight = layers.weight_of(modules[name])
        if not isinstance(change, Tensor) or change.shape != weight.shape:
            got = f"one of shape {tuple(change.shape)}" if isinstance(change, Tensor) else shown(change)
            raise InputError(
                f"changes[{name!r}]: a tensor of the weight's shape {tuple(weight.shape)} is wanted, got {got}"
            )
        if not change.is_floating_point() or not bool(change.isfinite().all()):
            raise InputError(f"changes[{name!r}]: finite numbers are wanted, got {change.dtype} with NaN or infinity")
        dtype = promoted_dtype(weight.dtype)  # in half precision the change would lose digits that w + Δ still has
        found[name] = change.detach().to(device=weight.device, dtype=dtype)
    return found


class Costs:
    """Compute what changes cost."""

    def __init__(self, task: Task, changes: Mapping[str, Tensor]) -> None:
        self._task, self._modules = task, task.selection.modules
        self._changes = {name: changes[name] for name in self._modules}

    def second_order(self) -> dict[tuple[str, str], Estimate]:
        """Return both terms of the expansion and their sum, for each layer and for all of them together."""
        sweep = ChangeSweep(
            self._task, dict.fromkeys(self._modules, 1), lambda name: [self._changes[name]], products=True
        )
        found = sweep.found()
        self._modules = {name: self._modules[name] for name in found.places}
        self._changes = {name: self._changes[name] for name in found.places}
        self._task = replace(self._task, selection=Selection(self._modules, frozenset()))
        every = [place for places in found.places.values() for place in places]
        rest = [name for name in found.places if name not in found.by_factors]
        by_product = self._by_products(rest, together=not found.together)
        firsts = self._along_gradient() if found.differentiated else {}
        estimates: dict[tuple[str, str], Estimate] = {}
        for name, places in {**found.places, "": every}.items():
            value = firsts.get(name, found.first(places))
            first = self._estimate(name, value, "definition", exact=True, found=found)
            second = by_product.get(name) or self._by_factors(name, places, found)
            estimates[name, GRADIENT], estimates[name, COST] = first, second
            estimates[name, PREDICTED] = replace(second, value=first.value + second.value, per_neuron=None)
        return estimates

    def _by_factors(self, name: str, places: Sequence[int], found: ChangeCosts) -> Estimate:
        value, stderr, dof = found.second(places)
        linear = name in found.linear if name else found.linear == {*found.places} and len(found.places) == 1
        rows = found.rows(name)
        return replace(
            self._estimate(name, value, "ggn", exact=linear and stderr is None, found=found),
            method="ggn" if stderr is None else "ggn-sampled",
            stderr=stderr,
            dof=dof,
            per_neuron=None if rows is None or found.sampled else rows[0],
        )

    def _estimate(self, name: str, value: float, method: str, *, exact: bool, found: ChangeCosts) -> Estimate:
        sums, notes = found.sums, layers.tie_notes(self._task.model, self._modules[name]) if name else ()
        return Estimate(
            *(value, None, sums.samples, method, exact, "reference"), layer=name, omitted=sums.omitted, notes=notes
        )

    def _by_products(self, names: list[str], *, together: bool) -> dict[str, Estimate]:
        """Return the second order by a Hessian product for each of some layers, and for all of them together."""
        blocks = {name: (name,) for name in names} | ({"": tuple(self._modules)} if together else {})
        if not blocks:
            return {}
        products = Products(self._task)
        vectors = {block: self._vector(block, products.device) for block in dict.fromkeys(blocks.values())}
        found = products({block: vector.unsqueeze(0) for block, vector in vectors.items()})
        estimates = {}
        for name, block in blocks.items():
            custom = not products.custom.isdisjoint(block)
            by = "ggn" if self._task.options.by_ggn else "hessian"
            estimates[name] = Estimate(
                value=0.5 * float(vectors[block] @ found[block][0]),
                stderr=None,
                samples=products.samples,
                method=by,
                exact=by == "hessian" and not custom,
                backend="reference",
                layer=name,
                notes=products.notes(name),
            )
        return estimates

    def _along_gradient(self) -> dict[str, float]:
        """Return ⟨∇E, Δ⟩ of each layer and of all together, by the gradient in the weights themselves."""
        products = Products(self._task)
        names, gradient = [*self._modules], products.gradient()
        parts = gradient.split([products.size((name,)) for name in names])
        found = {n: float(g @ self._vector((n,), products.device)) for n, g in zip(names, parts, strict=True)}
        return found | {"": sum(found.values())}

    def _vector(self, names: tuple[str, ...], device: torch.device) -> Tensor:
        """Return the changes of some layers as one vector (N,) float64."""
        modules, changes = self._modules, self._changes
        matrices = [layers.as_matrix(modules[n], as_called(n, modules[n], changes[n])) for n in names]
        return torch.cat([matrix.flatten().double() for matrix in matrices]).to(device)

    def measured(self) -> dict[tuple[str, str], Estimate]:
        """Return how much the loss changes with the change of each layer, and with all of them."""
        before = risk_at(self._task, {})
        found = {}
        for name in (*self._modules, ""):
            changes = {name: self._changes[name]} if name else self._changes
            after = risk_at(self._task, changes)
            found[name, MEASURED] = Estimate(
                *(after.value - before.value, None, before.samples, "definition", True, "reference"), layer=name
            )
        return found

    def by_trace(self) -> dict[tuple[str, str], Estimate]:
        """Return Tr(H) |Δ|² / (d m) of each layer, and their sum."""
        sampled = replace(self._task, options=self._task.options.of_layers)
        traces = LayerValues(sampled).estimates([TRACE])
        found = {}
        for name, change in self._changes.items():
            trace, factor = traces[name, TRACE.name], float(change.double().square().mean())
            found[name, BY_TRACE] = replace(
                trace, value=factor * trace.value, stderr=None if trace.stderr is None else factor * trace.stderr
            )
        stderr, dof = together([*found.values()])
        value = sum(estimate.value for estimate in found.values())
        found["", BY_TRACE] = replace(traces["", TRACE.name], value=value, stderr=stderr, dof=dof)
        return found
