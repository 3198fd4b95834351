"""Standard deviations of features, by which the normalised measures rescale (Petzka et al. 2021, Theorem 4).

    κ_n = Σ with φ_j / σ_j for φ_j and w_j σ_j for w_j

σ_j is the biased, unweighted standard deviation over the rows that the loss does not ignore. A feature that is zero
throughout drops out; a constant c ≠ 0 takes |c|. Only so does no rescaling of a neuron change the value.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from . import layers, signals
from .contractions import promoted
from .errors import NonFiniteError
from .losses import Loss
from .runner import Run, Runner

_ULPS = 16  # a deviation below so many units in the last place of the largest entry is none


class FeatureScale:
    """Running mean, deviation and largest magnitude of each feature, in float64 (Chan's update).

    ``rows`` says how many rows were taken in; without any there is no scale.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._mean = self._squares = self._largest = torch.zeros((), dtype=torch.float64, device="cpu")
        self._eps = 0.0

    def add(self, features: Tensor) -> None:
        """Take in rows (rows, m)."""
        if len(features) == 0:
            return
        self._eps = torch.finfo(features.dtype).eps
        rows = features.double()
        mean = rows.mean(dim=0)
        squares = (rows - mean).square().sum(dim=0)
        largest = rows.abs().amax(dim=0)
        if self.rows == 0:
            self.rows, self._mean, self._squares, self._largest = len(rows), mean, squares, largest
            return
        total = self.rows + len(rows)
        shift = mean - self._mean
        self._squares = self._squares + squares + shift.square() * (self.rows * len(rows) / total)
        self._mean = self._mean + shift * (len(rows) / total)
        self._largest = torch.maximum(self._largest, largest)
        self.rows = total

    def scale(self) -> Tensor:
        """(m,) float64: σ_j, |c| for a constant feature, 0 for one that is zero throughout (and drops out)."""
        deviation = (self._squares / self.rows).sqrt()
        constant = deviation <= _ULPS * self._eps * self._largest
        return torch.where(constant, self._largest, deviation)


def apply(scale: Tensor, matrix: Tensor, *, inverse: bool = False) -> Tensor:
    """Columns of ``matrix`` times ``scale``, or divided by it; those of scale 0 dropped."""
    matrix, kept = promoted(matrix), scale > 0
    factors = scale[kept]
    columns = matrix if bool(kept.all()) else matrix[:, kept]
    return columns * (1 / factors if inverse else factors).to(matrix.dtype)


def multiplied(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """``tensor`` times the scale of its channels, which are in ``dim``."""
    sizes = [1] * tensor.ndim
    sizes[dim] = len(scale)
    tensor = promoted(tensor)
    return tensor * scale.view(sizes).to(tensor.dtype)


def divided(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """``tensor`` divided by the scale of its channels; channels of scale 0 become 0, which drops them."""
    return multiplied(tensor, torch.where(scale > 0, 1 / scale, 0.0), dim)


def feature_scales(runner: Runner, loss: Loss, nan_policy: str) -> dict[str, Tensor]:
    """The scale of every layer's input channels, by one pass over the data.

    Rows are positions, or the unpadded pixels of a convolution. Positions of ignored targets are left out where the
    layer's positions are the loss's; with them the padding of an ``attention_mask``; else samples without any target.

    Raises:
        NonFiniteError: NaN or infinity in a layer's input, under ``nan_policy="raise"``.
    """
    deviations: dict[str, FeatureScale] = {}
    for rows in runner.results(lambda run: _rows(runner, run, loss, nan_policy)):
        for name, kept in rows.items():
            deviations.setdefault(name, FeatureScale()).add(kept)
    return {name: deviation.scale() for name, deviation in deviations.items()}


def _rows(runner: Runner, run: Run, loss: Loss, nan_policy: str) -> dict[str, Tensor]:
    """(rows, channels) of each layer's input, those that count."""
    inputs = {name: _by_sample(module, run, name) for name, module in runner.modules.items() if run.calls(name)}
    used = signals.of_run(run, loss).used
    good = torch.ones(run.samples, dtype=torch.bool, device=run.outputs.device)
    if nan_policy == "omit":  # the sweep will leave out samples with such outputs too
        good = run.outputs.detach().isfinite().reshape(run.samples, -1).all(dim=1)
    masks = {}
    for name, rows in inputs.items():
        masks[name] = _mask(run, used, rows.shape[1], layers.is_pointwise(runner.modules[name]))
        bad = (~rows.isfinite().all(dim=2) & masks[name]).any(dim=1)
        if bool(bad.any()) and nan_policy == "raise":
            raise NonFiniteError(
                f"batch {run.number}: {int(bad.sum())} of {run.samples} samples have NaN or infinity in the input of "
                f"layer {name!r}; pass nan_policy='omit' or 'propagate' to go on"
            )
        if nan_policy == "omit":
            good = good & ~bad
    return {name: rows[masks[name] & good.unsqueeze(1)] for name, rows in inputs.items()}


def _by_sample(module: nn.Module, run: Run, name: str) -> Tensor:
    """(n, rows, channels)."""
    parts = []
    for call in run.calls(name):
        inputs = run.samples_first(name, call.inputs.detach())
        if layers.is_convolution(module):
            inputs = inputs.movedim(2, -1)
        parts.append(inputs.reshape(run.samples, -1, inputs.shape[-1]))
    return torch.cat(parts, dim=1)


def _mask(run: Run, used: Tensor, rows: int, pointwise: bool) -> Tensor:
    """(n, rows), which of a layer's rows count."""
    mask = used.any(dim=1, keepdim=True).expand(-1, rows)
    if pointwise and rows == used.shape[1]:
        mask = used
    attention = run.batch.get("attention_mask") if isinstance(run.batch, Mapping) else None
    if isinstance(attention, Tensor) and pointwise and attention.shape == mask.shape:
        mask = mask & (attention != 0)
    return mask
