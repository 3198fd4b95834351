"""Compute the features' standard deviations, by which normalised measures rescale (Petzka et al. 2021, Theorem 4).

    κ_n is κ with φ_j / σ_j in the place of φ_j and w_j σ_j in the place of w_j

σ_j is the biased, unweighted standard deviation over the rows that the loss does not ignore. A feature that is zero
throughout drops out; for a constant c ≠ 0, σ_j = |c|, as otherwise rescaling a neuron would change the value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..contractions import promoted
from ..errors import InputError, NonFiniteError
from ..losses import Loss
from ..model import layers
from ..model.kinds.deviations import ULPS, Deviations
from ..numerics import accumulate
from ..numerics.accumulate import non_finite, omits
from . import cotangents
from .batch_layout import ByRow
from .cotangents import Cotangents
from .runner import Run, Runner


def differentiable_scale(rows: Tensor, used: Tensor | None, eps: float) -> Tensor:
    """Return the scale of features, differentiable, from all rows (rows, m) of the data, of which ``used`` count.

    ``eps`` is that of the dtype in which the rows were computed.
    """
    counted = torch.ones_like(rows[:, :1], dtype=torch.bool) if used is None else used.unsqueeze(1)
    count = counted.sum().clamp_min(1)  # of no rows the deviations are 0
    rows = torch.where(counted, rows, 0.0).double()
    mean = rows.sum(dim=0) / count
    variance = torch.where(counted, rows - mean, 0.0).square().sum(dim=0) / count
    largest = rows.abs().amax(dim=0)
    constant = variance.detach().sqrt() <= ULPS * eps * largest.detach()
    return torch.where(constant, largest, torch.where(constant, 1.0, variance).sqrt())


def apply(scale: Tensor, matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """Return ``matrix`` with its last dimension multiplied or divided by ``scale``; entries of scale 0 are dropped."""
    matrix, kept = promoted(matrix), scale > 0
    factors = scale[kept]
    columns = matrix if bool(kept.all()) else matrix[..., kept]
    return columns * (1 / factors if inverse else factors).to(matrix.dtype)


def of_columns(module: nn.Module, scale: Tensor) -> Tensor:
    """Return the factors of a layer's columns, (G, 1, m), for a scale of its input channels."""
    kernel_elements = layers.kind_of(module).geometry.kernel_elements
    return scale.view(layers.kind_of(module).groups, 1, -1).repeat_interleave(kernel_elements, dim=2)


def feature_scales(runner: Runner, loss: Loss, nan_policy: str) -> dict[str, Tensor]:
    """Return the scale of every layer's input channels, by one data read.

    Rows, positions or unpadded pixels, of ignored targets are left out where the layer's positions are the loss's,
    with the padding of an ``attention_mask``; elsewhere samples without targets are. So are all without a value.
    """
    for name, module in runner.selected.items():
        if layers.kind_of(module).by_weight:
            raise InputError(
                f"layer {name!r} is a weight in all of its uses, whose inputs have no deviations in common: normalised "
                "measures are of each use by itself"
            )
    deviations: dict[str, Deviations] = {}

    def of(name: str) -> Deviations:
        if name not in deviations:
            module = runner.selected[name]
            deviations[name] = layers.kind_of(module).deviations(layers.without_entries(module).shape[1])
        return deviations[name]

    def take(rows: dict[str, Tensor]) -> None:
        for name, kept in rows.items():
            of(name).add(kept)

    runner.each(lambda run: _rows(runner, run, loss, nan_policy), take)
    for name in runner.modules if not runner.batches.shard.ranks.alone else ():
        of(name).together(runner.batches.shard, name)
    return {name: deviation.scale() for name, deviation in deviations.items()}


def left_out(runner: Runner, run: Run, sent: Cotangents, nan_policy: str) -> Tensor:
    """Return which samples (n,) have no value: no loss, or NaN in a counted row if deviations leave those out."""
    if not omits(nan_policy):
        return sent.bad
    bad = [~kept.good for kept in _kept(runner, run, sent).values()]
    return torch.stack([sent.bad, *bad]).any(dim=0)


def check_in_time(nan_policy: str, late: Tensor, number: int, what: str, check_weights: Callable[[], None]) -> None:
    """Raise if samples, or rows, to be left out are found too late, after the deviations have counted them."""
    if omits(nan_policy) and bool(late.any()):
        check_weights()
        raise NonFiniteError(
            f"batch {number}: {int(late.sum())} {what} with finite inputs and targets have NaN or infinity (or squares "
            "beyond the dtype's range) in the derivatives, so that nan_policy='omit' cannot leave them out of the "
            "deviations of normalize='std' too; leave them out of the data"
        )


@dataclass(frozen=True)
class _KeptInputs:
    """Hold a layer's inputs, and which of them count."""

    rows: Tensor  # (n, rows, channels)
    mask: Tensor  # (n, rows), which count
    good: Tensor  # (n,), whether these are finite


def _kept(runner: Runner, run: Run, sent: Cotangents) -> dict[str, _KeptInputs]:
    """Return the kept inputs by layer."""
    found = {}
    for name, module in runner.modules.items():
        if run.calls(name):
            rows = _by_sample(run, name)
            mask = _counted(run, name, sent.used, rows.shape[1], layers.kind_of(module).pointwise)
            good = torch.ones_like(sent.bad)
            if not bool(rows.sum().isfinite()):
                good = (rows.isfinite().all(dim=2) | ~mask).all(dim=1)
            found[name] = _KeptInputs(rows, mask, good)
    return found


def _rows(runner: Runner, run: Run, loss: Loss, nan_policy: str) -> dict[str, Tensor]:
    """Return the rows of each layer's input that count, (rows, channels)."""
    sent = cotangents.of_run(run, loss)
    found = _kept(runner, run, sent)
    goods = {name: part.good for name, part in found.items()}
    fine = torch.stack([torch.ones_like(sent.bad), *goods.values()]).all(dim=0)
    kept = accumulate.kept(nan_policy, fine, partial(_non_finite, run, goods))
    counted = {}
    for name, part in found.items():
        good = part.good if kept is None else kept
        counted[name] = part.rows[part.mask & (good & ~sent.bad).unsqueeze(1)]
    return counted


def _non_finite(run: Run, goods: Mapping[str, Tensor]) -> NonFiniteError:
    """Return the error of the first layer that has samples which are not good, (n,)."""
    name, good = next((name, good) for name, good in goods.items() if not bool(good.all()))
    return non_finite(run.number, good, f"in the input of layer {name!r}")


def _by_sample(run: Run, name: str) -> Tensor:
    """Return the inputs of a layer as (n, rows, channels)."""
    first = partial(run.samples_first, name)
    calls = run.calls(name)
    return torch.cat([call.kind.input_rows(call.inputs.detach(), call.coefficients, first) for call in calls], dim=1)


def _counted(run: Run, name: str, used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which of a layer's rows count, (n, rows)."""
    layout, routes = run.layouts[name], [call.route for call in run.calls(name) if call.route is not None]
    if isinstance(layout, ByRow):
        if not layout.sure and not bool(used.any(dim=1).all()):
            raise InputError(
                f"layer {name!r}: nothing comes back to some of its rows, so that it is not known whether they are of "
                "a sample without a target, which normalize='std' would leave out; leave such samples out of the data"
            )
        present = torch.cat([layout.present(call.output) for call in run.calls(name)], dim=1)
        return present.repeat_interleave(rows // present.shape[1], dim=1) & used.any(dim=1, keepdim=True)
    if not routes:
        return _mask(run, used, rows, pointwise)
    tokens = [route.tokens for route in routes]
    masks = _mask(run, used, sum(tokens), pointwise).split(tokens, dim=1)
    return torch.cat([route.of_tokens(mask) for route, mask in zip(routes, masks, strict=True)], dim=1)


def rows_used(used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which rows of each sample at a layer the loss uses, (n, rows), from the terms that it uses (n, L).

    If the layer's positions are the loss's, each row is a term; otherwise all rows count of a sample with any term.
    """
    return used if pointwise and rows == used.shape[1] else used.any(dim=1, keepdim=True).expand(-1, rows)


def _mask(run: Run, used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which rows of each sample count, (n, rows), if they are in order."""
    mask = rows_used(used, rows, pointwise)
    attention = run.batch.get("attention_mask") if isinstance(run.batch, Mapping) else None
    if isinstance(attention, Tensor) and pointwise and attention.shape == mask.shape:
        mask = mask & (attention != 0)
    return mask
