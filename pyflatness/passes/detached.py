"""Find whether a model's outputs depend on what its forward pass took out of autograd's graph.

Autograd takes what ``detach``, ``.data``, ``torch.no_grad`` or a Python number gives as constant, and no graph shows
that it was not. So the forward pass is watched: a tensor that is computed from tensors with a graph, and has none
itself, is followed through all operations of torch to the outputs. What becomes a number or an array of NumPy's cannot
be followed, and counts. Comparisons and indices have no derivative to miss.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode

TAKEN_AS_CONSTANT = (
    "the model's outputs may depend on tensors that its forward pass takes out of autograd's graph (detach, .data, "
    "torch.no_grad, item, numpy): derivatives take these as constant, and are not those of the function it computes"
)

_WITHOUT_VALUES = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_WITHOUT_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"}
_AS_ANOTHER = {"to", "type_as", "view_as", "reshape_as", "expand_as"}  # whose values are not read
_OUT_OF_TORCH = {"item", "__float__", "tolist", "numpy", "__array__", "__dlpack__"}


class Detached(TorchFunctionMode):
    """Watch one forward pass inside; see :meth:`reaches`."""

    def __init__(self) -> None:
        super().__init__()
        self._below = _len_torch_function_stack()
        self._held: dict[int, Tensor] = {}  # by id; the tensors are kept so that ids stay theirs
        self._recording = True  # what the model's own code has set the grad mode to
        self._left_torch = False  # whether such a tensor, or one with a graph, became a number or an array

    def __exit__(self, *exception: Any) -> None:
        if _len_torch_function_stack() > self._below:  # torch takes a mode off while it is asked; Ctrl-C can come then
            super().__exit__(*exception)

    def reaches(self, outputs: Tensor) -> bool:
        """Return whether a tensor depends on some that were taken out of the graph."""
        return self._left_torch or self._is_held(outputs)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled":
            self._recording = args[0]
        elif name in _OUT_OF_TORCH and args[0].is_floating_point():
            self._left_torch |= args[0].requires_grad or self._is_held(args[0])
        elif name in ("__setitem__", "__set__"):  # of entries, of ``.data``
            self._follow(name, [*_tensors(args)], [args[0]])
        elif isinstance(result, (Tensor, tuple, list)):
            read = args[:1] if name in _AS_ANOTHER else (args, kwargs)
            self._follow(name, [*_tensors(read)], [*_tensors(result)])
        return result

    def _follow(self, name: str, inputs: list[Tensor], results: list[Tensor]) -> None:
        depends = bool(self._held) and any(map(self._is_held, inputs))
        if not depends and not any(tensor.requires_grad for tensor in inputs):
            return
        if name in _WITHOUT_VALUES:
            return
        for tensor in results:
            if tensor.is_floating_point() and (depends or self._is_cut(tensor)):
                self._held[id(tensor)] = tensor
                if tensor._is_view() and name.endswith("_") and tensor._base is not None:
                    self._held[id(tensor._base)] = tensor._base

    def _is_cut(self, tensor: Tensor) -> bool:
        """Return whether the result of an operation on a tensor with a graph has none.

        What is written in place under ``no_grad`` keeps an older one. Inside the ``forward`` of a
        ``torch.autograd.Function`` none has: there it is not the model's code that switched the graph off, and the
        function's own derivative counts.
        """
        if torch.is_grad_enabled() or tensor.is_inference():
            return not tensor.requires_grad
        return not self._recording

    def _is_held(self, tensor: Tensor) -> bool:
        return self._held.get(id(tensor)) is tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
