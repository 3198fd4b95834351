"""Measure flatness in the training of the Trainer of Hugging Face's transformers, or add it to the loss."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, MissingExtraError
from ..losses import auto
from ..model import hugging_face, selectors
from ..model.layers import unwrap
from ..model.selectors import Selector
from ..options import check_number
from ..training.layer_penalty import FlatnessPenalty
from .watch import Watch

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise MissingExtraError(f"{error.name} is not installed: pip install 'pyflatness[hf]' accelerate") from None


class FlatnessTrainerCallback(Watch, TrainerCallback):  # type: ignore[misc]
    """Measure the model at the ends of epochs, and log the values through the trainer.

    The training is what it is without the callback, bit by bit: modes, buffers, gradients, random states, samplers and
    workers of loaders stay as they are. Values are logged by ``trainer.log``, and so stand in
    ``trainer.state.log_history`` and in TensorBoard, Weights & Biases and others of ``report_to``: as
    ``flatness/relative_flatness/classifier`` for a layer and ``flatness/network/relative_flatness`` for the network,
    with ``flatness/seconds``, what the measurement took. (The trainer puts ``train/`` in front where it writes to
    TensorBoard and Weights & Biases.) Over ranks all take part, each with the batches of its own loader.

    Exact values behind attention and GELU take hundreds of Hessian products a layer, which a line on standard error
    says before: name layers, or pass ``probes=1`` or ``budget=``.

    What is not possible is skipped with a warning: a measure that the model does not have, data that are not there,
    weights that FSDP1 or DeepSpeed has spread.

    Args:
        trainer: the trainer that the callback is added to. It is not known to callbacks otherwise, and has the loggers.
        layers: a selector or several, see :func:`pyflatness.measure`; None: every layer that can be measured and ran.
        measures: names, or None, ``"sweep"`` or ``"all"``, see :func:`pyflatness.measure`.
        data: ``"train"``, which the papers' measure is of: the loader of the training; ``"val"``: of
            ``trainer.get_eval_dataloader()``; or a loader, a list of batches or a tuple of tensors.
        loss: see :func:`pyflatness.measure`; ``"auto"`` is the one that the model computes itself.
        model: the attribute of the trainer's model that is measured; None: the model.
        every_n_epochs: epochs n, 2 n, … are measured, counted from 1 and from the first training, also after resuming.
        limit_batches: how many batches are read, on each rank; None: all.
        name: what the names of logged values begin with; two callbacks of a trainer need two.
        strict: whether what is not possible is an error, which ends the training.
        budget: the part of the training's time, such as 0.01, that may go into measuring: after steps in place of
            epochs, the GGN by one probe of each of some samples of the batch that was trained on, or of ``data``, a
            tuple or a list of batches; see :func:`pyflatness.track`.
        **options: of :func:`pyflatness.measure`: ``probes``, ``curvature``, ``normalize``, ``forward``, ``memory``, …

    Attributes:
        history: a :class:`pyflatness.results.History` with a record for each measured epoch, counted from 1, or for
            each measured step, at a fraction of an epoch.

    Raises:
        InputError: measures, options or a model that do not exist; ``loss="auto"`` where the trainer has another loss,
            or the model is none of transformers.
        MissingExtraError: without transformers.

    Example:
        >>> from pyflatness.integrations.transformers import FlatnessTrainerCallback
        >>> # trainer.add_callback(FlatnessTrainerCallback(trainer, layers="classifier", probes=4))
    """

    def __init__(
        self,
        trainer: Any,
        layers: Selector | Sequence[Selector] | None = None,
        measures: str | Sequence[str] | None = "relative_flatness",
        data: Any = "train",
        *,
        loss: Any = "auto",
        model: str | None = None,
        every_n_epochs: int = 1,
        limit_batches: int | None = None,
        name: str = "flatness",
        strict: bool = False,
        budget: float | None = None,
        **options: Any,
    ) -> None:
        if not callable(getattr(trainer, "add_callback", None)):
            raise InputError(
                f"trainer: a Trainer of transformers is wanted, got {type(trainer).__name__}; "
                "trainer.add_callback(FlatnessTrainerCallback(trainer, layers=…))"
            )
        how: dict[str, Any] = {"every_n_epochs": every_n_epochs, "limit_batches": limit_batches, "budget": budget}
        super().__init__(layers, measures, data, loss=loss, model=model, name=name, strict=strict, **how, **options)
        self._trainer, self._batch = trainer, dict[str, Tensor]()
        self._hook: Any = None
        measured = self._part_of(trainer.model)
        if not auto.is_auto(loss):
            return
        auto.of_transformers(unwrap(measured))
        if trainer.compute_loss_func is not None or trainer.label_smoother is not None:
            own = "compute_loss_func=" if trainer.compute_loss_func is not None else "label_smoothing_factor"
            raise InputError(
                f"loss='auto' is the model's own loss, and the trainer has another by {own}; pass the one to measure "
                "by, such as loss=nn.CrossEntropyLoss(label_smoothing=0.1)"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise if there are no such layers or data; begin to count the training's time."""
        # The user's own loader may need none.
        is_own = not self._trainer.get_eval_dataloader.__module__.startswith("transformers.")
        if self._data == "val" and self._trainer.eval_dataset is None and not is_own:
            raise InputError("data='val': the trainer has no eval_dataset; pass data='train', or a loader")
        if self._layers is not None:
            selectors.select(self._part_of(self._trainer.model), self._layers)
        if self._budget is not None:
            if self._hook is not None:  # of a training that an error ended
                self._hook.remove()
            self._hook = kwargs["model"].register_forward_pre_hook(self._keep, with_kwargs=True)
        self._begin()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the epoch, if it is one that is to be measured, and log the values."""
        train, epoch = kwargs["train_dataloader"], _epoch(state)
        if self._budget is None and epoch % self._every_n_epochs == 0:
            self._measure(epoch, state, control, lambda: self._batches(train))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where the budget allows it, and log the values."""
        batch = self._due(self._batch)
        if batch is not None:
            self._measure(float(state.epoch), state, control, lambda: [batch])

    def _measure(self, epoch: float, state: Any, control: Any, batches: Callable[[], Any]) -> None:
        def problem() -> tuple[nn.Module, Any]:
            if self._trainer.is_deepspeed_enabled:
                raise InputError(
                    "under DeepSpeed the weights are not in the model as a whole; measure a checkpoint of it after the "
                    "training"
                )
            return self._part_of(self._trainer.model), self._loss

        values = self._measured(epoch, state.global_step, problem, batches)
        if values:
            due = control.should_log  # of the training's own loss, by logging_strategy="epoch"
            self._trainer.log(values)
            control.should_log = due

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what the measurements have cost."""
        if self._budget is not None:
            self._hook.remove()
        self._end(prints=state.is_world_process_zero)

    def _keep(self, model: nn.Module, args: Any, given: dict[str, Any]) -> None:
        """Keep the batch of a step, of which a trainer tells callbacks nothing."""
        if model.training:
            self._batch = {name: held for name, held in given.items() if isinstance(held, Tensor) and held.ndim}

    def _batches(self, train: Any) -> Any:
        data = self._data
        if data == "val" and isinstance(self._trainer.eval_dataset, dict):
            names = ", ".join(map(repr, self._trainer.eval_dataset))
            raise InputError(f"data='val': the trainer has several data sets ({names}); pass a loader of one as data=")
        if isinstance(data, str):
            data = self._trainer.get_eval_dataloader() if data == "val" else train
        return _plain(data)


def _epoch(state: Any) -> int:
    return math.ceil(float(state.epoch) - 1e-6)  # steps are fractions of an epoch, and a last one may be cut short


class PenaltyCallback(TrainerCallback):  # type: ignore[misc]
    """Add the relative flatness of some layers, times a strength, to the loss that a Trainer minimises.

    In training the ``loss`` of the model's outputs is then its own loss plus ``strength`` times
    :class:`pyflatness.FlatnessPenalty` of the batch, and so is the loss that the trainer logs. The model in eval mode
    has its own loss, as ``eval_loss``. Accumulated gradients are those of the whole batch where they are of the model's
    own loss, but with ``normalize="std"``, whose deviations are a micro-batch's.

    Where the model is none of transformers, or the trainer has another loss, as by ``label_smoothing_factor``, pass the
    trainer a ``compute_loss_func`` that adds the penalty (with both divided by ``gradient_accumulation_steps``)::

        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        penalty = pf.FlatnessPenalty(model, "classifier", loss)

        def penalised(outputs, labels, num_items_in_batch=None):
            risk = loss(outputs.logits, labels)
            return risk + 0.01 * penalty(outputs.logits, labels) if torch.is_grad_enabled() else risk

    Args:
        layers: name, pattern or module of layers, or a sequence of these, see :class:`pyflatness.FlatnessPenalty`.
        strength: what the relative flatness is multiplied by, λ; above 0.
        probes: random cotangents of a batch, each with a backward pass of its own.
        normalize: ``"std"`` or None, see :class:`pyflatness.FlatnessPenalty`.

    Raises:
        InputError: a strength that is no number above 0; when the training begins: layers or a model that do not fit,
            or ``label_smoothing_factor``; at its first step: a ``compute_loss_func``.
        MissingExtraError: without transformers.

    Example:
        >>> from pyflatness.integrations.transformers import PenaltyCallback
        >>> # Trainer(model, arguments, train_dataset=train, callbacks=[PenaltyCallback("classifier", 0.01)]).train()
    """

    def __init__(
        self, layers: Selector | Sequence[Selector], strength: float, *, probes: int = 1, normalize: str | None = None
    ) -> None:
        self._made = partial(FlatnessPenalty, layers=layers, loss=auto.AUTO, probes=probes, normalize=normalize)
        self._strength = check_number("strength", strength)
        self._penalty: FlatnessPenalty | None = None
        self._hook: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hook the model and its layers."""
        model = kwargs["model"]
        for hook in [*model._forward_hooks.values()]:  # of a training that an error ended, by any callback
            if isinstance(callback := getattr(hook, "__self__", None), PenaltyCallback):
                callback._remove()
        if args.label_smoothing_factor:
            raise _refusal(f"this trainer has another by label_smoothing_factor={args.label_smoothing_factor}")
        if hugging_face.inner(unwrap(model)) is None:
            raise _refusal(f"a {type(model).__name__} is none")
        self._penalty = self._made(model)
        self._hook = model.register_forward_hook(self._add, with_kwargs=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks off."""
        self._remove()

    def _add(self, model: nn.Module, args: Any, given: dict[str, Any], outputs: Any) -> None:
        if not model.training or not torch.is_grad_enabled():
            return
        if getattr(outputs, "loss", None) is None:
            raise _refusal("this one was called without any, as by compute_loss_func=")
        assert self._penalty is not None
        outputs["loss"] = outputs.loss + self._strength * self._penalty(outputs, given)

    def _remove(self) -> None:
        if self._penalty is not None:
            self._penalty.remove()
            self._hook.remove()
        self._penalty = None


def _refusal(why: str) -> InputError:
    return InputError(
        f"PenaltyCallback adds to the loss that a model of transformers computes of its labels, and {why}; leave the "
        "callback out, and pass the trainer a compute_loss_func= that in training returns loss(outputs.logits, labels) "
        "+ strength * penalty(outputs.logits, labels), with penalty = pf.FlatnessPenalty(model, layers, loss)"
    )


def _plain(loader: Any) -> Any:
    """Return the loader inside of accelerate's: reading that one counts epochs and tells gradient accumulation."""
    return loader.base_dataloader if type(loader).__name__ == "DataLoaderShard" else loader
