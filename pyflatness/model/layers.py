"""Treat layers of all kinds as weight matrices (d, m), with inputs and cotangents in one form."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contractions import full_precision, promoted
from ..errors import InputError, NonFiniteError
from . import kinds, spread, uses, walk
from .kinds import SUPPORTED, Linear
from .uses import Use


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside ``DataParallel``, ``DistributedDataParallel`` or ``torch.compile``."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextlib.contextmanager
def parts_not_compiled(model: nn.Module) -> Iterator[None]:
    """Replace modules compiled by ``torch.compile`` by the user's own, with the user's names, inside the context."""
    compiled = [
        (module, name, part)
        for _, module in walk.named_modules(model)
        for name, part in module._modules.items()
        if part is not None and "_orig_mod" in part._modules
    ]
    for module, name, part in compiled:
        module._modules[name] = unwrap(part)
    try:
        yield
    finally:
        for module, name, part in compiled:
            module._modules[name] = part


def without_compile(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` adds to names of modules and parameters."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def kind_of(module: nn.Module) -> Linear:
    """Return a layer's kind: how it is a weight matrix."""
    kind = kinds.find(module)
    assert kind is not None, f"a {type(module).__name__} is no layer that can be measured"
    return kind


def kind_of_call(module: nn.Module) -> Linear:
    """Return the kind of a layer's current or last call."""
    return (module.called_as if isinstance(module, Use) else None) or kind_of(module)


def with_weight(module: nn.Module, weight: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a layer's forward with ``weight(w)`` in place of its own weight w, at each call."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        own, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(own, Tensor)
        return kind_of_call(module).forward(args, kwargs, weight(own), bias if isinstance(bias, Tensor) else None)

    return forward


def why_not_supported(module: nn.Module) -> str:
    """Return why a module is not a layer that can be measured, with its class."""
    kind = type(module).__name__
    base = kinds.base(module)
    if base is None:
        return f"is a {kind}; what can be measured is {SUPPORTED}"
    if kinds.obstacle(module):
        return f"is of type {kind} and {kinds.obstacle(module)}: it has no one weight matrix; choose other layers"
    return (
        f"is a {kind}, a subclass of {base.__name__} whose forward is its own, so that its output need not be W φ + "
        "b of its weight: measure another layer (an adapter's base layer, say), or, where it is that all the same, put "
        f"a plain {base.__name__} with this weight and bias in its place"
    )


def did_not_run(names: Iterable[str], modules: Mapping[str, nn.Module]) -> InputError:
    """Return the error for layers of ``modules`` that the model's forward pass does not call."""
    listed = [*names]
    reasons = {name: module.refusal for name in listed if isinstance(module := modules[name], Use) and module.refusal}
    reasons |= {name: kind.when_idle for name in listed if (kind := kinds.find(modules[name])) and kind.when_idle}
    why = "".join(f"; {name!r}: {reason}" for name, reason in reasons.items())
    return InputError(
        f"layer: {', '.join(map(repr, listed))} did not run in the model's forward pass (calls on empty tensors, or "
        f"inside of torch.func.vmap, do not count){why}"
    )


def is_convolution(module: nn.Module) -> bool:
    """Return whether a layer is a convolution, with channels before the dimensions of space."""
    kind = kinds.find(module)
    return kind is not None and kind.space > 0


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, or a subclass that computes the same."""
    return kinds.base(module) is nn.Linear and kinds.is_plain(module)


def is_pointwise(module: nn.Module) -> bool:
    """Return whether a module multiplies every position by one matrix, once: linear, or a 1 × 1 convolution."""
    kind = kinds.find(module)
    return kind is not None and kind.pointwise and kind.has_input and kinds.is_plain(module)


def feeds_another(model: nn.Module, name: str) -> bool:
    """Return whether a layer is followed by parameters in an ``nn.Sequential``, which is assumed to run as a whole."""
    module = model
    for own in name.split("."):
        if type(module).forward is nn.Sequential.forward:
            names = [*module._modules]
            behind = names[names.index(own) + 1 :]
            if any(next(module.get_submodule(key).parameters(), None) is not None for key in behind):
                return True
        module = module.get_submodule(own)
    return False


def matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the effective weight (d, m), with filters as rows, and the bias (d,) of a supported layer, detached."""
    return as_matrix(module, weight_of(module)), _bias(module)


def without_entries(module: nn.Module) -> Tensor:
    """Return a tensor in the shape of the effective weight (d, m) that uses no memory."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return as_matrix(module, torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape))


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor in the shape of the layer's weight as (d, m)."""
    return kind_of(module).as_matrix(weight)


def as_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """Return a (d, m) matrix in the shape of the layer's weight; undoes :func:`as_matrix`."""
    return kind_of(module).as_weight(matrix)


def as_called(module: nn.Module, change: Tensor) -> Tensor | None:
    """Return a tensor in a parameter's shape as the operation's view of it, once the layer ran.

    It is None if the operation's weight is not a view of the parameter.
    """
    weight, own = module.weight, _parameter(module)
    assert isinstance(weight, Tensor)
    if weight.shape == change.shape:
        return change
    if own.shape != change.shape or own.data_ptr() != weight.data_ptr():
        return None
    like = torch.empty_strided(own.shape, own.stride(), dtype=change.dtype, device=change.device).copy_(change)
    return like.as_strided(weight.shape, weight.stride())


def as_parameter(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor in the shape of the operation's weight in the parameter's shape; undoes :func:`as_called`."""
    view, own = module.weight, _parameter(module)
    assert isinstance(view, Tensor)
    if view.shape == own.shape or view.numel() != own.numel() or own.data_ptr() != view.data_ptr():
        return weight
    like = torch.empty_strided(own.shape, own.stride(), dtype=weight.dtype, device=weight.device)
    like.as_strided(view.shape, view.stride()).copy_(weight)
    return like


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the layer's unpadded input as (positions or pixels of all samples, channels), channels moved last."""
    inputs = inputs.detach().movedim(kind_of(module).class_dim, -1)
    return inputs.reshape(-1, inputs.shape[-1])


def computes(module: nn.Module, inputs: Tensor, output: Tensor, coefficients: Tensor | None = None) -> Tensor | bool:
    """Return whether an output is W φ + b of its input, in its first and last row, or along the edges.

    If entries are compared, the result is a tensor (), for which the host has not waited.
    """
    if output.is_meta or output.numel() == 0:
        return True
    kind, own = kind_of_call(module), spread.own_rows(module)
    if own is None:
        weight, bias = weight_of(module), _bias(module)
    else:
        weight, bias, start = own
        output = output.narrow(kind.class_dim, start, len(weight))
    if output.numel() == 0:
        return True
    with full_precision(inputs):
        expected, output = kind.at_ends(inputs.detach(), output.detach(), weight, coefficients)
        expected = expected.movedim(kind.class_dim, -1)
        expected = promoted(expected) + (0 if bias is None else promoted(bias))
    tolerance = max(1e-3, 8 * torch.finfo(output.dtype).eps)
    size = expected.nan_to_num(0, 0, 0).abs().amax()
    output = output.movedim(kind.class_dim, -1).to(expected.dtype)
    off = (output - expected).abs()
    return ((off <= tolerance * (expected.abs() + size)) | ~expected.isfinite()).all()


def check_measurable(name: str, module: nn.Module) -> None:
    """Raise unless the layer's weights have values of a dtype for contractions."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        raise InputError(f"layer {name!r}: its weights are on the meta device; load the model first")
    check_dtype(f"layer {name!r}: weight", weight.dtype)
    if isinstance(bias, Tensor) and bias.dtype != weight.dtype:
        raise InputError(f"layer {name!r}: weight is {weight.dtype}, bias {bias.dtype}; they must be of one dtype")


def check_finite(modules: Mapping[str, nn.Module]) -> None:
    """Raise if a layer's weight or bias has NaN or infinity in it."""
    for name, module in modules.items():
        check_finite_entries(f"layer {name!r}", *matrix(module))


def check_finite_entries(where: str, weight: Tensor, bias: Tensor | None) -> None:
    """Raise if a weight or bias has NaN or infinity in it; ``where`` names the layer."""
    for what, values in (("weight", weight), ("bias", bias)):
        if values is not None and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            raise NonFiniteError(f"{where}: its {what} has {count} entries of NaN or infinity")


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is a dtype for contractions."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"{what} is {dtype}; float16, bfloat16, float32 or float64 is wanted")


def tie_notes(model: nn.Module, layer: nn.Module) -> tuple[str, ...]:
    """Return notes for the reader of a layer's value if its weight is tied."""
    others, functions = uses.ties(model, layer), uses.elsewhere(layer)
    notes = [f"weight tied with {', '.join(others)}: derivative through this use only"] if others else []
    if functions:
        notes.append(f"weight used in {functions} outside of the layer too: derivative through the layer's calls only")
    return tuple(notes)


def _parameter(module: nn.Module) -> Tensor:
    """Return the parameter of a layer's weight, or the layer's rows of it."""
    if not isinstance(module, Use):
        assert isinstance(module.weight, Tensor)
        return module.weight
    return rows_of(module, module.source.parameter)


def rows_of(module: nn.Module, parameter: Tensor) -> Tensor:
    """Return the rows of a parameter, or of a tensor in its shape, that are a layer's weight."""
    return parameter[module.rows] if isinstance(module, Use) and module.rows is not None else parameter


def weight_of(module: nn.Module) -> Tensor:
    """Return a layer's effective weight, detached and whole."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return spread.whole(weight).detach()


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return spread.whole(bias).detach().flatten() if isinstance(bias, Tensor) else None
