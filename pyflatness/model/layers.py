"""Treat layers as weight matrices: their (d, m) matrix, inputs and cotangents in one form, whatever their kind is."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contractions import Geometry, full_precision, promoted
from ..errors import InputError, NonFiniteError
from . import kinds, spread, uses
from .kinds import SUPPORTED, Linear
from .uses import Use, besides

_IDLE = "its module is not called"


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
    """Let a model have its own modules in the place of what ``torch.compile`` made of them, inside.

    So names of layers and parameters are those that the user gave, without ``_orig_mod``.
    """
    compiled = [
        (module, name, part)
        for module in model.modules()
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
    """Return a name without what ``torch.compile`` puts into those of its modules and their parameters."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def kind_of(module: nn.Module) -> Linear:
    """Return how a layer is a weight matrix."""
    kind = kinds.find(module)
    assert kind is not None, f"a {type(module).__name__} is no layer that can be measured"
    return kind


def kind_of_call(module: nn.Module) -> Linear:
    """Return of which kind a layer's call is that is under way, or was the last one."""
    return (module.called_as if isinstance(module, Use) else None) or kind_of(module)


def with_weight(module: nn.Module, weight: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return a layer's forward with another weight in the place of its own, which that is made of at each call."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        own, bias = module.weight, getattr(module, "bias", None)
        assert isinstance(own, Tensor)
        return kind_of_call(module).forward(args, kwargs, weight(own), bias if isinstance(bias, Tensor) else None)

    return forward


def is_together(module: nn.Module) -> bool:
    """Return whether a layer is a weight in all of its uses, of which each may be of a kind of its own."""
    kind = kinds.find(module)
    return kind is not None and kind.by_weight


def bytes_by_sample(modules: Mapping[str, nn.Module]) -> int:
    """Return how much memory a change of its own of weights that are taken in all of their uses is for a sample."""
    weights = [_weight(module) for module in modules.values() if is_together(module)]
    return sum(weight.numel() * weight.element_size() for weight in weights)


def is_supported(module: nn.Module) -> bool:
    """Return whether a module is a layer of a kind that can be measured, and computes what its class says."""
    return kinds.is_plain(module)


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
    """Return the error for layers, among these modules, that the model's forward pass does not call."""
    listed = [*names]
    reasons = {name: module.refusal for name in listed if isinstance(module := modules[name], Use) and module.refusal}
    reasons |= {name: kind.when_idle for name in listed if (kind := kinds.find(modules[name])) and kind.when_idle}
    why = "".join(f"; {name!r}: {reason}" for name, reason in reasons.items())
    return InputError(
        f"layer: {', '.join(map(repr, listed))} did not run in the model's forward pass (calls on empty tensors, or "
        f"inside of torch.func.vmap, do not count){why}"
    )


def why_idle(model: nn.Module, module: nn.Module) -> str:
    """Return why a module that is a layer has no value where the forward pass was not seen to call it."""
    kind = kinds.find(module)
    if kind is not None and kind.when_idle:
        return kind.when_idle
    others = uses.ties(model, module)
    return f"{_IDLE}, and its weight is that of {', '.join(others)} too" if others else _IDLE


def is_convolution(module: nn.Module) -> bool:
    """Return whether a layer's inputs and outputs have channels in front of dimensions of space."""
    kind = kinds.find(module)
    return kind is not None and kind.space > 0


def takes_bias(module: nn.Module) -> bool:
    """Return whether a module is a layer that adds its bias, or would if it had one."""
    return kinds.is_plain(module) and not kind_of(module).tokens


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is torch's linear layer, or one that is derived from it and computes what that does."""
    return kinds.base(module) is nn.Linear and is_supported(module)


def is_pointwise(module: nn.Module) -> bool:
    """Return whether it multiplies every position by the same matrix, once: linear, or a 1 × 1 convolution."""
    return kinds.is_plain(module) and kind_of(module).pointwise and kind_of(module).has_input


def feeds_another(model: nn.Module, name: str) -> bool:
    """Return whether a layer is in an ``nn.Sequential`` with parameters behind it, which its output then goes through.

    This takes it for granted that the model calls the ``nn.Sequential`` whole.
    """
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
    """Return the effective weight (d, m), a filter to a row, and the bias (d,) of a supported layer, detached."""
    return as_matrix(module, _weight(module)), _bias(module)


def rows(module: nn.Module) -> int:
    """Return how many rows d the effective weight (d, m) has."""
    return len(without_entries(module))


def without_entries(module: nn.Module) -> Tensor:
    """Return a tensor of the form of the effective weight (d, m), which takes no memory."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return as_matrix(module, torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape))


def as_matrix(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a tensor of the shape of the layer's weight as (d, m)."""
    return kind_of(module).as_matrix(weight)


def as_weight(module: nn.Module, matrix: Tensor) -> Tensor:
    """Return a (d, m) matrix as a tensor of the shape of the layer's weight; undoes :func:`as_matrix`."""
    return kind_of(module).as_weight(matrix)


def as_called(module: nn.Module, change: Tensor) -> Tensor | None:
    """Return a tensor of a parameter's shape as the view of it that the operation has, once the layer ran.

    None: the operation has another tensor than a view of the parameter, or of the layer's rows of it.
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
    """Return a tensor of the shape that the operation's weight has in that of the parameter, or the layer's rows of it.

    It undoes :func:`as_called`, and leaves what is no view of the parameter as it is.
    """
    view, own = module.weight, _parameter(module)
    assert isinstance(view, Tensor)
    if view.shape == own.shape or view.numel() != own.numel() or own.data_ptr() != view.data_ptr():
        return weight
    like = torch.empty_strided(own.shape, own.stride(), dtype=weight.dtype, device=weight.device)
    like.as_strided(view.shape, view.stride()).copy_(weight)
    return like


def groups(module: nn.Module) -> int:
    """Return how many separate weight matrices the layer is made of."""
    return kind_of(module).groups


def geometry(module: nn.Module) -> Geometry:
    """Return which (padded) inputs a position of the layer sees."""
    return kind_of(module).geometry


def class_dim(module: nn.Module) -> int:
    """Return the dimension of the layer's output that holds its d rows: last for linear layers, 1 for convolutions."""
    return kind_of(module).class_dim


def input_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the layer's unpadded input as (positions or pixels of all samples, channels), channels moved last."""
    inputs = inputs.detach().movedim(class_dim(module), -1)
    return inputs.reshape(-1, inputs.shape[-1])


def repeats_inputs(module: nn.Module) -> bool:
    """Return whether a layer is a convolution whose padding repeats pixels of its input."""
    return kind_of(module).repeats_inputs


def apply(module: nn.Module, inputs: Tensor, like: Tensor | None = None) -> Tensor:
    """Return W φ, the layer's linear part on an input, without bias or hooks; see :func:`affine`."""
    return affine(module, inputs, _weight(module), None, like)


def affine(
    module: nn.Module, inputs: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor | None = None
) -> Tensor:
    """Return W φ + b as the layer computes it, with a given bias and weight (of the shape of the layer's).

    Where the input leaves open what size the output has, it is that of ``like``, or the layer's usual one.
    """
    return kind_of(module).affine(inputs, weight, bias, like)


def carried(module: nn.Module, delta: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return Wᵀ δ: a gradient in the layer's output carried to its unpadded input through this layer alone.

    Args:
        delta: of the shape of the layer's output.
        size: of an input, without its dimension 0.
    """
    return kind_of(module).carried(delta, size, _weight(module))


def computes(module: nn.Module, inputs: Tensor, output: Tensor, coefficients: Tensor | None = None) -> bool:
    """Return whether an output is W φ + b of its input, looked at in its first and last row.

    Of a convolution these are the positions along the edges of the first and the last image. Tokens have
    ``coefficients``, see :meth:`.kinds.Linear.coefficients`.
    """
    if output.is_meta or output.numel() == 0:
        return True
    kind, own = kind_of_call(module), spread.own_rows(module)
    if own is None:
        weight, bias = _weight(module), _bias(module)
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
    size = float(expected.nan_to_num(0, 0, 0).abs().amax())
    output = output.movedim(kind.class_dim, -1).to(expected.dtype)
    off = (output - expected).abs()
    return bool(((off <= tolerance * (expected.abs() + size)) | ~expected.isfinite()).all())


def check_measurable(name: str, module: nn.Module) -> None:
    """Raise unless the layer's weights are numbers that the contractions can take."""
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
    """Raise if the weight or bias of what is called ``where`` has NaN or infinity in it."""
    for what, values in (("weight", weight), ("bias", bias)):
        if values is not None and not bool(values.isfinite().all()):
            count = int((~values.isfinite()).sum())
            raise NonFiniteError(f"{where}: its {what} has {count} entries of NaN or infinity")


def check_dtype(what: str, dtype: torch.dtype) -> None:
    """Raise unless ``dtype`` is one that the contractions can take."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(f"{what} is {dtype}; float16, bfloat16, float32 or float64 is wanted")


def tie_notes(model: nn.Module, layer: nn.Module) -> tuple[str, ...]:
    """Return what a reader of a layer's value should know if its weight is tied."""
    others, besides_in = uses.ties(model, layer), besides.of(layer)
    notes = [f"weight tied with {', '.join(others)}: derivative through this use only"] if others else []
    if besides_in:
        notes.append(f"weight used in {besides_in} outside of the layer too: derivative through the layer's calls only")
    return tuple(notes)


def _parameter(module: nn.Module) -> Tensor:
    """Return the parameter that a layer's weight is, or the rows of it that are the layer's."""
    if not isinstance(module, Use):
        assert isinstance(module.weight, Tensor)
        return module.weight
    return module.source.parameter if module.rows is None else module.source.parameter[module.rows]


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return spread.whole(weight).detach()


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return spread.whole(bias).detach().flatten() if isinstance(bias, Tensor) else None
