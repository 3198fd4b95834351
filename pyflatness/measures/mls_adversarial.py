"""Estimate maximum local sensitivity without a Jacobian (C24, Eq. 47), for models too large for one.

    s_max(∂f_i/∂x_i) ≈ max_δ |f(x_i + δ) - f(x_i)| / |δ|,    |δ| = r |x_i| held

by ascent on δ from a random start. Each step takes δ to the sphere's point in the direction of the gradient of ½ |f(x +
δ) - f(x)|². For small r that is JᵀJ δ, so that the steps are those of the power method. The value of a sample is the
largest quotient seen on the way. For r → 0 and up to rounding it is at most s_max, and comes close to it from below: by
about (s_2/s_1)^(2k) after k steps. ``normalized_mls_adversarial`` is the mean of |x_i|² s_max², normalised MLS
(Definition F.1), by the same ascent. At the model's input alone; r is the square root of the dtype's ε unless given,
small enough for the derivative and large enough for the difference to have digits.

C24: "From Loss Flatness to Compressed Representations".
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError
from ..model import calling, inputs
from ..model import data as batching
from ..numerics.accumulate import Accumulator, non_finite
from ..numerics.signs import Signs
from ..options import READING, MeasureHow, Options, check_count, check_flag, check_number
from ..passes import recorder
from ..passes.batch_layout import check_outputs
from ..passes.task import Task
from ..report import Estimate
from ..session import public, session
from .base import Measure

STEPS = 20


@public(*READING, "per_sample", "seed", "nan_policy", "memory")
def mls_adversarial(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    steps: int = STEPS,
    rho: float | None = None,
    normalized: bool = False,
    **how: Unpack[MeasureHow],
) -> Estimate:
    """Return how much a small change of the input changes the outputs at most, by gradient ascent on the change.

    mean_i max_δ |f(x_i + δ) - f(x_i)| / |δ|   ("From Loss Flatness to Compressed Representations", Eq. 47): ``mls`` of
    models with too many outputs for a Jacobian. ``pf.measure(…, measures="mls_adversarial")`` is this by default.

    Args:
        loss: … It has no part in the value.
        data: …
        steps: of the ascent, a forward and a backward pass each.
        rho: |δ| / |x|, √ε of the dtype unless given.
        normalized: mean_i |x_i|² s_max², normalised MLS (Definition F.1), in the place of mean_i s_max.

    Returns:
        The value, an estimate from below; it has no standard error, since more steps, not more draws, improve it.

    Raises:
        InputError: options that do not fit; a batch without a floating-point input.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(3, 2, bias=False).double()
        >>> _ = model.weight.data.copy_(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 2.0]]))
        >>> data = torch.randn(10, 3).double(), torch.randint(2, (10,))
        >>> round(pf.measures.mls_adversarial(model, torch.nn.CrossEntropyLoss(), data).value, 4)
        3.0
    """
    steps = check_count("steps", steps, 1, "a number of steps")
    rho = None if rho is None else check_number("rho", rho)
    normalized = check_flag("normalized", normalized)
    options = Options.of(how)
    with session(model, loss, data, options, how) as task:
        return _estimate(task, steps, rho, normalized=normalized)


def _estimate(task: Task, steps: int = STEPS, rho: float | None = None, *, normalized: bool = False) -> Estimate:
    signs, shard, done = Signs(task.options.seed, [0]), task.batches.shard, 0
    found, over = [], Accumulator(task.options.nan_policy)
    cuts = task.cut_batches(
        lambda some: _Ascent(task, some, 0, rho).values(1, signs, shard.numbers(0, batching.size(some)))
    )
    with task.forward.in_full(), recorder.frozen(task.model):
        for number, micro_batch in cuts.numbered(task.batches):
            ascent = _Ascent(task, micro_batch, number, rho)
            values = ascent.values(steps, signs, shard.numbers(done, len(ascent.sizes)))
            done += len(values)
            if normalized:
                values = ascent.sizes.square() * values.square()
            fine = values.isfinite()
            over.kept(fine, partial(non_finite, number, fine, "in their input, outputs or derivatives"))
            over.add(len(values))
            found.append(torch.where(fine, values, torch.nan))
    over.together(shard, {})
    over.check()
    each = shard.rows("the values of samples", torch.cat(found).cpu())
    return Estimate(
        value=float((each[~each.isnan()] if over.omitted else each).mean()),
        stderr=None,
        samples=over.samples,
        method="ascent",
        exact=False,
        backend="reference",
        per_sample=each if task.options.per_sample else None,
        omitted=over.omitted,
        notes=(f"{'normalized_' if normalized else ''}mls_adversarial: from below, {steps} steps",),
    )


class _Ascent:
    """Ascend on the changes of one batch's inputs; ``sizes`` are the |x_i|, (n,) float64."""

    def __init__(self, task: Task, batch: Any, number: int, rho: float | None) -> None:
        found = inputs.first_floating(batch, task.forward.by_user)
        if found is None:
            raise InputError(
                f"batch {number}: there is no floating-point tensor among its inputs that could be changed (tokens "
                "have no derivative); mls has values at the inputs of layers"
            )
        self._task, self._batch, self._input, self._samples = task, batch, found, batching.size(batch)
        self.sizes = _norms(found)
        self._size = self.sizes * (torch.finfo(found.dtype).eps ** 0.5 if rho is None else rho)
        self._size = torch.where(self._size == 0, torch.finfo(found.dtype).eps ** 0.5, self._size)
        with torch.no_grad():
            self._start = self._outputs(found)

    def values(self, steps: int, signs: Signs, numbers: Tensor) -> Tensor:
        """Return the largest quotient of each sample, (n,) float64; ``numbers`` are the samples' places in the data."""
        dtype = torch.promote_types(self._input.dtype, torch.float32)
        shape, device = self._input.shape, self._input.device
        start = signs.uniform(0, numbers.to(device), shape[1:].numel()).squeeze(0).mul_(2).sub_(1)
        direction = start.to(dtype).view(shape)
        best = torch.zeros(len(self._input), dtype=torch.float64, device=device)
        for step in range(steps + 1):
            displaced = self._displaced(direction).requires_grad_()
            with torch.enable_grad():
                change = self._outputs(displaced).double() - self._start.double()
                rows = change.reshape(self._samples, -1)
                went = _norms(displaced.detach().double() - self._input.double())  # after rounding
                best = torch.maximum(best, _norms(rows) / went)
                if step == steps or not change.requires_grad:
                    break
                with calling.differentiated():
                    (gradient,) = torch.autograd.grad(0.5 * rows.square().sum(), displaced, allow_unused=True)
                if gradient is None:
                    raise InputError(
                        "model: its forward pass cuts its inputs off from autograd's graph (x.detach()), so that there "
                        "is no derivative of the outputs in them; use x.requires_grad_() without detach()"
                    )
            lost = _norms(gradient) == 0
            direction = torch.where(_like(lost, gradient), direction, gradient.to(dtype))
        return best

    def _displaced(self, direction: Tensor) -> Tensor:
        scale = self._size / _norms(direction)
        return (self._input.double() + _like(scale, direction) * direction).to(self._input.dtype).detach()

    def _outputs(self, tensor: Tensor) -> Tensor:
        batch = inputs.replaced(self._batch, self._input, tensor.clone())
        outputs, _ = self._task.run(batch)
        check_outputs(outputs, self._samples)
        return outputs


def _norms(tensor: Tensor) -> Tensor:
    """Return the norm of each sample, (n,) float64."""
    norms: Tensor = torch.linalg.vector_norm(tensor.detach().reshape(len(tensor), -1).double(), dim=1)
    return norms


def _like(values: Tensor, tensor: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (tensor.ndim - 1))


MLS_ADVERSARIAL = Measure(
    name="mls_adversarial",
    formula="mean_i max_δ |f(x_i + δ) - f(x_i)| / |δ|, |δ| small, by gradient ascent",
    source="From Loss Flatness to Compressed Representations, Eq. 47",
    of_network=_estimate,
    invariant="layer-wise, neuron-wise",
    cost=f"{STEPS + 2} forward passes and {STEPS} backward passes",
)
NORMALIZED_MLS_ADVERSARIAL = Measure(
    name="normalized_mls_adversarial",
    formula="mean_i |x_i|² max_δ |f(x_i + δ) - f(x_i)|² / |δ|², |δ| small, by gradient ascent",
    source="From Loss Flatness to Compressed Representations, Definition F.1 and Eq. 47",
    of_network=partial(_estimate, normalized=True),
    invariant="layer-wise, neuron-wise",
    cost=MLS_ADVERSARIAL.cost,
)
