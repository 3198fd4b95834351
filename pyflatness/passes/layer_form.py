"""Convert a chosen layer to the common form that all contractions take, rescaled for normalised values."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..contractions import Contractor, DenseContraction, Ingredients, multiplied, product, promoted, promoted_dtype
from ..contractions.factor import gram_factor
from ..contractions.layer import Contraction, Memory, Sign
from ..contractions.quantities import Contribution
from ..contractions.routes import Calls
from ..errors import InputError
from ..interrupts import cached_property
from ..model import layers, spread
from ..model.kinds import Linear
from ..options import Options
from . import neighbours, normalize
from .batch_layout import Layout
from .memory import Budget
from .neighbours import Pooled
from .runner import Run


class LayerForm:
    """Convert one layer's weight, inputs and output gradients to the common form that its kind defines.

    With ``conv="affine"`` a convolution is the dense matrix of all its inputs and outputs, and a sample's calls its
    positions. ``scale`` is of the input's channels, see :mod:`.normalize`, or None.
    """

    def __init__(
        self, name: str, module: nn.Module, quantities: Sequence[str], options: Options, scale: Tensor | None = None
    ) -> None:
        self.name, self._module, self._scale, self.quantities = name, module, scale, quantities
        self._kind = kind = layers.kind_of(module)
        self.by_weight = kind.by_weight
        self._calls: tuple[Linear, ...] = ()  # the kinds of the last run's
        self._options = options
        weight = module.weight
        assert isinstance(weight, Tensor)
        dtype = promoted_dtype(weight.dtype)
        self.backend = contractions.choose(options.backend, weight.device, dtype)
        self.weight_bytes = weight.numel() * weight.element_size()
        self._dense = options.conv == "affine" and kind.space > 0
        self.pointwise = not self._dense and layers.is_pointwise(module)  # every position times the whole weight
        # How many columns of the weight belong to one input channel.
        self.kernel_elements = 1 if self._dense else kind.geometry.kernel_elements
        if self._dense:
            spread.refuse("conv='affine'", "pass conv='filter', or ")
        self._memory = Budget(options.memory, device=weight.device).buffers
        self._sizes: set[tuple[int, ...]] = set()
        self._factor: Tensor | None = None
        self.memory = Memory(), Memory()  # for inputs, and for a cotangent, of one run after another

    def of(self, quantities: Sequence[str]) -> "LayerForm":
        """Return the layer's form for other quantities."""
        return type(self)(self.name, self._module, quantities, self._options, self._scale)

    def contraction(self, run: Run) -> Contractor:
        """Return the contraction for the layer's calls in this run."""
        if self._dense:
            dense = DenseConvolution(self._module, self._scale, self._size(run), run.calls(self.name)[0].output)
            return DenseContraction(dense, self.backend, self.quantities)
        if spread.has_weight_of(self._module) and contractions.needs_weight(self.quantities):
            return Gathered(lambda: self._of(self.matrix))
        return self._own

    @cached_property
    def _own(self) -> Contractor:
        """The contraction of filters; without the entries of a weight that is spread over ranks."""
        if not spread.has_weight_of(self._module):
            return self._of(self.matrix)
        return self._of(layers.without_entries(self._module).unflatten(0, (self._kind.groups, -1)))

    def _of(self, weight: Tensor) -> Contractor:
        """Return the contraction with a weight (G, d, m)."""
        return self._kind.contraction(Ingredients(weight, self.backend, self.quantities, self._memory, self.gradients))

    def kept(self, places: int) -> int:
        """Return the bytes a sample that the contraction keeps of its inputs at so many positions."""
        return 0 if self._dense else self._own.kept(places)

    def weight(self, run: Run) -> Tensor:
        """Return the weight (G, d, m), with the columns that :meth:`patches` has."""
        if self._dense:
            size = self._size(run)
            dtype, device = layers.matrix(self._module)[0].dtype, run.outputs.device
            pixels = torch.eye(torch.Size(size).numel(), dtype=dtype, device=device).unflatten(1, size)
            if self._scale is not None:
                pixels = multiplied(pixels, self._scale, 1).to(dtype)
            output = run.calls(self.name)[0].output
            dense = self._kind.affine(pixels, layers.weight_of(self._module), None, output)
            return dense.flatten(1).t().unsqueeze(0)
        columns = self.columns(run)
        return self.matrix if columns is None else self.matrix[..., columns]

    def whole_weight(self, run: Run) -> Tensor:
        """Return the weight (G, d, m) with all columns, including those that no input of a run has."""
        return self.weight(run) if self._dense else self.matrix

    def columns(self, run: Run) -> Tensor | None:
        """Return the columns of the whole weight that :meth:`weight` has in a run, (U,); None for all."""
        return None if self._dense else self._kind.columns(partial(self.inputs, run))

    def factor(self, run: Run) -> Tensor:
        """Return R (G, r, d), RᵀR = w wᵀ of :meth:`whole_weight`; computed once, unless runs have other weights."""
        if self._factor is None or self._dense:
            self._factor = gram_factor(promoted(self.whole_weight(run)))
        return self._factor

    @property
    def matrix(self) -> Tensor:
        """Return the weight (G, d, m), of a convolution its filters."""
        weight: Tensor = self._kind.as_matrix(layers.weight_of(self._module)).unflatten(0, (self._kind.groups, -1))
        if self._scale is None:
            return weight
        columns = normalize.of_columns(self._module, self._scale)
        scaled: Tensor = promoted(weight) * columns.to(promoted_dtype(weight.dtype))
        return scaled

    def inputs(self, run: Run, memory: Memory | None = None) -> list[Tensor]:
        """Return φ of all calls in the common form; a copy of a single call's goes into ``memory``."""
        calls = run.calls(self.name)
        self._calls, memory = tuple(call.kind for call in calls), memory if len(calls) == 1 else None
        parts = [part for c in calls for part in self._input_parts(run, c.inputs.detach(), c.output, memory)]
        return parts if self._dense else self._kind.joined(parts)

    def input_rows(self, run: Run) -> Tensor:
        """Return φ of a pointwise layer's only call, (positions of all samples, m)."""
        (call,) = run.calls(self.name)
        return layers.input_rows(self._module, self._rescaled(call.inputs.detach()))

    def cotangent(self, run: Run, gradients: Sequence[Tensor], memory: Memory | None = None) -> list[Tensor]:
        """Return δ of all calls in the common form; a copy of a single call's goes into ``memory``."""
        first = partial(run.samples_first, self.name, memory=memory if len(gradients) == 1 else None)
        if self._dense:
            return [part for gradient in gradients for part in first(gradient).unbind(1)]
        calls = zip(gradients, run.calls(self.name), strict=False)  # gradients may be of one call alone
        return self._kind.joined(
            [
                part
                for gradient, call in calls
                for part in self._kind.cotangents(gradient, call.inputs, call.coefficients, self._scale, first)
            ]
        )

    def cotangents(self, run: Run, gradients: Tensor) -> Tensor | None:
        """Return gradients (k, …) in the only call's output as one δ of k n samples; None if they do not stack."""
        layout, count = run.layouts[self.name], len(gradients) * run.samples
        alone = len(run.calls(self.name)) != 1 or not self._kind.stacks_cotangents
        if alone or layout != Layout() or not layout.fits(gradients[0], run.samples):
            return None
        parts = self._in_form(layout.samples_first(gradients.flatten(0, 1), count))
        return parts[0] if len(parts) == 1 else None

    def pooled(self, run: Run) -> Pooled | None:
        """Return the max-pooling behind the layer, if its cotangents may be taken at the output of the pooling."""
        return neighbours.pooled_behind(run, self.name) if self._kind.space == 2 and not self._dense else None

    def of_carried(self, run: Run, inputs: list[Tensor], count: int) -> tuple[GradientEdge, Contraction] | None:
        """Return the edge of wᵀ δ and its contraction, if this is to replace δ for ``count`` cotangents; else None."""
        layer = self.contraction(run)
        if not (self.pointwise and self._scale is None and layer.carries(inputs, count)):
            return None
        arrives = neighbours.carried_edge(run, self.name, self.matrix.dtype)
        return None if arrives is None else (arrives, layer.at_carried(inputs))

    def rows(self, run: Run, gradients: Sequence[Tensor]) -> Tensor:
        """Return δ of all calls by position, (n, G, P, d): the gradients' entries in another order."""
        parts = self.cotangent(run, gradients)
        if self._dense:
            return torch.stack([promoted(part).flatten(1) for part in parts], dim=1).unsqueeze(1)
        return _joined([self._kind.rows(part) for part in parts])

    def changed(self, run: Run, kind: Linear, inputs: Tensor, output: Tensor, changes: Tensor) -> Tensor:
        """Return the change of a call's output for per-sample changes of the weight, (n, G, m, d)."""
        empty = torch.zeros_like(output, requires_grad=True)
        laid_out = self.rows(run, [empty])
        found = self._kind.changed(kind, self.patches(run, (inputs, output)), laid_out, changes)
        (placed,) = torch.autograd.grad(laid_out, empty, found.to(laid_out.dtype), create_graph=True)
        return placed

    def fingerprints(self, run: Run) -> Tensor:
        """Return a number for each sample's inputs, (n,), by which the sample can be recognised."""
        total = torch.zeros(run.samples, dtype=torch.float64, device=run.outputs.device)
        for number, call in enumerate(run.calls(self.name)):
            rows = promoted(run.samples_first(self.name, call.inputs.detach())).flatten(1)
            rows = rows if rows.is_floating_point() else rows.double()
            total += product(rows, (torch.arange(rows.shape[1], device=rows.device) + number).cos().to(rows.dtype))
        return total

    def patches(self, run: Run, call: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Return φ of all calls in a run by position, (n, G, P, m), written out.

        With ``call``, an input and its output, it is φ of that call, with the input's graph.
        """
        calls = [(made.inputs.detach(), made.output) for made in run.calls(self.name)] if call is None else [call]
        parts = [promoted(part) for inputs, output in calls for part in self._input_parts(run, inputs, output)]
        if self._dense:
            return torch.stack([part.flatten(1) for part in parts], dim=1).unsqueeze(1)
        columns, dtype = self.columns(run), promoted_dtype(layers.without_entries(self._module).dtype)
        return _joined([self._kind.patches(part, columns, dtype) for part in parts])

    def gradients(self, inputs: Sequence[Tensor], cotangent: Sequence[Tensor]) -> Tensor:
        """Return M of some samples, (n, G, d, m), written out, from their :meth:`inputs` and cotangents."""
        return self._kind.gradients(inputs, cotangent, layers.without_entries(self._module), self._calls)

    def on_all_columns(self, run: Run, found: Tensor) -> Tensor:
        """Return values on the columns of :meth:`weight`, (…, columns), placed on those of the matrix, 0 elsewhere."""
        columns = self.columns(run)
        if columns is None:
            return found
        whole = found.new_zeros(*found.shape[:-1], layers.without_entries(self._module).shape[1])
        return whole.index_copy_(whole.ndim - 1, columns, found)

    def _input_parts(self, run: Run, inputs: Tensor, output: Tensor, memory: Memory | None = None) -> list[Tensor]:
        inputs = self._rescaled(inputs)
        if not self._dense:
            inputs = self._kind.pad(inputs, output)
        return self._in_form(run.samples_first(self.name, inputs, memory))

    def _rescaled(self, inputs: Tensor) -> Tensor:
        return inputs if self._scale is None else self._kind.divided(inputs, self._scale)

    def _in_form(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.unbind(1)) if self._dense else self._kind.in_common_form(tensor)

    def _size(self, run: Run) -> tuple[int, ...]:
        """Return the size of a sample's unpadded input."""
        self._sizes |= {tuple(call.inputs.shape[1:]) for call in run.calls(self.name)}
        if len(self._sizes) > 1:
            raise InputError(
                f"layer {self.name!r}: conv='affine' on inputs of several sizes {sorted(self._sizes)}; each would be "
                "a dense matrix of its own"
            )
        (size,) = self._sizes
        return size


class DenseConvolution:
    """Represent a convolution as one dense matrix W (d, m), never written out; see :mod:`.contractions.dense`."""

    def __init__(self, module: nn.Module, scale: Tensor | None, size: tuple[int, ...], output: Tensor) -> None:
        self._module, self._scale, self._size, self._output = module, scale, size, output
        self.d, self.m = output[0].numel(), torch.Size(size).numel()
        self.device = layers.matrix(module)[0].device

    def carried(self, delta: Tensor) -> Tensor:
        """Return Wᵀ δ: the gradient in the layer's unpadded input through this layer alone."""
        gamma = layers.kind_of(self._module).carried(delta, self._size, layers.weight_of(self._module))
        return gamma if self._scale is None else multiplied(gamma, self._scale, 1)

    def applied(self, inputs: Tensor, power: int) -> Tensor:
        """Return W x, or (W ∘ W) x; entries of W are those of the weight if the padding is zeros."""
        weight = promoted(layers.weight_of(self._module)) ** power
        if self._scale is not None:
            inputs = multiplied(inputs, self._scale**power, 1)
        return layers.kind_of(self._module).affine(promoted(inputs), weight, None, self._output)


def _joined(calls: list[Tensor]) -> Tensor:
    """Return the positions of all calls side by side."""
    return calls[0] if len(calls) == 1 else torch.cat(calls, dim=2)


class Gathered(Contractor):
    """Contract with a weight that is gathered from the ranks when it is needed."""

    def __init__(self, make: Callable[[], Contractor]) -> None:
        self._make = make

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> "GatheredContraction":
        """Return the contraction at the inputs of a micro-batch; no cotangents are held back."""
        return GatheredContraction(lambda: self._make().at(inputs, 1))

    def nothing(self, samples: int) -> Contribution:
        """Return the contribution of samples without cotangents."""
        return self._make().nothing(samples)


class GatheredContraction(Contraction):
    """Contract one cotangent after another with a gathered weight; none is held back."""

    stack_size, held = 1, 0

    def __init__(self, make: Callable[[], Contraction]) -> None:
        self._make = make

    def of(self, cotangent: Calls, sign: Sign = None) -> Contribution:
        """Return the contribution of a cotangent by itself."""
        return self._make().of(cotangent, sign)
