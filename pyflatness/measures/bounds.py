"""Bounds on the representation's measures by derivatives in the weights (C24, Propositions 3.4 to 3.10).

For layer l with weight W and input x_i, J_i = ∂f_i/∂x_i through everything behind, s = s_max(J_i), g_i = |∂f_i/∂W|_F,
N outputs, and S the sharpness at an interpolation, (1/n) Σ_i |∂f_i/∂θ|_F² (Eq. 3), θ the chosen layers' weights:

    mls_bound         |W|₂ √(mean 1/|x_i|²) √(mean g_i²)  ≥ mls                                  C of Eq. 48
    nmls_bound        √(mean_i Σ_l |W_l|₂²/|x_i^l|²) √S  ≥ nmls                                  Eq. 12
    log_volume_bound  log of (1/n) √(Σ_i |W|₂^2N/|x_i|^2N) (nS/N)^(N/2)  ≥ log of volume         Eq. 9; network: Eq. 10

``pf.bounds`` lists all of the paper's steps with their left sides. The paper's S is over all parameters, which are
more: the S here gives smaller right-hand sides for which the proofs hold as well; another one can be passed. A
convolution's W has a filter to a row, its groups are matrices of their own, and |W|₂ is the largest of theirs. Where an
input is zero the right-hand sides are infinite.

The inequalities rest on J = (∂f/∂z) W and g = |∂f/∂z|_F |x| at the layer's output z. They hold for Linear layers with
one position, called once, whose input goes nowhere else; elsewhere (tokens, convolutions, shortcuts) there is **no
guarantee**, and the values say so.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from .. import capture, jacobians, losses, selectors
from .. import layers as layer_weights
from ..data import Batches
from ..errors import InputError
from ..jacobians import Samples
from ..options import Options
from ..report import Estimate
from ..selectors import Selector
from ..task import Task
from .base import Measure, Values
from .representation import COST

_NO_GUARANTEE = "no guarantee"


@dataclass(frozen=True)
class Bound:
    """One inequality: ``left`` is at most ``right`` where it is guaranteed.

    Attributes:
        equation: of the paper: its number, and which of its steps.
        layer: whose; empty for the network.
        what: the left side in words.
        left: its value.
        right: the right-hand side.
        log: whether both are logarithms, as wherever a power of N appears.
        caveat: why it need not hold; empty where it must.
    """

    equation: str
    layer: str
    what: str
    left: float
    right: float
    log: bool = False
    caveat: str = ""

    @property
    def guaranteed(self) -> bool:
        """Whether it must hold, up to rounding."""
        return not self.caveat


@dataclass(frozen=True, repr=False)
class Bounds:
    """The inequalities of the paper, with both their sides. ``str(bounds)`` is a table.

    Attributes:
        rows: layer by layer, then of the network.
        sharpness: S, of the chosen layers' weights unless it was given.
        samples: how many all means are over.
        outputs: N.
    """

    rows: tuple[Bound, ...]
    sharpness: float
    samples: int
    outputs: int

    def __getitem__(self, key: str | tuple[str, str]) -> Bound:
        layer, equation = ("", key) if isinstance(key, str) else key
        for row in self.rows:
            if (row.layer, row.equation) == (layer, equation):
                return row
        known = ", ".join(dict.fromkeys(row.equation for row in self.rows))
        raise InputError(f"bounds: nothing of layer {layer!r} and equation {equation!r}; equations are {known}")

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        return asdict(self)

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON; NaN and infinity as Python writes them."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def __str__(self) -> str:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for header in ("layer", "equation", "what"):
            table.add_column(header, overflow="fold")
        for header in ("value", "bound"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("guaranteed")
        for row in self.rows:
            said = f"{_NO_GUARANTEE}: {row.caveat}" if row.caveat else "yes"
            table.add_row(row.layer or "network", row.equation, row.what, f"{row.left:.6g}", f"{row.right:.6g}", said)
        console = Console(width=200, markup=False, highlight=False, emoji=False, color_system=None)
        with console.capture() as captured:
            console.print(table)
        lines = [line.rstrip() for line in captured.get().splitlines() if line.strip()]
        return "\n".join([*lines, f"{self.samples} samples, N = {self.outputs}, S = {self.sharpness:.6g}"])

    __repr__ = __str__


class _Layer:
    """What the inequalities of one layer are made of; Tensors are (n,) float64, norms not squared."""

    def __init__(self, samples: Samples, name: str) -> None:
        self.name, self.caveat = name, samples.apart[name]
        module = samples.task.selection.modules[name]
        weight = layer_weights.matrix(module)[0].double().unflatten(0, (layer_weights.groups(module), -1))
        self.spectral = float(torch.linalg.matrix_norm(weight, 2).max())
        self.frobenius = float(weight.norm())
        self.x = samples.counted(name, "size").sqrt()
        self.s = samples.counted(name, "largest")
        self.jacobian = samples.counted(name, "trace").sqrt()
        self.log_volume = samples.counted(name, "log_volume")
        self.g = samples.counted(name, "weights").sqrt()

    @property
    def sensitivity(self) -> float:
        """Mean |W|₂ g / |x|: B of Eq. 48."""
        return _mean(torch.where(self.x > 0, self.ratios * self.g, torch.inf))

    @property
    def ratios(self) -> Tensor:
        """|W|₂ / |x|; infinite if an input is zero."""
        return torch.where(self.x > 0, self.spectral / self.x, torch.inf)

    @property
    def spread(self) -> float:
        """√(mean 1/|x|²)."""
        return math.sqrt(_mean(self.x.pow(-2)))

    @property
    def weights(self) -> float:
        """√(mean g²)."""
        return math.sqrt(_mean(self.g.square()))

    @property
    def mls_bound(self) -> float:
        """C of Eq. 48."""
        return _product(self.spread, self.spectral, self.weights)


class _Network:
    """The layers together."""

    def __init__(self, samples: Samples, sharpness: float | None = None) -> None:
        self.layers = [_Layer(samples, name) for name in samples.layers]
        self.outputs, self.samples = samples.width, int(samples.kept.sum())
        own = sum(layer.weights**2 for layer in self.layers)
        if sharpness is not None and not sharpness >= own * (1 - 1e-4):
            raise InputError(f"sharpness={sharpness}: of the chosen layers' weights alone it is {own:.6g} already")
        self.sharpness = own if sharpness is None else sharpness
        apart = [f"{layer.name!r}: {layer.caveat}" for layer in self.layers if layer.caveat]
        self.caveat = "; ".join(apart[:2]) + ("; …" if len(apart) > 2 else "")

    def nmls(self) -> float:
        """The right-hand side of Eq. 12."""
        ratios = torch.stack([layer.ratios.square() for layer in self.layers])
        return math.sqrt(_product(_mean(ratios.sum(dim=0)), self.sharpness))

    def log_volume(self, layers: Sequence[_Layer]) -> float:
        """The logarithm of the right-hand side of Eq. 9 for one layer, of Eq. 10 for all."""
        n, N = self.samples, self.outputs
        ratios = torch.stack([layer.ratios for layer in layers]).flatten()
        if bool(ratios.isinf().any()):
            return math.inf
        sharpness = math.log(n * self.sharpness / N) if self.sharpness else -math.inf
        return 0.5 * float((2 * N * ratios.log()).logsumexp(dim=0)) - math.log(n) + N / 2 * sharpness

    def log_norms(self, layers: Sequence[_Layer]) -> float:
        """Log of N^(-N/2) (1/n) Σ |J|_F^N, over layers: the middle of Eq. 9 and 10."""
        N = self.outputs
        logs = torch.stack([layer.jacobian.log() for layer in layers]).flatten()
        return float((N * logs).logsumexp(dim=0)) - math.log(self.samples) - N / 2 * math.log(N)

    def log_volumes(self, layers: Sequence[_Layer]) -> float:
        """Log of the sum over layers of the mean volumes."""
        logs = torch.stack([layer.log_volume for layer in layers]).flatten()
        return float(logs.logsumexp(dim=0)) - math.log(self.samples)


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _product(factor: float, *others: float) -> float:
    """Infinite if the first factor is: a sample whose input is zero has no bound, whatever the others do."""
    return factor if math.isinf(factor) else factor * math.prod(others)


def _of_layer(net: _Network, layer: _Layer, behind: _Layer | None) -> list[Bound]:
    root, A = math.sqrt(net.sharpness), _mean(layer.s)

    def row(equation: str, what: str, left: float, right: float, *, log: bool = False) -> Bound:
        return Bound(equation, layer.name, what, left, right, log, layer.caveat)

    factor = float(layer.ratios.max()) ** 2
    square = _mean(layer.s.square())
    volume, both = net.log_volumes([layer]), _mean(layer.jacobian * layer.x)
    rows = [
        row("5", "mean s_max, by |∂f/∂W|/|x|: B of Eq. 48", A, layer.sensitivity),
        row(
            "6, W",
            "mean s_max², by the smallest |x| and W",
            _mean(layer.s.square()),
            _product(factor, layer.weights**2),
        ),
        row("6", "mean s_max², by the smallest |x| and S", square, _product(factor, net.sharpness)),
        row("9, middle", "log of the mean volume, by |J|_F", volume, net.log_norms([layer]), log=True),
        row("9", "log of the mean volume, by S", volume, net.log_volume([layer]), log=True),
        row("48, C", "mean s_max, by W", A, layer.mls_bound),
        row("11", "mean s_max, by S: D of Eq. 48", A, _product(layer.spread, layer.spectral, root)),
        row("37", "2 mean |J|_F |x|, by g² + |W|²", 2 * both, layer.weights**2 + layer.frobenius**2),
    ]
    if behind is not None:
        drop = _mean(layer.s - behind.s)
        rows.append(row("17", "mean s_max less that of the next layer", drop, layer.sensitivity))
    return rows


def _of_network(net: _Network) -> list[Bound]:
    every, first, last = net.layers, net.layers[0], net.layers[-1]

    def row(equation: str, what: str, left: float, right: float, *, log: bool = False) -> Bound:
        return Bound(equation, "", what, left, right, log, net.caveat)

    volume = net.log_volumes(every)
    scaled = sum(_mean(layer.s) / layer.spread for layer in every)
    return [
        row("10, middle", "log of the sum of mean volumes, by |J|_F", volume, net.log_norms(every), log=True),
        row("10", "log of the sum of mean volumes, by S", volume, net.log_volume(every), log=True),
        row("12", "Σ_l mean s_max", sum(_mean(layer.s) for layer in every), net.nmls()),
        row("35", "Σ_l mean s_max / √(mean 1/|x|²), by |W|₂", scaled, sum(one.spectral * one.weights for one in every)),
        row("35, F", "the same, by |W|_F", scaled, sum(one.frobenius * one.weights for one in every)),
        row(
            "17, summed",
            "mean s_max at the first layer less that at the last",
            _mean(first.s - last.s),
            sum(layer.sensitivity for layer in every[:-1]),
        ),
    ]


@capture.eager
def bounds(
    model: nn.Module,
    loss: Any,
    data: Any,
    *,
    layers: Selector | Sequence[Selector] | None = None,
    sharpness: float | None = None,
    nan_policy: str = "raise",
    backend: str = "auto",
    forward: capture.Forward | None = None,
    memory: int | None = None,
    progress: bool | None = None,
) -> Bounds:
    """The bounds of "From Loss Flatness to Compressed Representations" with both their sides, layer by layer.

    Eq. 5, 6, 9 to 12, 17 (and its sum over layers, appendix A), 35, 37 at σ = σ' = 1 and λ = ½, 48; see
    docs/measures.md for the symbols. One forward pass and one backward pass per output.

    Args:
        model: in eval mode; left as it was found.
        loss: as for :func:`pyflatness.measure`; it has no part in the values.
        data: as for :func:`pyflatness.relative_flatness`.
        layers: whose weights θ is made of; None: all layers that can be measured and ran.
        sharpness: S of more parameters, as the paper has it of all: (1/n) Σ_i |∂f_i/∂θ|_F².
        nan_policy: ``"raise"``, ``"propagate"`` or ``"omit"``.
        backend: ``"auto"``, ``"compiled"`` or ``"reference"``.
        forward: ``(model, batch) -> (outputs, targets)``.
        memory: bytes for a part's graph, layer inputs and Jacobians, to which batches are cut (512 MiB).
        progress: show a bar.

    Returns:
        ``bounds[layer, equation]`` and ``bounds[equation]`` are inequalities, ``str(bounds)`` a table.

    Raises:
        FlatnessError: as :func:`pyflatness.representation`; a ``sharpness`` below that of the weights.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> found = pf.bounds(model, torch.nn.CrossEntropyLoss(), data)
        >>> found["12"].guaranteed, found["12"].left <= found["12"].right
        (True, True)
    """
    options = Options(backend=backend, nan_policy=nan_policy, memory=memory)
    resolved = losses.resolve(loss, None)
    with capture.observing(model) as module:
        batches = Batches(data, capture.device(module), shown=progress)
        task = Task(module, selectors.select(module, layers), resolved, batches, forward, options)
        net = _Network(jacobians.measured(task, ("weights", "log_volume")), sharpness)
    rows: list[Bound] = []
    for layer, behind in zip(net.layers, [*net.layers[1:], None], strict=True):
        rows += _of_layer(net, layer, behind)
    return Bounds((*rows, *_of_network(net)), net.sharpness, net.samples, net.outputs)


def _estimate(samples: Samples, value: float, layer: str, caveat: str) -> Estimate:
    return Estimate(
        value=value,
        stderr=None,
        samples=int(samples.kept.sum()),
        method="jacobian",
        exact=True,
        backend=samples.backend,
        layer=layer,
        omitted=int((~samples.kept).sum()),
        notes=(f"bounds: {_NO_GUARANTEE}, {caveat}",) if caveat else (),
    )


def _mls_bounds(samples: Samples) -> Values:
    found = [_Layer(samples, name) for name in samples.layers]
    return {layer.name: _estimate(samples, layer.mls_bound, layer.name, layer.caveat) for layer in found}


def _nmls_bound(samples: Samples) -> Values:
    net = _Network(samples)
    return {"": _estimate(samples, net.nmls(), "", net.caveat)}


def _log_volume_bounds(samples: Samples) -> Values:
    net = _Network(samples)
    found = {layer.name: _estimate(samples, net.log_volume([layer]), layer.name, layer.caveat) for layer in net.layers}
    return {**found, "": _estimate(samples, net.log_volume(net.layers), "", net.caveat)}


MLS_BOUND = Measure(
    name="mls_bound",
    formula="|W|₂ √(mean_i 1/|x_i|²) √(mean_i |∂f_i/∂W|_F²)",
    source="From Loss Flatness to Compressed Representations, Eq. 48, C",
    of_jacobians=_mls_bounds,
    needs=("weights", "log_volume"),
    granularity="layer",
    cost=COST,
)
NMLS_BOUND = Measure(
    name="nmls_bound",
    formula="√(mean_i Σ_l |W_l|₂²/|x_i^l|²) √(mean_i Σ_l |∂f_i/∂W_l|_F²)",
    source="From Loss Flatness to Compressed Representations, Eq. 12",
    of_jacobians=_nmls_bound,
    needs=("weights", "log_volume"),
    granularity="network",
    cost=COST,
)
LOG_VOLUME_BOUND = Measure(
    name="log_volume_bound",
    formula="log of (1/n) √(Σ_i |W|₂^2N/|x_i|^2N) (nS/N)^(N/2), S = mean_i Σ_l |∂f_i/∂W_l|_F²",
    source="From Loss Flatness to Compressed Representations, Eq. 9 and 10",
    of_jacobians=_log_volume_bounds,
    needs=("weights", "log_volume"),
    cost=COST,
)
ROWS = (MLS_BOUND, NMLS_BOUND, LOG_VOLUME_BOUND)
