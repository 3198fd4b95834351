"""One sweep over the data for all layers and quantities: forward, output factors backward, contractions.

for x, y in batches:                              # cut to the memory budget
    f, φ, edges = model(x)                        # tape: layer inputs, gradient edges of layer outputs
    for each output factor s of f:                # signals: C - 1 for cross-entropy, terms of a sample apart
        δ = autograd.grad(f, edges, s)            # for all layers at once
        for each layer: value_i += σ q(M_i)       # contractions of M_i = Σ_p δ_ip φ_ipᵀ
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from . import contractions, layers, normalize, signals
from .contractions import DenseGradients, WeightGradients
from .errors import InputError
from .losses import Loss
from .options import Options
from .runner import Run, Runner

Parts = list[Tensor]


@dataclass(frozen=True)
class Values:
    """Of some samples.

    Attributes:
        values: (layers, quantities, n) float64, summed over output factors; not yet divided by the loss's divisor.
            Of all selected layers; 0 for one that did not run.
        mass: (n,) float64, the samples' part of the divisor of a mean.
        number: of the user's batch.
    """

    values: Tensor
    mass: Tensor
    number: int


class Layer:
    """A layer as the contractions see it, rescaled where the user wants normalised values.

    Args:
        name: for errors.
        module: the layer.
        scale: of the layer's input channels, or None; see :mod:`.normalize`.
        backend: a module from :func:`.contractions.choose`.
        quantities: what is wanted.
        options: of the user.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        scale: Tensor | None,
        backend: ModuleType,
        quantities: Sequence[str],
        options: Options,
    ) -> None:
        self._name, self._module, self._scale = name, module, scale
        self._backend, self._quantities = backend, quantities
        self._dense = options.conv == "affine" and layers.is_convolution(module)
        self._sizes: set[tuple[int, ...]] = set()
        self._gradients: WeightGradients | None = None
        if not self._dense:
            weight = layers.matrix(module)[0].unflatten(0, (layers.groups(module), -1))
            if scale is not None:
                taps = layers.geometry(module).taps
                columns = scale.view(len(weight), 1, -1).repeat_interleave(taps, dim=2)
                weight = contractions.promoted(weight) * columns.to(contractions.promoted_dtype(weight.dtype))
            memory = options.memory or contractions.DEFAULT_MEMORY
            geometry = layers.geometry(module)
            self._gradients = WeightGradients(weight, geometry, backend, quantities, memory=memory)

    def gradients(self, run: Run) -> WeightGradients | DenseGradients:
        """The contractions for the layer's calls in this run."""
        if self._gradients is not None:
            return self._gradients
        self._sizes |= {tuple(call.inputs.shape[1:]) for call in run.calls(self._name)}
        if len(self._sizes) > 1:
            raise InputError(
                f"layer {self._name!r}: conv='affine' on inputs of several sizes {sorted(self._sizes)}; each would be "
                "a dense matrix of its own"
            )
        (size,) = self._sizes
        return DenseGradients(lambda delta: self._carried(delta, size), self._backend, self._quantities)

    def inputs(self, run: Run) -> Parts:
        """φ of all calls, as the contractions want them."""
        parts: Parts = []
        for call in run.calls(self._name):
            inputs = call.inputs.detach()
            if self._scale is not None:
                inputs = normalize.divided(inputs, self._scale, layers.class_dim(self._module))
            if not self._dense:
                inputs = layers.pad(self._module, inputs)
            parts += self._in_form(run.samples_first(self._name, inputs))
        return parts if self._dense else layers.joined(self._module, parts)

    def signal(self, run: Run, gradients: Sequence[Tensor]) -> Parts:
        """δ of all calls, as the contractions want them."""
        parts: Parts = []
        for gradient in gradients:
            parts += self._in_form(run.samples_first(self._name, gradient))
        return parts if self._dense else layers.joined(self._module, parts)

    def _in_form(self, tensor: Tensor) -> Parts:
        return list(tensor.unbind(1)) if self._dense else layers.in_common_form(self._module, tensor)

    def _carried(self, delta: Tensor, size: tuple[int, ...]) -> Tensor:
        """γ = Wᵀ δ: the gradient in the layer's unpadded input through this layer alone."""
        weight = layers.matrix(self._module)[0]
        inputs = torch.zeros(len(delta), *size, dtype=weight.dtype, device=weight.device, requires_grad=True)
        with torch.enable_grad():
            (gamma,) = torch.autograd.grad(layers.apply(self._module, inputs), inputs, delta.to(weight.dtype))
        return gamma if self._scale is None else normalize.multiplied(gamma, self._scale, 1)


class Sweep:
    """The sweep of a runner, for some quantities.

    Args:
        runner: the model, its layers and data.
        loss: from :func:`.losses.resolve`.
        options: of the user.
        quantities: of :data:`.contractions.layer.QUANTITIES`.
    """

    def __init__(self, runner: Runner, loss: Loss, options: Options, quantities: Sequence[str]) -> None:
        self._runner, self._loss, self._options, self._quantities = runner, loss, options, quantities
        self._layers: dict[str, Layer] = {}
        self._scales: Mapping[str, Tensor] = {}
        self.backend = ""
        if options.normalize:
            self._scales = normalize.feature_scales(runner, loss, options.nan_policy)

    def values(self) -> Generator[Values, None, None]:
        """Every sample's quantities in every layer.

        Raises:
            InputError: see :meth:`.Runner.results`; targets that do not fit.
            NotYetError: too many backward passes.
        """
        return self._runner.results(self._values)

    def block_traces(self, limit: int) -> Generator[tuple[Tensor, Values], None, None]:
        """Of one layer: Σ_i Σ_c σ_ic M_i^(c) M_i^(c)ᵀ, (G, d, d) float64, beside the values of the same samples.

        Raises:
            InputError: the matrix would take more than ``limit`` bytes.
        """
        return self._runner.results(lambda run: self._block_traces(run, limit))

    def notes(self, name: str) -> tuple[str, ...]:
        """What a reader of a layer's value should know."""
        dropped = int((self._scales[name] == 0).sum()) if name in self._scales else 0
        return (f"{dropped} features that are zero throughout dropped",) if dropped else ()

    def _values(self, run: Run) -> Values:
        sent = self._prepared(run)
        places = {name: place for place, name in enumerate(self._runner.selected) if run.calls(name)}
        totals = torch.zeros(len(self._runner.selected), len(self._quantities), run.samples, dtype=torch.float64)
        totals = totals.to(run.outputs.device)
        contract = {}
        with contractions.full_precision(run.outputs):
            for name in places:
                layer = self._layers[name]
                contract[name] = layer.gradients(run).of(layer.inputs(run), sent.passes)
        for gradients, signs in _backward(run, sent):
            with contractions.full_precision(run.outputs):
                for name, place in places.items():
                    share = contract[name](self._layers[name].signal(run, gradients.pop(name)))
                    totals[place] += share if signs is None else share * signs
        return Values(totals, sent.mass, run.number)

    def _block_traces(self, run: Run, limit: int) -> tuple[Tensor, Values]:
        ((name, module),) = self._runner.selected.items()
        rows = len(layers.matrix(module)[0])
        if self._options.conv == "affine" and layers.is_convolution(module) and run.calls(name):
            rows = max(call.output.numel() for call in run.calls(name)) // run.samples
        if limit < 8 * rows**2:
            raise InputError(
                f"layer {name!r}: its block traces are a matrix of {rows} x {rows}, more than {limit >> 20} MiB; "
                "relative_flatness and measure need no such matrix"
            )
        values = self._values(run)
        kept = values.values.isfinite().flatten(0, 1).all(dim=0)
        if self._options.nan_policy != "omit":
            kept = torch.ones_like(kept)
        if not run.calls(name):
            return torch.zeros((), dtype=torch.float64, device=run.outputs.device), values
        layer = self._layers[name]
        inputs = [_masked(part, kept) for part in layer.inputs(run)]
        total = torch.zeros((), dtype=torch.float64, device=run.outputs.device)
        for gradients, signs in _backward(run, self._prepared(run)):
            with contractions.full_precision(run.outputs):
                signal = [_masked(part, kept) for part in layer.signal(run, gradients[name])]
                coefficients = torch.ones_like(values.mass) if signs is None else torch.where(kept, signs, 0.0)
                total = total + layer.gradients(run).traces(inputs, signal, coefficients)
        return total, values

    def _prepared(self, run: Run) -> signals.Signals:
        """The signals of a run; layers are set up when the first one comes."""
        for name, module in self._runner.modules.items():
            if name not in self._layers:
                self._layers[name] = self._layer(name, module)
        return signals.of_run(run, self._loss)

    def _layer(self, name: str, module: nn.Module) -> Layer:
        weight = layers.matrix(module)[0]
        backend = contractions.choose(self._options.backend, weight.device, contractions.promoted_dtype(weight.dtype))
        self.backend = contractions.describe(backend)
        return Layer(name, module, self._scales.get(name), backend, self._quantities, self._options)


def _backward(run: Run, sent: signals.Signals) -> Iterator[tuple[dict[str, list[Tensor]], Tensor | None]]:
    """For each signal: the gradients in all calls of all layers, and the signs."""
    for signal, signs in sent:
        yield run.tape.gradients(run.outputs, signal), signs


def _masked(part: Tensor, kept: Tensor) -> Tensor:
    """Zeros for the samples that are left out."""
    return part if bool(kept.all()) else torch.where(kept.view(-1, *(1,) * (part.ndim - 1)), part, 0.0)
