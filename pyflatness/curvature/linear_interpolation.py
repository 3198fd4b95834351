"""Evaluate the loss on the line between two networks, and the barrier between them: linear mode connectivity.

    barrier = max_α E((1 - α) θ + α θ') - ((1 - α) E(θ) + α E(θ'))

over α from 0 to 1 (Frankle et al. 2020, https://arxiv.org/abs/1912.05671; Entezari et al. 2022,
https://arxiv.org/abs/2110.06296). Two minima without a barrier are connected. Between them the statistics of BatchNorm
that either was trained with are not those of its activations, and are computed anew at each point: means of those of
batches, as SWA takes them (Izmailov et al. 2018, https://arxiv.org/abs/1803.05407; ``swa_utils.update_bn`` of torch).
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import Unpack

from .. import progress as bars
from ..errors import InputError, NotYetError
from ..messages import shown
from ..model import calling
from ..model.parameters import Parameters
from ..model.selectors import Selector
from ..options import CALL, How, Options, check_count, check_flag, check_progress
from ..passes.task import Task
from ..report import Result, views
from ..session import public, session
from . import directions as making
from .points import PointLosses, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class LinearInterpolation(Result):
    """Hold the loss on the line between two networks.

    Attributes:
        coefficients: (points,) float64, α from 0, the model, to 1, the other.
        losses: (points,) float64, on the training data.
        accuracy: (points,), or None where targets are no classes.
        test_losses: on the test data, or None.
        test_accuracy: or None.
        samples: of the training data.
        refreshed: whether statistics of BatchNorm were computed anew at each point.
    """

    coefficients: Tensor
    losses: Tensor
    accuracy: Tensor | None
    test_losses: Tensor | None
    test_accuracy: Tensor | None
    samples: int
    refreshed: bool

    @property
    def barrier(self) -> float:
        """Return max_α E(α) - ((1 - α) E(0) + α E(1)) over the points; 0 without a barrier, NaN if a loss is."""
        return _barrier(self.coefficients, self.losses)

    @property
    def test_barrier(self) -> float | None:
        """Return the same on the test data; None without such."""
        return None if self.test_losses is None else _barrier(self.coefficients, self.test_losses)

    @property
    def error_barrier(self) -> float | None:
        """Return the same of the error, 1 - accuracy, on the training data; None without accuracies."""
        return None if self.accuracy is None else _barrier(self.coefficients, 1 - self.accuracy)

    @property
    def test_error_barrier(self) -> float | None:
        """Return the same of the error on the test data; None without such, or without accuracies."""
        return None if self.test_accuracy is None else _barrier(self.coefficients, 1 - self.test_accuracy)

    def plot(self, path: "str | Path | None" = None, *, axes: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw the losses on the line, dashed what is linear between the ends; a loss that is not finite is a gap.

        Args:
            path: where the figure is written too.
            axes: to draw into; None: those of a new figure, outside of pyplot.

        Returns:
            Figure and axes of matplotlib.

        Raises:
            MissingExtraError: without matplotlib.
        """
        figure, axes = views.onto(axes)
        for label, losses in (("training", self.losses), ("test", self.test_losses)):
            if losses is None:
                continue
            (line,) = axes.plot(
                self.coefficients, losses.where(losses.isfinite(), torch.nan), marker=".", label=f"{label} loss"
            )
            axes.plot([0, 1], losses[[0, -1]], "--", color=line.get_color(), linewidth=0.9)
        axes.set(xlabel="α, from one network to the other", ylabel="loss")
        axes.legend()
        views.save(figure, path)
        return figure, axes

    def __str__(self) -> str:
        lines = [
            f"{name} loss {float(losses[0]):.6g} at α = 0, {float(losses[-1]):.6g} at α = 1; barrier {barrier:.6g}"
            for name, losses, barrier in (
                ("training", self.losses, self.barrier),
                ("test", self.test_losses, self.test_barrier),
            )
            if losses is not None
        ]
        anew = ", statistics of BatchNorm computed anew" if self.refreshed else ""
        return "\n".join([*lines, f"{len(self.coefficients)} points, {self.samples} samples{anew}"])


@public(*CALL, "memory")
def linear_interpolation(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    other: nn.Module | Mapping[str, Tensor] = ...,  # type: ignore[assignment]
    *,
    test: Any = None,
    layers: Selector | Sequence[Selector] | None = None,
    points: int = 21,
    update_bn: bool | None = None,
    accuracy: bool | None = None,
    **how: Unpack[How],
) -> LinearInterpolation:
    """Return the loss on the line between two networks, E((1 - α) θ + α θ'), and the barrier between them.

    Args:
        data: … They are the training data, and are read again and again.
        other: another module of the same structure, or a state dict.
        test: batches of other data, for the loss on these too.
        layers: selectors: only the parameters of these layers go from the one network to the other. None: all, and
            buffers of floating-point numbers.
        points: how many, with both ends.
        update_bn: compute the statistics of BatchNorm anew at each point, ends too, by a read of ``data`` with these
            layers, and no others, in training mode: means over batches of their means and variances, as
            ``torch.optim.swa_utils.update_bn`` takes them. None: where there is such a layer. False: statistics are
            linear in α, as other buffers are.
        accuracy: also evaluate the accuracy; None: where targets are classes.
        process_group: as for :func:`pyflatness.relative_flatness`. Statistics of BatchNorm are means over the batches
            of all ranks.

    Returns:
        Losses and accuracies, whose ``barrier`` is max_α E(α) - ((1 - α) E(0) + α E(1)). NaN and infinity are kept.

    Raises:
        InputError: another checkpoint than of this model, or the model itself; ``update_bn=True`` without BatchNorm;
            batches of one sample, which have no variance; see :func:`pyflatness.relative_flatness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> one, other = (torch.nn.Linear(1, 1, bias=False).double() for _ in range(2))
        >>> _ = one.weight.data.fill_(-1.0), other.weight.data.fill_(1.0)
        >>> data = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
        >>> found = pf.linear_interpolation(one, lambda f, y: -((f - y) ** 2).mean(), data, other, points=3)
        >>> found.losses.tolist(), found.barrier
        ([-1.0, 0.0, -1.0], 1.0)
    """
    points = check_count("points", points, 2)
    update_bn = None if update_bn is None else check_flag("update_bn", update_bn)
    accuracy = None if accuracy is None else check_flag("accuracy", accuracy)
    progress = check_progress(how)
    if not isinstance(other, (nn.Module, Mapping)):
        raise InputError(f"other={shown(other)}: a module or a state dict is wanted")
    options = Options.of(how, nan_policy="propagate")
    with session(model, loss, data, options, {**how, "progress": False}, reads=3) as task:
        there = bool(_norms(task.model))
        anew = there if update_bn is None else update_bn
        if anew and not there:
            raise InputError("update_bn=True: the model has no BatchNorm with running statistics")
        tasks = [task] if test is None else [task, task.on(test, reads=3)]
        names = None if layers is None else making.chosen(task.model, layers)
        direction = making.to(task.model, other, names, "other", "")
        theta = making.origin(task.model, [direction])
        evaluated = [Points(each, accuracy) for each in tasks]
        found: list[list[PointLosses]] = [[] for _ in tasks]
        coefficients = torch.linspace(0, 1, points, dtype=torch.float64, device="cpu")
        shown_here = False if task.batches.shard.ranks.rank else progress
        with bars.bar("points", points, shown_here) as advance:
            for some in coefficients.split(min(each.at_once(theta) for each in evaluated)):
                networks = [making.moved(theta, [direction], [alpha]) for alpha in some.tolist()]
                if anew:
                    networks = [values | _refreshed(task, values) for values in networks]
                for own, held in zip(evaluated, found, strict=True):
                    held.append(own(networks))
                advance(len(some), "")
        train, *others = map(_joined, found)
        on_test = others[0] if others else None
        return LinearInterpolation(
            coefficients=coefficients,
            losses=train.losses,
            accuracy=train.accuracies,
            test_losses=None if on_test is None else on_test.losses,
            test_accuracy=None if on_test is None else on_test.accuracies,
            samples=evaluated[0].samples,
            refreshed=anew,
        )


def _joined(parts: Sequence[PointLosses]) -> PointLosses:
    accuracies = [part.accuracies for part in parts if part.accuracies is not None]
    return PointLosses(torch.cat([part.losses for part in parts]), torch.cat(accuracies) if accuracies else None)


def _barrier(coefficients: Tensor, values: Tensor) -> float:
    return float((values - torch.lerp(values[0], values[-1], coefficients)).max())


_MEAN, _VARIANCE, _CALLS = "running_mean", "running_var", "num_batches_tracked"


def _norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the BatchNorm layers with running statistics by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and module.num_batches_tracked is not None
    }


def _refreshed(task: Task, values: Parameters) -> Parameters:
    """Return the statistics by name of buffer: means over all calls of a layer on batches, by one read of the data."""
    own, buffers = _norms(task.model), dict(task.model.named_buffers())
    synchronised = next((name for name, norm in own.items() if isinstance(norm, nn.SyncBatchNorm)), None)
    if synchronised is not None and not task.batches.shard.ranks.alone:
        raise NotYetError(f"{synchronised!r} (SyncBatchNorm): its statistics are not refreshed over several ranks")
    names = [(f"{name}.{_CALLS}", [f"{name}.{key}" for key in (_MEAN, _VARIANCE)]) for name in own]
    sums: dict[str, Tensor] = {}
    with _of_batches(own.values()), calling.dry_run():
        for batch in task.batches:
            fresh = {key: torch.zeros_like(buffers[key]) for calls, of in names for key in (calls, *of)}
            task.run(batch, {**values, **fresh})
            for calls, of in names:
                sums[calls] = sums.get(calls, 0) + fresh[calls].double()
                for key in of:
                    sums[key] = sums.get(key, 0) + fresh[calls] * fresh[key].double()
    sums = task.batches.shard.sum("the statistics of BatchNorm", sums)
    return {
        key: (sums[key] / sums[calls]).to(buffers[key].dtype) for calls, of in names if int(sums[calls]) for key in of
    }


@contextlib.contextmanager
def _of_batches(found: Iterable[_BatchNorm]) -> Iterator[None]:
    """Let BatchNorm layers, and these alone, normalise by the batch and average its statistics, inside."""
    before = [(norm, norm.training, norm.momentum) for norm in found]
    try:
        for norm, _, _ in before:
            norm.training, norm.momentum = True, None
        yield
    finally:
        for norm, training, momentum in before:
            norm.training, norm.momentum = training, momentum
