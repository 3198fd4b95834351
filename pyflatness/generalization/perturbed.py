"""Run a model whose layer gives z + s Δz(φ) in the place of z: its features or weight vary along a direction."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import interrupts
from ..contractions import promoted
from ..errors import InputError
from ..model import calling, layers, uses
from .noise import orthonormal

Change = Callable[[Tensor, Tensor], Tensor]
"""The layer's input φ and its output -> Δz, of the shape of the layer's output."""


class Perturbed:
    """Run a model with one of its layers perturbed.

    At a head, where the outputs are a view of z, the model runs once a batch, and its outputs are displaced.

    Args:
        model: inside :func:`.state.observing`.
        name: the layer.
        forward: see :func:`.calling.run`.
        head: whether the layer was found to be the head.
    """

    def __init__(self, model: nn.Module, name: str, forward: calling.Forward | None, *, head: bool) -> None:
        self._model, self._name, self._forward, self._head = model, name, forward, head
        self.layer = uses.layer(model, name)
        layers.check_measurable(name, self.layer)
        if not layers.kind_of(self.layer).has_input:
            raise InputError(
                f"layer {name!r} is of type {type(self.layer).__name__}: there is no feature vector in front of it to "
                "perturb; choose a linear layer or a convolution"
            )
        self._batch: Any = None
        self._call: calling.Call | None = None  # of a layer that was called once

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Return the unperturbed model's outputs and targets for a batch, which later calls perturb.

        Raises:
            InputError: the layer did not run.
        """
        with calling.Calls({self._name: self.layer}) as calls, self._attached():
            outputs, targets = calling.run(self._model, batch, self._forward)
            if self._name not in calls.last:
                raise layers.did_not_run([self._name], {self._name: self.layer})
            call = calls.last[self._name]
            single = calls.count[self._name] == 1 and calling.version(call.inputs) == call.versions[0]
            self._call = call if single else None
            self._at_head = self._head and single and not call.changed()
        self._batch, self._outputs = batch, outputs
        return outputs, targets

    def inputs(self) -> Tensor:
        """Return φ of the batch, of a layer that is called once.

        Raises:
            InputError: it is not, or its input is modified in place.
        """
        if self._call is None:
            raise InputError(
                f"layer {self._name!r} runs several times in one forward pass, or its input is modified in place: "
                "there is no one set of features to put noise on"
            )
        return self._call.inputs.detach()

    def displaced(self, change: Change, scales: Sequence[float]) -> Iterator[Tensor]:
        """Yield outputs of the batch at z + s Δz for each s."""
        call = self._call
        delta = None if call is None else change(call.inputs.detach(), call.output)
        shift = None if delta is None else self._of_outputs(delta)
        for scale in scales:
            interrupts.check()
            if shift is not None:
                yield self._outputs.double() + scale * shift
                continue
            with calling.dry_run(), self._attached(), _adding(self.layer, _scaled(change, delta, scale)):
                outputs, _ = calling.run(self._model, self._batch, self._forward)
            yield outputs

    def _attached(self) -> contextlib.AbstractContextManager[None]:
        return uses.attached({self._name: self.layer})

    def _of_outputs(self, delta: Tensor) -> Tensor | None:
        """Return Δz as a direction of the model's outputs, where these are a view of z; float64."""
        assert self._call is not None
        z, outputs = self._call.output, self._outputs
        if (
            not self._at_head
            or outputs.untyped_storage()._cdata != z.untyped_storage()._cdata
            or outputs.dtype != z.dtype
        ):
            return None
        like_z = torch.empty_strided(z.shape, z.stride(), dtype=torch.float64, device=z.device)
        like_z.copy_(delta)
        return like_z.as_strided(outputs.shape, outputs.stride(), outputs.storage_offset() - z.storage_offset())


def _scaled(change: Change, known: Tensor | None, scale: float) -> Change:
    return lambda inputs, output: scale * (change(inputs, output) if known is None else known)


@contextlib.contextmanager
def _adding(layer: nn.Module, addition: Change) -> Iterator[None]:
    """Add something that is made of the layer's input and output to its output, inside."""

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        inputs = args[0] if args else kwargs["input"]
        return (promoted(output) + addition(inputs, output)).to(output.dtype)

    handle = layer.register_forward_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def by_weight(layer: nn.Module, weight: Tensor) -> Change:
    """Return the change Δz = Δw φ for a tensor of the shape of the layer's weight."""
    return lambda inputs, output: layers.affine(layer, inputs.to(weight.dtype), weight, None, output)


class Turns:
    """Draw wA for random A, Haar on O(m), independent for each group of a convolution.

    With w = Rᵀ Q, Q of orthonormal rows, wA = Rᵀ (QA), and QA is a set of the first rows of such a matrix again: min(d,
    m) rows are drawn, not m.
    """

    def __init__(self, layer: nn.Module, generator: torch.Generator) -> None:
        matrix, _ = layers.matrix(layer)
        groups = layers.groups(layer)
        parts = promoted(matrix).unflatten(0, (groups, -1))
        self._left = torch.linalg.qr(parts.transpose(1, 2)).R.transpose(1, 2)  # (groups, d / groups, rows)
        self._layer, self._generator, self.features = layer, generator, matrix.shape[1]

    def draw(self) -> Tensor:
        """Return a draw of wA, as a tensor of the shape of the layer's weight."""
        groups, _, rows = self._left.shape
        turned = self._left @ orthonormal(groups, rows, self.features, self._generator, self._left)
        return layers.as_weight(self._layer, turned.flatten(0, 1))
