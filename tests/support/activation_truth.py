"""Truth for the curvature in activations, in float64: nested autograd with respect to layers' outputs and inputs.

What a layer puts out, or takes in, is moved by tensors that hooks add to it in every call. The diagonal of the
empirical risk's Hessian in these, summed over the samples, is the mean of the samples' own.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import functional as autograd
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.grid import Case


@contextlib.contextmanager
def moved(layer: nn.Module, of: str, parts: Sequence[Tensor]) -> Iterator[None]:
    """Let each call of a layer put out, or take in, one of the parts more; those of recomputation the same again."""
    calls = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return tensor + parts[(calls - 1) % len(parts)]

    if of == "outputs":
        handle = layer.register_forward_hook(lambda _, args, output: add(output))
    else:
        handle = layer.register_forward_pre_hook(lambda _, args: (add(args[0]), *args[1:]))
    with handle, sdpa_kernel(SDPBackend.MATH):
        yield


def shapes(model: nn.Module, layer: nn.Module, of: str, inputs: Tensor) -> list[torch.Size]:
    """Return the shape of every call's output or input."""
    found: list[torch.Size] = []
    with layer.register_forward_hook(
        lambda _, args, output: found.append(output.shape if of == "outputs" else args[0].shape)
    ):
        model(inputs)
    return found


def diagonal(model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], name: str, of: str, curvature: str):
    """Return the diagonal of ∂²E/∂z² of each call's outputs, or inputs, z: tensors of their shapes."""
    (inputs, targets), layer = data, model.get_submodule(name)
    made = shapes(model, layer, of, inputs)
    sizes = [shape.numel() for shape in made]

    def outputs(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), made, strict=True)]
        with moved(layer, of, parts):
            return model(inputs)

    none = torch.zeros(sum(sizes), dtype=torch.float64)
    if curvature == "ggn":
        jacobian = autograd.jacobian(outputs, none)
        flat = jacobian.reshape(-1, len(none))
        shape = jacobian.shape[:-1]
        inner = autograd.hessian(lambda f: loss(f.view(shape), targets), outputs(none).detach().flatten())
        found = (flat * (inner @ flat)).sum(dim=0)
    else:
        found = autograd.hessian(lambda flat: loss(outputs(flat), targets), none).diagonal()
    return [part.view(shape) for part, shape in zip(found.split(sizes), made, strict=True)]


def by_channel(layer: nn.Module, parts: Sequence[Tensor]) -> Tensor:
    """Return a diagonal summed over samples, positions and calls, (channels,)."""
    dim = 1 if isinstance(layer, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)) else -1
    return torch.stack([part.movedim(dim, -1).flatten(0, -2).sum(dim=0) for part in parts]).sum(dim=0)


@functools.cache
def of_case(case: Case, name: str, of: str, curvature: str = "hessian") -> Tensor:
    """Return the diagonal of a case's layer by channel."""
    model = case.build()
    parts = diagonal(model, case.loss, (case.inputs, case.targets), name, of, curvature)
    return by_channel(model.get_submodule(name), parts)
