"""Multiply the loss Hessian, or its GGN, by vectors in the space of layers' weights, over all of the data.

    H v = ∂⟨∂E/∂w, v⟩/∂w                              by two backward passes through the graph
    G v = Σ_i J_iᵀ (∂²ℓ_i/∂f_i²) (J_i v) / Σ_i ω_i    with J v as the derivative of ⟨Jᵀu, v⟩ in u

Derivatives are in the effective weight of each layer, which its calls get as a leaf. So they count the layer's own use
of a tied weight, the weight that a parametrisation returns, and all calls of a layer, also a call on its own output.
Changes of the layers' outputs (δz = v φ) would be wrong in that case, and for several layers together, since one
layer's input depends on the others' weights.

Vectors are float64: the (d, m) matrix of each layer in turn, row by row. The passes are in the model's dtype, and the
results of micro-batches are added in float64.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import contractions
from ..errors import NonFiniteError, NotYetError
from ..model import calling, layers
from ..numerics import lanczos
from ..numerics.accumulate import Accumulator, all_finite, check_together
from ..numerics.lanczos import LargestEigenvalues
from ..numerics.signs import RandomVectors
from ..options import Options
from ..passes import cotangents, dry_run, linearity, normalize
from ..passes.runner import Run, Runner
from ..passes.task import Task
from . import block_traces

Names = tuple[str, ...]  # the layers of a block
Vectors = dict[Names, Tensor]  # by block b vectors in the space of its weights, (b, N)

_GRAPHS = 4  # about the memory of a graph of second derivatives, in graphs of the forward pass
# Residuals relative to the block's norm, in double and in other precisions; with products in single precision they
# cannot become much smaller. An eigenvalue's error is the squared residual over the distance to the next eigenvalue.
_TOLERANCE, _COARSE_TOLERANCE = 1e-8, 1e-5


def for_second_derivatives(found: dry_run.Findings) -> int:
    """Return the bytes for one sample of the graph of derivatives, beyond that of the forward pass."""
    return (_GRAPHS - 1) * found.bytes


class Products:
    """Represent E's Hessian or GGN in the weights of some layers, or in w_j σ_j, as a matrix to multiply with.

    ``eps`` is the products' relative rounding; ``custom`` are the layers with custom autograd functions behind them.
    """

    _what = "layer"  # what a name names, for messages

    def __init__(self, task: Task) -> None:
        self._task, self._model, self._loss, self._options = task, task.model, task.loss, task.options
        self._leaves: dict[str, Tensor] = {}  # by layer its effective weight, which its calls use
        self._runner = self._made_runner()
        over = Accumulator(self._options.nan_policy, task.loss.reduction)
        self.custom: set[str] = set()

        def take(seen: tuple[int, float, set[str]]) -> None:
            samples, weight, custom = seen
            over.add(samples, weight)
            self.custom |= custom

        self._runner.each(self._seen, take)
        self._shard = task.batches.shard
        over.together(self._shard, {})
        self.custom = {*self._shard.united("custom functions", {"": dict.fromkeys(self.custom, True)})[""]}
        self.samples, self._normaliser = over.samples, over.normaliser
        self._spreads: dict[str, Tensor] = {}
        self._set_up()

    def _made_runner(self) -> Runner:
        check_filters(self._task)
        return Runner(
            self._task, by_sample=False, certify=False, reserve=for_second_derivatives, inside=self._weights_as_leaves
        )

    def _set_up(self) -> None:
        """Set device, precision and the factors of the weights, once it is known which layers run."""
        self.modules = self._runner.modules
        weights = [layers.matrix(module)[0] for module in self.modules.values()]
        self.device, self.eps = weights[0].device, max(torch.finfo(weight.dtype).eps for weight in weights)
        if self._options.normalize:
            scales = normalize.feature_scales(Runner(self._task), self._loss, self._options.nan_policy)
            self._spreads = {name: spread(module, scales[name]) for name, module in self.modules.items()}

    def _seen(self, run: Run) -> tuple[int, float, set[str]]:
        """Return a micro-batch's samples and normaliser, and the layers with custom autograd functions behind them."""
        custom = linearity.with_custom_functions(linearity.users_of(run.outputs), self._edges(run))
        linearity.refuse_custom_functions(self._options, dict.fromkeys(sorted(custom), linearity.CUSTOM), self._what)
        sent = cotangents.of_run(run, self._loss)
        self._check(run.number, not math.isnan(sent.weight))
        return run.samples, sent.weight, custom

    def _edges(self, run: Run) -> linearity.Edges:
        """Return the gradient edges of each layer in the graph of a run."""
        return linearity.edges_of(run.recorder.calls)

    @contextlib.contextmanager
    def _weights_as_leaves(self) -> Iterator[None]:
        """Give the layers' calls their weights as leaves of a graph, inside the context, also in backward passes."""
        modules = self._runner.modules
        self._leaves = {name: _leaf(module) for name, module in modules.items()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            for name, weight in self._leaves.items():
                forward = layers.with_weight(modules[name], partial(_instead, weight))
                stack.enter_context(calling.replaced_forward(modules[name], forward))
            yield

    def size(self, names: Names) -> int:
        """Return N, the number of entries of a vector for these layers."""
        return sum(self._shape(name).numel() for name in names)

    @property
    def tolerance(self) -> float:
        """Return the smallest residuals of eigenvalues that can be reached, relative to the block's norm."""
        return _TOLERANCE if self.eps < _TOLERANCE else max(_COARSE_TOLERANCE, self.eps)

    def largest_eigenvalues(self, blocks: Sequence[Names]) -> dict[Names, LargestEigenvalues]:
        """Return the algebraically largest eigenvalue of each block; a read of the data gives a product for all."""
        sizes = {names: self.size(names) for names in blocks}
        basis, seed = max(1, self._task.budget().bases // (8 * sum(sizes.values()))), self._options.seed
        searches = {}
        for names, size in sizes.items():
            start = RandomVectors(seed, size, self.device).draw().unsqueeze(0)
            start = start * (self._inverse_spread(names) != 0)  # zeros for features that ``normalize`` drops
            searches[names] = lanczos.largest(start, tolerance=self.tolerance, size=basis)
        return lanczos.solved_in_step(searches, self)

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the notes on a layer's value, or on the network's (``""``)."""
        custom = name in self.custom if name else bool(self.custom)
        tied = layers.tie_notes(self._model, self.modules[name]) if name else ()
        return (*tied, *((linearity.TAKEN_AS_THEY_ARE,) if custom else ()))

    def __call__(self, vectors: Mapping[Names, Tensor]) -> Vectors:
        """Return the product of each block with its vectors, by one read of the data."""
        inverse = {names: self._inverse_spread(names) for names in vectors} if self._spreads else {}
        sent = {names: rows * inverse[names] if inverse else rows for names, rows in vectors.items()}
        sums = {names: torch.zeros_like(rows) for names, rows in vectors.items()}

        def take(found: tuple[int, Vectors]) -> None:
            number, products = found
            for names, product in products.items():
                self._check(number, all_finite(product))
                sums[names] += product

        self._runner.each(lambda run: (run.number, self._of_run(run, sent)), take)
        whole = self._shard.sum("a product with the Hessian", {**sums})
        for names, rows in whole.items():
            rows /= self._normaliser
            if inverse:
                rows *= inverse[names]
        return whole

    def gradient(self) -> Tensor:
        """Return ∂E/∂w of all layers, (N,) float64, by one read of the data."""
        sums: list[Tensor] = []

        def take(found: tuple[int, Tensor]) -> None:
            number, part = found
            self._check(number, all_finite(part))
            sums[:] = [sum(sums, part)]

        self._runner.each(self._gradient_of_run, take)
        return self._shard.sum("the gradient", {"": sums[0]})[""] / self._normaliser

    @torch.enable_grad()
    def _gradient_of_run(self, run: Run) -> tuple[int, Tensor]:
        with contractions.full_precision(run.outputs):
            value = self._loss.value(run.outputs, run.targets.detach())
            return run.number, self._joined(_gradients(value, self._leaves)).double()

    @torch.enable_grad()
    def _of_run(self, run: Run, vectors: Vectors) -> Vectors:
        advice = "eigenvalues, of the GGN too, cannot do without"
        names = [*run.recorder.calls] or [*self._leaves]
        with contractions.full_precision(run.outputs), block_traces.differentiable(names, advice, self._what):
            multiply = self._ggn(run) if self._options.by_ggn else self._hessian(run)
            return {names: self._each(partial(multiply, names), rows) for names, rows in vectors.items()}

    @staticmethod
    def _each(multiply: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Return the products of rows (b, N), all by backward passes through one graph."""
        found = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for row, place in zip(rows, found, strict=True):
            place.copy_(multiply(row))
        return found

    def _hessian(self, run: Run) -> Callable[[Names, Tensor], Tensor]:
        leaves = self._leaves
        value = self._loss.value(run.outputs, run.targets.detach())
        self._check_complete(run, value, torch.ones_like(value))
        gradients = _gradients(value, leaves, create_graph=True)

        def multiply(names: Names, vector: Tensor) -> Tensor:
            return self._joined(self._along(gradients, names, vector, {name: leaves[name] for name in names}))

        return multiply

    def _ggn(self, run: Run) -> Callable[[Names, Tensor], Tensor]:
        leaves = self._leaves
        u = run.outputs.detach().requires_grad_()  # any values: Jᵀu is linear in them
        self._check_complete(run, run.outputs, u)
        gradients = _gradients(run.outputs, leaves, u, create_graph=True)  # Jᵀu
        sent = cotangents.of_run(run, self._loss)
        outputs = run.outputs.detach().requires_grad_()

        @functools.cache
        def gradient() -> Tensor:
            value = self._loss.value(outputs, run.targets.detach())
            return _gradients(value, {"": outputs}, create_graph=True)[""]

        def multiply(names: Names, vector: Tensor) -> Tensor:
            (pushed,) = self._along(gradients, names, vector, {"": u}).values()  # J v
            product = sent.times(pushed)
            product = _gradients(gradient(), {"": outputs}, pushed)[""] if product is None else product
            return self._joined(_gradients(run.outputs, {name: leaves[name] for name in names}, product))

        return multiply

    def _check_complete(self, run: Run, value: Tensor, cotangent: Tensor) -> None:
        names = self.custom.intersection(run.recorder.calls)
        for name, found in run.recorder.gradients(value, cotangent, names, create_graph=True).items() if names else ():
            linearity.check_complete(f"layer {name!r}", found)

    def _along(
        self, gradients: Mapping[str, Tensor], names: Names, vector: Tensor, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the gradients of ⟨gradients, v⟩ in ``inputs``."""
        sent = {
            name: (gradients[name], direction.to(gradients[name].dtype))
            for name, direction in self.as_weights(names, vector).items()
            if gradients[name].requires_grad
        }
        return _gradients([each for each, _ in sent.values()], inputs, [each for _, each in sent.values()])

    def as_weights(self, names: Names, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector (N,) as tensors in the shapes of the layers' weights."""
        parts = zip(names, vector.split([self.size((name,)) for name in names]), strict=True)
        # Each part is aligned to 16 bytes.
        aligned = {name: part.clone() if part.storage_offset() % 2 else part for name, part in parts}
        return {name: self._as_weight(name, part.view(self._shape(name))) for name, part in aligned.items()}

    def as_parameters(self, names: Names, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector (N,) as tensors in the shapes of the layers' parameters, or of their rows of these."""
        weights = self.as_weights(names, vector)
        return {name: layers.as_parameter(self.modules[name], weight) for name, weight in weights.items()}

    def _shape(self, name: str) -> torch.Size:
        """Return the shape of a layer's matrix (d, m)."""
        return layers.matrix(self.modules[name])[0].shape

    def _as_weight(self, name: str, matrix: Tensor) -> Tensor:
        return layers.as_weight(self.modules[name], matrix)

    def _as_matrix(self, name: str, weight: Tensor) -> Tensor:
        return layers.as_matrix(self.modules[name], weight)

    def _joined(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return gradients as one vector (N,)."""
        return torch.cat([self._as_matrix(n, g).flatten() for n, g in gradients.items()])

    def _inverse_spread(self, names: Names) -> Tensor:
        """Return the inverse of each entry's factor, (N,), or a 1, (1,), without ``normalize``."""
        if not self._spreads:
            return torch.ones(1, dtype=torch.float64, device=self.device)
        spread = torch.cat([self._spreads[name].flatten() for name in names])
        return torch.where(spread > 0, 1 / spread, 0.0)

    def _check(self, number: int, fine: bool) -> None:
        """Raise unless a batch's targets, or its contribution to a product, are finite or may be NaN."""
        what = "its targets, or its part of a product with the loss Hessian, have NaN or infinity"
        check_batch(self._options, self._runner, number, fine, what)


def check_batch(options: Options, runner: Runner, number: int, fine: bool, what: str) -> None:
    """Raise ``what`` is wrong unless a batch's contribution to an eigenvalue is ``fine``, or may be NaN."""

    def error() -> NonFiniteError:
        layers.check_finite(runner.modules)
        return NonFiniteError(
            f"batch {number}: {what}; an eigenvalue is one of all samples together, so that nan_policy='omit' can "
            "leave none of them out: leave them out of the data, or pass nan_policy='propagate' for NaN"
        )

    check_together(options.nan_policy, fine, error)


def check_filters(task: Task) -> None:
    """Raise if the options ask for convolutions as dense matrices."""
    found = [name for name, module in task.selection.modules.items() if layers.is_convolution(module)]
    if task.options.conv == "affine" and found:
        raise NotYetError(
            f"layer {found[0]!r}: eigenvalues of a convolution as one dense matrix (conv='affine') are not there yet; "
            "conv='filter' gives those in its filters"
        )


def spread(module: nn.Module, scale: Tensor) -> Tensor:
    """Return the factors of a layer's weights, (d, m) float64, if its inputs are divided by ``scale``."""
    matrix = layers.matrix(module)[0]
    columns = normalize.of_columns(module, scale)
    return columns.expand(-1, len(matrix) // len(columns), -1).reshape(matrix.shape)


def _gradients(
    value: Tensor | list[Tensor],
    inputs: Mapping[str, Tensor],
    cotangent: Tensor | list[Tensor] | None = None,
    *,
    create_graph: bool = False,
) -> dict[str, Tensor]:
    """Return the gradients of a value, or of ⟨cotangent, value⟩; zeros for an input that it does not depend on."""
    if not (len(value) if isinstance(value, list) else value.requires_grad):
        return {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    found = torch.autograd.grad(
        value, [*inputs.values()], cotangent, create_graph=create_graph, retain_graph=True, materialize_grads=True
    )
    return dict(zip(inputs, found, strict=True))


def _leaf(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach().requires_grad_()


def _instead(weight: Tensor, own: Tensor) -> Tensor:
    return weight
