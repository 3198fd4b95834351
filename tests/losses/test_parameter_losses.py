"""Losses that depend on the model's parameters beside its outputs: refused by all public calls, and only they."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import pyflatness as pf
from support.public_calls import CALLS, OF_TENSORS, batches

DATA = batches()
MESSAGE = "depends on parameters in another way than by the model's outputs"


def network(frozen=False):
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 6))
    net.add_module("act", nn.ReLU())
    net.add_module("head", nn.Linear(6, 3))
    return net.double().eval().requires_grad_(not frozen)


def decayed(net):
    return lambda f, y: F.cross_entropy(f, y) + 0.05 * sum(p.square().sum() for p in net.parameters())


OF_TRAINABLE = {  # parameters, so not of a frozen network
    *("sharpness", "fisher_rao", "adaptive_sharpness_mc", "spectrum", "worst_case_sharpness"),
    *("importance", "importance, sampled"),
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [*((name, False) for name in CALLS), *((name, True) for name in CALLS if name not in OF_TRAINABLE)],
)
def test_every_public_call_refuses_weight_decay(name, frozen):
    net = network(frozen)
    flags = [p.requires_grad for p in net.parameters()]
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        CALLS[name](net, decayed(net), DATA)
    assert [p.requires_grad for p in net.parameters()] == flags
    CALLS[name](net, lambda f, y: F.cross_entropy(f, y), DATA)


@pytest.mark.parametrize("name", OF_TENSORS)
@pytest.mark.parametrize("detached", [False, True])
def test_heads_given_as_tensors(name, detached):
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    net = network()
    phi = net[:2](x).detach()
    weight = net.head.weight.detach() if detached else net.head.weight
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        OF_TENSORS[name](phi, weight, y, lambda f, t: F.cross_entropy(f, t) + net.head.weight.square().sum())
    OF_TENSORS[name](phi, weight, y, lambda f, t: F.cross_entropy(f, t))


def test_a_tensor_head_in_the_loss_itself():
    phi, weight = torch.randn(5, 4), torch.randn(3, 4)
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        pf.head_flatness(phi, weight, targets=torch.arange(5) % 3, loss=lambda f, t: f.square().mean() + weight.sum())
    assert not weight.requires_grad


class Keeping(nn.Module):
    """A network that keeps its activations, and a penalty on them, for the loss."""

    def __init__(self):
        super().__init__()
        self.net, self.kept, self.penalty = network(), None, None

    @property
    def head(self):
        return self.net.head

    def forward(self, x):
        self.kept = self.net[:2](x)
        self.penalty = self.kept.square().mean()
        return self.net.head(self.kept)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "relative_flatness, a layer"])
@pytest.mark.parametrize("penalty", [lambda net, f: net.penalty, lambda net, f: net.kept.square().sum() / len(f)])
def test_activations_that_the_model_keeps(name, penalty):
    net = Keeping()
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        CALLS[name](net, lambda f, y: F.cross_entropy(f, y) + 0.5 * penalty(net, f), DATA)
    assert net.kept is None
    assert net.penalty is None


class Penalised(nn.Module):
    """A loss module that holds the model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, f, y):
        return F.cross_entropy(f, y) + 0.1 * self.net.head.weight.square().sum()


class Tempered(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, f, y):
        return F.cross_entropy(f / self.temperature, y)


def test_a_loss_module_that_holds_the_model():
    net = network()
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        pf.relative_flatness(net, Penalised(net), DATA)


def test_parameters_of_the_loss_alone_are_constants():
    net, loss = network(), Tempered()
    found = pf.relative_flatness(net, loss, DATA).value
    closure = pf.relative_flatness(net, lambda f, y: F.cross_entropy(f / loss.temperature, y), DATA).value
    net.head.weight.data /= 2
    net.head.bias.data /= 2
    scaled = pf.relative_flatness(net, nn.CrossEntropyLoss(), DATA).value  # κ is the same: w/2 with outputs f/2
    assert found == pytest.approx(scaled, rel=1e-12)
    assert closure == pytest.approx(scaled, rel=1e-12)
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    assert pf.head_flatness(net[:2](x), 2 * net.head.weight, 2 * net.head.bias, y, loss=loss).value == pytest.approx(
        scaled, rel=1e-12
    )


def test_a_parametrised_weight_in_the_loss():
    net = network()
    parametrizations.weight_norm(net.body)
    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        pf.relative_flatness(net, lambda f, y: F.cross_entropy(f, y) + net.body.weight.square().sum(), DATA, "body")


def test_under_no_grad_and_in_inference_mode():
    net = network()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(pf.errors.InputError, match=MESSAGE):
            pf.relative_flatness(net, decayed(net), DATA)


def test_what_the_message_says_to_add():
    """½ λ |θ|² adds λ m |w|² to κ: against the Hessian of the whole loss."""
    net, rate = network(), 0.1
    x, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    weight = net.head.weight.detach()

    def risk(w):
        f = torch.func.functional_call(net, {"head.weight": w}, x)
        others = sum(p.square().sum() for name, p in net.named_parameters() if name != "head.weight")
        return F.cross_entropy(f, y) + rate / 2 * (w.square().sum() + others)

    hessian = torch.autograd.functional.hessian(risk, weight)
    truth = torch.einsum("sk,tk,sjtj->", weight, weight, hessian)
    found = pf.relative_flatness(net, nn.CrossEntropyLoss(), DATA).value
    found += rate * weight.shape[1] * float(weight.square().sum())
    assert found == pytest.approx(float(truth.detach()), rel=1e-12)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()])
def test_targets_that_forward_computes_with_the_model(loss):
    """Derivatives go through the outputs alone, so that targets that depend on the weights would count as constants."""
    inputs = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def measured(ended):
        forward = lambda net, batch: (net(batch[0]), ended(net(batch[0] + 0.1).sigmoid()))  # noqa: E731
        return pf.measure(network(), loss, (inputs, inputs), forward=forward)["trace"].value

    with pytest.raises(pf.errors.InputError, match=MESSAGE):
        measured(torch.Tensor.clone)
    assert measured(torch.Tensor.detach) > 0


@pytest.mark.parametrize("sorted_by_class", [False, True])
def test_class_weights_in_a_callable_that_the_first_batch_does_not_show(sorted_by_class):
    inputs = torch.randn(24, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0] * 16 + [1] * 8 if sorted_by_class else [0] * 8 + [0, 1] * 8)
    weight, data = torch.tensor([0.2, 5.0, 1.0]).double(), [*zip(inputs.split(8), targets.split(8), strict=True)]
    with pytest.raises(pf.errors.InputError, match=r"batch [12]: loss: over \d+ samples it is not the mean"):
        pf.measure(network(), lambda f, y: F.cross_entropy(f, y, weight=weight), data)
