"""Promote half precision: it is computed and accumulated in float32, a chunk at a time.

Logits in bf16 step by 0.125 at 20.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHAIN = 2048
"""Terms that a library may add up in one chain of float32.

Of terms of about one size, 1.1 to 1.101, 4,096 were off by a relative 2e-6 there; 30,000 by 5e-5, and 100,000 by 1e-4.
4,096 probabilities that fall like a power of their place, the largest first, moved a head's value by 2.4e-5, and 2,048
by 1.1e-6.
"""

_MIXED, _NAMED = "2.8", "2.9"  # torch from which products of half precision write float32; settings of TF32 have names
_SETTING = threading.RLock()  # of torch for the process: two threads that put it back in turn would leave it changed
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SETTING._at_fork_reinit)  # type: ignore[attr-defined]


def promoted(tensor: Tensor) -> Tensor:
    """Return half precision as float32; anything else as it is."""
    return tensor.to(promoted_dtype(tensor.dtype))


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that tensors of ``dtype`` are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def multiplied(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` times the scale of its channels, which are in ``dim``."""
    sizes = [1] * tensor.ndim
    sizes[dim] = len(scale)
    tensor = promoted(tensor)
    return tensor * scale.view(sizes).to(tensor.dtype)


def divided(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` divided by its channels' scale; channels of scale 0 become 0, which drops them."""
    kept = scale > 0
    return multiplied(tensor, torch.where(kept, 1 / torch.where(kept, scale, 1.0), 0.0), dim)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device: the user's is for the model alone."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext()


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return the matrix product ``a @ b``, of half precision as float32, and add a bias; ``out`` is float32 or float64.

    A long inner dimension is cut, and the products of the parts are added in float64. No value may rest on how a
    library sums, and some add all terms in one chain where the columns are few. With a bias ``a`` is (n, k).
    """
    length = a.shape[-1]
    if length <= CHAIN or a.dtype == torch.float64:
        return _library_product(a, b, bias, out)
    width = -(-length // -(-length // CHAIN))  # all parts are about as long
    parts = zip(a.split(width, dim=-1), b.split(width, dim=max(-2, -b.ndim)), strict=True)
    total = _library_product(*next(parts), None, None)
    dtype, total = total.dtype, total.double()
    for part in parts:
        total += _library_product(*part, None, None)
    total = total if bias is None else total + bias
    return total.to(dtype) if out is None else out.copy_(total)


def _library_product(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
    batched = a.ndim == b.ndim == 3
    if promoted_dtype(a.dtype) != a.dtype and a.is_cuda and batched and torch.__version__ >= _MIXED:
        found: Tensor = torch.bmm(a, b, out_dtype=torch.float32)
        return found
    a, b = promoted(a), promoted(b)
    if bias is not None:
        return torch.addmm(bias, a, b, out=out)
    return torch.bmm(a, b, out=out) if batched else torch.matmul(a, b, out=out)


def convolutions_in_tf32() -> bool:
    """Return whether convolutions of float32 on CUDA round their factors to TF32, which is torch's default."""
    cudnn: Any = torch.backends.cudnn
    if torch.__version__ < _NAMED:
        return bool(cudnn.allow_tf32)
    return bool(cudnn.conv.fp32_precision == "tf32")


@contextlib.contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Let float32 products on CUDA round their factors to TF32 or not, inside a ``with`` block.

    It is the process's setting, which other threads see for that time; blocks of several threads come one by one.
    Afterwards it is as it was: a setting that is inherited is inherited again, as is one that is the inherited one.
    """
    matmul: Any = torch.backends.cuda.matmul
    with _SETTING:
        if torch.__version__ < _NAMED:
            before = matmul.allow_tf32
            matmul.allow_tf32 = tf32
            try:
                yield
            finally:
                matmul.allow_tf32 = before
            return
        before = matmul.fp32_precision
        if tf32 == (before == "tf32"):
            yield
            return
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = "none"
            if matmul.fp32_precision != before:
                matmul.fp32_precision = before
