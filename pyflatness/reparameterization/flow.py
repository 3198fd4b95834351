"""Follow the outputs of layers through a model, entry by entry, to find what a factor on them would multiply.

A label gives for each entry of a tensor the row of a layer that it comes from: if that row's output were multiplied by
λ > 0, so would be the entry. Labels pass through ReLU and LeakyReLU, pooling, reshapes and eval BatchNorm (whose own
parameters can be rescaled).

Labels are followed in a run on real data, below autograd. So the model may contain any Python code, which symbolic
tracing would not accept, and every operation of torch on a labelled tensor is seen, also ``detach``, comparisons and
writes into other tensors. What cannot be seen (a detour through numpy) is left to a comparison of outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import private
from ..errors import InputError
from ..model import kinds, layers, uses

_ELEMENTWISE = {"relu", "leaky_relu", "_prelu_kernel", "abs", "neg", "clone", "detach", "alias", "_to_copy"}
_VIEWS = {"view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze", "permute", "transpose", "t", "expand"}
_VIEWS |= {"slice", "select", "split", "split_with_sizes", "chunk", "unbind"}
_RESHAPES = {"view", "_unsafe_view", "_reshape_alias"}
_PRODUCTS = {"mul", "div"}
_REDUCTIONS = {"mean", "sum", "amax"}
_POOLS = {  # the number of last dimensions that each pools over
    "max_pool1d": 1,
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "avg_pool2d": 2,
    "avg_pool3d": 3,
    "_adaptive_avg_pool2d": 2,
    "_adaptive_avg_pool3d": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
}


@dataclass(frozen=True)
class Label:
    """Hold where the entries of a tensor come from: ``rows`` of the layer ``source``, in the tensor's shape."""

    source: str
    rows: Tensor

    def channels(self, dim: int) -> Tensor | None:
        """Return the row of each index along ``dim``, (channels,); None if entries of one index differ in it."""
        rows = self.rows.movedim(dim, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        return rows[0] if bool((rows == rows[0]).all()) else None


Elsewhere = Callable[[str, str, str], None]
"""(source, operation, name of its module): called where a labelled tensor enters an operation that keeps no label."""


class Flow(private.TorchDispatchMode):
    """Follow labels through one run of a model on a few samples, within the context.

    ``sources`` has the number of labels of each layer's rows, and ``arrivals`` the label of the input of each call of a
    layer. ``elsewhere`` is called where a label ends and no layer receives it. Without ``through`` no operation passes
    labels on.
    """

    def __init__(
        self, model: nn.Module, sources: Mapping[str, int], elsewhere: Elsewhere, *, through: bool = True
    ) -> None:
        super().__init__()
        self.arrivals: dict[str, list[Label | None]] = {}
        self._model, self._sources, self._elsewhere, self._through = model, sources, elsewhere, through
        self._labels: dict[int, tuple[Tensor, Label]] = {}  # by id; tensors are kept so that ids are not reused
        self._running: list[str] = []
        self._inside = 0  # depth of calls of layers, whose inside is not followed
        self._handles: list[Any] = []

    def __enter__(self) -> "Flow":
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*exception)

    def finish(self, outputs: Tensor) -> None:
        """Report a label of the model's outputs, and forget all labels."""
        label = self._label(outputs)
        if label is not None:
            self._elsewhere(label.source, "output", "")
        self._labels.clear()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [] if self._inside else private.tree_leaves((args, kwargs))
        held = [label for leaf in leaves if (label := self._label(leaf))]
        if held:
            found = self._carried(func, args, kwargs or {}, result) if self._through and len(held) == 1 else None
            if found is None:
                place = self._running[-1] if self._running else ""
                self._elsewhere(held[0].source, func.overloadpacket.__name__, place)
            else:
                for tensor, rows in found:
                    self._labels[id(tensor)] = tensor, Label(held[0].source, rows)
        return result

    def _carried(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> list[tuple[Tensor, Tensor]] | None:
        """Return the labelled tensors in an operation's result with their rows; None if factors do not pass through."""
        name, label = func.overloadpacket.__name__, self._label(args[0])
        if label is None:  # the labelled tensor is not the first argument
            return self._carried(func, args[1::-1], kwargs, result) if name == "mul" and self._label(args[1]) else None
        rows = label.rows
        if name.rstrip("_") in _ELEMENTWISE:
            return [(result, rows)]
        if name.rstrip("_") in _PRODUCTS and result.shape == rows.shape and "rounding_mode" not in kwargs:
            return [(result, rows)]
        if name in _VIEWS and func._overloadname != "dtype":
            views = rows.reshape(result.shape) if name in _RESHAPES else func(rows, *args[1:], **kwargs)
            return list(zip(private.tree_leaves(result), private.tree_leaves(views), strict=True))
        if name in _REDUCTIONS:
            dims = args[1] if len(args) > 1 and args[1] else [*range(rows.ndim)]
            low, high = rows.amin(dims), rows.amax(dims)
            return [(result, low.reshape(result.shape))] if bool((low == high).all()) else None
        last = _POOLS.get(name, 0)
        if name == "constant_pad_nd" and (len(args) < 3 or args[2] == 0):
            last = len(args[1]) // 2
        if last:
            first = rows.flatten(-last)[..., :1].unflatten(-1, (1,) * last)
            pooled = private.tree_leaves(result)[0]
            return [(pooled, first.expand(pooled.shape))] if bool((rows == first).all()) else None
        return None

    def _label(self, tensor: Any) -> Label | None:
        held = self._labels.get(id(tensor))
        return held[1] if held is not None and held[0] is tensor else None

    def _before(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(name)
            if takes_factors(module):
                if not self._inside:
                    self.arrivals.setdefault(name, []).append(self._label(args[0] if args else kwargs.get("input")))
                self._inside += 1

        return enter

    def _after(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._running.pop()
            if not takes_factors(module):
                return
            self._inside -= 1
            if self._inside:
                return
            came = self.arrivals[name][-1]
            if name in self._sources:
                self._labels[id(output)] = output, Label(name, _rows(module, output, self._sources[name]))
            elif isinstance(module, private.BatchNorm) and came is not None and self._through:
                self._labels[id(output)] = output, came

        return leave


def takes_factors(module: nn.Module) -> bool:
    """Return whether a module's own parameters can undo factors on its inputs, or pass them on."""
    return isinstance(module, private.BatchNorm) or (kinds.is_plain(module) and layers.kind_of(module).has_input)


def _rows(module: nn.Module, output: Tensor, count: int) -> Tensor:
    dim = layers.kind_of(module).class_dim
    rows = torch.arange(count, device=output.device)
    return rows.expand(output.movedim(dim, -1).shape).movedim(-1, dim)


def obstacle(model: nn.Module, name: str, module: nn.Module) -> str:
    """Return the reason why the weight and bias of a layer cannot be changed alone; empty if they can be."""
    for what in ("weight", "bias"):
        held = getattr(module, what, None)
        if held is not None and not isinstance(module._parameters.get(what), nn.Parameter):
            return (
                f"layer {name!r}: its {what} is made by a parametrisation (or a hook); remove that first "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            )
    others = uses.ties(model, module)
    return f"layer {name!r}: its weight is tied with {', '.join(others)}, which would change with it" if others else ""


def check_plain(model: nn.Module, name: str, module: nn.Module) -> None:
    """Raise an InputError if there is an :func:`obstacle`."""
    reason = obstacle(model, name, module)
    if reason:
        raise InputError(reason)
