"""A layer's penalty in training steps as users write them, and the errors of what cannot be done."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from support.grid import Net

LOSS = nn.CrossEntropyLoss()
GENERATOR = torch.Generator().manual_seed(2)
X, Y = torch.randn(4, 2, 6, 6, generator=GENERATOR), torch.arange(4) % 3
SIGNS = torch.randn(4, 3, generator=GENERATOR).sign()


def cnn():
    torch.manual_seed(1)
    layers = nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    return nn.Sequential(*layers)


def fixed(penalty):
    penalty._signs = lambda like: SIGNS[: len(like)].to(like)
    return penalty


def gradients(model, call=None, layer="2", **options):
    """Of a loss with a penalty."""
    model.zero_grad()
    with fixed(pf.FlatnessPenalty(model, layer, LOSS, **options)) as penalty:
        outputs = (call or model)(X)
        (LOSS(outputs, Y) + penalty(outputs, Y)).backward()
    return [p.grad for p in model.parameters()]


def test_hooks_leave_the_model_as_it_was():
    model = cnn()
    with pf.FlatnessPenalty(model, "2"):
        model(X)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_evaluation_between_steps_does_no_harm():
    model = cnn()
    expected = gradients(model)
    with fixed(pf.FlatnessPenalty(model, "2", LOSS)) as penalty:
        with torch.no_grad():
            model(X[:1])
        outputs = model(X)
        total = LOSS(outputs, Y) + penalty(outputs, Y)
        model.zero_grad()
        total.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])


def test_gradient_accumulation_and_clipping():
    model = cnn()
    expected = gradients(model)
    model.zero_grad()
    with pf.FlatnessPenalty(model, "2", LOSS) as penalty:
        for part in (slice(0, 2), slice(2, 4)):
            penalty._signs = lambda like, part=part: SIGNS[part]
            outputs = model(X[part])
            ((LOSS(outputs, Y[part]) + penalty(outputs, Y[part])) / 2).backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt() <= 1.001e-3


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_autocast_and_a_gradient_scaler(dtype, rtol):
    model = cnn()
    expected = gradients(model)
    model.zero_grad()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=256.0), torch.optim.SGD(model.parameters(), lr=0.0)
    with fixed(pf.FlatnessPenalty(model, "2", LOSS)) as penalty:
        with torch.autocast("cpu", dtype):
            outputs = model(X)
            value = penalty(outputs, Y)
            total = LOSS(outputs, Y) + value
        assert outputs.dtype == dtype
        assert value.dtype == torch.float32
        scaler.scale(total).backward()
        scaler.unscale_(optimizer)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert (parameter.grad - gradient).norm() <= rtol * gradient.norm() + 1e-4


def test_small_cotangents_do_not_underflow_in_float16():
    """Of outputs so sure that √p is below the smallest number that float16 has."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[2].weight.copy_(torch.tensor([[20.0, 20.0], [-20.0, -20.0]]))
        for layer in (model[0], model[2]):
            layer.bias.zero_()
    x, y = torch.ones(1, 2).half(), torch.tensor([0])
    double = copy.deepcopy(model).double()
    expected = pf.relative_flatness(double, LOSS, (x.double(), y), "0").value
    with pf.FlatnessPenalty(model, "0") as penalty:
        penalty._signs = torch.ones_like
        assert penalty(model(x), y).item() == pytest.approx(expected, rel=1e-2)
    assert 0 < expected < 1e-20


def test_activation_checkpointing():
    model = cnn()
    expected = gradients(model)
    run = lambda x: model[3:](checkpoint(model[:3], x, use_reentrant=False))  # noqa: E731

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return run(x)

    outer = Checkpointed()
    torch.testing.assert_close([*gradients(outer, layer="inner.2")], [*expected])


def test_parametrised_weights_are_the_ones_that_the_forward_pass_used():
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 4)), nn.ReLU(), nn.Linear(4, 3)).double()
    other = copy.deepcopy(model)
    x = torch.randn(4, 5).double()
    with fixed(pf.FlatnessPenalty(model, "0", LOSS)) as penalty:
        outputs = model(x)
        value = penalty(outputs, Y)
        value.backward()
    other(x)  # as many steps of the power method
    for key, buffer in model.state_dict().items():
        torch.testing.assert_close(buffer, other.state_dict()[key], rtol=0, atol=0)
    assert model[0].parametrizations.weight.original.grad.abs().sum() > 0
    plain = nn.Sequential(nn.Linear(5, 4), *copy.deepcopy(list(model)[1:])).double()
    with torch.no_grad():
        plain[0].weight.copy_(other.eval()[0].weight)
        plain[0].bias.copy_(model[0].bias)
    with fixed(pf.FlatnessPenalty(plain, "0", LOSS)) as penalty:
        assert penalty(plain(x), Y).item() == pytest.approx(value.item(), rel=1e-10)


def test_copies_of_a_model_have_hooks_that_do_nothing():
    model = cnn()
    with fixed(pf.FlatnessPenalty(model, "2", LOSS)) as penalty:
        outputs = model(X)
        copied = copy.deepcopy(model)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        torch.save(model, held := io.BytesIO())
        held.seek(0)
        for other in (copied, averaged, torch.load(held, weights_only=False)):
            other(X[:1])
        expected = gradients(cnn())
        (LOSS(outputs, Y) + penalty(outputs, Y)).backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])


# --- torch.compile ----------------------------------------------------------------------------------------------------


def test_what_is_in_front_of_the_layer_may_be_compiled():
    model = cnn()
    expected = gradients(model)
    model[0] = torch.compile(model[0], backend="aot_eager")
    torch.testing.assert_close([*gradients(model)], [*expected])


class Stages(nn.Module):
    """The same network with its layers called one after another."""

    def __init__(self):
        super().__init__()
        self.first, _, self.second, _, _, self.head = cnn()

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).flatten(1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.library_sums
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_has_the_same_gradients_or_an_error(backend):
    model = Stages()
    expected = gradients(model, layer="second")
    model.zero_grad()
    with fixed(pf.FlatnessPenalty(model, "second", LOSS)) as penalty:
        outputs = torch.compile(model, backend=backend)(X)
        if backend == "eager":
            (LOSS(outputs, Y) + penalty(outputs, Y)).backward()
            torch.testing.assert_close([parameter.grad for parameter in model.parameters()], [*expected])
        else:
            message = "'second'.*no second derivative.*leave what is behind the layer out of torch.compile"
            with pytest.raises(pf.errors.InputError, match=message):
                penalty(outputs, Y)


# --- BatchNorm --------------------------------------------------------------------------------------------------------


def normed():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    model = nn.Sequential(*layers).double()
    nn.init.uniform_(model[1].weight, 0.5, 2.0)
    nn.init.normal_(model[1].bias)
    return model


def with_weights_by_sample(model, x, y):
    """Σ_i κ of the batch's loss in a weight of sample i alone, in the GGN: nested autograd."""
    weight = model[0].weight.detach()

    def outputs(weights):
        each = [nn.functional.conv2d(one.unsqueeze(0), own, model[0].bias) for one, own in zip(x, weights, strict=True)]
        return model[1:](torch.cat(each))

    weights = weight.expand(len(x), *weight.shape).clone()
    f = outputs(weights).detach()
    jacobian = torch.autograd.functional.jacobian(outputs, weights).reshape(f.numel(), len(x), *weight.flatten(1).shape)
    curvature = torch.autograd.functional.hessian(lambda z: LOSS(z, y), f).reshape(f.numel(), f.numel())
    carried = torch.einsum("fidm,dk->fimk", jacobian, weight.flatten(1))
    return torch.einsum("fimk,fg,gimk->", carried, curvature, carried).item()


def test_in_training_mode_batch_norm_moves_with_the_weight_of_one_sample():
    model = normed()
    x, y = torch.randn(2, 1, 3, 3, generator=GENERATOR).double(), torch.tensor([0, 2])
    total = 0.0
    with pf.FlatnessPenalty(model, "0", LOSS) as penalty:
        for rest in itertools.product((-1.0, 1.0), repeat=5):
            penalty._signs = lambda like, rest=rest: torch.tensor([(1.0, *rest)]).double().view(2, 3)
            total += penalty(model(x), y).item() / 32
    assert total == pytest.approx(with_weights_by_sample(model, x, y), rel=1e-9)


def test_that_differs_from_fixed_statistics_by_the_inverse_of_the_batch_size():
    off = {}
    for samples in (8, 64):
        model = normed()
        x = torch.randn(samples, 1, 3, 3, generator=torch.Generator().manual_seed(5)).double()
        y = torch.arange(samples) % 3
        moving = with_weights_by_sample(model, x, y)
        with torch.no_grad():
            z = model[0](x)
            model[1].running_mean.copy_(z.mean((0, 2, 3)))
            model[1].running_var.copy_(z.var((0, 2, 3), correction=0))
        held = pf.relative_flatness(model.eval(), LOSS, (x, y), "0").value
        off[samples] = abs(moving / held - 1)
    assert off[8] < 1.5 / 8
    assert off[64] < 1.5 / 64
    assert off[8] > 1e-3


# --- errors -----------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.idle, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.shared(torch.relu(self.shared(x)))))


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) @ torch.ones(5, 5) + self.body.bias.sum()).roll(1, 0)


class Aside(Twice):
    def forward(self, x):
        self.idle(x)
        return self.head(torch.relu(self.shared(x)))


INPUTS = torch.randn(4, 5, generator=GENERATOR)


@pytest.mark.parametrize(
    ("make", "layer", "message"),
    [
        (Twice, "idle", "layer 'idle' did not run"),
        (Twice, "shared", "layer 'shared' ran 2 times"),
        (Aside, "idle", "layer 'idle': the outputs do not depend on"),
        (Mixing, "body", "layer 'body': its rows .* cannot be told apart"),
    ],
)
def test_errors_name_the_layer(make, layer, message):
    model = make()
    with pf.FlatnessPenalty(model, layer, LOSS) as penalty, pytest.raises(pf.errors.InputError, match=message):
        penalty(model(INPUTS), Y)


def test_a_frozen_layer_and_outputs_without_a_graph():
    model = Twice()
    with pf.FlatnessPenalty(model, "head", LOSS) as penalty:
        with torch.no_grad():
            outputs = model(INPUTS)
        with pytest.raises(pf.errors.InputError, match="outputs: they have no graph"):
            penalty(outputs, Y)
        model.head.weight.requires_grad_(False)
        with pytest.raises(pf.errors.InputError, match="layer 'head' is frozen"):
            penalty(model(INPUTS), Y)


def test_outputs_of_another_pass_or_of_another_shape():
    model = Aside()
    with pf.FlatnessPenalty(model, "shared", LOSS) as penalty:
        first = model(INPUTS)
        model(INPUTS)
        with pytest.raises(pf.errors.InputError, match=r"layer 'shared'.*last forward pass"):
            penalty(first, Y)
        with pytest.raises(pf.errors.InputError, match=r"targets: class indices of shape \(4,\) are wanted"):
            penalty(model(INPUTS), Y[:3])
        with pytest.raises(pf.errors.InputError, match=r"no tensor, .* got str; pass the one that the loss takes"):
            penalty("nothing", Y)
        with pytest.raises(pf.errors.InputError, match="targets: a tensor is wanted"):
            penalty(model(INPUTS), [0, 1, 2, 0])


def test_what_cannot_be_penalised_is_refused_at_once():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    for layer, what in (("0", "a Embedding"), ("1", "a LayerNorm")):
        with pytest.raises(pf.errors.NotYetError, match=f"layer '{layer}' is {what}; FlatnessPenalty takes linear"):
            pf.FlatnessPenalty(model, layer)
    with pytest.raises(pf.errors.NotYetError, match=r"has no sampled factors.*; pass nn.CrossEntropyLoss"):
        pf.FlatnessPenalty(model, "2", nn.L1Loss())
    for loss in (nn.NLLLoss(), F.nll_loss):
        with pytest.raises(pf.errors.NotYetError, match=r"leave the LogSoftmax out of the model.*nn.CrossEntropyLoss"):
            pf.FlatnessPenalty(model, "2", loss)
    with pytest.raises(pf.errors.InputError, match="nothing in the model matches 'linear'"):
        pf.FlatnessPenalty(model, "linear")
    with pytest.raises(pf.errors.InputError, match="probes=0"):
        pf.FlatnessPenalty(model, "2", probes=0)
    with pytest.raises(pf.errors.InputError, match="normalize='max'"):
        pf.FlatnessPenalty(model, "2", normalize="max")
    with pytest.raises(pf.errors.InputError, match=r"generator: a torch.Generator is wanted, got 3"):
        pf.FlatnessPenalty(model, "2", generator=3)
    with pytest.raises(pf.errors.InputError, match=r"model: a torch.nn.Module is wanted"):
        pf.FlatnessPenalty("model", "2")
    attention = nn.TransformerEncoderLayer(4, 2, 4)
    with pytest.raises(pf.errors.NotYetError, match="a weight that no module calls"):
        pf.FlatnessPenalty(attention, "self_attn.in_proj_weight[q]")


def attending(net, x):
    h = net.first(x).unsqueeze(1)
    return net.head(nn.functional.scaled_dot_product_attention(h, h, h).squeeze(1).mean(1))


def test_fused_attention_is_named_in_the_first_call():
    model, x = Net(attending, first=nn.Linear(4, 4), head=nn.Linear(4, 3)), torch.randn(4, 3, 4, generator=GENERATOR)
    with pf.FlatnessPenalty(model, "first", LOSS) as penalty:
        with pytest.raises(pf.errors.InputError, match=r"layer 'first'.*no second derivative.*sdpa_kernel"):
            penalty(model(x), Y)
        with sdpa_kernel(SDPBackend.MATH):
            outputs = model(x)
        penalty(outputs, Y).backward()
    assert model.first.weight.grad.abs().sum() > 0


def test_an_input_that_was_modified_in_place():
    def overwriting(net, x):
        h = net.front(x)
        return net.head(torch.relu(net.layer(h) + h.mul_(2)))

    model = Net(overwriting, front=nn.Linear(5, 5), layer=nn.Linear(5, 5), head=nn.Linear(5, 3))
    with (
        pf.FlatnessPenalty(model, "layer", LOSS) as penalty,
        pytest.raises(pf.errors.InputError, match=r"'layer'.*in place"),
    ):
        penalty(model(INPUTS), Y)
