"""Keep a layer's call in the user's own forward pass: its input, its weight, and where its output is.

Hooks on the model say when a forward pass begins and ends, so that what activation checkpointing computes again in a
backward pass is not kept.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import parametrize

from .. import private
from ..errors import InputError
from ..model import data, layers, state
from ..model.calling import version
from ..passes import linearity
from ..passes.batch_layout import Layout, mixed
from ..passes.dry_run import layouts_of, narrow
from ..passes.recorder import RecordedCall, Recorder, with_own_history
from ..private import untraced

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def not_compiled(hook: _Hook) -> _Hook:
    """Return a hook that torch.compile does not trace."""
    return cast("_Hook", untraced(hook))


class Contents:
    """Detect whether tensors still hold the values that they had when this was made.

    Version counters miss the steps of fused optimisers, and parameters that FSDP gathers anew. Norms show both, to the
    last bit.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._norms = self._now()

    def _now(self) -> list[Tensor]:
        return [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64) for tensor in self._tensors]

    def changed(self) -> bool:
        """Return whether any of them holds something else."""
        pairs = zip(self._norms, self._now(), strict=True)
        return not all(torch.allclose(before, now, 0, 0, equal_nan=True) for before, now in pairs)


class LayerCalls:
    """Hook a model and one of its layers, and keep the layer's calls of the last forward pass with a graph.

    The hooks of a copied model keep no calls.
    """

    def __init__(self, name: str, layer: nn.Module | None) -> None:
        self.name, self._layer = name, layer
        self._calls: list[RecordedCall] = []
        self._weight: Tensor | None = None  # the effective one of the last call, of the shape that the layer keeps
        self._version, self._samples, self._running = 0, -1, False  # of the weight's contents then; of the batch
        self.contents = Contents([])  # of the parameters that the weight is made of
        self._layout: Layout | None = None
        self._handles: list[Any] = []
        self._cached = contextlib.ExitStack()

    @property
    def layer(self) -> nn.Module:
        """Return the layer."""
        assert self._layer is not None
        return self._layer

    def hook(self, model: nn.Module) -> None:
        """Hook the user's own module, without wrappers, and the layer.

        A layer may be the model itself: its call is kept between the model's first hook and its last.
        """
        layer = self.layer
        self._handles += [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            layer.register_forward_hook(self._keep, with_kwargs=True, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        if parametrize.is_parametrized(layer):  # its weight is made anew whenever it is asked for
            self._handles.append(layer.register_forward_pre_hook(self._enter))
            self._handles.append(layer.register_forward_hook(self._leave, always_call=True))

    def last(self, outputs: Tensor) -> tuple[RecordedCall, Tensor]:
        """Return the layer's only call in the last forward pass, and its weight then."""
        name, calls, weight = f"layer {self.name!r}", self._calls, self._weight
        if not any(parameter.requires_grad for own, parameter in self.layer.named_parameters() if own != "bias"):
            raise InputError(f"{name} is frozen: its weight does not require a gradient; choose another layer")
        if not outputs.requires_grad:
            raise InputError(
                "outputs: they have no graph (detached, or of a forward pass under torch.no_grad()); pass them as the "
                "model returned them in training"
            )
        if not calls or weight is None:
            raise InputError(
                f"{name} did not run in the last forward pass with gradients: call the model itself, and then the "
                "penalty, with no pass under torch.no_grad() between them (hooks do not run where a part of the model "
                "is called, or in code that torch.compile made before)"
            )
        if len(calls) > 1:
            raise InputError(
                f"{name} ran {len(calls)} times in the forward pass, and FlatnessPenalty is for one call; choose "
                "another layer"
            )
        if version(calls[0].inputs) != calls[0].version:
            raise InputError(f"{name}: its input was modified in place after it ran; leave that input as it is")
        if version(weight) != self._version:
            raise self._modified()
        layers.check_dtype(f"{name}: weight", weight.dtype)
        return calls[0], weight

    def check_contents(self, contents: "Contents") -> None:
        """Raise if the layer's parameters, which are gathered now, do not hold what they did in a forward pass."""
        if contents.changed():
            raise self._modified()

    def _modified(self) -> InputError:
        return InputError(
            f"layer {self.name!r}: its weight was modified in place after the forward pass; call the penalty, and go "
            "backward, before optimizer.step(), or make another forward pass"
        )

    def samples_of(self, outputs: Tensor) -> int:
        """Return the number of samples of the batch from the model's input, since outputs may be flattened."""
        samples = self._samples
        return samples if samples > 0 and len(outputs) % samples == 0 else len(outputs)

    def laid_out(self, model: nn.Module, outputs: Tensor) -> Layout:
        """Return the batch layout of the layer's output, which the first batch with several samples shows."""
        call, samples = self._calls[0], self.samples_of(outputs)
        if self._layout is None and samples > 1:
            self._layout = Layout() if _couples_samples(model) else self._found(call, outputs, samples)
        layout = self._layout or Layout()
        if not layout.fits(call.output, samples):
            raise InputError(
                f"layer {self.name!r}: its output {tuple(call.output.shape)} does not have the {samples} samples of "
                f"the batch in dimension {layout.dim}"
            )
        return layout

    def _found(self, call: RecordedCall, outputs: Tensor, samples: int) -> Layout:
        recorder = Recorder({self.name: self.layer})
        recorder.calls[self.name] = [call]
        layouts = layouts_of(recorder, samples)
        if not layouts[self.name]:
            raise mixed(self.name, call.output.shape, samples)
        return narrow(outputs, linearity.users_of(outputs), recorder, layouts, samples)[self.name][0]

    def __reduce__(self) -> Any:
        return _unused, ()

    def remove(self) -> None:
        """Take the hooks away and forget the calls."""
        try:
            self._take_off()
        finally:  # once more, where an interrupt cut that off
            self._take_off()

    def _take_off(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()
        self._forget()

    def _forget(self) -> None:
        self._calls, self._weight, self.contents = [], None, Contents([])

    @not_compiled
    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if state.is_measuring():  # the user's own pass is still the last one
            return
        self._forget()
        self._running = self._layer is not None and torch.is_grad_enabled()
        self._samples = data.size((args, kwargs))

    @not_compiled
    def _end(self, *_: Any) -> None:
        self._running = False

    @not_compiled
    def _enter(self, *_: Any) -> None:
        self._cached.enter_context(parametrize.cached())

    @not_compiled
    def _leave(self, *_: Any) -> None:
        self._cached.close()

    @not_compiled
    def _keep(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        kind = layers.kind_of(layer)
        inputs = kind.inputs_of(args, kwargs) if self._running else None
        if inputs is None or not isinstance(output, Tensor) or not output.requires_grad:
            return None
        own = with_own_history(output)
        shape = torch.empty_like(own, device="meta", requires_grad=False)
        weight = self._weight = layer.weight
        self._version = version(weight)
        self.contents = Contents([parameter for own, parameter in layer.named_parameters() if own != "bias"])
        self._calls.append(RecordedCall(inputs, version(inputs), get_gradient_edge(own), None, shape, kind))
        return None if own is output else own


@contextlib.contextmanager
def graph_as_recorded() -> Iterator[None]:
    """Turn torch's errors for a graph that is gone, or was modified in place, into ones that say what to do."""
    try:
        yield
    except RuntimeError as error:
        if "backward through the graph a second time" in str(error):
            raise InputError(
                "outputs: a backward pass has freed their graph; call the penalty before backward() and add it to the "
                "loss, or keep the graph by backward(retain_graph=True)"
            ) from error
        if "modified by an inplace operation" in str(error):
            raise InputError(
                "outputs: a weight or another tensor that the forward pass used was modified in place after it; call "
                f"the penalty before optimizer.step(), or make another forward pass ({error})"
            ) from error
        raise


def _unused() -> LayerCalls:
    """Return calls without a layer, for the hooks of a copied model."""
    return LayerCalls("", None)


def _couples_samples(model: nn.Module) -> bool:
    """Return whether a BatchNorm normalises by the batch, so that every sample's output depends on all of them."""
    return any(
        isinstance(module, private.BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )
