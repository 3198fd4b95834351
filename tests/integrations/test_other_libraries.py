"""Models of other libraries, each with its own package: values against nested autograd, and what is left as found.

A case is a row of the table in ``docs/models.md``. It skips where its package is not installed.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import pyflatness as pf
from pyflatness.errors import InputError
from support import ROOT
from support.unchanged import assert_unchanged, snapshot

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(8) % 3


@dataclass(frozen=True)
class Network:
    """Hold a model of a library, and how it is measured."""

    model: nn.Module
    data: object = (X, Y)
    options: dict = field(default_factory=dict)  # of pf.measure
    weights: dict[str, str] = field(default_factory=dict)  # the parameter of a layer where it is not NAME.weight
    uncovered: tuple[str, ...] = ()
    refusal: str = ""  # a part of the error, for a model that is refused
    tolerance: float = 1e-9
    plainly: Callable[[nn.Module], object] = lambda model: None  # makes a model ready to be differentiated by torch


@dataclass(frozen=True)
class Case:
    """Name a row of the page, and what makes its network."""

    library: str  # as pip has it
    version: str  # that was tried
    module: str
    make: Callable[[], Network]
    name: str = ""  # of several cases of a library


def opacus() -> Network:
    from opacus import GradSampleModule

    return Network(GradSampleModule(_tanh()).train(), plainly=GradSampleModule.remove_hooks)


def mup() -> Network:
    import mup

    class Readout(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, width).double(), mup.MuReadout(width, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).tanh())

    model = Readout(8)
    mup.set_base_shapes(model, Readout(4), delta=Readout(6))
    nn.init.normal_(model.last.weight)
    return Network(model)


def spikingjelly() -> Network:
    from spikingjelly.activation_based import functional

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        functional.reset_net(model)
        return sum(model(batch[0]) for _ in range(3)), batch[1]

    return Network(_spiking(), options={"forward": forward, "curvature": "ggn"})


def spikingjelly_not_reset() -> Network:
    refusal = "it keeps \"1._memories['v']\" from call to call"
    return Network(_spiking(), options={"curvature": "ggn"}, refusal=refusal)


def snntorch() -> Network:
    from snntorch import utils

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        utils.reset(model)
        return sum(model(batch[0]) for _ in range(3)), batch[1]

    options = {"forward": forward, "curvature": "ggn"}
    return Network(_leaky(), (X.float(), Y), options, tolerance=1e-4)


def snntorch_not_reset() -> Network:
    return Network(_leaky(), (X.float(), Y), {"curvature": "ggn"}, refusal="depend on the calls before: it keeps '1.")


def torchao(fp8: bool) -> Network:
    from torchao import quantization

    model, config = _tanh().float(), quantization.Float8WeightOnlyConfig if fp8 else quantization.Int8WeightOnlyConfig
    quantization.quantize_(model[0:1], config())
    return Network(model, (X.float(), Y), uncovered=("0.weight",), tolerance=1e-4)


def quanto() -> Network:
    from optimum import quanto

    model = _tanh().float()
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return Network(model, (X.float(), Y), refusal="keeps its weight as a WeightQBytesTensor of optimum")


CASES = [
    Case("opacus", "1.6.0", "opacus", opacus),
    Case("mup", "1.0.0", "mup", mup),
    Case("spikingjelly", "2.0.0", "spikingjelly", spikingjelly),
    Case("spikingjelly", "2.0.0", "spikingjelly", spikingjelly_not_reset, "not reset"),
    Case("torchao", "0.18.0", "torchao", functools.partial(torchao, fp8=False), "int8"),
    Case("torchao", "0.18.0", "torchao", functools.partial(torchao, fp8=True), "fp8"),
    Case("optimum-quanto", "0.2.7", "optimum.quanto", quanto),
    Case("snntorch", "1.0.0", "snntorch", snntorch),
    Case("snntorch", "1.0.0", "snntorch", snntorch_not_reset, "not reset"),
]


def _tanh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _spiking() -> nn.Module:
    from spikingjelly.activation_based import neuron, surrogate

    torch.manual_seed(0)
    node = neuron.LIFNode(surrogate_function=surrogate.Sigmoid())
    return nn.Sequential(nn.Linear(6, 5), node, nn.Linear(5, 3)).double()


def _leaky() -> nn.Module:
    import snntorch

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), snntorch.Leaky(beta=0.9, init_hidden=True), nn.Linear(5, 3))
    model(X.float())
    return model


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(filter(None, (case.library, case.name))))
def test_values_are_those_of_nested_autograd(case: Case) -> None:
    pytest.importorskip(case.module)
    network = case.make()
    before, measures = snapshot(network.model), ["relative_flatness", "trace"]
    before["state"] = {name: held for name, held in before["state"].items() if type(held) is Tensor}  # can be compared
    if network.refusal:
        with pytest.raises(InputError, match=re.escape(network.refusal)):
            pf.measure(network.model, "cross_entropy", network.data, measures=measures, **network.options)
        assert_unchanged(network.model, before)
        return
    report = pf.measure(network.model, "cross_entropy", network.data, measures=measures, **network.options)
    assert_unchanged(network.model, before)
    assert tuple(report.uncovered) == network.uncovered
    assert report.layers
    for layer in report.layers:
        weight = network.model.get_parameter(network.weights.get(layer, f"{layer}.weight"))
        matrix = _curvature(network, weight)
        gram = weight.detach().flatten(1) @ weight.detach().flatten(1).t()
        kappa = float((gram * torch.einsum("sjtj->st", matrix)).sum())
        assert report[layer, "relative_flatness"].value == pytest.approx(kappa, rel=network.tolerance), layer
        trace = float(torch.einsum("sjsj->", matrix))
        assert report[layer, "trace"].value == pytest.approx(trace, rel=network.tolerance), layer


def _curvature(network: Network, weight: Tensor) -> Tensor:
    """Return the Hessian or GGN of the mean loss in a weight of two dimensions, (d, m, d, m)."""
    forward = network.options.get("forward", lambda model, batch: (model(batch[0]), batch[1]))
    network.plainly(network.model)
    outputs, targets = forward(network.model, network.data)
    risk = nn.functional.cross_entropy
    if network.options.get("curvature") == "ggn":
        inner = torch.autograd.functional.hessian(lambda o: risk(o, targets), outputs.detach())
        rows = [torch.autograd.grad(entry, weight, retain_graph=True)[0] for entry in outputs.flatten()]
        jacobian = torch.stack(rows).flatten(1)
        matrix = jacobian.t() @ inner.flatten(2).flatten(0, 1) @ jacobian
    else:
        (gradient,) = torch.autograd.grad(risk(outputs, targets), weight, create_graph=True)
        rows = [torch.autograd.grad(entry, weight, retain_graph=True)[0] for entry in gradient.flatten()]
        matrix = torch.stack(rows).flatten(1)
    return matrix.unflatten(1, weight.shape).unflatten(0, weight.shape)


def test_the_page_has_a_row_for_each_library() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("## Models of other libraries")[1]
    rows = re.findall(r"^\| \[?([\w-]+)\]?[^|]*\| ([\d.]+)", page.partition("\n## ")[0], re.MULTILINE)
    assert {(case.library, case.version) for case in CASES} <= set(rows)
