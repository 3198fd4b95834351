"""Have second derivatives of what torch gets wrong, or makes slowly, by other ways: weight_norm and convolutions.

Torch's second derivative of a convolution (2.13) takes the gradient in the weight, of a gradient in the input, as a
convolution with a kernel of the size of an image, which its fast kernels do not do: on a processor a Hessian product
takes 1.1 to 1.4 times as long. It is the same bilinear map as the first gradient in the weight.

    y = x ∗ w      ∂⟨g, y⟩/∂x = X(g, w)      ∂⟨g, y⟩/∂w = W(g, x)
    of ⟨a, X(g, w)⟩ + ⟨b, W(g, x)⟩:   in g   a ∗ w + x ∗ b      in x   X(g, b)      in w   W(g, a)
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Form(NamedTuple):
    """Hold what a convolution has besides its tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x ∗ w + bias."""
        stride, padding, dilation, groups = self
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    def gradients(
        self, g: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool], bias: list[int] | None = None
    ) -> _Gradients:
        """Return those of X(g, w), W(g, x) and the gradient in the bias, of so many entries, that are wanted."""
        stride, padding, dilation, groups = self
        rest = (stride, padding, dilation, False, [0] * len(stride), groups, [*wanted])
        found: _Gradients = torch.ops.aten.convolution_backward(g, x, weight, bias, *rest)
        return found


class _Convolution(Function):
    """Convolve."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, form: _Form) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.form, ctx.bias = form, None if bias is None else [*bias.shape]
        return form.of(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        return (*_Gradient.apply(g, x, weight, ctx.form, ctx.needs_input_grad[:3], ctx.bias), None)


class _Gradient(Function):
    """Take the gradients of a convolution."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, form: _Form, wanted: tuple[bool, bool, bool], bias: Any
    ) -> _Gradients:
        ctx.save_for_backward(g, x, weight)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return form.gradients(g, x, weight, wanted, bias)

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, of_bias: Tensor | None) -> tuple[Any, ...]:
        g, x, weight = ctx.saved_tensors
        form, found = ctx.form, [None, None, None]
        if ctx.needs_input_grad[0]:
            parts = [form.of(a, weight, of_bias)] if a is not None else []
            parts += [form.of(x, b, None if parts else of_bias)] if b is not None else []
            if not parts and of_bias is not None:
                parts = [of_bias.view(-1, *[1] * len(form.stride)).expand_as(g)]
            found[0] = sum(parts[1:], parts[0]) if parts else None
        if ctx.needs_input_grad[1] and b is not None:
            found[1] = form.gradients(g, x, b, (True, False, False))[0]
        if ctx.needs_input_grad[2] and a is not None:
            found[2] = form.gradients(g, a, weight, (False, True, False))[1]
        return (*found, None, None, None)


def convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that compute plain convolutions, padded with zeros by numbers of pixels."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _CLASSES)
        and any(type(module)._conv_forward is kind._conv_forward for kind in _CLASSES)
        and "_conv_forward" not in module.__dict__
        and module.padding_mode == "zeros"
        and all(isinstance(each, (tuple, list)) for each in (module.stride, module.padding, module.dilation))
    ]


@contextlib.contextmanager
def of_convolutions(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules of :func:`convolutions` have them, inside; also where checkpointing runs them again."""
    modules = [*modules]
    for module in modules:
        own: Any = module._conv_forward
        module.__dict__["_conv_forward"] = partial(_convolved, module, own)
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__["_conv_forward"]


def _convolved(module: Any, own: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a module computes."""
    plain = x.ndim == weight.ndim and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
    if not plain or torch._C._are_functorch_transforms_active():
        return own(x, weight, bias)
    form = _Form(module.stride, module.padding, module.dilation, module.groups)
    found: Tensor = _Convolution.apply(x, weight, bias, form)
    return found


class WrittenOut(TorchFunctionMode):
    """Write weight_norm out, inside: the second derivative of torch's kernel in its direction is wrong (2.13).

    Torch leaves a mode out while it runs a backward pass, so that weight_norm is another function when activation
    checkpointing calls it again there, which torch notices.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch._weight_norm:
            return func(*args, **(kwargs or {}))
        direction, size, dim = (*args, *(kwargs or {}).values(), 0)[:3]
        return direction * (size / torch.norm_except_dim(direction, 2, dim))
