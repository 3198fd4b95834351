"""What a measurement must leave alone: the user's model, its gradients, modes and buffers, and the random state."""

import copy
import gc

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import doors
from support.combinations import every, in_soak
from support.public_calls import CALLS, batches, network
from support.residual import X as IMAGES
from support.residual import Y as LABELS
from support.residual import residual
from support.unchanged import LOSS, X, Y, assert_unchanged, snapshot
from support.values import facts


class Counting(nn.Module):
    """A model that writes to its buffers and draws random numbers in eval mode."""

    def __init__(self, inputs=4, width=8):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        self.last = x.sum()[None]
        return self.head(torch.relu_(self.norm(self.body(x))) + 0 * torch.rand(1))


def used(net, x, y):
    """The network as its user has it: trained, in eval mode, with gradients, a frozen weight and a hook."""
    LOSS(net.train()(x), y).backward()
    next(net.parameters()).requires_grad_(False)
    [*net.modules()][-1].register_forward_hook(lambda *_: None)
    return net.eval()


@pytest.fixture
def model():
    return used(Counting(), X, Y)


def _measured(**options):
    return lambda *arguments, **more: pf.measure(*arguments, **options, **more)


OF_IMAGES = {  # calls on a residual network of convolutions
    "sweep": _measured(measures="sweep"),
    "sweep, std": _measured(measures="sweep", normalize="std"),
    "sweep, affine": _measured(measures="sweep", conv="affine"),
    "sweep, ggn, by sample": _measured(measures="sweep", curvature="ggn", per_sample=True),
    "sweep, probes": _measured(measures="sweep", probes=3),
    "block_traces, a convolution": lambda *arguments, **more: pf.block_traces(*arguments, "3.conv1", **more),
    "eigenvalues": _measured(measures=["lambda_max", "relative_flatness_max"], layers="8"),
    "interpolation_sharpness": _measured(measures="interpolation_sharpness"),
    "adaptive_sharpness": _measured(measures="adaptive_sharpness"),
    "weight_norm": _measured(measures="weight_norm"),
}
OF_ROWS = {
    **CALLS,
    "measure, adaptive": _measured(measures="trace", rtol=0.1, curvature="ggn"),
    "relative_flatness, std": lambda *arguments, **more: pf.relative_flatness(*arguments, normalize="std", **more),
    "relative_flatness, reference": lambda *arguments, **more: pf.relative_flatness(
        *arguments, per_sample=True, backend="reference", **more
    ),
}
EVERY = {**OF_ROWS, **OF_IMAGES}
ROWS, CLASSES = (torch.cat(parts) for parts in zip(*batches(), strict=True))


def place(name):
    """A network and samples for a call."""
    if name in OF_IMAGES:
        return used(residual(), IMAGES, LABELS), IMAGES, LABELS
    return used(Counting(4, 6).double(), ROWS, CLASSES), ROWS, CLASSES


class Halves:
    """Two batches; with an error in between."""

    def __init__(self, x, y, error=None):
        self.x, self.y, self.error = x, y, error

    def __iter__(self):
        half = len(self.x) // 2
        yield self.x[:half], self.y[:half]
        if self.error:
            raise self.error("stopped")
        yield self.x[half:], self.y[half:]


@pytest.mark.parametrize("name", EVERY)
def test_a_call_leaves_no_trace(name):
    model, x, y = place(name)
    before = snapshot(model)
    EVERY[name](model, LOSS, Halves(x, y))
    assert_unchanged(model, before)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["sweep", "sweep, std", "relative_flatness", "relative_flatness, std", "fisher_rao"])
def test_also_of_shuffled_data(name):
    model, x, y = place(name)
    before = snapshot(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=6, shuffle=True)
    EVERY[name](model, LOSS, loader)
    assert_unchanged(model, before)


@every(
    name=[name for name in EVERY if name not in ("weight_norm", "verify")],
    where=["data", "forward"],
    error=[KeyboardInterrupt, RuntimeError],
)
def test_an_exception_leaves_no_trace(name, where, error):
    """Of calls that read all data."""
    model, x, y = place(name)
    before, calls = snapshot(model), []

    def forward(net, batch):
        calls.append(1)
        if len(calls) > 1:
            raise error("stopped")
        return net(batch[0]), batch[1]

    given = {"data": Halves(x, y, error)} if where == "data" else {"data": Halves(x, y), "forward": forward}
    data = given.pop("data")
    explained = error is RuntimeError and where == "forward"  # with ours around it
    with pytest.raises(pf.errors.InputError if explained else error, match="stopped"):
        EVERY[name](model, LOSS, data, **given)
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_a_backward_pass_leaves_no_trace(model, error):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error("stopped")

    before = snapshot(model)
    with pytest.raises(error, match="stopped"):
        pf.measure(model, LOSS, (X, Y), forward=lambda net, b: (Stop.apply(net(b[0])), b[1]), curvature="ggn")
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    "name", [*[*OF_IMAGES][:-1], "relative_flatness", "relative_flatness, std", "feature_robustness"]
)
def test_an_error_leaves_no_trace_while_it_is_handled(name):
    """Hooks are gone in the handler already, not when the error is forgotten."""
    model, x, y = place(name)
    before, x = snapshot(model), x.clone()
    x[3] = torch.nan
    try:
        EVERY[name](model, LOSS, (x, y))
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


SAME = ("relative_flatness", "measure", "block_traces", "fisher_rao", "sharpness", "pac_bayes", "adaptive_sharpness_mc",
    "sweep", "interpolation_sharpness", "adaptive_sharpness", "weight_norm")  # fmt: skip


def values(name, net, x, y):
    return [text for path, text in facts(EVERY[name](net, LOSS, (x, y))) if "table" not in path]


@pytest.mark.parametrize("name", SAME[:2] + tuple(in_soak(*SAME[2:])))
def test_values_do_not_depend_on_torch_compile(name):
    model, x, y = place(name)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    assert values(name, compiled, x, y) == values(name, model, x, y)


@pytest.mark.parametrize("name", SAME)
def test_values_do_not_depend_on_grad_modes_wrappers_and_frozen_parameters(name):
    model, x, y = place(name)
    expected = values(name, model, x, y)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert values(name, model, x, y) == expected
            assert values(name, model, x.clone(), y) == expected
    assert values(name, nn.DataParallel(model), x, y) == expected
    if name in ("relative_flatness", "measure", "block_traces", "sweep"):
        model.requires_grad_(False)
        assert values(name, model, x.clone().requires_grad_(), y) == expected


def test_values_of_tensors_with_gradients_have_none():
    features, layer = torch.randn(3, 8, requires_grad=True), nn.Linear(8, 3)
    value = pf.head_flatness(features, layer.weight, layer.bias, per_sample=True)
    assert not value.per_sample.requires_grad


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


# --- nothing stays alive ----------------------------------------------------------------------------------------------


DATA = batches(samples=3, size=3)


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def tensors():
    gc.collect()
    return sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())


@pytest.mark.usefixtures("new_objects")
@pytest.mark.parametrize(("few", "more"), [(2, 2), pytest.param(5, 45, marks=pytest.mark.soak)])
@pytest.mark.parametrize("call", CALLS)
def test_many_calls_leave_no_more_tensors_than_few(call, few, more):
    net = network()
    for _ in range(few):
        CALLS[call](net, loss, DATA)
    before = tensors()
    for _ in range(more):
        CALLS[call](net, loss, DATA)
    assert tensors() <= before
