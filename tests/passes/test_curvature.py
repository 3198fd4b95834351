"""What autograd's graph proves of a tail, and that nothing is proved of a curved one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes import linearity
from pyflatness.passes.recorder import Recorder
from support import truth
from support.functions import Once, Opaque, Relu, network
from support.grid import Net

X, Y = torch.randn(6, 4, 4, 4), torch.arange(6) % 3


PROVEN = {
    "relu": F.relu,
    "in place": lambda z: F.leaky_relu_(z).clone(),
    "pooled": lambda z: F.avg_pool2d(F.max_pool2d(z, 2, 1), 2, 1, 1),
    "padded": lambda z: F.pad(z, (1, 1, 1, 1), mode="reflect"),
    "residual": lambda z: F.relu6(z) + z * 3 - z / 2 + 1,
    "batch norm": lambda z: F.batch_norm(z, torch.ones(5), torch.full((5,), 2.0)),
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "upsampled": lambda z: F.interpolate(z, scale_factor=2, mode="bilinear"),
    "clamped, largest": lambda z: torch.stack([z.clamp(-1, 1), z.abs()]).amax(0),
    "convolved": lambda z: F.conv_transpose2d(z, torch.ones(5, 5, 2, 2)),
    "matrix": lambda z: z @ torch.ones(4, 4),
}
CURVED = {
    "tanh": torch.tanh,
    "square": lambda z: z * z,
    "power": lambda z: z**2,
    "inverse": lambda z: 1 / (z.abs() + 1),
    "softmax": lambda z: z.softmax(1),
    "normalised by the sample": lambda z: F.instance_norm(z),
    "product": lambda z: z @ z.mT,
    "a function of the user's": Relu.apply,
    "layer norm": lambda z: F.layer_norm(z, z.shape[1:]),
    "gelu": F.gelu,
}


def _written(z):
    out = torch.zeros_like(z)
    out[:, 1:] = z[:, :-1]
    return out


def _partly(change):
    def tail(z):
        z = z.clone()
        change(z[:, :3])
        return z

    return tail


CURVED |= {
    "an opaque function": Opaque.apply,
    "curved in a part": _partly(torch.Tensor.tanh_),
    "exponential in a part": _partly(torch.Tensor.exp_),
    "complex": lambda z: (z[:, :5] + 1j * z.flip(1)).abs(),
}


def layers_of(tail):
    """Return the layers in which the graph proves f linear, and those with a custom function behind them."""
    net = network(tail)
    recorder = Recorder({"body": net.body, "head": net.head})
    with recorder.attached():
        with recorder.recording():
            outputs = net(X)
        users, edges = linearity.users_of(outputs), linearity.edges_of(recorder.calls)
        return linearity.proven(users, edges), linearity.with_custom_functions(users, edges)


@pytest.mark.parametrize("name", PROVEN)
def test_linear_tails_are_proven(name):
    net = network(PROVEN[name])
    net.requires_grad_(False)
    recorder = Recorder({"body": net.body, "head": net.head})
    with recorder.attached(), recorder.recording():
        users = linearity.users_of(net(X))
        assert linearity.proven(users, linearity.edges_of(recorder.calls)) == {"body", "head"}
    assert pf.measure(network(PROVEN[name]), nn.CrossEntropyLoss(), (X, Y), layers="body")["trace"].exact


@pytest.mark.parametrize("name", CURVED)
def test_curved_tails_take_second_derivatives(name):
    proven, custom = layers_of(CURVED[name])
    assert "body" not in proven
    net, loss = network(CURVED[name]).double(), nn.CrossEntropyLoss()
    if custom:
        with pytest.raises(pf.errors.InputError, match=r"behind layer 'body' is a function that torch did not write"):
            pf.relative_flatness(net, loss, (X.double(), Y), "body")
    else:
        estimate = pf.relative_flatness(net, loss, (X.double(), Y), "body")
        expected = truth.of_model(net, loss, X.double(), Y, "body")
        assert (estimate.method, estimate.exact) == ("hessian", True)
        assert estimate.value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert not pf.relative_flatness(net, loss, (X.double(), Y), "body", curvature="ggn").exact


def test_functions_that_torch_did_not_write_are_taken_as_they_are_on_request():
    net, loss, data = network(Relu.apply).double(), nn.CrossEntropyLoss(), (X.double(), Y)
    estimate = pf.relative_flatness(net, loss, data, "body", curvature="hessian")
    assert estimate.value == pytest.approx(truth.of_model(net, loss, X.double(), Y, "body"), rel=1e-9)
    assert not estimate.exact
    assert "taken as they are" in repr(estimate)
    with pytest.raises(
        pf.errors.InputError, match="layer 'body': the second derivative of a function behind it is missing"
    ):
        pf.relative_flatness(network(Opaque.apply).double(), loss, data, "body", curvature="hessian")


def test_operations_without_a_second_derivative_certify_nothing():
    with pytest.raises(pf.errors.InputError, match="no second derivative"):
        pf.measure(network(F.hardsigmoid), nn.CrossEntropyLoss(), (X, Y), layers="body")


def test_parts_written_into_are_looked_at():
    assert "body" not in layers_of(_written)[0]
    assert pf.measure(network(_written), nn.CrossEntropyLoss(), (X, Y), layers="body")["trace"].exact


def test_a_recurrence_that_begins_in_a_later_batch():
    def unrolled(net, x):
        h = F.relu(net.body(x[:, 0]))
        for _ in range(x.shape[1] - 1):
            h = F.relu(net.cell(h))
        return net.head(h)

    net = Net(unrolled, body=nn.Linear(4, 5), cell=nn.Linear(5, 5), head=nn.Linear(5, 3)).double()
    batches = [(torch.randn(6, 2, 4).double(), Y), (torch.randn(6, 4, 4).double(), Y)]
    for order in (batches, batches[::-1]):
        estimate = pf.relative_flatness(net, nn.CrossEntropyLoss(), order, "cell")
        values = [truth.of_model(net, nn.CrossEntropyLoss(), x.double(), y, "cell") for x, y in order]
        assert estimate.value == pytest.approx(sum(values) / 2, rel=1e-9)
        assert estimate.exact
        assert not pf.relative_flatness(net, nn.CrossEntropyLoss(), order, "cell", curvature="ggn").exact


def test_products_that_are_curved_at_later_samples():
    net = network(lambda z: F.relu(z) * F.relu(z)).double()
    with torch.no_grad():
        net.body.bias.fill_(-0.1)
    x = torch.cat([torch.zeros_like(X[:2]), X[2:]]).double()
    for size in (1, 2, 6):
        estimate = pf.relative_flatness(
            net, nn.CrossEntropyLoss(), list(zip(x.split(size), Y.split(size), strict=True)), "body"
        )
        assert estimate.value == pytest.approx(truth.of_model(net, nn.CrossEntropyLoss(), x, Y, "body"), rel=1e-9)
        assert (estimate.method, estimate.exact) == ("hessian", True)


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("probes", [None, 1, 2])
def test_a_second_derivative_that_is_missing_without_a_sign(width, probes):
    model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)).double()
    model[1].forward = Once.apply
    data = torch.randn(6, 4).double(), torch.arange(6) % 3
    with pytest.raises(
        pf.errors.InputError, match="layer '0': the second derivative of a function behind it is missing"
    ):
        pf.relative_flatness(model, nn.CrossEntropyLoss(), data, "0", curvature="hessian", probes=probes)


@pytest.mark.parametrize(
    ("measure", "curvature"),
    [("relative_flatness", "hessian"), ("lambda_max", "hessian"), ("lambda_max", "ggn"),
     ("relative_flatness_max", "hessian"), ("sharpness", "hessian")],
)  # fmt: skip
def test_a_second_derivative_that_is_missing_on_one_of_two_ways(measure, curvature):
    def forward(self, x):
        z = self.body(x)
        return self.head(z.tanh() + Once.apply(z))

    net = Net(forward, body=nn.Linear(4, 5), head=nn.Linear(5, 3))
    data = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(
        pf.errors.InputError, match=r"'body.*': the second derivative of a function behind it is missing"
    ):
        pf.measure(net, nn.CrossEntropyLoss(), data, layers="body", measures=measure, curvature=curvature)


# --- kinks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_adaptive_sharpness_mc_comes_to_its_limit_only_below_the_nearest_kink(activation):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 3)).double().eval()
    data, loss = (torch.randn(40, 8).double(), torch.randint(3, (40,))), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(300):
        optimizer.zero_grad()
        loss(model(data[0]), data[1]).backward()
        optimizer.step()
    nearest = float(model[0](data[0]).detach().abs().min())
    limit = pf.measure(model, loss, data, measures="adaptive_sharpness")["adaptive_sharpness"]
    near, far = (
        pf.measures.adaptive_sharpness_mc(model, loss, data, rho=rho, probes=200) for rho in (3 * nearest, nearest / 30)
    )
    low, high = far.interval(0.999)
    assert low < limit < high
    low, high = near.interval(0.999)
    assert (low > limit) is (activation is nn.ReLU)
    assert high > limit
