"""Gradients in a layer's input stand for wᵀ δ where nothing else takes that input, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import neighbours
from support import truth

transformers = pytest.importorskip("transformers", reason="its Conv1D is one of the layers")

N, P, M = 4, 3, 5
X = torch.randn(N, P, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 2, 1, 0])
LOSS = nn.CrossEntropyLoss()
LAYER = ["front", "layer"]  # with one in front, or nothing there is recorded


class Net(nn.Module):
    """Something in front of a layer, the layer in some use, and a head."""

    def __init__(self, layer: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.front, self.layer, self.head = nn.Linear(M, M), layer, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.used(torch.tanh(self.front(x))).relu().mean(1))

    def used(self, h: Tensor) -> Tensor:
        return self.layer(h)


class Convolved(Net):
    """A convolution by single pixels."""

    def used(self, h: Tensor) -> Tensor:
        return self.layer(h.mT).mT


class Beside(Net):
    """What the layer takes is taken by another operation too."""

    def used(self, h: Tensor) -> Tensor:
        return self.layer(h) + F.pad(h, (0, 1))


class Within(Net):
    """A part of what another operation gives is taken."""

    def used(self, h: Tensor) -> Tensor:
        first, second = torch.cat([h, h.cos()], 1).split(P, 1)
        return self.layer(first) + F.pad(second, (0, 1))


class Sine(Net):
    """What the layer takes is taken by a sine too."""

    def used(self, h: Tensor) -> Tensor:
        h = h * 2
        return self.layer(h) + F.pad(h.sin(), (0, 1))


class Changed(Net):
    """What the layer has taken is changed in place."""

    def used(self, h: Tensor) -> Tensor:
        h = h * 2
        made = self.layer(h)
        return made + F.pad(h.sin_(), (0, 1))


class Twice(Net):
    """The layer is called twice."""

    def used(self, h: Tensor) -> Tensor:
        return self.layer(h) * self.layer(h.cos())


class Hooked(Net):
    """What arrives at the input is changed on its way to what is in front."""

    def used(self, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: 3 * gradient)
        return self.layer(h)


LAYERS = {
    "more rows": lambda: nn.Linear(M, 6),
    "without bias": lambda: nn.Linear(M, 6, bias=False),
}


def made(kind: type[Net], layer: Callable[[], nn.Module] = lambda: nn.Linear(M, 6), width: int = 6) -> Net:
    torch.manual_seed(0)
    return kind(layer(), width).double().eval()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the layers of which the gradient in the input was taken, as it goes."""
    names: list[str] = []
    edge = neighbours.carried_edge

    def noted(run, name, dtype):
        found = edge(run, name, dtype)
        if found is not None:
            names.append(name)
        return found

    monkeypatch.setattr(neighbours, "carried_edge", noted)
    return names


def value(model: Net, **options) -> float:
    report = pf.measure(
        model, LOSS, (X, Y), layers=LAYER, measures="relative_flatness", curvature="ggn", progress=False, **options
    )
    return report["layer", "relative_flatness"].value


def expected(model: Net) -> float:
    weight = truth.as_matrix(model.layer, truth.weight_of(model, "layer"))
    return truth.relative_flatness_of(truth.layer_ggn(model, LOSS, X, Y, "layer"), weight)


@pytest.mark.parametrize("layer", LAYERS)
def test_it_is_the_value(layer: str, taken: list[str]) -> None:
    model = made(Net, LAYERS[layer])
    assert value(model) == pytest.approx(expected(model), rel=1e-12)
    assert "layer" in taken


def test_it_is_the_value_of_a_layer_as_in_gpt2(taken: list[str]) -> None:
    model, linear = made(Net, lambda: transformers.pytorch_utils.Conv1D(6, M)), made(Net)
    linear.load_state_dict(model.state_dict() | {"layer.weight": model.layer.weight.t()})
    assert value(model) == pytest.approx(expected(linear), rel=1e-12)
    assert "layer" in taken


def test_it_is_the_value_of_fewer_rows_than_columns(taken: list[str]) -> None:
    model = made(Net, lambda: nn.Linear(M, 4), 4)
    assert value(model) == pytest.approx(expected(model), rel=1e-12)
    assert "layer" in taken


def test_it_is_the_value_of_a_convolution_by_single_pixels(taken: list[str]) -> None:
    model = made(Convolved, lambda: nn.Conv1d(M, 6, 1))
    assert value(model) == pytest.approx(expected(model), rel=1e-12)
    assert "layer" in taken


@pytest.mark.parametrize("kind", [Beside, Within, Sine, Changed, Twice, Hooked])
def test_where_something_else_arrives_it_is_not_taken(kind: type[Net], taken: list[str]) -> None:
    model = made(kind)
    found = value(model)
    assert "layer" not in taken
    plain = made({Hooked: Net, Changed: Sine}.get(kind, kind))
    assert found == pytest.approx(expected(plain), rel=1e-12)


def test_draws_are_the_same_as_by_the_cotangent(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(Net)
    by_input = value(model, probes=3)
    assert "layer" in taken
    monkeypatch.setattr(neighbours, "carried_edge", lambda run, name, dtype: None)
    assert by_input == pytest.approx(value(model, probes=3), rel=1e-12)


def test_what_autocast_rounds_is_not_taken(taken: list[str]) -> None:
    model = made(Net).float()

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch[0].float()).float(), batch[1]

    pf.measure(model, LOSS, (X, Y), layers=LAYER, measures="relative_flatness", curvature="ggn", forward=forward)
    assert "layer" not in taken


def test_half_precision_is_not_taken(taken: list[str]) -> None:
    model = made(Net).bfloat16()
    data = (X.bfloat16(), Y)
    found = pf.measure(model, LOSS, data, layers=LAYER, measures="relative_flatness", curvature="ggn", progress=False)
    assert "layer" not in taken
    assert found["layer", "relative_flatness"].value == pytest.approx(value(made(Net)), rel=0.1)


def test_other_quantities_take_the_cotangent(taken: list[str]) -> None:
    model = made(Net)
    pf.measure(model, LOSS, (X, Y), layers=LAYER, measures=["relative_flatness", "trace"], progress=False)
    assert "layer" not in taken


def test_normalised_weights_take_the_cotangent(taken: list[str]) -> None:
    value(made(Net), normalize="std")
    assert "layer" not in taken


def test_a_layer_whose_output_is_not_used_has_the_value_zero() -> None:
    """Nothing behind it takes its output, so that its input's node is in no graph of the outputs."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.side, self.head = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.first(x))
            self.side(h)
            return self.head(h.mean(dim=1))

    torch.manual_seed(0)
    data = torch.randn(4, 8, 16), torch.arange(4) % 3
    report = pf.measure(Unused().eval(), nn.CrossEntropyLoss(), data, measures="relative_flatness")
    assert report["side", "relative_flatness"].value == 0
