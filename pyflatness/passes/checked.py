"""Call the user's forward pass as all public calls do, and check what every value relies on.

A value is of one function of a sample, and of a loss of that function's outputs. So a forward pass must not draw random
numbers that matter, outputs must not change with the batch that a sample is in, and the loss must not depend on the
parameters by another way. All are looked at where batches are run anyway: the first costs the comparison of two states
of generators a batch (and a second pass where they differ), the second a pass of two samples a call, where no few
samples were looked at before, and the third, for a loss that is a callable, such a pass and one evaluation of it. A
pass whose graph will be differentiated is watched for what it detaches, see :mod:`.detached`.
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import FlatnessError, InputError
from ..losses import Loss, remarks
from ..losses.closure import REFUSAL, depends_on
from ..messages import IN_TRAINING, is_out_of_memory
from ..model import calling, data, state
from ..model.generators import Randomness, equal, outside
from ..model.outputs import single
from .detached import Detached
from .independence import Decisions, agree, check_each_alone, two_alone

_CALL = "_pyflatness_call"  # an attribute of what a forward pass raised: what was called, and of which parameters
GIVEN_COPIES = "the model changes its inputs in place, so that it was given copies of them"
_LOOKS = 3  # passes of few samples that are watched for decisions by values
_ALONE = 32  # samples of a batch that run each by itself where there are some
_ROUNDING = 8  # units of the outputs' rounding that two forward passes of the same batch may differ by


class Checked:
    """Call the user's ``forward``, or the model itself, and check what comes of it.

    Args:
        model: inside :func:`.state.observing`.
        loss: the user's.
        forward: the user's; see :func:`.calling.run`.
        random: what the model may draw from.
    """

    def __init__(self, model: nn.Module, loss: Loss, forward: calling.Forward | None, random: Randomness) -> None:
        self._forward, self._loss, self._random = forward, loss, random
        self.by_user = forward is not None  # whether the user's own forward says what of a batch are targets
        self._parameters = [p for module in model.modules() for p in module._parameters.values() if p is not None]
        self._changes_inputs: bool | None = None  # whether the model does so in place; not known before it ran
        self._looks = _LOOKS  # that are left
        self._batches = 0  # that went through the model to be measured
        self.decides = False  # whether something is decided by values, see :class:`.Decisions`
        self._is_first = True  # whether no batch was run yet, but to find something out
        self._fewest = math.inf  # samples that were run to find something out
        self.notes: tuple[str, ...] | None = None  # of an estimate; known once a batch went through
        self.doubts: tuple[str, ...] = ()  # why derivatives may not be those of what the model computes
        self._loss_is_open = not loss.known  # whether it may depend on more than the outputs

    @property
    def is_users(self) -> bool:
        """Return whether a function of the user's calls the model."""
        return self._forward is not None

    def compare_by_itself(self) -> None:
        """Have the next batch compared with two of its samples alone: no one compares it with what was run so far."""
        self._fewest = math.inf

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """See :data:`.calling.Forward`.

        Raises:
            InputError: random numbers that change the outputs; outputs that change with the batch that a sample is in;
                a loss that depends on the parameters by another way.
        """
        if calling.is_dry_run():
            outputs, targets = self._run(model, batch)
            self._fewest = min(self._fewest, data.size(batch))
        else:
            before, others = self._random.states(), outside() if self._is_first else None
            outputs, targets = self._watched(model, batch) if torch.is_grad_enabled() else self._run(model, batch)
            if self._random.moved(before) or (others is not None and not equal(others, outside())):
                self._check_repeated(model, batch, outputs)
            if self._is_first and self._fewest >= data.size(batch):
                self._check_independent(model, batch, outputs)
            self._is_first = False
            if self.decides:
                self._check_decisions(model, batch, outputs)
            if self.notes is None and not outputs.is_meta and isinstance(targets, Tensor):
                self.notes = (GIVEN_COPIES,) if self._changes_inputs else ()
                with contextlib.suppress(Exception):  # what does not go together is an error of the measure
                    self.notes += remarks.of(self._loss, outputs, targets, self._parameters)
        if self._loss_is_open and not outputs.is_meta and isinstance(targets, Tensor):
            self._check_loss(model, batch)
        return outputs, targets

    def _tensor(self, returned: Any) -> Tensor:
        """Return the outputs in what the model returned: side by side if there are several and the loss takes all."""
        found = single(returned)
        return self._loss.side_by_side(returned) if found is None else found

    def _call(self, batch: Any) -> str:
        """Return in words what was called, and on what."""
        if self._forward is not None:
            return f"forward(model, batch) on the batch {data.described(batch)}"
        if isinstance(batch, Mapping):
            keywords = {key: part for key, part in batch.items() if key != "labels"}
            return f"model(**inputs) on the inputs {data.described(keywords)} (`labels` are the targets)"
        return f"model(inputs) on the inputs {data.described(batch[0])}"

    def _kinds(self) -> str:
        """Return in words what the parameters are."""
        kinds = {f"{parameter.dtype} on {parameter.device}" for parameter in self._parameters}
        return ", ".join(sorted(kinds)).replace("torch.", "")

    def _run(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Run a batch, or a copy of it for a model that may change its inputs in place; the first pass shows whether.

        Raises:
            InputError: a later pass is the first to change them.
        """
        given = batch if self._changes_inputs is False else data.copied(batch)
        before = _versions(given)
        if self._looks and calling.is_dry_run():
            self._looks -= 1
            with Decisions() as decisions:
                result = self._run_on(model, given)
            self.decides |= decisions.seen
        else:
            result = self._run_on(model, given)
        if self._changes_inputs is None:
            self._changes_inputs = _versions(given) != before or not data.same(batch, given)
        elif given is batch and _versions(batch) != before:
            raise InputError(
                "model: it changes its inputs in place on the batch "
                f"{data.described(batch)}, which is changed now, and did not on those before; have it work on a copy, "
                "x = x.clone()"
            )
        return result

    def _run_on(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        try:
            return calling.run(model, batch, self._forward, self._tensor)
        except FlatnessError:
            raise
        except StopIteration as error:  # by itself it would be an error of a generator's, or the end of a loop
            stopped = RuntimeError("the forward pass raised StopIteration")
            setattr(stopped, _CALL, (self._call(batch), self._kinds()))
            raise stopped from error
        except Exception as error:
            if not is_out_of_memory(error):
                setattr(error, _CALL, (self._call(batch), self._kinds()))
            raise

    def _watched(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        with Detached() as detached:
            outputs, targets = self._run(model, batch)
        self.doubts = tuple(dict.fromkeys([*self.doubts, *detached.doubts(outputs)]))
        return outputs, targets

    def _check_repeated(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if a second forward pass of a batch, in which random numbers were drawn, has other outputs."""
        outputs = outputs.detach()
        if not outputs.is_meta:
            with calling.aside(), torch.no_grad(), self._random.watched():
                again, _ = self._run(model, batch)
            if agree(
                outputs, again, _ROUNDING * torch.finfo(outputs.dtype).eps if outputs.is_floating_point() else 0.0
            ):
                return
        mode = f"it {IN_TRAINING}, and " if model.training else ""
        raise InputError(
            f"model: it draws random numbers in its forward pass: on the same batch, {data.described(batch)}, a second "
            f"pass has other outputs, so that a value would be one of many; {mode}switch off what draws them (dropout "
            "that does not ask for self.training, added noise, sampling), or have it draw the same at every call"
        )

    def _check_independent(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if two samples of a batch have other outputs without the others."""
        if not (outputs.is_meta or outputs.ndim == 0 or len(outputs) % data.size(batch)):
            with calling.aside():
                check = two_alone(batch, functools.partial(self._run, model))
            check(outputs)

    def _check_decisions(self, model: nn.Module, batch: Any, outputs: Tensor) -> None:
        """Raise if samples of a batch have other outputs by themselves: many of some batches, one of each other."""
        samples, self._batches = data.size(batch), self._batches + 1
        if outputs.is_meta or outputs.ndim == 0 or samples < 2 or len(outputs) % samples:
            return
        is_power_of_two = self._batches & (self._batches - 1) == 0
        count = min(samples, _ALONE)
        places = [place * samples // count for place in range(count)] if is_power_of_two else [self._batches % samples]
        with calling.aside():
            check_each_alone(batch, functools.partial(self._run, model), outputs, places)

    def _check_loss(self, model: nn.Module, batch: Any) -> None:
        """Raise if the loss depends on the model's parameters otherwise than by the outputs; once."""
        held = {*self._parameters, *model.parameters()}  # others where the model is run functionally
        # Of hooks the innermost are called, so that what this graph keeps is not counted as the sweep's by a dry run. A
        # node that keeps its own output as it is would be held by it, in a cycle that nothing frees.
        uncounted = functools.partial(
            torch.autograd.graph.saved_tensors_hooks, lambda kept: kept.detach(), lambda kept: kept
        )
        for part in (data.first(batch, min(2, data.size(batch))), batch):
            with contextlib.suppress(Exception), state.made_anew(model), calling.aside(), uncounted():
                found = depends_on(self._loss, functools.partial(self._run, model, part), held)
                break
        else:  # a loss that does not take these; the measure says better what is wrong
            return
        self._loss_is_open = False
        if found:
            raise InputError(REFUSAL)


def _versions(batch: Any) -> list[int]:
    """Return how often each tensor of a batch was changed in place."""
    return [calling.version(part) for part in data.leaves(batch) if isinstance(part, Tensor)]


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Let an error that the user's forward pass raises inside, and that nothing catches, say what was called.

    Inner code sees what was raised: a batch that cannot be cut, say, goes through the model whole then.

    Raises:
        InputError: such an error; what was raised is the cause.
    """
    try:
        yield
    except Exception as error:
        if not hasattr(error, _CALL):
            raise
        raised = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
        call, parameters_are = getattr(error, _CALL)
        raise InputError(
            f"model: {call} raised {type(raised).__name__}: {raised}; pass data that fit the model (its parameters are "
            f"{parameters_are}), or forward=, a function (model, batch) -> (outputs, targets) that calls it as it "
            "wants to be called"
        ) from raised
