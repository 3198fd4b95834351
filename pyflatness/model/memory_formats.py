"""Keep torch from kernels of normalisations that go wrong for some orders of a tensor's entries in memory (2.13).

- The gradient of ``group_norm`` in its weight or bias alone, of an input that is ``channels_last``: the process ends on
  a CPU, since the kernel writes the gradient in the input, which nobody asked for and which has no memory.
- The gradients of ``batch_norm`` for one sample. An image that is ``channels_last`` and gets its dimension of samples
  by ``unsqueeze(0)`` has strides of which torch's kernel makes contiguous ones halfway: the gradients are wrong.
  ``instance_norm`` calls it on one such sample of all channels of all images.

Contiguous inputs and gradients have neither. So torch's functions get these, from modules and from
:mod:`torch.nn.functional` alike.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor


@contextlib.contextmanager
def safe() -> Iterator[None]:
    """Have these functions make their inputs contiguous where that matters, inside."""
    before = {name: getattr(torch, name) for name in ("group_norm", "batch_norm", "instance_norm")}
    vars(torch).update(
        group_norm=_contiguous(torch.group_norm, lambda given: True),
        instance_norm=_contiguous(torch.instance_norm, lambda given: True),
        batch_norm=_contiguous(torch.batch_norm, lambda given: len(given) == 1),
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
        if outputs.requires_grad:  # the gradient that arrives may be in another order too
            outputs.register_hook(Tensor.contiguous)
        return outputs

    return called
