"""A head's penalty in a training loop: compiled, transformed, in half precision, over processes."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pyflatness as pf
from support.ranks import outcomes

N, M, D = 12, 5, 3
TARGETS = torch.arange(N) % D
TARGETS[4] = -100
WEIGHTED = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1)


of_dynamo = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch's own, 2.13


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, M), nn.Linear(M, D)

    def forward(self, x):
        features = self.body(x).relu()
        return self.head(features), features


def inputs(n=N):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(1))


def objective(net, x, y, **options):
    logits, features = net(x)
    head = net.module.head if isinstance(net, DistributedDataParallel) else net.head
    return F.cross_entropy(logits, y) + 0.3 * pf.flatness_penalty(features, head.weight, head.bias, y, **options)


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


def trained(step):
    """The gradients of a network after ``step(net, x, y)``."""
    net = Net()
    step(net, inputs(), TARGETS)
    return gradients(net)


def plain(net, x, y):
    objective(net, x, y).backward()


@pytest.mark.library_sums
@of_dynamo
@pytest.mark.parametrize("options", [{}, {"normalize": "std"}, {"loss": WEIGHTED}], ids=str)
def test_a_compiled_step_has_no_break_and_the_same_gradients(options):
    torch.compiler.reset()
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    expected, found = Net(), Net()
    objective(expected, inputs(), TARGETS, **options).backward()
    compiled(found, inputs(), TARGETS, **options).backward()
    torch.testing.assert_close(gradients(found), gradients(expected))


@pytest.mark.library_sums
@of_dynamo
def test_a_compiled_step_refuses_targets_that_do_not_exist():
    torch.compiler.reset()
    compiled = torch.compile(pf.flatness_penalty, fullgraph=True, backend="aot_eager")
    with pytest.raises(pf.errors.InputError, match="class 7 does not exist among 3 classes"):
        compiled(torch.ones(2, M), torch.ones(D, M), None, torch.tensor([0, 7]))


@pytest.mark.library_sums
@of_dynamo
@pytest.mark.soak
def test_a_step_compiled_by_inductor():
    torch.compiler.reset()
    compiled = torch.compile(objective, fullgraph=True)
    torch.testing.assert_close(trained(lambda *given: compiled(*given).backward()), trained(plain))


def test_a_batch_of_heads_and_its_gradients():
    draw = torch.Generator().manual_seed(2)
    features, weights, bias = (torch.randn(4, *s, generator=draw).double() for s in ((N, M), (D, M), (D,)))
    targets = torch.randint(D, (4, N), generator=draw)
    each = zip(features, weights, bias, targets, strict=True)
    expected = torch.stack([pf.flatness_penalty(*given) for given in each])
    torch.testing.assert_close(vmap(pf.flatness_penalty)(features, weights, bias, targets), expected)
    found = vmap(grad(pf.flatness_penalty, argnums=1))(features, weights, bias, targets)
    of_all = grad(lambda w: vmap(pf.flatness_penalty)(features, w, bias, targets).sum())(weights)
    weights.requires_grad_()
    each = zip(features, weights, bias, targets, strict=True)
    (expected,) = torch.autograd.grad(sum(pf.flatness_penalty(*given) for given in each), weights)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(of_all, expected)
    shared = vmap(pf.flatness_penalty, in_dims=(None, 0, None, None))(features[0], weights, bias[0], targets[0])
    assert shared[2].item() == pytest.approx(pf.flatness_penalty(features[0], weights[2], bias[0], targets[0]).item())


def test_second_derivatives_by_transforms():
    draw = torch.Generator().manual_seed(2)
    features, weight = (torch.randn(*s, generator=draw).double() for s in ((N, M), (D, M)))
    found = jacrev(grad(pf.flatness_penalty, argnums=1), argnums=1)(features, weight)
    expected = torch.autograd.functional.hessian(lambda w: pf.flatness_penalty(features, w), weight)
    torch.testing.assert_close(found, expected)


def test_gradients_of_parameters_in_a_functional_call():
    net = Net()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def risk(parameters):
        _, features = functional_call(net, parameters, inputs())
        return pf.flatness_penalty(features, parameters["head.weight"], parameters["head.bias"], TARGETS)

    _, features = net(inputs())
    pf.flatness_penalty(features, net.head.weight, net.head.bias, TARGETS).backward()
    found = grad(risk)(parameters)
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_half_precision_in_float32(dtype):
    net = Net()
    with torch.autocast("cpu", dtype):
        _, features = net(inputs())
        assert features.dtype == dtype
        found = pf.flatness_penalty(features, net.head.weight, net.head.bias, TARGETS)
    found.backward()
    single = features.detach().float()
    expected = pf.flatness_penalty(single, net.head.weight, net.head.bias, TARGETS)
    assert found.dtype == torch.float32
    assert found.item() == expected.item()
    (of_weight,) = torch.autograd.grad(expected, net.head.weight)
    torch.testing.assert_close(net.head.weight.grad, of_weight)


def test_accumulated_gradients_are_those_of_the_sum():
    def halves(net, x, y):
        for some in (slice(0, 6), slice(6, 12)):
            (objective(net, x[some], y[some]) / 2).backward()

    def together(net, x, y):
        (sum(objective(net, x[some], y[some]) for some in (slice(0, 6), slice(6, 12))) / 2).backward()

    torch.testing.assert_close(trained(halves), trained(together))


def test_gradients_are_clipped_as_others_are():
    def clipped(net, x, y):
        plain(net, x, y)
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.01) > 0.01

    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in trained(clipped)]))
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_a_scaler_takes_steps_and_leaves_out_those_that_overflow():
    net, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    expected = copy.deepcopy(net)
    for model in (net, expected):
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        loss = objective(model, inputs(), TARGETS)
        if model is net:
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        else:
            loss.backward()
            optimiser.step()
    torch.testing.assert_close([*net.parameters()], [*expected.parameters()])
    before = [p.detach().clone() for p in net.parameters()]
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    optimiser.zero_grad()
    scaler.scale(objective(net, inputs() * 1e25, TARGETS)).backward()
    scaler.step(optimiser)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))


def spread(rank, size):
    net = DistributedDataParallel(Net())
    some = slice(6 * rank, 6 * rank + 6)
    objective(net, inputs()[some], TARGETS[some]).backward()
    dist.barrier()
    return gradients(net)


def test_two_processes_average_the_gradients_of_their_batches():
    found = outcomes(__name__, ["spread"], 2)["spread"]

    def both(net, x, y):
        (sum(objective(net, x[some], y[some]) for some in (slice(0, 6), slice(6, 12))) / 2).backward()

    expected = trained(both)
    for each in found:
        torch.testing.assert_close(each, expected)


def test_nothing_is_kept_for_a_backward_pass_that_is_not_wanted():
    net = Net()
    with torch.no_grad():
        _, features = net(inputs())
        assert not pf.flatness_penalty(features, net.head.weight, net.head.bias, TARGETS).requires_grad
    with torch.inference_mode():
        _, features = net(inputs())
        pf.flatness_penalty(features, net.head.weight, net.head.bias, TARGETS)
