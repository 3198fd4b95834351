"""The truth itself: dense matrices against each other, against what can be done by hand, and against other networks."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

from support import grid, networks, truth
from support.combinations import in_turn
from support.convolutions import GEOMETRIES
from support.networks import CASES, LAYERS

FLAT = [
    ("unused output", "side"),
    *((f"loss: {name}", i) for name in ("custom, linear", "nll of a head") for i in "02"),
]


def flatness(case, layer):
    weight = grid.weight_of(case, layer)
    return truth.relative_flatness_of(grid.hessian(case, layer), weight, grid.groups(case, layer))


def flatness_of(model, case, layer):
    """κ of a layer of another model on a case's data."""
    matrix = truth.layer_hessian(model, case.loss, case.inputs, case.targets, layer)
    return truth.relative_flatness_of(matrix, truth.weight_of(model, layer))


@in_turn(4, ("name", "layer"), LAYERS)
def test_gauss_newton_is_the_hessian_where_the_outputs_are_linear(name, layer):
    case = CASES[name]
    hessian, ggn = grid.hessian(case, layer), grid.ggn(case, layer)
    largest = hessian.abs().max()
    assert (largest == 0) == ((name, layer) in FLAT)
    assert torch.allclose(hessian, hessian.permute(2, 3, 0, 1), rtol=0, atol=1e-10 * largest)
    if layer in case.linear:
        assert torch.allclose(ggn, hessian, rtol=0, atol=1e-10 * largest)
    else:
        assert (ggn - hessian).abs().max() > 1e-2 * largest
    if case.convex:
        values = torch.linalg.eigvalsh(ggn.flatten(2).flatten(0, 1))
        assert values.min() >= -1e-12 * values.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_network_is_a_function_of_one_sample_and_finds_its_weights_again(name):
    case = CASES[name]
    model = case.build()
    outputs = model(case.inputs)
    assert len(outputs) == len(case.targets) == case.samples
    alone = torch.cat([model(case.inputs[i : i + 1]) for i in range(case.samples)])
    assert torch.allclose(alone, outputs, rtol=0, atol=1e-12)
    assert torch.equal(case.build()(case.inputs), outputs)
    assert sum(truth.weight_of(model, layer).numel() for layer in case.layers) < 400
    assert outputs.dtype == torch.float64
    assert not model.training


def test_indefinite_losses_are():
    values = torch.linalg.eigvalsh(grid.ggn(CASES["indefinite loss, Tanh"], "4").flatten(2).flatten(0, 1))
    assert values[0] < -1e-3 < 1e-3 < values[-1]


def test_example_by_hand():
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).double()
    model[0].weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]]).double()
    data = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).double(), torch.tensor([0, 1])
    for matrix_of in (truth.layer_hessian, truth.layer_ggn):
        matrix, weight = matrix_of(model, F.cross_entropy, *data, "0"), truth.weight_of(model, "0")
        assert truth.relative_flatness_of(matrix, weight) == pytest.approx(1.474589, abs=1e-6)
        assert truth.trace_of(matrix) == pytest.approx(0.589836, abs=1e-6)
        assert truth.block_traces(matrix).flatten().tolist() == pytest.approx(
            [0.294918, -0.294918, -0.294918, 0.294918], abs=1e-6
        )
        assert torch.linalg.eigvalsh(matrix.view(4, 4)).max().item() == pytest.approx(0.514737, abs=1e-6)
        shares = [matrix_of(model, F.cross_entropy, *data, "0", sample=i) for i in (0, 1)]
        assert [2 * truth.relative_flatness_of(share, weight) for share in shares] == pytest.approx(
            [0.983060, 1.966119], abs=1e-6
        )


SHARED = [name for name in CASES if name.startswith("loss: ")]


@pytest.mark.parametrize("name", [*SHARED, "tokens, weighted sum", "attention", "segmentation", "recurrent", "windows"])
def test_shares_of_samples_add_up(name):
    case = CASES[name]
    for layer in case.layers[:1]:
        for matrix_of, whole in ((truth.layer_hessian, grid.hessian), (truth.layer_ggn, grid.ggn)):
            model = case.build()
            parts = [
                matrix_of(model, case.loss, case.inputs, case.targets, layer, sample=i) for i in range(case.samples)
            ]
            assert torch.allclose(sum(parts), whole(case, layer), rtol=0, atol=1e-12)


# --- against other networks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp GELU", "cnn", "residual", "tokens", "recurrent", "segmentation"])
def test_substituted_weights_are_those_of_functional_call(name):
    case = CASES[name]
    for layer in case.layers:
        expected = truth.of_model(case.build(), case.loss, case.inputs, case.targets, layer)
        assert flatness(case, layer) == pytest.approx(expected, rel=1e-12)


def test_tied_weights_are_differentiated_through_one_use():
    for name, layers in (("tied", "ab"), ("tokens, tied head", ["head"])):
        case = CASES[name]
        for layer in layers:
            model = case.build()
            untied = copy.deepcopy(model.get_submodule(layer).weight)
            model.get_submodule(layer).weight = untied
            assert flatness(case, layer) == pytest.approx(flatness_of(model, case, layer), rel=1e-12)
    model = CASES["tied"].build()
    assert model.a.weight is model.b.weight


@pytest.mark.parametrize("name", ["weight norm", "weight norm of a convolution, spectral norm", "pruned"])
def test_effective_weights_are_measured(name):
    case = CASES[name]
    model = case.build()
    for layer in case.layers:
        module = model.get_submodule(layer)
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, "weight")
        elif prune.is_pruned(module):
            prune.remove(module, "weight")
        assert type(module.weight) is nn.Parameter
    assert torch.allclose(model(case.inputs), case.build()(case.inputs))
    for layer in case.layers:
        assert flatness(case, layer) == pytest.approx(flatness_of(model, case, layer), rel=1e-12)


def test_checkpointing_changes_nothing(monkeypatch):
    case = CASES["checkpointed"]
    values = [flatness(case, layer) for layer in case.layers]
    monkeypatch.setattr(networks, "checkpoint", lambda run, *args, **options: run(*args))
    assert values == pytest.approx([flatness_of(case.build(), case, layer) for layer in case.layers], rel=1e-12)


def test_a_model_is_left_as_it_was():
    case = CASES["frozen but the head"]
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    truth.layer_hessian(model, case.loss, case.inputs, case.targets, "2")
    assert "forward" not in vars(model[2])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.startswith(("mlp", "one", "peaked", "custom", "indefinite"))]
)
def test_the_laplacian_in_the_inputs_of_a_linear_layer_is_the_definition(name):
    case = CASES[name]
    assert flatness(case, "0") == pytest.approx(laplacian(case.build(), case), rel=1e-10)


def laplacian(model, case):
    """Σ_i |x_i|² Tr ∂²E/∂x_i² (spec 2.4), x the inputs of a model whose first layer is the measured one."""
    second = torch.autograd.functional.hessian(lambda x: case.loss(model(x), case.targets), case.inputs)
    m, n = case.inputs[0].numel(), case.samples
    traces = torch.einsum("ijij->i", second.reshape(n, m, n, m))
    return float(case.inputs.flatten(1).square().sum(1) @ traces)


class Split(nn.Module):
    """A grouped convolution as one convolution per group, ``parts``."""

    def __init__(self, conv):
        super().__init__()
        options = {key: getattr(conv, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
        inside, outside = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        self.parts = nn.ModuleList(type(conv)(inside, outside, **options).double() for _ in range(conv.groups))
        for part, weight, bias in zip(
            self.parts, conv.weight.split(outside), conv.bias.split(outside), strict=True
        ):  # fmt: skip
            part.weight.data, part.bias.data = weight.detach().clone(), bias.detach().clone()

    def forward(self, x):
        pieces = x.chunk(len(self.parts), dim=1)
        return torch.cat([part(piece) for part, piece in zip(self.parts, pieces, strict=True)], dim=1)


@pytest.mark.parametrize("name", [name for name in GEOMETRIES if "grouped" in name or "depthwise" in name])
def test_groups_are_weight_matrices_of_their_own(name):
    case = CASES[f"conv {name}"]
    model = case.build()
    groups, d = model[0].groups, model[0].out_channels
    model[0] = Split(model[0])
    assert torch.allclose(model(case.inputs), case.build()(case.inputs))
    parts = [flatness_of(model, case, f"0.parts.{g}") for g in range(groups)]
    assert flatness(case, "0") == pytest.approx(sum(parts), rel=1e-12)
    matrix = grid.hessian(case, "0")
    traces = truth.block_traces(matrix, groups).unflatten(0, (groups, -1)).unflatten(2, (groups, -1))
    for g in range(groups):
        one = truth.layer_hessian(model, case.loss, case.inputs, case.targets, f"0.parts.{g}")
        assert torch.allclose(traces[g, :, g], truth.block_traces(one))
        assert not traces[g, :, torch.arange(groups) != g].any()
    assert float(traces.view(d, d).trace()) == pytest.approx(truth.trace_of(matrix))


# --- convolutions as dense matrices -----------------------------------------------------------------------------------

CONVOLUTIONS = [
    (name, layer)
    for name, layer in LAYERS
    if not isinstance(CASES[name].build().get_submodule(layer), nn.Linear)
]  # fmt: skip


@pytest.mark.parametrize(("name", "layer"), CONVOLUTIONS)
def test_a_dense_layer_is_the_convolution(name, layer):
    case = CASES[name]
    model = case.build()
    dense, linear = truth.affine(model, layer, case.inputs)
    assert isinstance(dense.get_submodule(linear), nn.Linear)
    assert torch.allclose(dense(case.inputs), model(case.inputs), rtol=0, atol=1e-12)
    assert torch.equal(model(case.inputs), case.build()(case.inputs))


@in_turn(2, "name", GEOMETRIES)
def test_affine_flatness_is_the_laplacian_in_the_pixels(name):
    case = CASES[f"conv {name}"]
    model, linear = truth.affine(case.build(), "0", case.inputs)
    value = flatness_of(model, case, linear)
    assert value == pytest.approx(laplacian(case.build(), case), rel=1e-10)
    if name != "1d, kernel as long as the input":
        assert value != pytest.approx(flatness(case, "0"), rel=1e-3)


def test_a_convolution_over_one_pixel_is_its_dense_layer():
    case = CASES["conv 1d, kernel as long as the input"]
    model, linear = truth.affine(case.build(), "0", case.inputs)
    assert flatness(case, "0") == pytest.approx(flatness_of(model, case, linear), rel=1e-12)


# --- normalised -------------------------------------------------------------------------------------------------------


def test_deviations():
    rows = torch.tensor([[1.0, -2.5, 0.0, 0.0], [3.0, -2.5, 0.0, 4.0]]).double()
    assert truth.deviations(rows).tolist() == [1.0, 2.5, 0.0, 2.0]


class Divided(nn.Module):
    """A layer whose inputs are divided by σ in ``dim`` and whose columns are multiplied by it."""

    def __init__(self, layer, deviation):
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.shape = [-1] + [1] * (layer.weight.ndim - 2)
        groups, inside = getattr(layer, "groups", 1), layer.weight.shape[1]
        for g, rows in enumerate(self.layer.weight.data.chunk(groups)):
            rows *= deviation[g * inside : (g + 1) * inside].view(self.shape)
        self.deviation = deviation

    def forward(self, x):
        return self.layer(x / self.deviation.view(self.shape))


@pytest.mark.parametrize(
    ("name", "layer"),
    [("mlp GELU", "0"), ("mlp LeakyReLU", "2"), ("tokens", "mix"), ("siamese", "encoder"), ("conv 2d, grouped", "0"),
     ("segmentation", "2"), ("conv 3d, depthwise, dilated", "0"), ("siamese, convolution", "encoder")],
)  # fmt: skip
def test_normalised_flatness_is_that_of_the_rescaled_network(name, layer):
    case = CASES[name]
    model = case.build()
    deviation = truth.layer_deviations(model, layer, case.inputs)
    assert (deviation > 0).all()
    groups = grid.groups(case, layer)
    value = truth.relative_flatness_of(
        *truth.scaled(model.get_submodule(layer), grid.hessian(case, layer), deviation), groups
    )
    rescaled = case.build()
    rescaled.set_submodule(layer, Divided(model.get_submodule(layer), deviation))
    assert torch.allclose(rescaled(case.inputs), model(case.inputs), rtol=0, atol=1e-12)
    matrix = truth.layer_hessian(rescaled, case.loss, case.inputs, case.targets, f"{layer}.layer")
    weight = truth.weight_of(rescaled, f"{layer}.layer")
    assert value == pytest.approx(truth.relative_flatness_of(matrix, weight, groups), rel=1e-11)


def test_normalised_flatness_is_the_same_for_rescaled_neurons_and_without_dead_ones():
    case = CASES["mlp ReLU"]

    def normalised(model, name="2"):
        deviation = truth.layer_deviations(model, name, case.inputs)
        matrix = truth.layer_hessian(model, case.loss, case.inputs, case.targets, name)
        return truth.relative_flatness_of(*truth.scaled(model.get_submodule(name), matrix, deviation)), deviation

    model = case.build()
    model[0].weight.data[1], model[0].bias.data[1] = 0, -1.0  # dead
    model[0].weight.data[2], model[0].bias.data[2] = 0, 0.7  # constant
    value, deviation = normalised(model)
    assert deviation[1] == 0
    assert deviation[2] == pytest.approx(0.7)
    scales = torch.tensor([2.0, 3.0, 0.1, 5.0, 0.5, 4.0]).double()
    rescaled = copy.deepcopy(model)
    rescaled[0].weight.data *= scales[:, None]
    rescaled[0].bias.data *= scales
    rescaled[2].weight.data /= scales
    assert normalised(rescaled)[0] == pytest.approx(value, rel=1e-12)
    assert flatness_of(rescaled, case, "2") != pytest.approx(flatness_of(model, case, "2"), rel=1e-2)
    kept = [0, 2, 3, 4, 5]
    smaller = copy.deepcopy(model)
    smaller[0].weight.data, smaller[0].bias.data = model[0].weight.data[kept], model[0].bias.data[kept]
    smaller[2].weight.data = model[2].weight.data[:, kept]
    assert normalised(smaller)[0] == pytest.approx(value, rel=1e-12)
