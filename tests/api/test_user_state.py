"""What a measurement must leave alone: the user's model, its gradients, modes and buffers, and the random state."""

import copy

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import doors
from support.unchanged import LOSS, X, Y, assert_unchanged, snapshot


class Counting(nn.Module):
    """A model that writes to its buffers and draws random numbers in eval mode."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = x.sum()[None]
        return self.head(torch.relu_(self.norm(self.body(x))) + 0 * torch.rand(1))


@pytest.fixture
def model():
    net = Counting()
    net.train()
    LOSS(net(X), Y).backward()
    net.eval()
    net.body.weight.requires_grad_(False)
    net.head.register_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize("options", [{}, {"normalize": "std"}, {"per_sample": True, "backend": "reference"}])
def test_a_measurement_leaves_no_trace(model, options):
    before = snapshot(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6, shuffle=True)
    pf.relative_flatness(model, LOSS, loader, **options)
    assert_unchanged(model, before)


def test_verify_leaves_no_trace(model):
    before = snapshot(model)
    assert pf.verify(model, LOSS, (X, Y))
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_no_trace(model, error):
    before = snapshot(model)

    def batches():
        yield X[:5], Y[:5]
        raise error("stopped")

    with pytest.raises(error, match="stopped"):
        pf.relative_flatness(model, LOSS, batches())
    assert_unchanged(model, before)


@pytest.mark.parametrize("options", [{}, {"normalize": "std"}])
def test_an_error_leaves_no_trace_while_it_is_handled(model, options):
    """Hooks are gone in the handler already, not when the error is forgotten."""
    before = snapshot(model)
    x = X.clone()
    x[3] = torch.nan
    try:
        pf.relative_flatness(model, LOSS, (x, Y), **options)
    except pf.errors.NonFiniteError:
        assert_unchanged(model, before)
    else:
        pytest.fail("NaN was not noticed")


def test_a_refusal_leaves_no_trace(model):
    before = snapshot(model)
    for layer in ("he", "nothing", "re:("):
        with pytest.raises(pf.errors.FlatnessError):
            pf.relative_flatness(model, LOSS, (X, Y), layer)
    assert_unchanged(model, before)


def test_inside_no_grad_and_inference_mode(model):
    expected = float(pf.relative_flatness(model, LOSS, (X, Y)))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert float(pf.relative_flatness(model, LOSS, (X, Y))) == expected
            assert float(pf.relative_flatness(model, LOSS, (X.clone(), Y))) == expected
            custom = pf.relative_flatness(model, lambda f, y: f.logsumexp(1).mean(), (X, Y))
            assert float(custom) == pytest.approx(expected, rel=1e-5)


def test_frozen_models_and_tensors_with_gradients(model):
    expected = float(pf.relative_flatness(model, LOSS, (X, Y)))
    model.requires_grad_(False)
    assert float(pf.relative_flatness(model, LOSS, (X.clone().requires_grad_(), Y))) == expected
    model.requires_grad_(True)
    value = pf.head_flatness(torch.randn(3, 8, requires_grad=True), model.head.weight, model.head.bias, per_sample=True)
    assert not value.per_sample.requires_grad


def test_wrapped_models(model):
    expected = float(pf.relative_flatness(model, LOSS, (X, Y), "head"))
    assert float(pf.relative_flatness(nn.DataParallel(model), LOSS, (X, Y), "head")) == expected
    compiled = torch.compile(model, backend="eager")
    assert float(pf.relative_flatness(compiled, LOSS, (X, Y), "head")) == expected


def test_parametrised_weights():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))).eval()
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain[0].load_state_dict(model[0].state_dict())
    plain[2].weight.data, plain[2].bias.data = model[2].weight.detach(), model[2].bias.detach()
    expected = float(pf.relative_flatness(plain, LOSS, (X, Y)))
    assert float(pf.relative_flatness(model, LOSS, (X, Y))) == pytest.approx(expected, rel=1e-6)


def test_tied_weights_are_noted():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    estimate = pf.relative_flatness(Tied(), LOSS, (torch.arange(5), torch.arange(5)))
    assert estimate.notes == ("weight tied with embed: derivative through this use only",)


def test_outputs_that_users_return():
    class Output(dict):
        logits = None

    class Wrapped(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.head, self.kind = nn.Linear(4, 3), kind

        def forward(self, x):
            z = self.head(x)
            if self.kind == "tuple":
                return z, "attentions"
            output = Output(logits=z)
            output.logits = z
            return output

    torch.manual_seed(1)
    expected = None
    for kind in ("tuple", "object"):
        torch.manual_seed(1)
        value = float(pf.relative_flatness(Wrapped(kind), LOSS, (X, Y)))
        assert expected is None or value == expected
        expected = value


def test_forward_for_other_batches():
    model = nn.Sequential(nn.Linear(4, 3))
    batches = [{"x": X[:7], "y": Y[:7]}, {"x": X[7:], "y": Y[7:]}]
    value = pf.relative_flatness(model, LOSS, batches, forward=lambda net, batch: (net(batch["x"]), batch["y"]))
    assert float(value) == pytest.approx(float(pf.relative_flatness(model, LOSS, (X, Y))), rel=1e-6)
    assert value.samples == 20


def test_the_last_linear_that_ran_is_the_default():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body, self.unused = nn.Linear(8, 3), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    assert pf.relative_flatness(Net(), LOSS, (X, Y)).layer == "head"


@pytest.mark.parametrize("selector", ["head", "he*", "re:he.d", "type:Linear", "module"])
def test_selectors(selector):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv1d(1, 8, 4), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(torch.relu(self.body(x[:, None])).flatten(1))

    net = Net()
    assert pf.relative_flatness(net, LOSS, (X, Y), net.head if selector == "module" else selector).layer == "head"


def test_progress_is_silent_off_a_terminal(capsys):
    pf.relative_flatness(nn.Sequential(nn.Linear(4, 3)), LOSS, (X, Y))
    pf.relative_flatness(nn.Sequential(nn.Linear(4, 3)), LOSS, (X, Y), progress=False)
    assert capsys.readouterr() == ("", "")


def in_training(*more):
    """A network in training mode, of which one part is in eval mode."""
    model = nn.Sequential(*doors.net(), nn.Dropout(0.5), *more, nn.Dropout(0.5)).train()
    model(doors.X)  # for running statistics
    model[-1].eval()
    return model


@pytest.mark.parametrize("name", doors.ON_MODELS)
def test_eval_measures_in_eval_mode_and_gives_each_module_its_mode_back(name):
    call, model = doors.ON_MODELS[name], in_training()
    given = doors.LOSS, (doors.X, doors.Y)
    expected = call(copy.deepcopy(model).eval(), *given)
    before = snapshot(model)
    found = call(model, *given, eval=True)
    assert_unchanged(model, before)
    if isinstance(found, nn.Module):
        assert [module.training for module in found.modules()] == [module.training for module in model.modules()]
        found.eval()
    assert str(found) == str(expected)


def test_modes_are_given_back_after_an_interrupt():
    model = in_training()
    before = snapshot(model)

    def stopped():
        yield doors.X, doors.Y
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pf.relative_flatness(model, doors.LOSS, stopped(), eval=True)
    assert_unchanged(model, before)


def test_eval_is_for_all_models_that_are_scored():
    models = {name: in_training(nn.BatchNorm1d(doors.C)) for name in "ab"}
    before = {name: snapshot(model) for name, model in models.items()}
    scores = pf.score(models, doors.LOSS, (doors.X, doors.Y), eval=True)
    for name, model in models.items():
        assert_unchanged(model, before[name])
        expected = pf.measure(copy.deepcopy(model).eval(), doors.LOSS, (doors.X, doors.Y))
        assert scores[name, "relative_flatness"].value == expected["relative_flatness"].value
    assert "or pass eval=True" in pf.score(models, doors.LOSS, (doors.X, doors.Y)).errors["a"]
