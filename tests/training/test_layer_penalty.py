"""The penalty of a layer estimates κ and its gradient without bias: means over all signs are held against truth."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import truth
from support.combinations import every

N, C = 2, 3
Y = torch.tensor([2, 0])
GENERATOR = torch.Generator().manual_seed(4)
VALUES = torch.randn(N, C, generator=GENERATOR).double()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5]).double()
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss(), Y),
    "weighted, smoothed": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), Y),
    "sum, one ignored": (nn.CrossEntropyLoss(reduction="sum", ignore_index=2), Y),
    "probabilities": (nn.CrossEntropyLoss(), VALUES.softmax(1)),
    "squared error": (nn.MSELoss(), VALUES),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), VALUES.sigmoid()),
}


class Tokens(nn.Module):
    """A layer on tokens in front of a smooth mixing of them."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 5), nn.Linear(5, C)

    def forward(self, x):
        return self.head((torch.tanh(self.layer(x)).cumsum(1) ** 2).mean(1))


class Flattened(Tokens):
    """The same, of tokens that were flattened into the dimension of the samples, or put in front of it."""

    def __init__(self, first=False):
        super().__init__()
        self.first = first

    def forward(self, x):
        if self.first:
            h = self.layer(x.transpose(0, 1)).transpose(0, 1)
        else:
            h = self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.head((torch.tanh(h).cumsum(1) ** 2).mean(1))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Bilinear(3, 3, 4), nn.Linear(4, C)

    def forward(self, x):
        return self.head(torch.relu(self.layer(x, x.flip(1))))


def behind(layer, *size):
    """A network of a layer, ReLU and a head, for inputs of a size without samples."""
    outputs = layer(torch.zeros(1, *size)).numel()
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, C)), size, "0"


def conv1d():
    # P² (d + m) is small: the products of pairs of positions
    return behind(nn.Conv1d(8, 6, 3, dilation=2, padding="same", padding_mode="replicate"), 8, 4)


CASES = {
    "vectors": lambda: behind(nn.Linear(4, 5), 4),
    "head": lambda: (nn.Sequential(nn.Linear(4, C)), (4,), "0"),
    "more inputs than outputs": lambda: behind(nn.Linear(6, 2), 6),
    "tokens": lambda: (Tokens(), (2, 3), "layer"),
    "many tokens": lambda: (Tokens(), (9, 3), "layer"),
    "flattened tokens": lambda: (Flattened(), (2, 3), "layer"),
    "tokens first": lambda: (Flattened(first=True), (4, 3), "layer"),
    "convolution": lambda: behind(nn.Conv2d(2, 3, 3, padding=1), 2, 4, 4),
    "strided, grouped": lambda: behind(nn.Conv2d(4, 6, (2, 3), stride=2, groups=2, padding=(1, 0)), 4, 5, 5),
    "circular": lambda: behind(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 1, 3, 3),
    "pointwise": lambda: behind(nn.Conv2d(4, 2, 1), 4, 2, 2),
    "1d": conv1d,
    "3d": lambda: behind(nn.Conv3d(1, 2, 2), 1, 3, 3, 3),
    "transposed": lambda: behind(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), 2, 2, 2),
    "bilinear": lambda: (Bilinear(), (3,), "layer"),
}


def case(name):
    torch.manual_seed(3)
    model, size, layer = CASES[name]()
    return model.double(), torch.randn(N, *size).double(), layer


def enumerated(penalty, estimate):
    """The mean of an estimate over all signs of N x C columns; those of the first one cancel in a square."""
    total, count = 0, 0
    for rest in itertools.product((-1.0, 1.0), repeat=N * C - 1):
        signs = torch.tensor((1.0, *rest)).double().view(N, C)
        penalty._signs = lambda like, signs=signs: signs.to(like.dtype)
        total, count = total + estimate(), count + 1
    return total / count


def exact(model, loss, data, layers, **options):
    report = pf.measure(model, loss, data, layers=layers, measures="relative_flatness", curvature="ggn", **options)
    return report["relative_flatness"].value


def along(model, direction, step):
    """The model moved along a direction in all of its parameters."""
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), direction, strict=True):
            parameter.add_(part, alpha=step)


def check(model, loss, x, y, layer, **options):
    """Hold the mean of value and gradient against exact values, there and a step to either side."""
    direction = [torch.randn_like(parameter) for parameter in model.parameters()]
    with pf.FlatnessPenalty(model, layer, loss, **options) as penalty:
        mean = enumerated(penalty, lambda: penalty(model(x), y))
    assert mean.item() == pytest.approx(exact(model, loss, (x, y), layer, **options), rel=1e-9)
    gradient = torch.autograd.grad(mean, [*model.parameters()], allow_unused=True)
    slope = sum((g * part).sum() for g, part in zip(gradient, direction, strict=True) if g is not None)
    step, values = 1e-5, []
    for move in (step, -2 * step):
        along(model, direction, move)
        values.append(exact(model, loss, (x, y), layer, **options))
    assert slope.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_unbiased_for_each_kind_of_layer(name):
    model, x, layer = case(name)
    check(model, *LOSSES["cross-entropy"][:1], x, Y, layer)


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_unbiased_for_each_loss(name):
    model, x, layer = case("convolution")
    loss, y = LOSSES[name]
    check(model, loss, x, y, layer)


LAYERS = {"tokens first": ["layer", "head"], "strided, grouped": ["0", "type:Linear"]}


@every(together=1, name=[*LAYERS], normalize=[None, "std"])
def test_value_and_gradient_of_several_layers(name, normalize):
    model, x, _ = case(name)
    check(model, nn.CrossEntropyLoss(), x, Y, LAYERS[name], normalize=normalize)


def test_several_layers_share_a_backward_pass():
    model, x, _ = case("convolution")
    passes = []

    def value(layers):
        with pf.FlatnessPenalty(model, layers, generator=torch.Generator().manual_seed(1)) as penalty:
            outputs = model(x)
            outputs.register_hook(lambda _: passes.append(layers))
            found = penalty(outputs, Y)
            return found, torch.autograd.grad(found, [*model.parameters()], allow_unused=True)

    (both, gradients), (first, own), (head, others) = (value(layers) for layers in (["0", "3"], "0", "3"))
    assert both.item() == pytest.approx((first + head).item(), rel=1e-12)
    for gradient, *parts in zip(gradients, own, others, strict=True):
        expected = sum(part for part in parts if part is not None)
        torch.testing.assert_close(gradient, expected if isinstance(expected, torch.Tensor) else None)
    assert passes.count(["0", "3"]) == passes.count("0")  # as many as for the one in front


@pytest.mark.parametrize("name", ["vectors", "tokens", "convolution", "strided, grouped", "1d"])
def test_normalised_value_and_gradient_are_unbiased(name):
    model, x, layer = case(name)
    check(model, nn.CrossEntropyLoss(), x, Y, layer, normalize="std")


def test_it_is_the_hessian_where_the_model_is_piecewise_linear():
    model, x, layer = case("vectors")
    loss = nn.CrossEntropyLoss()
    expected = truth.of_model(model, loss, x, Y, layer)
    with pf.FlatnessPenalty(model, layer, loss) as penalty:
        assert enumerated(penalty, lambda: penalty(model(x), Y)).item() == pytest.approx(expected, rel=1e-10)


def test_terms_of_a_sample_have_signs_of_their_own():
    """Of one sample with two tokens and three classes: two terms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, C), nn.Unflatten(0, (1, 2)), Transposed()).double()
    x, y = torch.randn(2, 4).double(), torch.tensor([[1, 0]])
    data = (x.unsqueeze(0), y)
    whole = nn.Sequential(nn.Flatten(0, 1), *model).double()
    expected = exact(whole, nn.CrossEntropyLoss(), data, "1")
    with pf.FlatnessPenalty(whole, "1") as penalty:
        assert enumerated(penalty, lambda: penalty(whole(data[0]), y)).item() == pytest.approx(expected, rel=1e-9)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def test_probes_are_averaged_and_come_from_the_generator():
    model, x, layer = case("convolution")

    def value(probes, calls):
        generator = torch.Generator().manual_seed(1)
        with pf.FlatnessPenalty(model, layer, probes=probes, generator=generator) as penalty:
            return torch.stack([penalty(model(x), Y) for _ in range(calls)]).mean().item()

    before = torch.get_rng_state()
    assert value(6, 1) == pytest.approx(value(1, 6), rel=1e-12)
    assert value(1, 1) == value(1, 1)
    assert len({value(1, calls) for calls in (1, 2, 3, 4)}) > 1  # two draws of few signs may be the same
    assert torch.equal(before, torch.get_rng_state())
    with pf.FlatnessPenalty(model, layer) as penalty:
        penalty(model(x), Y)
    assert not torch.equal(before, torch.get_rng_state())


@every(together=1, normalize=[None, "std"], name=["vectors", "tokens", "many tokens", "strided, grouped", "1d"])
def test_gradcheck_and_gradgradcheck_with_fixed_signs(name, normalize):
    model, x, layer = case(name)
    names = [key for key, _ in model.named_parameters()]

    def value(*parameters):
        state = dict(zip(names, parameters, strict=True))
        outputs = torch.func.functional_call(model, state, (x,))
        return penalty(outputs, Y)

    with pf.FlatnessPenalty(model, layer, normalize=normalize) as penalty:
        penalty._signs = lambda like: torch.sign(VALUES)
        leaves = tuple(parameter.detach().clone().requires_grad_() for parameter in model.parameters())
        assert torch.autograd.gradcheck(value, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(value, leaves, fast_mode=True)


@pytest.mark.parametrize("probability", [1e-6, 1e-30])
def test_factors_of_peaked_outputs_keep_their_digits(probability):
    """κ of a head whose softmax is nearly one-hot, in float32, and a finite gradient where √p underflows."""
    logits = torch.tensor([[0.0, torch.tensor(probability).log().item(), -200.0]])
    head = nn.Linear(1, C, bias=False)
    with torch.no_grad():
        head.weight.copy_(logits.t())
    x, y = torch.ones(1, 1), torch.tensor([0])
    expected = pf.head_flatness(x.double(), head.weight.detach().double()).value
    with pf.FlatnessPenalty(head, "") as penalty:
        found = []
        for rest in itertools.product((-1.0, 1.0), repeat=2):
            penalty._signs = lambda like, rest=rest: torch.tensor([(1.0, *rest)])
            found.append(penalty(head(x), y))
        mean = torch.stack(found).mean()
    assert mean.item() == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(mean, head.weight)
    assert bool(gradient.isfinite().all())


def test_a_feature_that_is_zero_throughout_has_a_finite_gradient():
    model, x, layer = case("vectors")
    x = torch.cat([x[:, :-1], torch.zeros_like(x[:, :1])], dim=1)
    with pf.FlatnessPenalty(model, layer, normalize="std") as penalty:
        penalty(model(x), Y).backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_transformers_conv1d_and_outputs_with_logits():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": C}
    config = transformers.GPT2Config(**sizes, attn_implementation="eager", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    tokens = torch.tensor([[0, 1], [2, 1]])
    inner = lambda m, batch: (m(batch[0]).logits.transpose(1, 2), batch[1])  # noqa: E731
    layer = "transformer.h.0.mlp.c_fc"
    expected = exact(model, nn.CrossEntropyLoss(ignore_index=9), (tokens, torch.tensor([[1, 9], [9, 2]])), layer,
        forward=inner)  # fmt: skip
    found = 0
    with pf.FlatnessPenalty(model, layer, nn.CrossEntropyLoss(ignore_index=9)) as penalty:
        for signs in itertools.product((-1.0, 1.0), repeat=5):
            given = torch.ones(4, C).double()
            given.view(-1)[torch.tensor([1, 2, 9, 10, 11])] = torch.tensor(signs).double()
            penalty._signs = lambda like, given=given: given
            outputs = model(tokens)
            found += penalty(outputs.logits.transpose(1, 2), torch.tensor([[1, 9], [9, 2]])).item() / 32
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_loss_and_the_penalty_share_one_backward_pass():
    model, x, layer = case("convolution")
    loss = nn.CrossEntropyLoss()
    with pf.FlatnessPenalty(model, layer, loss) as penalty:
        penalty._signs = lambda like: torch.sign(VALUES)
        outputs = model(x)
        (F.cross_entropy(outputs, Y) + 0.5 * penalty(outputs, Y)).backward()
        both = [p.grad.clone() for p in model.parameters()]
        apart = torch.autograd.grad(loss(model(x), Y), [*model.parameters()])
        of_penalty = torch.autograd.grad(penalty(model(x), Y), [*model.parameters()], allow_unused=True)
    for total, one, other in zip(both, apart, of_penalty, strict=True):
        torch.testing.assert_close(total, one + (0 if other is None else 0.5 * other))
