"""Measure flatness in the training of Lightning's Trainer."""

import contextlib
import importlib
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from .. import private
from ..errors import InputError, MissingExtraError
from ..model import hugging_face, selectors
from ..training.history import History
from .watch import Watch

_LOSSES = ("loss", "criterion", "loss_fn", "loss_function")  # attributes of modules
_NOT_WHOLE = ("FSDPStrategy", "DeepSpeedStrategy")  # with these no rank has the module's whole weights


def _bases() -> tuple[type, ...]:
    """Return the base classes of callbacks of both packages that Lightning comes as, where they are installed."""
    found = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ModuleNotFoundError):
            found.append(importlib.import_module(name).Callback)
    if not found:
        raise MissingExtraError("Lightning is not installed: pip install 'pyflatness[lightning]'")
    return tuple(found)


class FlatnessCallback(Watch, *_bases()):  # type: ignore[misc]
    """Measure the model at the ends of epochs of a fit, and log the values through the trainer's loggers.

    The training is what it is without the callback, bit by bit: modes, buffers, gradients, random states, samplers and
    workers of loaders stay as they are. Values are logged as ``flatness/relative_flatness/conv1`` for a layer and
    ``flatness/network/relative_flatness`` for the network, with ``flatness/seconds``, what the measurement took; other
    callbacks may monitor them (``ModelCheckpoint(monitor=…, save_on_train_epoch_end=True)``). Neither the sanity check
    nor ``trainer.validate`` measures. Over ranks (DDP) all take part, each with the batches of its own loader.

    What is not possible is skipped with a warning: a measure that the model does not have, data that are not there, the
    strategies FSDP and DeepSpeed.

    Args:
        layers: a selector or several, see :func:`pyflatness.measure`; None: every layer that can be measured and ran.
        measures: names, or None, ``"sweep"`` or ``"all"``, see :func:`pyflatness.measure`.
        data: ``"train"``, which the papers' measure is of, or ``"val"``: the trainer's own loader, with its
            ``limit_train_batches`` or ``limit_val_batches``; or a loader, a list of batches or a tuple of tensors.
            Batches of all but a tuple go through the module's batch hooks (``on_after_batch_transfer``, …) as in
            validation.
        loss: an ``nn`` loss module, ``F`` function, name or callable, see :func:`pyflatness.measure`. None: the
            module's (or the model's) attribute ``loss``, ``criterion``, ``loss_fn`` or ``loss_function``, if there is
            one; of a model of transformers its own.
        model: the attribute of the LightningModule that is measured, such as ``"net"`` or ``"ema.module"``; None: the
            LightningModule itself, called as ``module(inputs)``.
        every_n_epochs: epochs n, 2 n, … are measured, counted from 1 and from the first training, also after resuming.
        limit_batches: how many batches are read, on each rank; None: all.
        name: what the names of logged values begin with; two callbacks of a trainer need two.
        strict: whether what is not possible is an error, which ends the training.
        budget: the part of the training's time, such as 0.01, that may go into measuring: after steps in place of
            epochs, the GGN by one probe of each of some samples of the batch that was trained on, or of ``data``, a
            tuple or a list of batches; see :func:`pyflatness.track`.
        **options: of :func:`pyflatness.measure`: ``probes``, ``curvature``, ``normalize``, ``forward``, ``memory``, …

    Attributes:
        history: a :class:`pyflatness.results.History` with a record for each measured epoch, ``epoch`` and ``step`` as
            Lightning counts them (epochs from 0). It is saved in checkpoints and restored from them.

    Raises:
        InputError: measures or options that do not exist; when a fit begins: no loss, no such model, no such
            layers.
        MissingExtraError: without Lightning.

    Example:
        >>> from pyflatness.integrations.lightning import FlatnessCallback
        >>> callback = FlatnessCallback(layers="head", loss="cross_entropy", every_n_epochs=5)
        >>> # Trainer(callbacks=[callback]).fit(module)
        >>> callback.history
        History(0 records: nothing measured)
    """

    @property
    def state_key(self) -> str:
        """Return the callback's key in checkpoints."""
        return f"FlatnessCallback[{self._name}]"

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the callback: its history."""
        return {"history": self.history.to_json()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the history of a checkpoint."""
        self.history = History(History.from_json(state_dict["history"]), budget=self._budget)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise before a fit begins if there is no loss, model or layer; the module has made what it makes itself."""
        model = self._part_of(pl_module)
        self._loss_of(pl_module, model)
        if self._layers is not None:
            selectors.select(model, self._layers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count the training's time."""
        self._begin()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the epoch, if it is one that is to be measured, and log the values."""
        if self._budget is None and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._measure(trainer, pl_module, lambda: self._batches(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Measure where the budget allows it, and log the values."""
        batch = self._due(batch)
        if batch is not None:
            as_it_is = isinstance(self._data, (str, tuple))
            self._measure(trainer, pl_module, lambda: [batch] if as_it_is else _Prepared([batch], trainer))

    def _measure(self, trainer: Any, pl_module: Any, batches: Callable[[], Any]) -> None:
        def problem() -> tuple[nn.Module, Any]:
            if any(kind.__name__ in _NOT_WHOLE for kind in type(trainer.strategy).__mro__):
                raise InputError(
                    f"under {type(trainer.strategy).__name__} the weights are not in the module as a whole; measure a "
                    "checkpoint of it after the training, or train by DDPStrategy or ModelParallelStrategy"
                )
            model = self._part_of(pl_module)
            return model, self._loss_of(pl_module, model)

        epoch, step = trainer.current_epoch, trainer.global_step
        with _validating(trainer):
            values = self._measured(epoch, step, problem, batches)
        if values:
            pl_module.log_dict(values, sync_dist=trainer.world_size > 1, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say what the measurements have cost."""
        self._end(prints=trainer.is_global_zero)

    def _loss_of(self, pl_module: nn.Module, model: nn.Module) -> Any:
        """Return the user's loss, or the one that a module has."""
        if self._loss is not None:
            return self._loss
        held = {name: getattr(owner, name, None) for owner in (model, pl_module) for name in _LOSSES}
        # Methods of these names often take a batch, and are no loss functions.
        found = {name: loss for name, loss in held.items() if callable(loss) and type(loss) is not types.MethodType}
        if len({id(loss) for loss in found.values()}) == 1:
            return next(iter(found.values()))
        if not found and hugging_face.inner(model) is not None:
            return "auto"
        there = f"has several losses ({', '.join(found)})" if found else f"has no attribute {' or '.join(_LOSSES)}"
        raise InputError(
            f"loss: {type(pl_module).__name__} {there}; pass the loss that it is trained with, "
            "FlatnessCallback(loss=nn.CrossEntropyLoss())"
        )

    def _batches(self, trainer: Any) -> Any:
        """Return the data that are to be measured, as the module takes them."""
        data = self._data
        if not isinstance(data, str):
            return data if isinstance(data, tuple) and isinstance(data[0], Tensor) else _Prepared(data, trainer)
        if data == "train":
            held, limit = trainer.train_dataloader, trainer.num_training_batches
        else:
            loop = trainer.fit_loop.epoch_loop.val_loop
            loop.setup_data()  # where no validation came before, as with check_val_every_n_epoch
            held, limit = trainer.val_dataloaders, sum(loop.max_batches)
        found = [] if held is None else private.tree_leaves(held)
        if len(found) != 1:
            raise InputError(f"data={data!r}: the trainer has {len(found)} such loaders; pass one as data=")
        return _Prepared(found[0], trainer, limit)


class _Prepared:
    """Iterate over a loader's batches as the module gets them in validation: converted, moved, and by its hooks."""

    def __init__(self, loader: Any, trainer: Any, limit: float = math.inf) -> None:
        self._loader, self._trainer, self._limit = loader, trainer, limit

    def __len__(self) -> int:
        return int(min(len(self._loader), self._limit))

    def __iter__(self) -> Iterator[Any]:
        trainer = self._trainer
        for number, batch in enumerate(self._loader):
            if number >= self._limit:
                return
            batch = trainer.precision_plugin.convert_input(batch)
            batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
            yield trainer.strategy.batch_to_device(batch, dataloader_idx=0)


@contextlib.contextmanager
def _validating(trainer: Any) -> Iterator[None]:
    """Set the trainer to validation within the context, for hooks that ask it, with the trainer's precision."""
    trainer.validating = True
    try:
        with trainer.precision_plugin.val_step_context():
            yield
    finally:
        trainer.training = True
