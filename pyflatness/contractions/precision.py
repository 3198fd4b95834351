"""Promote half precision, which is computed and accumulated in float32, a chunk at a time.

For example, neighbouring bfloat16 numbers near 20 differ by 0.125, too much for logits.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHAIN = 2048
"""The most terms that a library may add one after another in float32.

The sum of 4,096 terms of about one size, 1.1 to 1.101, had a relative error of 2e-6; of 30,000 terms 5e-5, and of
100,000 terms 1e-4. With 4,096 probabilities that fall like a power of their rank, the largest first, a head's value was
off by 2.4e-5, and with 2,048 by 1.1e-6.
"""

AS_IT_IS = contextlib.nullcontext()  # one for all, as it has no state
_MIXED, _NAMED = "2.8", "2.9"  # torch versions with float32 products of half precision, and with named TF32 settings
_SETTING = threading.RLock()  # two threads that restore torch's setting out of order would leave it changed
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SETTING._at_fork_reinit)  # type: ignore[attr-defined]


def promoted(tensor: Tensor) -> Tensor:
    """Return half precision as float32, and other dtypes as they are."""
    return tensor.to(promoted_dtype(tensor.dtype))


def promoted_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def multiplied(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` times the scale of its channels, in dimension ``dim``."""
    sizes = [1] * tensor.ndim
    sizes[dim] = len(scale)
    tensor = promoted(tensor)
    return tensor * scale.view(sizes).to(tensor.dtype)


def divided(tensor: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Return ``tensor`` divided by the scale of its channels; channels of scale 0 become 0."""
    kept = scale > 0
    return multiplied(tensor, torch.where(kept, 1 / torch.where(kept, scale, 1.0), 0.0), dim)


def full_precision(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on the tensor's device; the user's autocast is for the model alone."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else AS_IT_IS


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Return ``a @ b``, of half precision as float32, plus a bias; ``out`` is float32 or float64.

    A long inner dimension is cut, and the products of the parts are added in float64. Otherwise values would depend on
    the library, as some add all terms one after another if there are few columns. With a bias ``a`` is (n, k).
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
    """Return whether float32 convolutions on CUDA round their factors to TF32, as is torch's default."""
    cudnn: Any = torch.backends.cudnn
    if torch.__version__ < _NAMED:
        return bool(cudnn.allow_tf32)
    return bool(cudnn.conv.fp32_precision == "tf32")


@contextlib.contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Set whether float32 products on CUDA round their factors to TF32 inside a ``with`` block.

    The setting is the process's: other threads see it meanwhile, and such blocks of several threads run one by one.
    Afterwards it is as before; if the setting is equal to the inherited one, it is inherited again.
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
