"""Measure the generalisation gap from the mean loss and the accuracy on training and test data, by one read of each.

    gap = E_test - E_train,   E = Σ terms of the loss / Σ their weights

E is the user's own loss over the whole data set. For the reduction ``"sum"`` it is the corresponding mean, since the
difference of sums over data sets of different sizes has no meaning.

Standard errors say how much the means would vary with other samples from the same distribution. Samples are
independent, the terms of one are not. With t_i the sum of a sample's terms, m_i that of their weights and
r_i = t_i - E m_i,

    stderr(E) = √(n/(n-1) Σ_i r_i²) / Σ_i m_i

and likewise for the accuracy, with t_i the number of correct ones among m_i predictions.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..errors import InputError, NonFiniteError
from ..losses import Loss, risk
from ..messages import in_words, with_error
from ..model.data import size
from ..numerics.accumulate import Accumulator, normaliser
from ..options import CALL, How, Options
from ..passes.task import Task
from ..session import public, session

_GROUPS = 64  # groups of samples, at least, that give a callable loss its standard error
_BATCHES = 8  # assumed number of batches of data without a length


@dataclass(frozen=True)
class Performance:
    """Hold a model's loss and accuracy on a data set.

    Attributes:
        loss: the mean over the loss terms.
        accuracy: the fraction of correct predictions; None where targets are not classes.
        samples: the number of samples.
        omitted: the number of samples left out by ``nan_policy="omit"``.
        loss_stderr: the standard error of ``loss`` over the samples; None for fewer than two.
        accuracy_stderr: that of ``accuracy``; 0 where all predictions are correct, or all wrong.
    """

    loss: float
    accuracy: float | None
    samples: int
    omitted: int = 0
    loss_stderr: float | None = None
    accuracy_stderr: float | None = None

    def __repr__(self) -> str:
        return in_words(
            self,
            f"loss {with_error(self.loss, self.loss_stderr)}",
            "" if self.accuracy is None else f"accuracy {with_error(self.accuracy, self.accuracy_stderr)}",
            f"{self.samples} samples",
            f"{self.omitted} omitted" if self.omitted else "",
        )


@dataclass(frozen=True)
class GeneralizationGap:
    """Hold how much worse a model does on data that it was not trained on.

    Attributes:
        train: on the training data.
        test: on the test data.
    """

    train: Performance
    test: Performance

    def __repr__(self) -> str:
        accuracy = self.accuracy_gap
        return in_words(
            self,
            with_error(self.gap, self.gap_stderr),
            "" if accuracy is None else f"of the accuracy {with_error(accuracy, self.accuracy_gap_stderr)}",
            f"train {self.train}",
            f"test {self.test}",
        )

    @property
    def gap(self) -> float:
        """Return the loss on test data less that on training data."""
        return self.test.loss - self.train.loss

    @property
    def accuracy_gap(self) -> float | None:
        """Return the accuracy on training data less that on test data; None where targets are not classes."""
        if self.train.accuracy is None or self.test.accuracy is None:
            return None
        return self.train.accuracy - self.test.accuracy

    @property
    def summed_gap(self) -> float:
        """Return n_train/n_test Σ_test - Σ_train = n_train ``gap``: the gap of summed losses instead of means.

        It is the generalisation error of Petzka et al. (2019), who have five times as many training samples as test
        samples: 5 Σ_test - Σ_train. Sums are over samples, of the mean over each sample's loss terms.
        """
        return self.train.samples * self.gap

    @property
    def gap_stderr(self) -> float | None:
        """Return the standard error of ``gap`` over the samples of both sets; None if one has none.

        If you take the training loss as known, because it is over all data that the model was trained on, the
        standard error of the gap is ``test.loss_stderr``.
        """
        return _together(self.train.loss_stderr, self.test.loss_stderr)

    @property
    def accuracy_gap_stderr(self) -> float | None:
        """Return the standard error of ``accuracy_gap``, as :attr:`gap_stderr`."""
        return _together(self.train.accuracy_stderr, self.test.accuracy_stderr)


@public(*CALL, "nan_policy")
def generalization_gap(
    model: nn.Module, loss: Any = "auto", train: Any = ..., test: Any = ..., **how: Unpack[How]
) -> GeneralizationGap:
    """Return loss and accuracy of a model on training and test data, by one read of each.

    E(f) - E_emp(f, S)   (Petzka et al. 2021, section 1), the risk estimated on ``test``.

    Args:
        loss: … The values are means over its terms.
        train: a tuple of tensors (inputs, targets), or an iterable of such batches.
        test: test data of the same form.
        nan_policy: ``"raise"``; ``"propagate"``: a loss that is NaN makes the mean NaN; ``"omit"``: samples whose loss
            is NaN or infinite are left out, of the accuracy too, and counted.

    Returns:
        Both, and their differences, with standard errors over the samples.

    Raises:
        InputError: batches, targets, modes or options that do not fit.
        NonFiniteError: a loss that is NaN or infinite, under ``nan_policy="raise"``.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> train = torch.eye(2), torch.tensor([0, 1])
        >>> test = torch.eye(2), torch.tensor([0, 0])
        >>> found = pf.generalization_gap(model, torch.nn.CrossEntropyLoss(), train, test)
        >>> round(found.gap, 6), found.accuracy_gap
        (0.5, 0.5)
    """
    policy = Options.of(how).nan_policy
    with session(model, loss, train, how=how) as task:
        return GeneralizationGap(performance(task, policy), performance(task.on(test), policy))


def performance(task: Task, nan_policy: str = "raise") -> Performance:
    """Return loss and accuracy by one read of the data."""
    loss = task.loss
    losses, accuracies = ([torch.zeros(2, 0, dtype=torch.float64, device="cpu")] for _ in range(2))
    groups = max(2, math.ceil(_GROUPS / (len(task.batches) or _BATCHES)))
    over, classes = Accumulator(nan_policy), True
    for number, batch in enumerate(task.batches):
        outputs, targets = task.run(batch)
        terms, count = _terms(loss, outputs, targets, number, groups), size(batch)
        over.add(count)
        kept = _kept(over, loss, terms[0].sum(), (outputs, targets), count, number)
        if kept is not None:
            outputs, targets, count = outputs[kept], targets[kept], int(kept.sum())
            if not count:
                continue
            terms = _terms(loss, outputs, targets, number, groups)
        losses.append(_by_sample(terms, count))
        classes = classes and risk.has_classes(outputs, targets, loss)
        if classes:
            right, counting = risk.judged(outputs, targets, loss, number)
            accuracies.append(_by_sample(torch.stack([right & counting, counting]).flatten(1), count))
    shard = task.batches.shard
    over.together(shard, {})
    of_losses = shard.rows("the losses", torch.cat(losses, dim=1))
    accuracy: tuple[float | None, float | None] = None, None
    if all(shard.every("the targets", classes)):
        of_classes = shard.rows("the accuracies", torch.cat(accuracies, dim=1))
        accuracy = _ratio(of_classes) if bool(of_classes[1].any()) else accuracy
    over.check()
    normaliser(float(of_losses[1].sum()))
    mean, stderr = _ratio(of_losses)
    return Performance(mean, accuracy[0], over.samples, over.omitted, stderr, accuracy[1])


def _by_sample(terms: Tensor, samples: int) -> Tensor:
    """Return sums of values and weights by sample, (2, samples), of the terms of samples in order, (2, terms).

    Terms that are those of groups of samples stay as they are.
    """
    rows = samples if terms.shape[1] % samples == 0 else terms.shape[1]
    return terms.double().view(2, rows, -1).sum(dim=2).cpu()


def _ratio(sums: Tensor) -> tuple[float, float | None]:
    """Return Σ_i t_i / Σ_i m_i of sums by sample, (2, samples), and its standard error over those that have terms.

    There is no error of fewer than two.
    """
    (values, weights), (value, weight) = sums, sums.sum(dim=1)
    ratio, count = float(value / weight), int((weights > 0).sum())
    apart = values - ratio * weights
    variance = apart.square().sum() * count / (count - 1) if count > 1 else None
    return ratio, None if variance is None else float(variance.sqrt() / weight)


def _terms(loss: Loss, outputs: Tensor, targets: Tensor, number: int, groups: int) -> Tensor:
    """Return values and weights of the loss terms of a batch, (2, terms); a callable has a term for a group of samples.

    One term for each sample would take a call of the callable for each. Groups are random, whatever the data's order.
    """
    weights = risk.rows(outputs, targets, loss, number).terms.weights.double()
    if loss.known:
        return torch.stack([loss.each(outputs, targets), weights])
    order = torch.randperm(len(weights), generator=torch.Generator("cpu").manual_seed(number), device="cpu")
    places = [index.to(outputs.device) for index in order.chunk(groups)]
    values = torch.stack([loss.value(outputs[index], targets[index]) for index in places])
    return torch.stack([values, torch.stack([weights[index].sum() for index in places])])


def _kept(
    over: Accumulator, loss: Loss, value: Tensor, batch: tuple[Tensor, Tensor], samples: int, number: int
) -> Tensor | None:
    """Return which samples of a batch count, (samples,), where ``value`` is the loss of them all; None if all count."""
    outputs, targets = batch
    error = partial(
        NonFiniteError,
        f"batch {number}: the loss is {float(value)}; nan_policy='omit' leaves such samples out, 'propagate' lets them "
        "through",
    )

    def finite(_: Tensor) -> Tensor:
        if len(outputs) != samples or len(targets) != samples:
            raise InputError(
                f"batch {number}: nan_policy='omit' cannot tell the {samples} samples apart in outputs of shape "
                f"{tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
            )
        return loss.each(outputs, targets).view(samples, -1).sum(dim=1).isfinite().to(outputs.device)

    return over.kept(value.isfinite(), error, finite)


def _together(*errors: float | None) -> float | None:
    return None if None in errors else math.hypot(*(error or 0.0 for error in errors))
