"""Find the loss that a model of Hugging Face's transformers computes itself from labels, for ``loss="auto"``."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import interrupts
from ..errors import InputError
from ..messages import is_out_of_memory
from ..model import calling, data, hugging_face
from . import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError, resolve, risk
from .base import Known, Reduction, Terms

AUTO = "auto"
_SAMPLES = 2  # samples of the first batch for which the loss is compared with the model's own
_MOST_LOGITS = 2**22  # of two samples; if they have more, one sample is compared
_POSITIONS, _TERMS = 64, 16  # of a causal model's sequences the first positions are compared if they have these terms
_RTOL = 1e-4
_WAY_OUT = (
    "pass loss=, and where outputs and labels do not fit as they are, forward=, a function (model, batch) -> "
    "(outputs, targets)"
)


def is_auto(loss: Any) -> bool:
    """Return whether ``loss`` asks for the model's own."""
    return isinstance(loss, str) and loss == AUTO


def of_model(model: nn.Module, batch: Any, reduction: Reduction | None = None) -> Loss:
    """Return the loss that a model computes itself: cross-entropy, squared error or binary cross-entropy.

    It is compared with the model's own ``.loss`` on the first two samples of the data, or on one if there are many
    logits. Call this within :func:`.state.observing`, with the first batch on the model's device.
    """
    few = _few(model, batch)
    own, inputs, labels = _with_labels(model, few)
    loss = _found(own, labels, reduction)
    with calling.aside(), torch.no_grad():
        _check(model, _own_loss(model, own, inputs), loss, lambda: calling.run(model, few, None))
    return loss


def unchecked(model: nn.Module, batch: Any) -> Loss:
    """Return the loss of :func:`of_model` for a model and data that it has checked already."""
    own, _, labels = _with_labels(model, batch)
    return _found(own, labels, None)


@dataclass(frozen=True)
class Returned:
    """Hold the arguments of the loss for a batch on which the model was called."""

    outputs: Tensor
    targets: Any
    loss: Known
    items: Any  # the ``num_items_in_batch`` by which the model divides the sum of loss terms; None for a mean

    @classmethod
    def of(cls, model: nn.Module, returned: Any, given: Any, *, by_items: bool = True) -> "Returned":
        """Return the loss's arguments from the model's return value, and labels or the mapping it was called with.

        With ``by_items`` the mapping's ``num_items_in_batch`` counts, which some models get and ignore.
        """
        batch = given if isinstance(given, Mapping) else {"labels": given}
        own = of_transformers(model)
        prepared = hugging_face.prepared(own, batch)
        outputs, targets = calling.arranged(returned, prepared)
        items = batch.get("num_items_in_batch") if by_items else None
        return cls(outputs, targets, _found(own, targets, None if items is None else "sum"), items)

    def check(self, model: nn.Module, returned: Any) -> None:
        """Raise if the model returned a loss of its own that differs from this one."""
        wanted = getattr(returned, "loss", None)
        if isinstance(wanted, Tensor) and wanted.numel() == 1:
            with torch.no_grad():
                _check(model, float(wanted), self.loss, lambda: (self.outputs, self.targets), self.items)


def _few(model: nn.Module, batch: Any) -> Any:
    """Return the samples, and of a causal language model the positions, on which losses are compared."""
    own = hugging_face.inner(model)
    few = _first_positions(own, data.first(batch, min(_SAMPLES, data.size(batch))))
    vocabulary = getattr(getattr(own, "config", None), "vocab_size", None) or 1
    most = max((leaf.numel() for leaf in data.leaves(few) if isinstance(leaf, Tensor) and leaf.ndim == 2), default=1)
    return few if most * vocabulary <= _MOST_LOGITS else data.first(few, 1)


def _first_positions(own: nn.Module | None, batch: Any) -> Any:
    """Return the first positions of a causal language model's sequences, or all if they have few terms or other inputs.

    Two passes over whole sequences would take a tenth to a half of a call with one probe.
    """
    if own is None or not (isinstance(batch, Mapping) and hugging_face.is_causal(own)):
        return batch
    tokens = batch.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return batch
    if any(not isinstance(part, Tensor) or part.shape != tokens.shape for part in batch.values()):
        return batch
    short = {key: part[:, :_POSITIONS] for key, part in batch.items()}
    terms = (hugging_face.causal_labels(short)[:, 1:] != hugging_face.IGNORED).sum()
    return short if int(terms) >= _TERMS else batch


def of_transformers(model: nn.Module) -> nn.Module:
    """Return the model of transformers that a module is, or that PEFT wraps, or raise, as others have no loss."""
    own = hugging_face.inner(model)
    if own is None:
        raise InputError(
            f"loss: 'auto' is the loss that a model of Hugging Face's transformers has by itself, and a "
            f"{type(model).__name__} is none; pass the loss that it was trained with, as loss='cross_entropy'"
        )
    return own


def _with_labels(model: nn.Module, batch: Any) -> tuple[nn.Module, dict[str, Any], Any]:
    """Return the model of transformers, its keyword arguments with labels, for its own loss, and the labels."""
    own = of_transformers(model)
    if isinstance(batch, Mapping):
        prepared = hugging_face.prepared(own, batch)
        labels = {} if prepared.spans else {"labels": prepared.targets}
        return own, {**batch, **labels}, prepared.targets
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        if isinstance(batch[1], Tensor) and batch[1].ndim > 1 and not batch[1].is_floating_point():
            raise InputError(
                "data: a tuple has one label for each sample, and these have several, as tokens do; pass mappings, "
                'as data=[{"input_ids": tokens}] for a language model, with "labels" where they are others'
            )
        return own, {getattr(own, "main_input_name", "input_ids"): batch[0], "labels": batch[1]}, batch[1]
    raise InputError(f"data: batches are mappings with the model's inputs and `labels`, got a {type(batch).__name__}")


def _found(own: nn.Module, labels: Any, reduction: Reduction | None) -> Known:
    if not isinstance(labels, Tensor):
        raise InputError(
            f"loss: 'auto' takes labels that are one tensor, and this {type(own).__name__} has a "
            f"{type(labels).__name__}, as for detecting objects; {_WAY_OUT}"
        )
    how = resolve("mse_loss", reduction).reduction
    kind = hugging_face.problem(own, labels)
    if kind == "classes":
        return CrossEntropy(None, hugging_face.IGNORED, 0.0, how)
    return ColumnSquaredError(how) if kind == "values" else BinaryCrossEntropy(None, None, how)


@dataclass
class ColumnSquaredError(SquaredError):
    """Represent squared error with targets (n,) for outputs (n, 1) too, as models of one number take them."""

    def terms(self, outputs: Tensor, targets: Tensor | None, class_dim: int) -> Terms:
        return super().terms(outputs, None if targets is None else _as_column(targets, outputs), class_dim)

    def reduced(self, outputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return super().reduced(outputs, _as_column(targets, outputs), reduction)


def _as_column(targets: Tensor, outputs: Tensor) -> Tensor:
    return targets.unsqueeze(-1) if outputs.shape == (*targets.shape, 1) else targets


def _own_loss(model: nn.Module, own: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Return the loss that the model computes, and restore its configuration, which it changes by the labels."""
    config: Any = own.config
    before, returned = {**vars(config)}, None
    try:
        returned = model(**inputs, return_dict=True)
    except Exception as error:
        interrupts.pass_on(error)
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"loss: 'auto' is what {type(own).__name__} computes of its labels, and called with "
            f"{data.description(inputs)} it raised {type(error).__name__}: {error}; {_WAY_OUT}"
        ) from error
    finally:
        vars(config).clear()
        vars(config).update(before)
    loss = getattr(returned, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InputError(
            f"loss: {type(own).__name__} computes no loss of its labels (has it a head for a task?); {_WAY_OUT}"
        )
    return float(loss)


def _check(
    model: nn.Module, wanted: float, loss: Loss, arranged: Callable[[], tuple[Tensor, Any]], items: Any = None
) -> None:
    """Raise if the loss of the outputs and targets that ``arranged`` returns differs from the model's own."""
    name = type(hugging_face.inner(model)).__name__
    try:
        outputs, targets = arranged()
        weight = risk.weight(outputs, targets, loss, 0) if items is None else float(items)
        terms = float(loss.value(outputs, targets))
    except InputError as error:
        raise InputError(
            f"loss: 'auto' knows cross-entropy, squared error and binary cross-entropy of a model's logits, and the "
            f"labels of this {name} are not theirs ({error}); {_WAY_OUT}"
        ) from error
    found = terms / weight if weight else math.nan
    rtol = max(_RTOL, 8 * torch.finfo(outputs.dtype).eps)
    if not math.isnan(wanted) and not math.isclose(found, wanted, rel_tol=rtol, abs_tol=rtol):
        raise InputError(
            f"loss: {name} has a loss of its own, {wanted:.6g} on the first samples, where "
            f"{type(loss).__name__} of its outputs is {found:.6g}: it adds something (the balance of experts), weighs "
            f"its terms, or has its labels at other positions; {_WAY_OUT}"
        )
