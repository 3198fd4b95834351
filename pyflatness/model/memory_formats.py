"""Work around kernels of normalisations that fail for some memory formats of a tensor (torch 2.13).

- The gradient of ``group_norm`` in its weight or bias alone, for a ``channels_last`` input, crashes the process on a
  CPU: the kernel also writes the gradient in the input, which was not requested and has no memory.
- The gradients of ``batch_norm`` for one sample can be wrong: torch's kernel misreads the strides of an image that is
  ``channels_last`` and gets its dimension of samples by ``unsqueeze(0)``. ``instance_norm`` calls ``batch_norm`` on one
  such sample, with all channels of all images.

Contiguous inputs and gradients have neither problem. So torch's functions get these, in modules and in
:mod:`torch.nn.functional`.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def safe() -> Iterator[None]:
    """Make these functions use contiguous inputs where that matters, inside the context."""
    before = {name: getattr(torch, name) for name in ("group_norm", "batch_norm", "instance_norm")}
    vars(torch).update(
        group_norm=_contiguous(torch.group_norm, lambda given: True),
        instance_norm=_contiguous(torch.instance_norm, lambda given: True),
        batch_norm=_contiguous(torch.batch_norm, lambda given: given.shape[0] == 1),
    )
    try:
        yield
    finally:
        vars(torch).update(before)


def _contiguous(function: Callable[..., Tensor], matters: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    def called(input: Tensor, *args: object, **kwargs: object) -> Tensor:  # noqa: A002, torch's name for it
        if not matters(input):
            return function(input, *args, **kwargs)
        outputs = function(input.contiguous(), *args, **kwargs)
        if outputs.requires_grad:  # the arriving gradient may not be contiguous either
            outputs.register_hook(Tensor.contiguous)
        return outputs

    return called
