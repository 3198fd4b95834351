"""Models that take a derivative in their forward pass, in which weights are used again: forces, scores, residuals."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import pyflatness as pf
from support import truth
from support.functions import WeightInBackward
from support.grid import Net, normal

X = normal(0, 8, 3)


def energy_and_forces(net, x):
    x = x.requires_grad_()
    energy = net.out(net.act(net.inner(x)))
    (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, -gradient], dim=1)


def forces(net, x):
    return energy_and_forces(net, x)[:, 1:]


def hamiltonian(net, x):
    """Return (∂H/∂p, -∂H/∂q) of a scalar, with a Linear behind it."""
    field = forces(net, x)
    return net.behind(torch.cat([field[:, 1:], -field[:, :1]], dim=1))


def residual(net, x):
    """Return u'' + u of a network of one input, by two derivatives."""
    x = x[:, :1].clone().requires_grad_()
    u = net.out(net.act(net.inner(x.expand(-1, 3))))
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second + u


def bare(net, x):
    """Return a score by weights that no module calls."""
    x = x.requires_grad_()
    value = torch.tanh(x @ net.w.t()) @ net.v.t()
    (score,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return score


def convolutional(net, x):
    x = x.view(-1, 1, 3).requires_grad_()
    energy = net.out(net.act(net.conv(x)).flatten(1))
    (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, gradient.flatten(1)], dim=1)


def network(forward, act, **modules):
    torch.manual_seed(0)
    net = Net(forward, act=act, **({"inner": nn.Linear(3, 5), "out": nn.Linear(5, 1)} | modules))
    if forward is bare:
        net.w, net.v = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(1, 5))
    return net.double().eval()


CASES = {
    "energy and forces, tanh": lambda: network(energy_and_forces, nn.Tanh()),
    "energy and forces, relu": lambda: network(energy_and_forces, nn.ReLU()),
    "forces alone": lambda: network(forces, nn.Tanh()),
    "forces alone, relu": lambda: network(forces, nn.ReLU()),
    "hamiltonian": lambda: network(hamiltonian, nn.Softplus(), behind=nn.Linear(3, 2)),
    "second derivative": lambda: network(residual, nn.Tanh()),
    "convolution": lambda: network(
        convolutional, nn.Tanh(), inner=nn.Identity(), conv=nn.Conv1d(1, 2, 2), out=nn.Linear(4, 1)
    ),
    "weights of no module": lambda: network(bare, nn.Tanh(), inner=nn.Identity(), out=nn.Identity()),
}
LOSS = nn.MSELoss()


def data_of(model):
    with torch.enable_grad():
        outputs = model(X.clone())
    return X.clone(), normal(1, *outputs.shape)


def risk_of(model, x, y, **parameters):
    return LOSS(torch.func.functional_call(model, parameters, (x.clone(),)), y)


def expected(model, x, y, layer):
    """Return κ and the trace of a layer's weight, by the Hessian in the parameter itself."""
    name = layer if layer in dict(model.named_parameters()) else f"{layer}.weight"
    weight = model.get_parameter(name).detach()
    hessian = truth.hessian(lambda w: risk_of(model, x, y, **{name: w}), weight)
    rows, columns = len(weight), weight[0].numel()
    traces = hessian.reshape(rows, columns, rows, columns).diagonal(dim1=1, dim2=3).sum(-1)
    flat = weight.flatten(1)
    return float((flat @ flat.t() * traces).sum()), float(traces.trace())


@pytest.mark.parametrize("name", CASES)
def test_every_layer_has_the_hessian_of_its_parameter(name: str) -> None:
    model = CASES[name]()
    x, y = data_of(model)
    report = pf.measure(model, LOSS, (x, y))
    assert len(report.layers) >= 2
    assert report.uncovered == {}
    for layer in report.layers:
        found = [report[layer, measure] for measure in ("relative_flatness", "trace")]
        assert [estimate.value for estimate in found] == pytest.approx(expected(model, x, y, layer), rel=1e-9)
        assert all(estimate.exact for estimate in found)
    assert not x.requires_grad, "the model set this on what it was given"


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_parametrised_layer_has_the_hessian_in_what_it_computes(kind: str) -> None:
    model = CASES["energy and forces, tanh"]()
    getattr(nn.utils.parametrizations, kind)(model.inner)
    x, y = data_of(model)
    report = pf.measure(model, LOSS, (x, y))
    found = [report["inner", measure] for measure in ("relative_flatness", "trace")]
    nn.utils.parametrize.remove_parametrizations(model.inner, "weight")
    assert [estimate.value for estimate in found] == pytest.approx(expected(model, x, y, "inner"), rel=1e-9)
    assert all(estimate.exact for estimate in found)


@pytest.mark.parametrize("name", ["energy and forces, tanh", "energy and forces, relu", "forces alone", "convolution"])
def test_verify_agrees(name: str) -> None:
    model = CASES[name]()
    for layer in pf.measure(model, LOSS, data_of(model)).layers:
        result = pf.verify(model, LOSS, data_of(model), layer)
        assert result, result
        assert result.truth == pytest.approx(expected(model, *data_of(model), layer)[0], rel=1e-9)


@pytest.mark.parametrize("place", ["behind", "in front"])
@pytest.mark.parametrize("derivative", [False, True])
def test_a_weight_in_the_backward_pass_of_a_custom_function_is_told(place: str, derivative: bool) -> None:
    def forward(net, x):
        given = WeightInBackward.apply(x, net.inner.weight) if place == "in front" else x
        h = net.inner(given).tanh()
        return net.out(WeightInBackward.apply(h, net.inner.weight) if place == "behind" else h)

    def forces(net, x):
        return torch.autograd.grad(forward(net, x.requires_grad_()).sum(), x, create_graph=True)[0]

    model = network(forces if derivative else forward, None, inner=nn.Linear(3, 3), out=nn.Linear(3, 2))
    report = pf.measure(model, LOSS, data_of(model), measures=["relative_flatness", "trace"])
    for measure in report.measures:
        assert not report[measure].exact
        assert report["inner", measure].notes, "of its calls alone, or of derivatives taken as they are"


@pytest.mark.parametrize("name", ["energy and forces, tanh", "forces alone, relu"])
def test_sampled_values_are_within_their_errors(name: str) -> None:
    model = CASES[name]()
    x, y = data_of(model)
    report = pf.measure(model, LOSS, (x, y), probes=2000)
    for layer in report.layers:
        found = report[layer, "relative_flatness"]
        assert abs(found.value - expected(model, x, y, layer)[0]) < 4 * found.stderr


@pytest.mark.parametrize("how", [{"curvature": "ggn"}, {"rtol": 0.1}, {"curvature": "ggn", "fraction": 0.5}])
def test_values_of_the_recorded_calls_alone_are_refused(how: dict[str, object]) -> None:
    model = CASES["energy and forces, tanh"]()
    with pytest.raises(pf.errors.InputError, match="layer 'inner', 'out': the model takes a derivative in its forward"):
        pf.measure(model, LOSS, data_of(model), **how)


def test_measures_of_the_network_are_those_of_the_parameters() -> None:
    model = CASES["energy and forces, tanh"]()
    x, y = data_of(model)
    theta = dict(model.named_parameters())
    names = ["sharpness", "adaptive_sharpness", "lambda_max", "relative_flatness_max", "fisher_rao"]
    report = pf.measure(model, LOSS, (x, y), measures=names)
    flat = torch.cat([p.detach().flatten() for p in theta.values()])

    def risk(vector):
        parts = vector.split([p.numel() for p in theta.values()])
        return risk_of(model, x, y, **{n: v.view_as(p) for (n, p), v in zip(theta.items(), parts, strict=True)})

    hessian = truth.hessian(risk, flat)
    assert report["sharpness"].value == pytest.approx(float(hessian.trace()), rel=1e-9)
    assert report["adaptive_sharpness"].value == pytest.approx(float(hessian.diagonal() @ flat.square()), rel=1e-9)
    weights = torch.cat([torch.full((p.numel(),), p.ndim == 2) for p in theta.values()])
    largest = float(torch.linalg.eigvalsh(hessian[weights][:, weights])[-1])
    assert report["lambda_max"].value == pytest.approx(largest, rel=1e-6)
    inner = hessian[:15, :15].view(5, 3, 5, 3)
    rows = theta["inner.weight"].detach().square().sum(1)
    of_rows = torch.stack([torch.linalg.eigvalsh(inner[s, :, s, :])[-1] for s in range(5)])
    assert report["inner", "relative_flatness_max"].value == pytest.approx(float(rows @ of_rows), rel=1e-6)


def test_what_a_model_does_with_its_inputs_requiring_gradients_is_no_change_of_their_values() -> None:
    model = CASES["energy and forces, tanh"]()
    report = pf.measure(model, LOSS, data_of(model))
    assert not any("in place" in note for note in report["inner", "trace"].notes)


def test_a_derivative_that_has_no_weight_in_the_outputs_changes_nothing() -> None:
    def forward(net, x):
        h = torch.relu(net.inner(x.requires_grad_()))
        torch.autograd.grad(h.sum(), x, retain_graph=True)
        return net.out(h)

    model = network(forward, nn.ReLU())
    x, y = data_of(model)
    report = pf.measure(model, LOSS, (x, y))
    assert report["inner", "trace"].method == "ggn"
    hessian = truth.layer_hessian(model, LOSS, x, y, "inner")
    assert report["inner", "trace"].value == pytest.approx(truth.trace_of(hessian))


@pytest.mark.parametrize("name", ["energy and forces, tanh", "forces alone, relu"])
def test_the_cost_of_a_change_is_that_of_the_parameter(name: str) -> None:
    model = CASES[name]()
    x, y = data_of(model)
    changes = {layer: 1e-3 * normal(2, *model.get_parameter(f"{layer}.weight").shape) for layer in ("inner", "out")}
    report = pf.cost_of_change(model, LOSS, (x, y), changes)
    for layer in ("inner", "out", ""):
        chosen = {f"{n}.weight": change for n, change in changes.items() if layer in ("", n)}

        def risk(step, chosen=chosen):
            moved = {n: model.get_parameter(n).detach() + step * change for n, change in chosen.items()}
            return risk_of(model, x, y, **moved)

        zero = torch.zeros((), dtype=torch.float64)
        first = float(torch.autograd.functional.jacobian(risk, zero))
        second = float(torch.autograd.functional.hessian(risk, zero)) / 2
        assert report[layer, "gradient_of_change"].value == pytest.approx(first, rel=1e-9)
        assert report[layer, "cost_of_change"].value == pytest.approx(second, rel=1e-9)
        assert report[layer, "loss_change"].value == pytest.approx((risk(1.0) - risk(0.0)).item(), rel=1e-9)


def test_a_plan_of_the_calls_alone_is_refused() -> None:
    model = CASES["energy and forces, tanh"]()
    with pytest.raises(pf.errors.InputError, match="in which the weight is used again, and the cost of all pairs"):
        pf.allocate(model, LOSS, data_of(model), ["int4", "int8"], bits=6)


@pytest.mark.parametrize("name", ["energy and forces, tanh", "energy and forces, relu", "forces alone"])
def test_a_penalty_refuses_them(name: str) -> None:
    model = CASES[name]()
    x, y = data_of(model)
    for layer in ("inner", "out"):
        with (
            pf.FlatnessPenalty(model, layer, LOSS) as penalty,
            pytest.raises(pf.errors.InputError, match=rf"layer '{layer}': its weight acts outside .* derivative"),
        ):
            penalty(model(x.clone()), y)


def test_a_penalty_takes_a_layer_behind_the_derivative() -> None:
    model = CASES["hamiltonian"]()
    x, y = data_of(model)
    with pf.FlatnessPenalty(model, "behind", LOSS, probes=2000) as penalty:
        assert penalty(model(x.clone()), y).item() == pytest.approx(expected(model, x, y, "behind")[0], rel=0.1)


def in_forward_mode(net, x):
    """Return the derivative along the first input, by dual numbers, beside the value."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.eye(3, dtype=x.dtype)[0].expand_as(x))
        return torch.cat([*forward_ad.unpack_dual(dual * dual + net.out(net.act(net.inner(dual))))[:2]], dim=1)


def of_one_row(net, x):
    return torch.func.vmap(torch.func.grad(lambda row: net.out(net.act(net.inner(row))).squeeze()))(x)


# Torch's own, where a process first makes a dual number.
of_torch = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@of_torch
@pytest.mark.parametrize("how", [{}, {"curvature": "ggn"}, {"probes": 3}])
def test_layers_inside_of_forward_mode_are_refused(how: dict[str, object]) -> None:
    """What hooks give a layer has no tangent: the GGN values were those of another network."""
    model = network(in_forward_mode, nn.Tanh())
    with pytest.raises(pf.errors.InputError, match=r"dual_level, where it cannot be observed; .*create_graph=True"):
        pf.measure(model, LOSS, data_of(model), **how)


@of_torch
def test_a_layer_behind_those_in_forward_mode_has_its_value() -> None:
    model = network(lambda net, x: net.behind(in_forward_mode(net, x)), nn.Tanh(), behind=nn.Linear(6, 2))
    x, y = data_of(model)
    report = pf.measure(model, LOSS, (x, y))
    assert report.layers == ("behind",)
    assert {*report.uncovered} == {"inner.weight", "out.weight"}
    found = [report["behind", measure].value for measure in ("relative_flatness", "trace")]
    assert found == pytest.approx(expected(model, x, y, "behind"), rel=1e-9)


def test_derivatives_by_torch_func_are_refused_by_that_name() -> None:
    model = network(of_one_row, nn.Tanh())
    with pytest.raises(pf.errors.InputError, match=r"takes a derivative by torch\.func .*create_graph=True"):
        pf.measure(model, LOSS, data_of(model))


def after_a_step(net, x):
    """Return the outputs at the weight that a step of gradient descent on data of the model's own gives."""
    (gradient,) = torch.autograd.grad(net.out(net.inner(torch.eye(3, dtype=x.dtype))).sum(), net.out.weight)
    return nn.functional.linear(net.inner(x), net.out.weight - gradient)


def by_jvp(net, x):
    return torch.func.jvp(lambda x: net.out(net.act(net.inner(x))), (x,), (torch.ones_like(x),))[1]


def of_attention(net, x):
    x = x.requires_grad_()
    h = net.inner(x).unflatten(1, (1, 1, 5)).expand(-1, 1, 2, 5)
    energy = net.out(nn.functional.scaled_dot_product_attention(h, h, h)[:, 0, 0])
    return torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


@of_torch
@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (after_a_step, "derivative in a tensor that requires none: in its own weights"),
        (by_jvp, r"inside of torch\.func\.vmap \(or grad, jvp\)"),
        (of_attention, r"differentiates once only .*sdpa_kernel"),
    ],
)
def test_what_cannot_be_had_says_so(forward, said: str) -> None:
    model = network(forward, nn.Tanh())
    with torch.enable_grad():
        y = normal(1, *forward(model, X.clone()).shape)
    with pytest.raises(pf.errors.InputError, match=said):
        pf.measure(model, LOSS, (X.clone(), y))


def test_a_dual_level_of_another_thread_s_changes_nothing() -> None:
    """There is one for the process."""
    model = CASES["energy and forces, tanh"]()
    data = data_of(model)
    expected_report = pf.measure(model, LOSS, data)
    with forward_ad.dual_level():
        report = pf.measure(model, LOSS, data)
    assert [estimate.value for *_, estimate in report] == [estimate.value for *_, estimate in expected_report]
