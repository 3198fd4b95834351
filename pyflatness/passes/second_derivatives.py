"""Replace second derivatives that torch gets wrong or computes slowly: of weight_norm, convolutions and BatchNorm.

Torch's second derivative of a convolution (2.13) takes the gradient in the weight, of a gradient in the input, as a
convolution with a kernel of the size of an image, which its fast kernels do not do: on a processor a Hessian product
takes 1.1 to 1.4 times as long. It is the same bilinear map as the first gradient in the weight.

    y = x ∗ w      ∂⟨g, y⟩/∂x = X(g, w)      ∂⟨g, y⟩/∂w = W(g, x)
    of ⟨a, X(g, w)⟩ + ⟨b, W(g, x)⟩:   in g   a ∗ w + x ∗ b      in x   X(g, b)      in w   W(g, a)

That of BatchNorm (2.13) is some thirty operations on tensors of the input's size. With x̂ = r (x − μ), r = 1/σ, and sums
Σ over the N entries of a channel it is a first derivative, one sum and a combination of three tensors:

    y = γ x̂ + β      ∂⟨g, y⟩/∂x = X(g) = γ r P g,   P u = u − Σu/N − x̂ Σ(x̂u)/N      ∂⟨g, y⟩/∂γ = Σ g x̂     in β   Σ g
    of ⟨a, X(g)⟩ + ⟨b, Σ g x̂⟩ + ⟨c, Σ g⟩:   in g   X(a) + b x̂ + c      in γ   r D,   D = ⟨a, P g⟩
                                            in x   r P[b g − γ r (a Σ(g x̂) + g Σ(a x̂))/N] − γ r² x̂ D/N

With the running statistics μ and σ are constants: P is the identity, and in x remains r b g.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from .. import private
from ..model import walk
from ..model.calling import Mode

_CLASSES = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Differentiated(Function):
    """Apply an operation whose form has its first and second derivatives written out."""

    @staticmethod
    def forward(ctx: Any, form: Any, *tensors: Tensor | None) -> Tensor:
        y, kept = form.computed(*tensors)
        ctx.save_for_backward(*kept)
        ctx.form = form
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        return (None, *_Gradient.apply(ctx.form, ctx.needs_input_grad[1:], g, *ctx.saved_tensors))


class _Gradient(Function):
    """Compute the gradients of an operation from its form."""

    @staticmethod
    def forward(ctx: Any, form: Any, wanted: tuple[bool, bool, bool], g: Tensor, *kept: Tensor | None) -> _Gradients:
        found, more = form.gradients(wanted, g, *kept)
        ctx.save_for_backward(g, *kept, *more)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return found  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.form.twice(ctx.needs_input_grad[2:], arrived, *ctx.saved_tensors))


class _Convolution(NamedTuple):
    """Hold the form of a convolution: its arguments besides tensors."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: list[int] | None  # its shape

    def computed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return x ∗ w + bias, and the tensors that the gradients need."""
        return self._of(x, weight, bias), (x, weight)

    def gradients(
        self, wanted: tuple[bool, bool, bool], g: Tensor, x: Tensor, weight: Tensor
    ) -> tuple[_Gradients, tuple[()]]:
        """Return X(g, w), W(g, x) and the gradient in the bias, each if ``wanted``."""
        rest = (self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups, [*wanted])
        return torch.ops.aten.convolution_backward(g, x, weight, self.bias, *rest), ()

    def twice(
        self, needed: Sequence[bool], arrived: _Gradients, g: Tensor, x: Tensor, weight: Tensor
    ) -> list[Tensor | None]:
        """Return the gradients in g, x and w for cotangents of the first gradients."""
        a, b, of_bias = arrived
        found: list[Tensor | None] = [None, None, None]
        if needed[0]:
            parts = [self._of(a, weight, of_bias)] if a is not None else []
            parts += [self._of(x, b, None if parts else of_bias)] if b is not None else []
            if not parts and of_bias is not None:
                parts = [of_bias.view(-1, *[1] * len(self.stride)).expand_as(g)]
            found[0] = sum(parts[1:], parts[0]) if parts else None
        if needed[1] and b is not None:
            found[1] = self.gradients((True, False, False), g, x, b)[0][0]
        if needed[2] and a is not None:
            found[2] = self.gradients((False, True, False), g, a, weight)[0][1]
        return found

    def _of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        stride, padding, dilation, groups, _ = self
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def convolutions(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that compute plain convolutions, padded with zeros by numbers of pixels."""
    return [
        module
        for module in walk.modules(model)
        if isinstance(module, _CLASSES)
        and any(type(module)._conv_forward is kind._conv_forward for kind in _CLASSES)
        and "_conv_forward" not in module.__dict__
        and module.padding_mode == "zeros"
        and all(isinstance(each, (tuple, list)) for each in (module.stride, module.padding, module.dilation))
    ]


def _convolved(module: Any, own: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the output of a convolution, by the form if that applies."""
    plain = x.ndim == weight.ndim and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
    if not plain or private.are_transforms_active():
        return own(x, weight, bias)
    shape = None if bias is None else [*bias.shape]
    form = _Convolution(module.stride, module.padding, module.dilation, module.groups, shape)
    found: Tensor = _Differentiated.apply(form, x, weight, bias)
    return found


class _BatchNorm(NamedTuple):
    """Hold the form of a BatchNorm: its arguments besides tensors; ``of_batch`` if statistics are the batch's."""

    of_batch: bool
    eps: float
    momentum: float
    running: tuple[Tensor | None, Tensor | None]  # statistics, which are updated

    def computed(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        """Return y, and what the gradients need: the batch's μ and r, or the running μ and σ² − ε."""
        rest = (*self.running, self.of_batch, self.momentum, self.eps)
        y, *statistics = torch.ops.aten.native_batch_norm(x, weight, bias, *rest)
        return y, (x, weight, *(statistics if self.of_batch else self.running))

    def gradients(
        self, wanted: Any, g: Tensor, x: Tensor, weight: Tensor | None, first: Tensor, second: Tensor
    ) -> tuple[_Gradients, tuple[Tensor, Tensor]]:
        """Return X(g), Σ g x̂ and Σ g, and the sums again."""
        if len(x) == 1:  # see :mod:`..model.memory_formats`
            g, x = g.contiguous(), x.contiguous()
        statistics = (None, None, first, second) if self.of_batch else (first, second, None, None)
        rest = (*statistics, self.of_batch, self.eps, [True, True, True])
        found = torch.ops.aten.native_batch_norm_backward(g, x, weight, *rest)
        return (found[0], None, None) if weight is None else found, found[1:]

    def twice(
        self,
        needed: Any,
        arrived: _Gradients,
        g: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        sum_gx: Tensor,
        sum_g: Tensor,
    ) -> tuple[Any, ...]:
        """Return the gradients in g, x and the weight for cotangents of the first gradients."""
        if torch.is_grad_enabled():  # for third derivatives, which torch >= 2.14 lacks for its function
            return (*self._written_out(g, x, weight, mean, scale, arrived), None, None)
        (a, b, c), n = arrived, x.numel() // x.shape[1]
        r = scale if self.of_batch else (scale + self.eps).rsqrt()
        gamma_r = r if weight is None else weight * r

        def along(channels: Tensor) -> Tensor:
            return channels.view(-1, *[1] * (x.ndim - 2))

        a = torch.zeros_like(g) if a is None else a
        in_a, (sum_ax, sum_a) = self.gradients(None, a, x, weight, mean, scale)
        inner, in_x = (a * g).transpose(0, 1).flatten(1).sum(1), None
        in_g: Any = in_a[0]
        centred: Any = x - along(mean) if self.of_batch or b is not None else None
        if b is not None:
            in_g = in_g.addcmul_(centred, along(b * r))
        if c is not None:
            in_g = in_g.add_(along(c))
        if not self.of_batch:
            in_x = None if b is None else g * along(b * r)
        else:
            inner = inner - (sum_a * sum_g + sum_ax * sum_gx) / n
            of_a, of_g = -gamma_r * sum_gx / n, -gamma_r * sum_ax / n
            of_g = of_g if b is None else of_g + b
            of_x = -(of_a * sum_ax + of_g * sum_gx + gamma_r * inner) / n
            constant = -(of_a * sum_a + of_g * sum_g) / n
            in_x = centred.mul_(along(of_x * r * r)).add_(along(constant * r))
            in_x = in_x.addcmul_(a, along(of_a * r)).addcmul_(g, along(of_g * r))
        return in_g, in_x, None if weight is None else r * inner, None, None

    def _written_out(
        self, g: Tensor, x: Tensor, weight: Tensor | None, first: Tensor, second: Tensor, arrived: _Gradients
    ) -> list[Tensor | None]:
        """Return the same with a graph, by operations that autograd differentiates at any order."""
        leaves = [tensor.view_as(tensor) for tensor in (g, x, weight) if tensor is not None]
        affine = [] if weight is None else [leaves[2], torch.zeros_like(weight, requires_grad=True)]
        each = leaves[1].transpose(1, -1)  # with the channels last, to broadcast along them
        spread, mean = second, first
        if self.of_batch:
            spread, mean = torch.var_mean(each, tuple(range(x.ndim - 1)), correction=0)
        y = (each - mean) * (spread + self.eps).rsqrt()
        y = (y * affine[0] + affine[1] if affine else y).transpose(1, -1)
        gradients = torch.autograd.grad(y, [leaves[1], *affine], leaves[0], create_graph=True)
        products = [(one * other).sum() for one, other in zip(gradients, arrived, strict=False) if other is not None]
        found = torch.autograd.grad(torch.stack(products).sum(), leaves, create_graph=True, allow_unused=True)
        return [*found, *[None] * (3 - len(found))]


def _batch_norm(
    x: Tensor,
    mean: Tensor | None,
    variance: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return the result of F.batch_norm, by the form if that applies."""
    plain = x.requires_grad and x.dtype in (torch.float32, torch.float64) and x.numel() > x.shape[1]
    plain = plain and (weight is None) == (bias is None) and (weight is None or weight.dtype == x.dtype)
    if not plain or eps <= 0 or torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling():
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    found: Tensor = _Differentiated.apply(_BatchNorm(training, eps, momentum, (mean, variance)), x, weight, bias)
    return found


class _Replacing(Mode):
    """Replace a function inside by another one of the same arguments."""

    def __init__(self, function: Callable[..., Tensor], other: Callable[..., Tensor]) -> None:
        super().__init__()
        self._function, self._other = function, other

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))


def _normalised(module: Any, in_eval: bool, x: Tensor) -> Tensor:
    """Return the output of a BatchNorm, by the form if that applies."""
    wanted = torch.is_grad_enabled() and (module.training or in_eval)
    own = wanted and not private.are_transforms_active()
    with _Replacing(F.batch_norm, _batch_norm) if own else contextlib.nullcontext():
        found: Tensor = type(module).forward(module, x)
    return found


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model with the forward pass of BatchNorm1d to BatchNorm3d."""
    return [
        module
        for module in walk.modules(model)
        if getattr(type(module), "forward", None) is nn.BatchNorm2d.forward and "forward" not in module.__dict__
    ]


def replace(modules: Iterable[nn.Module], in_eval: bool = True) -> None:
    """Replace second derivatives of :func:`convolutions` and :func:`batch_norms`, of these ``in_eval`` mode too.

    They stay replaced until :func:`put_back`, as activation checkpointing runs the modules again in the backward pass.
    """
    for module in modules:
        if isinstance(module, _CLASSES):
            module.__dict__["_conv_forward"] = partial(_convolved, module, module._conv_forward)
        else:
            module.__dict__["forward"] = partial(_normalised, module, in_eval)


def put_back(modules: Iterable[nn.Module]) -> None:
    """Undo :func:`replace`."""
    for module in modules:
        module.__dict__.pop("_conv_forward" if isinstance(module, _CLASSES) else "forward", None)


def written_out() -> contextlib.AbstractContextManager[object]:
    """Write weight_norm out inside, as the second derivative of torch's kernel in the direction is wrong (2.13).

    Modes are off while torch runs a backward pass. So activation checkpointing recomputes weight_norm by another
    function, which torch notices.
    """
    return _Replacing(private.weight_norm, _weight_norm)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))
