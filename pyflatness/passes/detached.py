"""Find whether a model's outputs depend on what its forward pass took out of autograd's graph.

Autograd takes what ``detach``, ``.data``, ``torch.no_grad`` or a Python number gives as constant, and no graph shows
that it was not. So the forward pass is watched: a tensor that is computed from tensors with a graph, and has none
itself, is followed through all operations of torch to the outputs. It is followed by its memory, so that views of it,
tensors that it is written to and parameters that are made of it are followed too. Comparisons and indices have no
derivative to miss. What becomes a number or an array of NumPy's cannot be followed, nor can what TorchScript does be
seen, and both count.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch, _len_torch_function_stack
from torch.overrides import TorchFunctionMode

TAKEN_AS_CONSTANT = (
    "the model's outputs may depend on tensors that its forward pass takes out of autograd's graph (detach, .data, "
    "torch.no_grad, item, numpy, or anything in TorchScript, which cannot be watched): derivatives take these as "
    "constant, and are not those of the function it computes"
)

TWICE_WRONG = (
    "the model calls torch.logcumsumexp, whose second derivative torch gets wrong where a gradient that reaches it is "
    "0 (2.13): where all of them are nonzero this value is right"
)

_WITHOUT_VALUES = {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
_WITHOUT_VALUES |= {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "new_empty_strided"}
_AS_ANOTHER = {"to", "type_as", "view_as", "reshape_as", "expand_as"}  # whose values are not read
_OUT_OF_TORCH = {"item", "__float__", "tolist", "numpy", "__array__", "__dlpack__"}


class Detached(TorchFunctionMode):
    """Watch one forward pass inside; see :meth:`doubts`."""

    def __init__(self) -> None:
        super().__init__()
        self._below = _len_torch_function_stack()
        self._held: dict[int, Tensor] = {}  # by id; the tensors are kept so that ids and memory stay theirs
        # Memory of these; false where tensors with a graph share it, so that it is held for those without one alone.
        self._memory: dict[int, bool] = {}
        self._recording = True  # what the model's own code has set the grad mode to
        self._is_lost = False  # whether such a tensor, or one with a graph, became a number or an array
        self._script = _last_script()
        self._is_twice_wrong = False

    def __exit__(self, *exception: Any) -> None:
        if _len_torch_function_stack() > self._below:  # torch takes a mode off while it is asked; Ctrl-C can come then
            super().__exit__(*exception)

    def doubts(self, outputs: Tensor) -> list[str]:
        """Return why derivatives of the outputs may not be those of what was computed."""
        scripted = torch._C._last_executed_optimized_graph() is not self._script
        found = {
            TAKEN_AS_CONSTANT: self._is_lost or self._is_held(outputs) or scripted,
            TWICE_WRONG: self._is_twice_wrong,
        }
        return [doubt for doubt, holds in found.items() if holds]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        had_graph = name == "detach_" and any(tensor.requires_grad for tensor in _tensors(args))
        result = func(*args, **kwargs)
        self._is_twice_wrong |= name == "logcumsumexp"
        if name == "_set_grad_enabled":
            self._recording = args[0]
        elif name in _OUT_OF_TORCH and args[0].is_floating_point():
            self._is_lost |= args[0].requires_grad or self._is_held(args[0])
        elif name in ("__setitem__", "__set__"):  # of entries, of ``.data``
            self._follow(name, [*_tensors(args)], [*_tensors(args[:1])])
        elif isinstance(result, (Tensor, tuple, list)):
            read = args[:1] if name in _AS_ANOTHER else (args, kwargs)
            self._follow(name, [*_tensors(read)], [*_tensors(result)], had_graph=had_graph)
        return result

    def _follow(self, name: str, inputs: list[Tensor], results: list[Tensor], *, had_graph: bool = False) -> None:
        depends = bool(self._held) and any(map(self._is_held, inputs))
        if not (depends or had_graph or any(tensor.requires_grad for tensor in inputs)):
            return
        if name in _WITHOUT_VALUES:
            return
        for tensor in results:
            if tensor.is_floating_point() and (depends or self._is_cut(tensor)):
                self._hold(tensor, inputs)

    def _hold(self, tensor: Tensor, inputs: Sequence[Tensor]) -> None:
        """Follow a tensor from here on, and what shares its memory.

        An alias of a tensor with a graph shares it with that: it is another's values without their graph. An alias of a
        leaf, a parameter of the model's as a rule, is followed by itself: the leaf has no graph either.
        """
        self._held[id(tensor)] = tensor
        memory = _memory(tensor)
        of = [given for given in inputs if given is not tensor and given.requires_grad and _memory(given) == memory]
        if not of:
            self._memory[memory] = True
        elif not all(given.is_leaf for given in of):
            self._memory.setdefault(memory, False)

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
        if self._held.get(id(tensor)) is tensor:
            return True
        whole = self._memory.get(_memory(tensor))
        return whole is not None and (whole or tensor.is_leaf)


def _memory(tensor: Tensor) -> int:
    """Return what tensors that share memory have in common."""
    try:
        memory: int = tensor.untyped_storage()._cdata
        return memory
    except NotImplementedError:  # it is sparse, say
        return id(tensor)


def _last_script() -> Any:
    """Return what torch has noted as the last run of TorchScript in this thread; a run makes it another one."""
    if torch._C._last_executed_optimized_graph() is not None:
        _nothing()(0)  # the next run may be of the same code
    return torch._C._last_executed_optimized_graph()


@functools.cache
def _nothing() -> Any:
    """Return a script that returns the number that it is given."""
    return torch._C._create_function_from_graph("nothing", torch._C.parse_ir("graph(%x : int):\n  return (%x)"))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments or results, as they are below ``torch.func``'s transformations."""
    if isinstance(value, Tensor):
        while _functorch.is_functorch_wrapped_tensor(value):
            value = _functorch.get_unwrapped(value)
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
