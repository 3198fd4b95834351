"""Truth for a random network by brute force: dense matrices of all its weights by nested autograd, once each."""

import copy
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

from support import jacobian_truth, truth
from support.fuzzed.drawing import Checkpointed, Returned
from support.fuzzed.losses import Problem

_DENSE = 150  # weights of a dense layer of which there is a Hessian
_LANCZOS = 100  # eigenvalues are found to within 1e-8 of the norm, a residual that their estimates state
Value = tuple[float, float]
"""A number, and the size of what was added up for it, to which rounding is relative."""


class Truth:
    """Compute the truth of a model (copied, without activation checkpointing) and a problem on ``inputs``.

    Args:
        model: in eval mode.
        problem: the loss and targets.
        inputs: samples first.
        targets: the problem's, or those of some of its samples.
        names: of the layers.
    """

    def __init__(
        self, model: nn.Module, problem: Problem, inputs: Tensor, targets: Tensor, names: Sequence[str]
    ) -> None:
        self.problem, self.inputs, self.targets, self.names = problem, inputs, targets, tuple(names)
        self.model = plain_copy(model)
        self._trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    @functools.cached_property
    def weights(self) -> dict[str, Tensor]:
        return {name: truth.weight_of(self.model, name) for name in self.names}

    @functools.cached_property
    def hessian(self) -> Tensor:
        """Return the Hessian of all layers' weights, one after the other (N, N)."""
        return truth.joint_hessian(self.model, self.problem.loss, self.inputs, self.targets, self.names)

    @functools.cached_property
    def ggn(self) -> Tensor:
        return truth.joint_ggn(self.model, self.problem.loss, self.inputs, self.targets, self.names)

    def slopes(self, name: str) -> tuple[float, list[float]]:
        """Return the loss's derivative along a direction of a layer's weight.

        By autograd, and by differences on each side.
        """
        outputs, weights = truth.outputs_of_all(self.model, self.inputs, [name])
        direction = torch.randn(weights.shape, generator=torch.Generator().manual_seed(0), dtype=weights.dtype)

        def risk(step: Tensor) -> Tensor:
            return self.problem.loss(outputs(weights + step * direction), self.targets)

        step = torch.zeros((), dtype=weights.dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(risk(step), step, materialize_grads=True)
        with torch.no_grad():
            here = risk(step)
            found = [float(here - risk(step - h)) / h for h in (1e-6, -1e-6)]
        return float(slope), found

    def is_at_kink(self, name: str) -> bool:
        """Return whether the loss has no derivative in a layer's weight, as at a maximum of equal entries.

        Which of these rounding makes the larger one is another one in every way to the value.
        """
        _, (before, behind) = self.slopes(name)
        return abs(before - behind) >= 1e-5 * (1 + abs(before))

    def block(self, curvature: str, name: str) -> Tensor:
        """Return the block (d, m, d, m) of one layer; ``curvature`` is "hessian" or "ggn"."""
        if name not in self.names:
            return self._alone(curvature, name)
        start = 0
        for other, weight in self.weights.items():
            if other == name:
                break
            start += weight.numel()
        rows = slice(start, start + self.weights[name].numel())
        return getattr(self, curvature)[rows, rows].reshape(*self.weights[name].shape, *self.weights[name].shape)

    @functools.cache  # noqa: B019, a truth lives as long as its case
    def _alone(self, curvature: str, name: str) -> Tensor:
        """Return the block of a layer that is none of ``names``."""
        matrix_of = {"hessian": truth.layer_hessian, "ggn": truth.layer_ggn}[curvature]
        return matrix_of(self.model, self.problem.loss, self.inputs, self.targets, name)

    def groups(self, name: str) -> int:
        return getattr(truth.place_of(self.model, name)[0], "groups", 1)

    def of_layer(self, measure: str, curvature: str, name: str) -> Value:
        """Return one of :data:`OF_LAYERS`."""
        return self.of_matrix(measure, self.block(curvature, name), name, self._cancelled(name))

    def of_matrix(self, measure: str, matrix: Tensor, name: str, size: Tensor | None = None) -> Value:
        of, weight = OF_LAYERS[measure], truth.weight_of(self.model, name)
        layer = truth.place_of(self.model, name)[0]
        scale = of(matrix.abs() if size is None else size, weight.abs(), layer)
        return of(matrix, weight, layer), float(scale)

    def _cancelled(self, name: str) -> Tensor:
        """Return what a Hessian is the difference of, in size: the GGN, and itself."""
        return self.block("ggn", name).abs() + self.block("hessian", name).abs()

    def shares(self, measure: str, curvature: str, name: str) -> list[Value]:
        """For every sample, n times its share in a layer's value."""
        matrix_of = {"hessian": truth.layer_hessian, "ggn": truth.layer_ggn}[curvature]
        n, found = len(self.inputs), []
        for i in range(n):
            matrix = n * matrix_of(self.model, self.problem.loss, self.inputs, self.targets, name, sample=i)
            found.append(self.of_matrix(measure, matrix, name, matrix.abs() + self._cancelled(name)))
        return found

    def per_neuron(self, measure: str, curvature: str, name: str) -> list[Value]:
        matrix, weight = self.block(curvature, name), truth.weight_of(self.model, name)
        layer = truth.place_of(self.model, name)[0]
        of = _columns if measure == "neuron_flatness" else _rows
        sizes = of(self._cancelled(name), weight.abs(), layer)
        return list(zip(of(matrix, weight, layer).tolist(), sizes.tolist(), strict=True))

    def lambda_max(self, curvature: str, names: tuple[str, ...]) -> Value:
        """Return the value of a layer, or of the weights of several together."""
        if len(names) == 1:
            matrix = self.block(curvature, names[0]).flatten(2).flatten(0, 1)
        elif names == self.names:
            matrix = getattr(self, curvature)
        else:
            joint = {"hessian": truth.joint_hessian, "ggn": truth.joint_ggn}[curvature]
            matrix = joint(self.model, self.problem.loss, self.inputs, self.targets, names)
        values = torch.linalg.eigvalsh((matrix + matrix.t()) / 2)
        return float(values[-1]), _LANCZOS * float(values.abs().max())

    def of_rows(self, curvature: str, name: str) -> Value:
        """Return κ^φ = Σ_s |w_s|² λ_max(H_ss)."""
        matrix, weight = self.block(curvature, name), truth.weight_of(self.model, name)
        values = torch.linalg.eigvalsh(torch.einsum("sjsk->sjk", (matrix + matrix.permute(2, 3, 0, 1)) / 2))
        norms = weight.square().sum(dim=1)
        return float(norms @ values[:, -1]), _LANCZOS * float(norms @ values.abs().amax(dim=1))

    def normalised(self, curvature: str, name: str) -> Value:
        """Return κ by Theorem 4."""
        deviation = truth.layer_deviations(self.model, name, self.inputs)
        layer, groups = self.model.get_submodule(name), self.groups(name)
        matrix, weight = truth.scaled(layer, self.block(curvature, name), deviation)
        size, _ = truth.scaled(layer, self._cancelled(name), deviation)
        scale = truth.relative_flatness_of(size, weight.abs(), groups)
        return truth.relative_flatness_of(matrix, weight, groups), scale

    def affine(self, name: str) -> Value | None:
        """Return κ of a convolution as one dense layer; None if that is a large one."""
        model, linear = truth.affine(self.model, name, self.inputs)
        weight = truth.weight_of(model, linear)
        if weight.numel() > _DENSE:
            return None
        matrix = truth.layer_hessian(model, self.problem.loss, self.inputs, self.targets, linear)
        size = truth.layer_ggn(model, self.problem.loss, self.inputs, self.targets, linear).abs() + matrix.abs()
        return truth.relative_flatness_of(matrix, weight), truth.relative_flatness_of(size, weight.abs())

    # --- all parameters -----------------------------------------------------------------------------------------------

    def parameters(self, *, trainable: bool) -> int:
        return sum(p.numel() for k, p in self.model.named_parameters() if not trainable or k in self._trainable)

    def _over(self, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """Return the outputs as a function of some parameters as one vector, and that vector."""
        model = copy.deepcopy(self.model)
        own = dict(model.named_parameters())
        places = [[(m, k) for m in model.modules() for k, p in m._parameters.items() if p is own[n]] for n in names]
        shapes = [own[name].shape for name in names]

        def outputs(theta: Tensor) -> Tensor:
            parts = theta.split([shape.numel() for shape in shapes])
            for found, part, shape in zip(places, parts, shapes, strict=True):
                for module, key in found:
                    module._parameters[key] = part.view(shape)
            with sdpa_kernel(SDPBackend.MATH):
                return model(self.inputs)

        return outputs, torch.cat([own[name].detach().flatten() for name in names])

    @functools.cached_property
    def diagonal(self) -> tuple[Tensor, Tensor]:
        """Return ∂²E/∂θ_j² over the trainable parameters, and θ."""
        outputs, theta = self._over(self._trainable)
        return truth.hessian(lambda vector: self.problem.loss(outputs(vector), self.targets), theta).diagonal(), theta

    @functools.cached_property
    def sharpness(self) -> Value:
        diagonal, _ = self.diagonal
        return float(diagonal.sum()), float(diagonal.abs().sum() + self._squares())

    @functools.cached_property
    def adaptive_sharpness(self) -> Value:
        diagonal, theta = self.diagonal
        return float((theta.square() * diagonal).sum()), float(
            (theta.square() * diagonal.abs()).sum() + self._squares()
        )

    def _squares(self) -> float:
        return self.interpolation_sharpness[0] * len(self.inputs)

    @functools.cached_property
    def interpolation_sharpness(self) -> Value:
        outputs, theta = self._over(self._trainable)
        jacobian = truth.jacobian(outputs, theta)
        value = float(jacobian.square().sum()) / len(self.inputs)
        return value, value

    @functools.cached_property
    def fisher_rao(self) -> Value:
        """Return √(Σ ⟨θ, ∂t/∂θ⟩²/mass / Σ mass) over all parameters and loss terms t."""
        outputs, theta = self._over([name for name, _ in self.model.named_parameters()])
        theta.requires_grad_()
        terms, mass = self.problem.terms(outputs(theta), self.targets)
        squares = torch.zeros(())
        for term, weight in zip(terms, mass, strict=True):
            if weight > 0 and term.requires_grad:
                (gradient,) = torch.autograd.grad(term, theta, retain_graph=True)
                squares = squares + (gradient @ theta.detach()) ** 2 / weight
        value = float((squares if self.problem.total else squares / mass.sum()).sqrt())
        return value, value + 1e-6

    def jacobians(self) -> dict[tuple[str, str], Tensor]:
        """Return (place, measure) -> (n,), as :func:`jacobian_truth.of_data`."""
        return jacobian_truth.of_data(self.model, self.inputs, self.names)


def plain_copy(model: nn.Module) -> nn.Module:
    """Return a copy without activation checkpointing that returns a tensor; its parameters require gradients."""
    model = copy.deepcopy(model).requires_grad_(True)
    for module in model.modules():
        if isinstance(module, (Checkpointed, Returned)):
            module.on = False
        if isinstance(module, parametrizations._WeightNorm):  # torch's kernel has a wrong second derivative (2.13)
            module.forward = _weight_norm
    return model


def _weight_norm(magnitude: Tensor, direction: Tensor) -> Tensor:
    norm = direction.flatten(1).norm(dim=1).view(magnitude.shape)
    return magnitude * direction / norm


def _columns(matrix: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
    taps = layer.weight[0, 0].numel() if hasattr(layer, "weight") else 1
    return truth.columns_of(matrix, weight, getattr(layer, "groups", 1), taps)


def _rows(matrix: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
    return truth.rows_of(matrix, weight)


OF_LAYERS: dict[str, Callable[[Tensor, Tensor, nn.Module], float]] = {
    "relative_flatness": lambda h, w, layer: truth.relative_flatness_of(h, w, getattr(layer, "groups", 1)),
    "trace": lambda h, w, layer: truth.trace_of(h),
    "adaptive_sharpness": lambda h, w, layer: truth.adaptive_sharpness_of(h, w),
    "neuron_flatness": lambda h, w, layer: float(_columns(h, w, layer).sum()),
    "neuron_flatness_rows": lambda h, w, layer: float(_rows(h, w, layer).sum()),
}
