"""Track a network while it is trained: measure it at steps that the user chooses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel
from typing_extensions import Unpack

from .. import interrupts, losses
from ..api import measure
from ..errors import InputError
from ..losses import auto
from ..measures import named
from ..messages import check_choice, check_module, shown
from ..model.data import used_up
from ..model.layers import unwrap
from ..model.selectors import Selector, select
from ..model.state import device, in_eval_mode
from ..options import EVERY, MeasureHow, check_names
from ..report import Report
from ..session import public
from . import loaders
from .budget import HOW, TimeBudget, check, of_distribution
from .history import History

_AVERAGED = ("ema", "swa")
_WEIGHTS = ("live", *_AVERAGED)


@public(*(name for name in EVERY if name != "eval"))
def track(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    measures: str | Sequence[str] | None = "relative_flatness",
    weights: str | Sequence[str] = "live",
    averaged: nn.Module | None = None,
    history: History | None = None,
    layers: Selector | Sequence[Selector] | None = None,
    budget: float | None = None,
    **how: Unpack[MeasureHow],
) -> History:
    """Return a history of a network's measures, to which every call of ``history.record()`` adds those of that moment.

    It measures as :func:`pyflatness.measure` does, at the cost of one such call
    for each record and each set of weights. The model may be in training mode: it is measured in eval mode, which is
    set on each module, without a call of ``eval()``. A training with records is bit for bit the one without.

    Args:
        model: the one that is trained.
        loss: …
        data: read at each record, so a tuple of tensors, a list of batches or a DataLoader, and no iterator. It may be
            the DataLoader that a training loop is in the middle of.
        measures: a name or several; None: relative flatness and the trace; ``"sweep"``: all that one sweep gives;
            ``"all"``: every measure that applies.
        weights: of which weights: ``"live"``, those of ``model``; ``"ema"`` or ``"swa"``, those of ``averaged``; or
            several of these. Averaged weights are left out of records before their first update.
        averaged: a ``torch.optim.swa_utils.AveragedModel`` of the model, or another module with its layers that holds
            averaged weights. Statistics of BatchNorm are measured as it has them: call ``update_bn`` first, or make it
            with ``use_buffers=True``.
        history: one to continue, as :meth:`.History.from_json` returns it; it is not changed itself.
        layers: selectors; None: every layer that can be measured. Names where averaged weights are measured.
        budget: the part of the time, such as 0.01, that may go into measuring. Call ``history.step()`` after each step
            of the training in place of ``record()``. As often as the budget allows, it measures the GGN with one probe
            of each of some samples, cycling through ``data`` (tensors in random order, or a list of batches). Standard
            errors are over the distribution of the samples. Time that an earlier ``history`` took counts too.
        process_group: whose ranks make the call together; None: all, where ``torch.distributed`` is initialised. Every
            rank records, with its own data, and has the values of the whole.

    Returns:
        The history, without a record or with those of ``history``.

    Raises:
        InputError: a loss, layers, weights, measures or data that cannot be had. All else that
            :func:`pyflatness.measure` raises comes with the first record, which is best made before the training.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> loss, data = torch.nn.CrossEntropyLoss(), (torch.randn(100, 4), torch.randint(3, (100,)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> history = pf.track(model, loss, data, layers=["0", "2"])
        >>> for step in range(2):
        ...     error = loss(model(data[0]), data[1])
        ...     record = history.record(step=step, train_loss=error)
        ...     error.backward()
        ...     optimizer.step()
        >>> history
        History(2 records from step 0 to 1: relative_flatness)
        >>> history[0].reports["live"]["2", "relative_flatness"]
        Estimate(...: exact, method head, layer '2', 100 samples, ... backend)
    """
    named(measures)
    chosen = _chosen(model, weights, averaged)
    device(model)  # a loss has none
    if layers is not None:
        select(unwrap(model), layers)
    if not auto.is_auto(loss):
        losses.resolve(loss, how.get("reduction"))
    if hasattr(data, "__next__"):
        raise used_up(data, "and every record reads them")
    earlier: Any = history
    if not (earlier is None or isinstance(earlier, History)):
        hint = "; pass pf.results.History.from_json(path)" if isinstance(earlier, (str, Path)) else ""
        raise InputError(f"history: a History is wanted, got {type(earlier).__name__} {shown(earlier)}{hint}")

    rest: dict[str, Any] = dict(how)
    chooser = None
    if budget is not None:
        check(loss, how)
        chooser = TimeBudget(budget, data, how.get("process_group"))
        rest = {**HOW, **how}

    def measured(batch: Any = None) -> dict[str, Report]:
        reports = {}
        with interrupts.undone():
            for name, module in chosen.items():
                if isinstance(module, AveragedModel):
                    if not module.n_averaged.item():
                        continue
                    module = module.module
                with in_eval_mode(module), loaders.as_found(data):
                    some = data if batch is None else [batch]
                    report = measure(module, loss, some, measures=measures, layers=layers, **rest)
                    reports[name] = report if batch is None else of_distribution(report)
        return reports

    return History(history or (), measured, chooser)


def _chosen(model: nn.Module, weights: str | Sequence[str], averaged: nn.Module | None) -> dict[str, nn.Module]:
    """Return the models that hold the wanted weights, by the names of these."""
    names = check_names("weights", weights)
    if not names:
        raise InputError("weights: an empty list; pass 'live' for those of the model")
    for name in names:
        check_choice("weights", name, _WEIGHTS)
    of_averages = [name for name in names if name in _AVERAGED]
    if len(of_averages) > 1:
        raise InputError("weights: 'ema' and 'swa' both are names for those of averaged=; ask for one of them")
    if of_averages and averaged is None:
        raise InputError(
            f"weights={shown(weights)}: pass the model that holds them, averaged=torch.optim.swa_utils.AveragedModel(…)"
        )
    if averaged is not None and not of_averages:
        raise InputError(f"averaged: weights={shown(weights)} do not ask for it; pass weights=['live', 'ema']")
    models: dict[str, Any] = {name: averaged if name in _AVERAGED else model for name in names}
    for name, module in models.items():
        check_module("averaged" if name in _AVERAGED else "model", module)
    return models
