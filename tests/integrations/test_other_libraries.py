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
from support import ROOT, truth
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
    loss: Callable[..., Tensor] = nn.functional.cross_entropy
    entrywise: tuple[str, ...] = ()  # layers whose entries multiply features one by one
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


def bitsandbytes(kind: str, place: int = 0, refusal: str = "", **options: object) -> Network:
    from bitsandbytes import nn as quantised

    model = _wide()
    given = model[place].in_features, model[place].out_features
    layer = quantised.Linear8bitLt(*given, has_fp16_weights=False) if kind == "8bit" else quantised.Linear4bit(*given)
    layer.load_state_dict(model[place].state_dict())
    model[place] = layer.to("cpu")
    model(X.float())  # which lays out what it keeps
    return Network(model, (X.float(), Y), options, uncovered=(f"{place}.weight",), refusal=refusal, tolerance=1e-3)


def hqq(place: int = 0, refusal: str = "", **options: object) -> Network:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model, config = _wide(), BaseQuantizeConfig(nbits=4, group_size=8)
    model[place] = HQQLinear(model[place], config, compute_dtype=torch.float32, device="cpu")
    return Network(model, (X.float(), Y), options, uncovered=(f"{place}.W_q",), refusal=refusal, tolerance=1e-4)


class Field(nn.Module):
    """Return the derivative in time of a state of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        return self.last(self.first(state).tanh())


class Flow(nn.Module):
    """Let a state flow for a unit of time, and classify where it ends."""

    def __init__(self, solve: Callable[..., Tensor]) -> None:
        super().__init__()
        self.solve, self.field, self.head = solve, Field(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        times = torch.tensor([0.0, 1.0], dtype=x.dtype)
        return self.head(self.solve(self.field, x, times)[-1])


def torchdiffeq(name: str, refusal: str = "", **how: object) -> Network:
    import torchdiffeq

    torch.manual_seed(0)
    model = Flow(functools.partial(getattr(torchdiffeq, name), **how)).double()
    return Network(model, (X[:, :3], Y), refusal=refusal)


def e3nn() -> Network:
    from e3nn import nn as gates
    from e3nn import o3

    class Equivariant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = gates.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
            self.linear = o3.Linear("3x0e+1x1o", self.gate.irreps_in)
            self.product = o3.FullyConnectedTensorProduct(self.gate.irreps_out, "1x0e+1x1o", "3x0e")
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            harmonics = o3.spherical_harmonics("1x0e+1x1o", x[:, 3:], normalize=True)
            return self.head(self.product(self.gate(self.linear(x)), harmonics).tanh())

    torch.manual_seed(0)
    return Network(Equivariant().double(), uncovered=("linear.weight", "product.weight"))


def neuraloperator() -> Network:
    from neuralop.models import FNO

    torch.manual_seed(0)
    sizes = {"in_channels": 1, "out_channels": 1, "hidden_channels": 3, "n_layers": 2}
    model = FNO(n_modes=(3,), lifting_channel_ratio=1, projection_channel_ratio=1, **sizes).double()
    for parameter in model.parameters():  # .double() leaves spectra in complex64
        parameter.data = parameter.data.to(torch.complex128) if parameter.is_complex() else parameter.data
    skips = tuple(f"fno_blocks.channel_mlp_skips.{block}.weight" for block in range(2))
    for name in skips:
        nn.init.normal_(model.get_parameter(name))
    waves = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    return Network(
        model,
        tuple(waves),
        loss=nn.functional.mse_loss,
        weights={name: name for name in skips},
        entrywise=skips,
        uncovered=tuple(f"fno_blocks.convs.{block}.weight.tensor" for block in range(2)),
        tolerance=1e-5,  # it has spectra in complex64
    )


def brevitas(convolution: bool) -> Network:
    import brevitas.nn

    torch.manual_seed(0)
    if convolution:
        layers = [nn.Unflatten(1, (1, 6)), brevitas.nn.QuantConv1d(1, 2, 3, weight_bit_width=4), nn.Flatten()]
    else:
        layers = [nn.Identity(), brevitas.nn.QuantLinear(6, 8, bias=True, weight_bit_width=4), nn.Identity()]

    def plainly(model: nn.Module) -> None:
        """Have the quantised weight in a layer of torch's."""
        plain = nn.Conv1d(1, 2, 3) if convolution else nn.Linear(6, 8)
        plain.weight = nn.Parameter(model[1].quant_weight().value.detach())
        plain.bias, model[1] = model[1].bias, plain

    return Network(nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 3)).double().eval(), plainly=plainly)


CASES = [
    Case("opacus", "1.6.0", "opacus", opacus),
    Case("mup", "1.0.0", "mup", mup),
    Case("spikingjelly", "2.0.0", "spikingjelly", spikingjelly),
    Case("spikingjelly", "2.0.0", "spikingjelly", spikingjelly_not_reset, "not reset"),
    Case("brevitas", "0.13.4", "brevitas", functools.partial(brevitas, convolution=False), "linear"),
    Case("brevitas", "0.13.4", "brevitas", functools.partial(brevitas, convolution=True), "convolution"),
    Case("neuraloperator", "2.0.0", "neuralop", neuraloperator),
    Case("e3nn", "0.6.0", "e3nn", e3nn),
    *(
        Case("torchdiffeq", "0.2.5", "torchdiffeq", functools.partial(torchdiffeq, **given), name)
        for name, given in {
            "fixed steps": {"name": "odeint", "method": "rk4", "options": {"step_size": 0.5}},
            "adaptive steps": {"name": "odeint", "refusal": "cannot be told apart by the 2 samples"},
            "adjoint": {"name": "odeint_adjoint", "method": "rk4", "refusal": "runs without recording a graph"},
        }.items()
    ),
    Case("torchao", "0.18.0", "torchao", functools.partial(torchao, fp8=False), "int8"),
    Case("torchao", "0.18.0", "torchao", functools.partial(torchao, fp8=True), "fp8"),
    Case("optimum-quanto", "0.2.7", "optimum.quanto", quanto),
    *(
        Case(library, version, library, functools.partial(make, *kind, **given), " ".join([*kind, name]))
        for library, version, make, kind in (
            ("bitsandbytes", "0.50.2", bitsandbytes, ("8bit",)),
            ("bitsandbytes", "0.50.2", bitsandbytes, ("4bit",)),
            ("hqq", "0.2.8.post1", hqq, ()),
        )
        for name, given in {
            "in front": {},
            "between": {"place": 2, "refusal": "behind layer '0' is a function that torch did not write"},
            "between, GGN": {"place": 2, "curvature": "ggn"},
        }.items()
    ),
    Case("snntorch", "1.0.0", "snntorch", snntorch),
    Case("snntorch", "1.0.0", "snntorch", snntorch_not_reset, "not reset"),
]


def _tanh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


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
            pf.measure(network.model, network.loss, network.data, measures=measures, **network.options)
        assert_unchanged(network.model, before)
        return
    report = pf.measure(network.model, network.loss, network.data, measures=measures, **network.options)
    assert_unchanged(network.model, before)
    assert tuple(report.uncovered) == network.uncovered
    assert report.layers
    network.plainly(network.model)
    for layer in report.layers:
        weight = network.model.get_parameter(network.weights.get(layer, f"{layer}.weight"))
        matrix = _curvature(network, weight)
        kappa = _relative_flatness(weight.detach().flatten(1), matrix, entrywise=layer in network.entrywise)
        assert report[layer, "relative_flatness"].value == pytest.approx(kappa, rel=network.tolerance), layer
        trace = float(torch.einsum("sjsj->", matrix))
        assert report[layer, "trace"].value == pytest.approx(trace, rel=network.tolerance), layer


EXPERTS = ("Mixtral", "Qwen3Moe", "GptOss")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers", "5", reason="experts in one parameter are of transformers 5")
    sizes = {"vocab_size": 7, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 4}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 16}
    more = {"moe_intermediate_size": 4, "num_experts": 3} if family == "Qwen3Moe" else {"num_local_experts": 3}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **more, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the default has no float64
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(0, 7, (2, 5))
    report = pf.measure(model, data=[{"input_ids": tokens}], measures=["relative_flatness", "trace"])
    assert report.uncovered == {}
    experts = [layer for layer in report.layers if "[" in layer]
    assert len(experts) == 6
    outputs = model(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    risk = nn.functional.cross_entropy(outputs, tokens[:, 1:].flatten())
    for layer in experts:
        name, _, expert = layer.rstrip("]").partition("[")
        parameter, place = model.get_parameter(name), int(expert)
        (gradient,) = torch.autograd.grad(risk, parameter, create_graph=True)
        rows = [torch.autograd.grad(g, parameter, retain_graph=True)[0][place] for g in gradient[place].flatten()]
        matrix = torch.stack(rows).view(*parameter.shape[1:], *parameter.shape[1:])
        weight = parameter.detach()[place]
        if family == "GptOss":  # it has its outputs in columns
            matrix, weight = matrix.permute(1, 0, 3, 2), weight.t()
        kappa, trace = _relative_flatness(weight, matrix), float(torch.einsum("sjsj->", matrix))
        assert report[layer, "relative_flatness"].value == pytest.approx(kappa, rel=1e-4), layer  # routed in float32
        assert report[layer, "trace"].value == pytest.approx(trace, rel=1e-4), layer


def _relative_flatness(weight: Tensor, matrix: Tensor, *, entrywise: bool = False) -> float:
    if entrywise:
        return float((weight.square() * torch.einsum("sjsj->sj", matrix)).sum())
    return float((weight @ weight.t() * torch.einsum("sjtj->st", matrix)).sum())


def _curvature(network: Network, weight: Tensor) -> Tensor:
    """Return the Hessian or GGN of the mean loss in a weight of d rows and m columns, (d, m, d, m)."""
    forward = network.options.get("forward", lambda model, batch: (model(batch[0]), batch[1]))
    outputs, targets = forward(network.model, network.data)
    risk = network.loss
    if network.options.get("curvature") == "ggn":
        inner = truth.hessian(lambda o: risk(o, targets), outputs.detach())
        jacobian = truth.rows(outputs, weight).flatten(1)
        matrix = jacobian.t() @ inner.flatten(2).flatten(0, 1) @ jacobian
    else:
        (gradient,) = torch.autograd.grad(risk(outputs, targets), weight, create_graph=True)
        matrix = truth.rows(gradient, weight).flatten(1)
    shape = weight.flatten(1).shape
    return matrix.unflatten(1, shape).unflatten(0, shape)


def test_the_page_has_a_row_for_each_library() -> None:
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").split("## Models of other libraries")[1]
    rows = re.findall(r"^\| \[?([\w-]+)\]?[^|]*\| ([\w.]+)", page.partition("\n## ")[0], re.MULTILINE)
    assert {(case.library, case.version) for case in CASES} <= set(rows)
