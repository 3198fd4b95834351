"""Slices of the loss against a plain loop that sets weights, dense Hessians, and what normalisation is by hand."""

import copy

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.brute_force import all_parameters_hessian
from support.functions import Once
from support.grid import Net
from support.unchanged import assert_unchanged, snapshot

LOSS = nn.CrossEntropyLoss()


def data(samples=40, inputs=5, classes=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(classes, (samples,), generator=generator)


def mlp(dtype=torch.float64, seed=0, between=nn.Tanh):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), between(), nn.Linear(6, 3)).to(dtype).eval()


def normed(seed=0):
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    model = nn.Sequential(*layers).double().eval()
    model[1].running_mean.uniform_(-0.1, 0.1)
    model[1].running_var.uniform_(0.5, 2)
    model[1].weight.data.uniform_(0.5, 2)
    return model


def pixels(samples=12):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


class Branching(nn.Module):
    """What torch.func.vmap does not take: the way depends on a number."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.body(x)
        return self.head(torch.tanh(h) if float(self.body.weight.sum()) > 0 else torch.relu(h))


def looped(model, x, y, directions, found, loss=LOSS):
    """Loss and accuracy by setting the weights of a copy, point by point."""
    losses, right = torch.empty(found.losses.numel()).double(), torch.empty(found.losses.numel()).double()
    for number, place in enumerate(torch.cartesian_prod(*found.coefficients).view(-1, len(found.coefficients))):
        other = copy.deepcopy(model)
        with torch.no_grad():
            for direction, c in zip(directions, place, strict=True):
                for name, change in direction.items():
                    other.get_parameter(name).add_(c.to(change.dtype) * change)
            outputs = other(x)
            losses[number] = loss(outputs.double(), y)
            right[number] = (outputs.argmax(1) == y).double().mean()
    return losses.view_as(found.losses), right.view_as(found.losses)


def own_directions(model, count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            name: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
            for name, p in model.named_parameters()
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("count", [1, 2])
def test_directions_of_ones_own_against_a_loop(count, dtype, tolerance):
    model, (x, y) = mlp(dtype), data(dtype=dtype)
    given = own_directions(model, count)
    before = snapshot(model)
    found = pf.landscape(
        model, LOSS, [(x[:23], y[:23]), (x[23:], y[23:])], directions=given, points=(7, 4)[:count], span=(-0.5, 2)
    )
    assert_unchanged(model, before)
    losses, accuracy = looped(model, x, y, given, found)
    assert found.losses.shape == (7, 4)[:count]
    torch.testing.assert_close(found.losses, losses, rtol=tolerance, atol=0)
    assert torch.equal(found.accuracy, accuracy)
    assert found.samples == 40
    assert found.loss == pytest.approx(LOSS(model(x).double(), y).item(), rel=tolerance)


@pytest.mark.parametrize("kind", [Branching, lambda: mlp(between=nn.ReLU), lambda: normed()])
def test_points_together_and_one_by_one_have_the_same_numbers(kind, monkeypatch):
    torch.manual_seed(1)
    model = kind().double().eval()
    held = pixels() if isinstance(model[0] if isinstance(model, nn.Sequential) else None, nn.Conv2d) else data()
    together = pf.landscape(model, LOSS, held, points=(5, 4))
    alone = pf.landscape(model, LOSS, held, points=(5, 4), memory=1)
    calls = []
    monkeypatch.setattr(torch.func, "vmap", lambda *args, **options: calls.append(1) or 1 / 0)
    failing = pf.landscape(model, LOSS, held, points=(5, 4))
    assert len(calls) == 1  # and not tried again
    torch.testing.assert_close(together.losses, alone.losses, rtol=1e-12, atol=0)
    torch.testing.assert_close(failing.losses, alone.losses, rtol=1e-12, atol=0)  # memory=1 cuts batches too
    assert torch.equal(together.accuracy, alone.accuracy)


def test_vmap_is_what_small_networks_take(monkeypatch):
    calls, vmap = [], torch.func.vmap
    monkeypatch.setattr(torch.func, "vmap", lambda *args, **options: calls.append(1) or vmap(*args, **options))
    pf.landscape(mlp(), LOSS, data(), points=(5, 4), quadratic=False)
    assert len(calls) == 1  # for all points of the one batch
    calls.clear()
    pf.landscape(mlp(), LOSS, data(), points=(5, 4), quadratic=False, memory=1)
    assert calls == []


def test_outputs_that_vmap_gets_wrong_are_not_taken(monkeypatch):
    vmap = torch.func.vmap

    def wrong(*args, **options):
        def called(values):
            outputs, targets = vmap(*args, **options)(values)
            return outputs + 1, targets

        return called

    expected = pf.landscape(mlp(), LOSS, data(), points=3, memory=1).losses
    monkeypatch.setattr(torch.func, "vmap", wrong)
    found = pf.landscape(mlp(), LOSS, data(), points=3, quadratic=False).losses
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_random_directions_are_filter_normalised():
    model = normed()
    found = pf.landscape(model, LOSS, pixels(), points=3, dimensions=1, seed=7)
    noise = torch.Generator().manual_seed(7)
    direction = {}
    for name in ("0.weight", "4.weight"):
        weight = model.get_parameter(name).detach()
        d = torch.randn(weight.shape, generator=noise, dtype=torch.float64)
        for filter_, own in zip(d, weight, strict=True):  # biases and the scale of BatchNorm stay
            filter_.mul_(own.norm() / filter_.norm())
        direction[name] = d
    losses, accuracy = looped(model, *pixels(), [direction], found)
    torch.testing.assert_close(found.losses, losses, rtol=1e-12, atol=0)
    assert torch.equal(found.accuracy, accuracy)
    assert found.coefficients[0].tolist() == [-1, 0, 1]
    other = pf.landscape(model, LOSS, pixels(), points=3, dimensions=1, seed=8)
    assert not torch.equal(other.losses, found.losses)


def test_filters_of_transposed_convolutions_are_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(1, 2, 3), nn.Flatten(), nn.Linear(128, 3)).double().eval()
    found = pf.landscape(model, LOSS, pixels(), layers="0", points=3, dimensions=1)
    weight = model[0].weight.detach()  # (inputs, outputs, …)
    d = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for output in range(2):
        d[:, output] *= weight[:, output].norm() / d[:, output].norm()
    losses, _ = looped(model, *pixels(), [{"0.weight": d}], found)
    torch.testing.assert_close(found.losses, losses, rtol=1e-12, atol=0)


def test_layer_wise_normalisation_and_none():
    model, given = mlp(), own_directions(mlp(), 1)[0]
    scaled = {n: d * model.get_parameter(n).detach().norm() / d.norm() for n, d in given.items()}
    for how, expected in (("layer", scaled), (None, given)):
        found = pf.landscape(model, LOSS, data(), directions=given, normalization=how, points=4)
        torch.testing.assert_close(found.losses, looped(model, *data(), [expected], found)[0], rtol=1e-12, atol=0)


def _dense(model, x, y):
    """The gradient and the Hessian in all parameters, by nested autograd."""
    gradients = torch.autograd.grad(LOSS(model(x), y), [*model.parameters()])
    return torch.cat([part.flatten() for part in gradients]), all_parameters_hessian(model, LOSS, x, y)[1]


@pytest.mark.parametrize("frozen", [False, True])
def test_the_quadratic_model_against_a_dense_hessian(frozen):
    model, (x, y), given = mlp(), data(), own_directions(mlp(), 2)
    gradient, hessian = _dense(model, x, y)
    d = torch.stack([torch.cat([each[n].flatten() for n, _ in model.named_parameters()]) for each in given])
    model.requires_grad_(not frozen)
    found = pf.landscape(model, LOSS, [(x[:11], y[:11]), (x[11:], y[11:])], directions=given, points=3)
    torch.testing.assert_close(found.quadratic.gradient, d @ gradient, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.quadratic.hessian, d @ hessian @ d.T, rtol=1e-10, atol=1e-12)
    assert found.quadratic.value == found.loss
    change = 0.3 * d[0] - 0.7 * d[1]
    value = found.quadratic.at(torch.tensor([0.3]), torch.tensor([-0.7]))
    expected = found.loss + gradient @ change + 0.5 * change @ hessian @ change
    torch.testing.assert_close(value, expected.view(1, 1), rtol=1e-7, atol=0)  # of coefficients in float32
    with pytest.raises(pf.errors.InputError, match="as many as there are directions are wanted, 2, got 1"):
        found.quadratic.at(torch.tensor([0.3]))


def test_a_quadratic_loss_is_its_quadratic_model():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 2).double(), data()[0]
    y = torch.randn(40, 2).double()
    found = pf.landscape(model, nn.MSELoss(), (x, y), points=(5, 6), span=3)
    torch.testing.assert_close(found.losses, found.quadratic.at(*found.coefficients), rtol=1e-12, atol=0)
    assert found.accuracy is None  # targets are no classes
    with pytest.raises(pf.errors.InputError, match="accuracy needs classes"):
        pf.landscape(model, nn.MSELoss(), (x, y), accuracy=True)


@pytest.mark.parametrize("layers", [None, "0"])
def test_eigenvectors(layers):
    model, held = mlp(), data()
    spectrum = pf.spectrum(model, LOSS, held, layers=layers, k=2)
    found = pf.landscape(model, LOSS, held, directions="eigenvectors", layers=layers, points=3)
    torch.testing.assert_close(found.quadratic.hessian, torch.diag(spectrum.eigenvalues), rtol=1e-6, atol=1e-7)
    given = pf.landscape(model, LOSS, held, directions=spectrum, points=3)
    assert torch.equal(given.losses, found.losses)
    names = {name: f"{name}.weight" if layers else name for name in spectrum.eigenvectors}
    vectors = [{names[n]: v[k] for n, v in spectrum.eigenvectors.items()} for k in range(2)]
    torch.testing.assert_close(found.losses, looped(model, *held, vectors, found)[0], rtol=1e-12, atol=0)
    assert f"λ = {float(spectrum.eigenvalues[0]):.4g}" in found.labels[0]


@pytest.mark.parametrize("as_state", [False, True])
def test_a_plane_through_checkpoints_has_their_losses_with_statistics(as_state):
    models = [normed(seed) for seed in range(3)]
    others = [other.state_dict() if as_state else other for other in models[1:]]
    x, y = pixels()
    found = pf.landscape(models[0], LOSS, (x, y), through=others, points=2, span=(0, 1))
    corners = [LOSS(model(x), y).item() for model in models]
    assert [float(found.losses[at]) for at in ((0, 0), (1, 0), (0, 1))] == pytest.approx(corners, rel=1e-12)
    assert found.quadratic is None
    with pytest.raises(pf.errors.InputError, match="quadratic=True: buffers go along"):
        pf.landscape(models[0], LOSS, (x, y), through=others, quadratic=True)
    line = pf.landscape(models[0], LOSS, (x, y), through=others[0], points=4)
    assert line.coefficients[0].tolist() == [-0.25, 0.25, 0.75, 1.25]


def test_a_line_to_a_checkpoint_of_some_layers():
    one, other, held = mlp(), mlp(seed=1), data()
    found = pf.landscape(one, LOSS, held, through=other, layers="0", points=2, span=(0, 1))
    mixed = copy.deepcopy(one)
    mixed[0].load_state_dict(other[0].state_dict())
    assert float(found.losses[1]) == pytest.approx(LOSS(mixed(held[0]), held[1]).item(), rel=1e-12)
    assert found.quadratic is not None


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))


def test_shared_parameters_move_once():
    torch.manual_seed(0)
    model = Tied().double().eval()
    change = torch.randn(5, 5).double()
    for names in (["one.weight"], ["two.weight"], ["one", "two.weight"]):
        given = dict.fromkeys(names, change)
        found = pf.landscape(model, LOSS, data(), directions=given, points=3)
        losses, _ = looped(model, *data(), [{"one.weight": change}], found)
        torch.testing.assert_close(found.losses, losses, rtol=1e-12, atol=0)
    with pytest.raises(pf.errors.InputError, match=r"'two' is 'one\.weight', one parameter of two names"):
        pf.landscape(model, LOSS, data(), directions={"one": change, "two": 2 * change})
    moved = copy.deepcopy(model)
    moved.one.weight.data += 1
    found = pf.landscape(model, LOSS, data(), through=moved, points=2, span=(0, 1))
    assert float(found.losses[1]) == pytest.approx(LOSS(moved(data()[0]), data()[1]).item(), rel=1e-12)


def test_losses_that_are_not_finite_are_kept():
    model, (x, y) = mlp(between=nn.ReLU), data()
    found = pf.landscape(
        model,
        LOSS,
        (x, y),
        directions={"2.weight": torch.full((3, 6), 1e200, dtype=torch.float64)},
        points=3,
        span=1e200,
    )
    assert found.losses.isnan().tolist() == [True, False, True]
    x[3] = torch.nan
    assert bool(pf.landscape(model, LOSS, (x, y), points=3).losses.isnan().all())


def test_errors_leave_all_as_it_was():
    model, other, count = normed(), normed(1), []

    def forward(net, batch):
        count.append(1)
        if len(count) == 5:
            raise RuntimeError("boom")
        return net(batch[0]), batch[1]

    before = snapshot(model)
    with pytest.raises(pf.errors.InputError, match="boom"):
        pf.landscape(model, LOSS, pixels(), through=other, forward=forward, memory=1)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"directions": "gaussian"}, "directions='gaussian' does not exist"),
        ({"directions": "random", "through": mlp(seed=1)}, "directions= and through= both"),
        ({"through": mlp(seed=1), "normalization": "filter"}, "normalization='filter': directions to checkpoints"),
        ({"through": mlp(seed=1), "dimensions": 2}, "dimensions=2 is for directions by name; of checkpoints"),
        ({"through": mlp()}, "through: it has the model's own weights"),
        ({"through": [mlp(seed=1)] * 3}, "one or two are wanted"),
        ({"through": 3}, "through=3: one or two are wanted"),
        ({"through": {"0.weight": torch.ones(6, 5)}}, "of this model is wanted, and it has no '0.bias'"),
        ({"through": {**mlp().state_dict(), "more": torch.ones(1)}}, "the model has no 'more'"),
        ({"through": {**mlp().state_dict(), "0.bias": torch.ones(1)}}, r"'0.bias' of shape \(6,\) is wanted, got one"),
        ({"directions": {"0.wait": torch.ones(1)}}, "the model has no parameter '0.wait', and no layer"),
        ({"directions": {"0": torch.ones(1)}}, r"for '0' finite numbers of shape \(6, 5\) are wanted, got \(1,\)"),
        ({"directions": {"0": torch.zeros(6, 5)}}, "direction 1 is zero"),
        ({"directions": [1, 2]}, "mappings from names of parameters to tensors are wanted, got 1"),
        ({"directions": {"0": torch.ones(6, 5)}, "layers": "0"}, "layers= is for"),
        ({"normalization": "model"}, "normalization='model' does not exist"),
        ({"dimensions": 3}, "dimensions=3: 1 or 2 directions is wanted"),
        ({"points": 1}, "points=1: a whole number is wanted, at least 2"),
        ({"points": (3, 3, 3)}, "points=.*one for each of 2 directions"),
        ({"span": 0}, "span=0: a positive number"),
        ({"span": (1, -1)}, "span="),
        ({"span": "wide"}, "span='wide'"),
        ({"span": [(0, 1)] * 3}, "span="),
        ({"quadratic": 1}, "quadratic=1: True or False"),
    ],
)
def test_what_does_not_fit_is_refused(options, match):
    with pytest.raises(pf.errors.InputError, match=match):
        pf.landscape(mlp(), LOSS, data(), **options)


def test_a_model_without_second_derivatives_says_what_to_do():
    model = Net(lambda net, x: Once.apply(net.head(x)), head=nn.Linear(5, 3)).double().eval()
    with pytest.raises(pf.errors.InputError, match="quadratic=False leaves the quadratic model out"):
        pf.landscape(model, LOSS, data(), points=3)
    assert pf.landscape(model, LOSS, data(), points=3, quadratic=False).quadratic is None
