"""Compute the features' standard deviations, by which normalised measures rescale (Petzka et al. 2021, Theorem 4).

    κ_n = Σ with φ_j / σ_j for φ_j and w_j σ_j for w_j

σ_j is the biased, unweighted standard deviation over the rows that the loss does not ignore. A feature that is zero
throughout drops out; a constant c ≠ 0 takes |c|. Only so does no rescaling of a neuron change the value.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..contractions import Columns, promoted
from ..errors import InputError, NonFiniteError
from ..losses import Loss
from ..model import layers
from ..numerics import accumulate
from ..numerics.accumulate import non_finite, omits
from ..numerics.shard import Shard
from . import cotangents
from .cotangents import Cotangents
from .recorder import Call
from .runner import Run, Runner

_ULPS = 16  # a deviation below so many units in the last place of the largest entry is none


class FeatureScale:
    """Update the mean, deviation and largest magnitude of each feature, in float64 (Chan's update).

    ``rows`` says how many rows were taken in.
    """

    def __init__(self) -> None:
        self.rows = self._features = 0
        self._mean = self._squares = self._largest = torch.zeros((), dtype=torch.float64, device="cpu")
        self._eps, self._device = 0.0, torch.device("cpu")

    def add(self, features: Tensor) -> None:
        """Take in rows (rows, m)."""
        self._features, self._device = features.shape[1], features.device
        if len(features) == 0:
            return
        self._eps = torch.finfo(features.dtype).eps
        rows = features.double()
        mean = rows.mean(dim=0)
        squares = (rows - mean).square().sum(dim=0)
        self._merge(len(rows), mean, squares, rows.abs().amax(dim=0))

    def _merge(self, rows: int, mean: Tensor, squares: Tensor, largest: Tensor) -> None:
        if self.rows == 0:
            self.rows, self._mean, self._squares, self._largest = rows, mean, squares, largest
            return
        total = self.rows + rows
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self.rows * rows / total)
        self._mean = self._mean + shift * (rows / total)
        self._largest = torch.maximum(self._largest, largest)
        self.rows = total

    def together(self, shard: Shard, name: str) -> None:
        """Take in the rows of other ranks, where a read of the data ends; ``name`` is the layer's."""
        if shard.ranks.alone:
            return
        own = {
            "rows": torch.tensor(self.rows, dtype=torch.int64, device="cpu"),
            "eps": torch.tensor(self._eps, dtype=torch.float64, device="cpu"),
        }
        own |= {"mean": self._mean, "squares": self._squares, "largest": self._largest} if self.rows else {}
        found, device = shard.each(f"the deviations of layer {name!r}", own), self._device
        self.rows = 0
        for each in found:
            rows = int(each["rows"])
            if rows:
                self._eps = float(each["eps"])
                self._merge(rows, *(each[key].to(device) for key in ("mean", "squares", "largest")))

    def scale(self) -> Tensor:
        """Return σ_j, (m,) float64; |c| for a constant feature, 0 for one that is zero throughout (and drops out).

        Ones where no rows were taken in.
        """
        if self.rows == 0:
            return torch.ones(self._features, dtype=torch.float64, device=self._device)
        deviation = (self._squares / self.rows).sqrt()
        constant = deviation <= _ULPS * self._eps * self._largest
        return torch.where(constant, self._largest, deviation)


def differentiable_scale(rows: Tensor, used: Tensor | None, eps: float) -> Tensor:
    """Return what :meth:`FeatureScale.scale` does for rows (rows, m), (m,) float64, as a function that has derivatives.

    Args:
        rows: of one batch, which is all of the data.
        used: which of them count, (rows,); None: all do.
        eps: of the dtype that the rows came in.
    """
    counted = torch.ones_like(rows[:, :1], dtype=torch.bool) if used is None else used.unsqueeze(1)
    count = counted.sum().clamp_min(1)  # of no rows the deviations are 0
    rows = torch.where(counted, rows, 0.0).double()
    mean = rows.sum(dim=0) / count
    variance = torch.where(counted, rows - mean, 0.0).square().sum(dim=0) / count
    largest = rows.abs().amax(dim=0)
    constant = variance.detach().sqrt() <= _ULPS * eps * largest.detach()
    return torch.where(constant, largest, torch.where(constant, 1.0, variance).sqrt())


class TokenScale:
    """Count how often each token comes, of which the deviations of one-hot features follow.

    Args:
        count: of all tokens, m.
    """

    def __init__(self, count: int) -> None:
        self.rows, self._count = 0, count
        self._sums = self._squares = torch.zeros(count, dtype=torch.float64, device="cpu")

    def add(self, features: Tensor) -> None:
        """Take in rows: the numbers of their tokens, and behind them as many coefficients."""
        self.rows += len(features)
        tokens, coefficients = features.chunk(2, dim=1)
        columns = Columns(tokens.long())
        counts = columns.of(coefficients.unsqueeze(2)).squeeze(2)
        self._sums, self._squares = (
            total.to(counts.device).index_add(0, columns.tokens.flatten(), values.flatten())
            for total, values in ((self._sums, counts), (self._squares, counts.square()))
        )

    def together(self, shard: Shard, name: str) -> None:
        """See :meth:`FeatureScale.together`."""
        rows = torch.tensor(self.rows, dtype=torch.int64, device="cpu")
        own = {"rows": rows, "sums": self._sums, "squares": self._squares}
        found = shard.sum(f"the deviations of layer {name!r}", own)
        self.rows, self._sums, self._squares = int(found["rows"]), found["sums"], found["squares"]

    def scale(self) -> Tensor:
        """Return σ_j, (m,) float64, as :meth:`FeatureScale.scale` does."""
        if self.rows == 0:
            return torch.ones_like(self._sums)
        mean = self._sums / self.rows
        variance = self._squares / self.rows - mean.square()
        eps = torch.finfo(torch.float64).eps
        return torch.where(variance <= _ULPS * eps * mean.square(), mean.abs(), variance.clamp_min(0).sqrt())


def apply(scale: Tensor, matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """Return ``matrix`` with its last dimension multiplied or divided by ``scale``; entries of scale 0 are dropped."""
    matrix, kept = promoted(matrix), scale > 0
    factors = scale[kept]
    columns = matrix if bool(kept.all()) else matrix[..., kept]
    return columns * (1 / factors if inverse else factors).to(matrix.dtype)


def of_columns(module: nn.Module, scale: Tensor) -> Tensor:
    """Return what a layer's columns are multiplied by, (G, 1, m), for a scale of its input channels."""
    kernel_elements = layers.geometry(module).kernel_elements
    return scale.view(layers.groups(module), 1, -1).repeat_interleave(kernel_elements, dim=2)


def multiplied(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` times the scale of its channels, which are in ``dim``."""
    sizes = [1] * tensor.ndim
    sizes[dim] = len(scale)
    tensor = promoted(tensor)
    return tensor * scale.view(sizes).to(tensor.dtype)


def divided(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` divided by its channels' scale; channels of scale 0 become 0, which drops them."""
    kept = scale > 0
    return multiplied(tensor, torch.where(kept, 1 / torch.where(kept, scale, 1.0), 0.0), dim)


def feature_scales(runner: Runner, loss: Loss, nan_policy: str) -> dict[str, Tensor]:
    """Return the scale of every layer's input channels, by one data read.

    Rows are positions, or the unpadded pixels of a convolution. Positions of ignored targets are left out where the
    layer's positions are the loss's, and with them the padding of an ``attention_mask``; elsewhere samples without any
    target are left out. Samples that have no value of the layer are left out too, but under ``nan_policy="raise"``.

    Raises:
        NonFiniteError: NaN or infinity in a layer's input, under ``nan_policy="raise"``.
        InputError: a weight in all of its uses.
    """
    for name, module in runner.selected.items():
        if layers.is_together(module):
            raise InputError(
                f"layer {name!r} is a weight in all of its uses, whose inputs have no deviations in common: normalised "
                "measures are of each use by itself"
            )
    deviations: dict[str, FeatureScale | TokenScale] = {}

    def of(name: str) -> FeatureScale | TokenScale:
        if name not in deviations:
            module = runner.selected[name]
            tokens = layers.kind_of(module).tokens
            deviations[name] = TokenScale(layers.matrix(module)[0].shape[1]) if tokens else FeatureScale()
        return deviations[name]

    def take(rows: dict[str, Tensor]) -> None:
        for name, kept in rows.items():
            of(name).add(kept)

    runner.each(lambda run: _rows(runner, run, loss, nan_policy), take)
    for name in runner.modules if not runner.batches.shard.ranks.alone else ():
        of(name).together(runner.batches.shard, name)
    return {name: deviation.scale() for name, deviation in deviations.items()}


def left_out(runner: Runner, run: Run, sent: Cotangents, nan_policy: str) -> Tensor:
    """Return which samples (n,) have no value: those without a loss.

    Samples that the deviations leave out are among them: those with NaN or infinity in a counted row of a layer's
    input.
    """
    if not omits(nan_policy):
        return sent.bad
    bad = [~kept.good for kept in _kept(runner, run, sent).values()]
    return torch.stack([sent.bad, *bad]).any(dim=0)


def check_in_time(nan_policy: str, late: Tensor, number: int, what: str, check_weights: Callable[[], None]) -> None:
    """Raise if samples that are to be left out turn out to have no value when the deviations have them in already.

    Args:
        nan_policy: of the user.
        late: whether each sample, or row, is one of these, (n,).
        number: of the batch.
        what: "samples" or "rows".
        check_weights: raises the error of weights with NaN, where these are the reason.

    Raises:
        NonFiniteError: there are some, under "omit".
    """
    if omits(nan_policy) and bool(late.any()):
        check_weights()
        raise NonFiniteError(
            f"batch {number}: {int(late.sum())} {what} with finite inputs and targets have NaN or infinity (or squares "
            "beyond the dtype's range) in the derivatives, so that nan_policy='omit' cannot leave them out of the "
            "deviations of normalize='std' too; leave them out of the data"
        )


@dataclass(frozen=True)
class _Kept:
    """Hold a layer's inputs and what counts of them.

    The inputs are (n, rows, channels); after them it says which rows count, (n, rows), and which samples are finite in
    those rows, (n,).
    """

    rows: Tensor
    mask: Tensor
    good: Tensor


def _kept(runner: Runner, run: Run, sent: Cotangents) -> dict[str, _Kept]:
    """Return the kept inputs by layer."""
    found = {}
    for name, module in runner.modules.items():
        if run.calls(name):
            rows = _by_sample(module, run, name)
            mask = _counted(run, name, sent.used, rows.shape[1], layers.kind_of(module).pointwise)
            good = torch.ones_like(sent.bad)
            if not bool(rows.sum().isfinite()):
                good = (rows.isfinite().all(dim=2) | ~mask).all(dim=1)
            found[name] = _Kept(rows, mask, good)
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


def _by_sample(module: nn.Module, run: Run, name: str) -> Tensor:
    """Return a tensor of a layer as (n, rows, channels)."""
    kind = layers.kind_of(module)
    if kind.tokens:
        return torch.cat([_tokens(run, name, call, kind.pointwise) for call in run.calls(name)], dim=1)
    parts = []
    for call in run.calls(name):
        inputs = run.samples_first(name, call.inputs.detach())
        if kind.class_dim == 1:
            inputs = inputs.movedim(2, -1)
        parts.append(inputs.reshape(run.samples, -1, inputs.shape[-1]))
    return torch.cat(parts, dim=1)


def _tokens(run: Run, name: str, call: Call, single: bool) -> Tensor:
    """Return the tokens of a call and their coefficients behind them, (n, rows, 2), or (n, bags, 2 tokens of a bag)."""
    tokens = run.samples_first(name, call.inputs)
    if single:  # padding is a feature like others, though its column has no derivative
        tokens = tokens.reshape(run.samples, -1, 1).double()
        return torch.cat([tokens, torch.ones_like(tokens)], dim=2)
    assert call.coefficients is not None
    return torch.cat([tokens.double(), run.samples_first(name, call.coefficients).double()], dim=2)


def _counted(run: Run, name: str, used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which of a layer's rows count, (n, rows)."""
    routes = [call.route for call in run.calls(name) if call.route is not None]
    if not routes:
        return _mask(run, used, rows, pointwise)
    tokens = [route.tokens for route in routes]
    masks = _mask(run, used, sum(tokens), pointwise).split(tokens, dim=1)
    return torch.cat([route.of_tokens(mask) for route, mask in zip(routes, masks, strict=True)], dim=1)


def rows_used(used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which of so many rows of each sample at a layer the loss does not ignore, (n, rows), of its terms (n, L).

    They are the terms' own where the layer's positions are the loss's, else those of samples with any term.
    """
    return used if pointwise and rows == used.shape[1] else used.any(dim=1, keepdim=True).expand(-1, rows)


def _mask(run: Run, used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """Return which of so many rows of each sample count, (n, rows), if they are in order."""
    mask = rows_used(used, rows, pointwise)
    attention = run.batch.get("attention_mask") if isinstance(run.batch, Mapping) else None
    if isinstance(attention, Tensor) and pointwise and attention.shape == mask.shape:
        mask = mask & (attention != 0)
    return mask
