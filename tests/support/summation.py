"""Stand in for the sums of a matrix library, which differ from processor to processor.

Inside of the contexts of :data:`ORDERS` every matrix product that reaches torch's own operations on the CPU is added up
otherwise: :class:`Chain` adds products of float32 one by one in float32, as some libraries do where the columns are
few, and :class:`Reversed` adds those of any dtype in the opposite order. Convolutions are another library's, and the
package's kernels add in an order of their own; both are left alone.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

_FACTORS = dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), 0) | dict.fromkeys(("addmm", "baddbmm", "addmv"), 1)
"""Operations by name: which of their arguments is the first factor; what it is added to stands in front of it."""
_MADE_OF_OTHERS = "CompositeImplicitAutograd"
_MANY = 4096  # sums of which one term each is worth an operation of its own
_ENTRIES = 2**20  # terms that are written out at a time


class _Products(TorchDispatchMode):
    """Hand products of matrices to :meth:`added`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import all of torch's compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket.__name__
        if func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _MADE_OF_OTHERS):
            with self:  # in inference mode also what consists of such operations comes here
                return func.decompose(*args, **kwargs)
        first = _FACTORS.get(packet.removesuffix("_")) if func.namespace == "aten" else None
        if first is None or args[first].device.type != "cpu" or not args[first].dtype.is_floating_point:
            return func(*args, **kwargs)
        return self.added(func, first, [*args], kwargs, packet.endswith("_"))

    def added(self, func: Any, first: int, args: list[Any], kwargs: dict[str, Any], in_place: bool) -> Any:
        """Return what the operation does, added up otherwise."""
        raise NotImplementedError


class Reversed(_Products):
    """Add from the last term to the first."""

    def added(self, func: Any, first: int, args: list[Any], kwargs: dict[str, Any], in_place: bool) -> Any:
        a, b = args[first : first + 2]
        args[first : first + 2] = a.flip(-1), b.flip(max(-2, -b.ndim))
        return func(*args, **kwargs)


class Chain(_Products):
    """Add products of float32 one by one, to what they are to be added to."""

    def added(self, func: Any, first: int, args: list[Any], kwargs: dict[str, Any], in_place: bool) -> Any:
        a, b = args[first : first + 2]
        if a.dtype != torch.float32 or "dtype" in kwargs:
            return func(*args, **kwargs)
        rows, columns = a if a.ndim > 1 else a.unsqueeze(0), b if b.ndim > 1 else b.unsqueeze(1)
        shape = torch.Size([*rows.shape[:-1], columns.shape[-1]])
        start = torch.zeros(shape)
        if first:
            given = args[0].unsqueeze(-1) if b.ndim == 1 else args[0]
            start += kwargs.get("beta", 1) * given
            rows = kwargs.get("alpha", 1) * rows
        total = torch.from_numpy(_chain(*(tensor.detach().numpy() for tensor in (rows, columns, start))))
        total = total if b.ndim > 1 else total.squeeze(-1)
        total = total if a.ndim > 1 else total.squeeze(0)
        out = args[0] if in_place else kwargs.get("out")
        return total if out is None else out.copy_(total)


@np.errstate(invalid="ignore", over="ignore")  # as torch
def _chain(a: np.ndarray, b: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return ``total + a @ b`` in float32, each sum in one chain."""
    left, right = np.ascontiguousarray(np.moveaxis(a, -1, 0)), np.ascontiguousarray(np.moveaxis(b, -2, 0))
    left, right = left[..., None], right[..., None, :]
    if total.size >= _MANY:
        for x, y in zip(left, right, strict=True):
            total += x * y
        return total
    step = max(1, _ENTRIES // max(1, total.size))
    for k in range(0, len(left), step):
        terms = left[k : k + step] * right[k : k + step]
        total = np.add.accumulate(np.concatenate([total[None], terms]))[-1]
    return total


ORDERS: dict[str, Callable[[], TorchDispatchMode]] = {"chain": Chain, "reversed": Reversed}
"""By name."""
