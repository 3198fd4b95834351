"""Penalties of heads and layers on a GPU: values and gradients are the CPU's, in training as users write it too."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyflatness as pf
from support.grid import Net
from support.on_cuda import on_a_gpu, random_states

pytestmark = on_a_gpu
N, M, D = 9, 5, 4
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
TARGETS = torch.tensor([0, 1, -100, 2, 0, -100, 1, 3, 2])
VALUES = torch.linspace(0, 1, N * D, dtype=torch.float64).view(N, D)
LOSSES = {
    "cross-entropy": (nn.CrossEntropyLoss, {}, TARGETS),
    "sum": (nn.CrossEntropyLoss, {"reduction": "sum"}, TARGETS),
    "class weights": (nn.CrossEntropyLoss, {"weight": WEIGHTS, "label_smoothing": 0.1}, TARGETS),
    "probabilities": (nn.CrossEntropyLoss, {}, VALUES.softmax(1)),
    "squared error": (nn.MSELoss, {}, VALUES),
    "binary": (nn.BCEWithLogitsLoss, {"weight": WEIGHTS, "pos_weight": WEIGHTS + 1}, VALUES),
}


def loss_and_targets(name, device):
    kind, options, targets = LOSSES[name]
    options = {key: value.to(device) if torch.is_tensor(value) else value for key, value in options.items()}
    return kind(**options), targets.to(device)


def head(device, n=N, m=M, d=D, dtype=torch.float64):
    draw = torch.Generator().manual_seed(n + m + d)
    drawn = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in ((n, m), (d, m), (d,))]
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def of_head(device, name="cross-entropy", dtype=torch.float64, normalize=None, sizes=(N, M, D)):
    """The value, its gradients, and those of a product of the gradients with themselves."""
    loss, targets = loss_and_targets(name, device)
    given = head(device, *sizes, dtype)
    targets = targets if sizes[0] == N else None
    value = pf.flatness_penalty(*given, targets=targets, loss=loss, normalize=normalize)
    first = torch.autograd.grad(value, given, create_graph=True, allow_unused=True, materialize_grads=True)
    second = torch.autograd.grad(sum(each.square().sum() for each in first), given[:2])
    assert {each.device.type for each in (value, *first, *second)} == {device.type}
    return [each.detach().cpu().double() for each in (value, *first, *second)]


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_two_derivatives(cuda_device, name, normalize):
    states = random_states()
    found = of_head(cuda_device, name, normalize=normalize)
    assert all(map(torch.equal, random_states(), states))
    torch.testing.assert_close(found, of_head(torch.device("cpu"), name, normalize=normalize), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sizes", [(64, 12, 10), (70, 40, 64), (33, 30, 70), (17, 8, 300), (5, 300, 2)])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
def test_sizes_and_dtypes(cuda_device, sizes, dtype, rtol):
    found = of_head(cuda_device, sizes=sizes, dtype=dtype)
    for one, other in zip(found, of_head(torch.device("cpu"), sizes=sizes), strict=True):
        assert (one - other).norm() <= rtol * other.norm() + 1e-9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(cuda_device, dtype):
    given = head(cuda_device, dtype=dtype)
    value = pf.flatness_penalty(*given)
    value.backward()
    assert value.dtype == torch.float32
    assert [tensor.grad.dtype for tensor in given] == [dtype] * 3
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in given]
    expected = pf.flatness_penalty(*exact)
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)


def test_transforms_of_functions(cuda_device):
    features, weight, bias = (tensor.detach() for tensor in head(cuda_device))
    weights = torch.stack([weight, 2 * weight, -weight])

    def penalty(weight):
        return pf.flatness_penalty(features, weight, bias)

    values = torch.func.vmap(penalty)(weights)
    torch.testing.assert_close(values, torch.stack([penalty(each) for each in weights]), rtol=1e-10, atol=0)
    gradients = torch.func.vmap(torch.func.grad(penalty))(weights)
    one_by_one = torch.stack([torch.func.grad(penalty)(each) for each in weights])
    torch.testing.assert_close(gradients, one_by_one, rtol=1e-9, atol=1e-12)


def test_compiled(cuda_device):
    if cuda_device.type == "cpu":
        pytest.skip("tests/training has this for the CPU")
    given, again = head(cuda_device), head(cuda_device)
    value = torch.compile(pf.flatness_penalty, fullgraph=True)(*given)
    value.backward()
    expected = pf.flatness_penalty(*again)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    for one, other in zip(given, again, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-12)


def tokens(net, x):
    """A layer on tokens in front of a smooth mixing of them."""
    return net.head((torch.tanh(net.layer(x)).cumsum(1) ** 2).mean(1))


def behind(layer, *size):
    """A network of a layer, ReLU and a head, for inputs of a size without samples; and the layer's name."""
    outputs = layer(torch.zeros(1, *size)).numel()
    return nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(outputs, D)), size, "0"


def normalised():
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, D))
    return body, (2, 5, 5), "0"


LAYERS = {
    "vectors": lambda: behind(nn.Linear(6, 5), 6),
    "tokens": lambda: (Net(tokens, layer=nn.Linear(3, 5), head=nn.Linear(5, D)), (7, 3), "layer"),
    "convolution": lambda: behind(nn.Conv2d(2, 3, 3, padding=1), 2, 5, 5),
    "strided, grouped": lambda: behind(nn.Conv2d(4, 6, (2, 3), stride=2, groups=2, padding=(1, 0)), 4, 5, 5),
    "circular": lambda: behind(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), 1, 4, 4),
    "1d": lambda: behind(nn.Conv1d(8, 6, 3, dilation=2), 8, 7),
    "3d": lambda: behind(nn.Conv3d(1, 2, 2), 1, 3, 3, 3),
    "transposed": lambda: behind(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), 2, 3, 3),
    "batch norm": normalised,
}


def of_layer(device, name, of="cross-entropy", dtype=torch.float64, **options):
    """The estimate with signs that are given, and its gradients in all parameters."""
    torch.manual_seed(3)
    model, size, layer = LAYERS[name]()
    model, x = model.to(device, dtype), torch.randn(N, *size).to(device, dtype)
    signs = torch.randn(N, D, generator=torch.Generator().manual_seed(4)).sign()
    loss, targets = loss_and_targets(of, device)
    with pf.FlatnessPenalty(model, layer, loss, **options) as penalty:
        penalty._signs = lambda like: signs.to(like)
        value = penalty(model(x), targets)
    value.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert {each.device.type for each in (value, *gradients)} == {device.type}
    return [each.detach().cpu().double() for each in (value, *gradients)]


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_penalty_of_a_layer(cuda_device, name, normalize):
    found = of_layer(cuda_device, name, normalize=normalize)
    torch.testing.assert_close(found, of_layer(torch.device("cpu"), name, normalize=normalize), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("of", ["class weights", "probabilities", "squared error", "binary"])
def test_a_penalty_of_a_layer_by_other_losses(cuda_device, of):
    found = of_layer(cuda_device, "convolution", of)
    torch.testing.assert_close(found, of_layer(torch.device("cpu"), "convolution", of), rtol=1e-8, atol=1e-10)


def test_signs_are_of_the_outputs_device(cuda_device):
    """A seed fixes them, a generator of the user's leaves torch's alone."""
    net = nn.Sequential(nn.Linear(M, 6), nn.ReLU(), nn.Linear(6, D)).to(cuda_device)
    x, y = torch.randn(N, M, device=cuda_device), TARGETS.to(cuda_device).clamp_min(0)
    penalty = pf.FlatnessPenalty(net, "0", nn.CrossEntropyLoss(), probes=2)

    def drawn(seed):
        torch.manual_seed(seed)
        return penalty(net(x), y).item()

    assert drawn(1) == drawn(1) != drawn(2)
    if cuda_device.type == "cuda":
        before = torch.get_rng_state()
        penalty(net(x), y)
        assert torch.equal(torch.get_rng_state(), before)
    own = [torch.Generator(cuda_device).manual_seed(5) for _ in range(2)]
    states = random_states()
    found = [pf.FlatnessPenalty(net, "0", nn.CrossEntropyLoss(), generator=each)(net(x), y).item() for each in own]
    assert found[0] == found[1]
    assert all(map(torch.equal, random_states(), states))


def checkpointed(net, x):
    """A network whose middle is computed again in the backward pass."""
    h = torch.relu(net.first(x))
    return net.last(checkpoint(lambda h: torch.relu(net.middle(h)), h, use_reentrant=False))


@pytest.mark.parametrize("layer", ["first", "middle", "last"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_training_steps(cuda_device, layer, dtype):
    """With autocast and a scaler of gradients, checkpointing, clipping: finite, and the curvature falls."""
    torch.manual_seed(0)
    net = Net(checkpointed, first=nn.Linear(M, 8), middle=nn.Linear(8, 8), last=nn.Linear(8, D)).to(cuda_device)
    x, y = torch.randn(64, M, device=cuda_device), torch.randint(D, (64,), device=cuda_device)
    loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(cuda_device.type, enabled=dtype is torch.float16, init_scale=2.0**10)
    before = pf.relative_flatness(net.eval(), loss, (x, y), layer).value
    net.train()
    with pf.FlatnessPenalty(net, layer, loss) as penalty:
        for _ in range(20):
            optimizer.zero_grad()
            with torch.autocast(cuda_device.type, dtype, enabled=dtype is not None):
                outputs = net(x)
                total = loss(outputs, y) + 0.5 * penalty(outputs, y)
            scaler.scale(total).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    assert pf.relative_flatness(net.eval(), loss, (x, y), layer).value < before


def waits(call):
    """How many times the host waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing CUDA operation" in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", ["head", "layer"])
def test_the_host_waits_as_often_for_many_samples_as_for_few(cuda_device, kind):
    if cuda_device.type == "cpu":
        pytest.skip("nothing to wait for")
    counted = []
    for samples in (64, 4096):
        net = nn.Sequential(nn.Linear(M, 6), nn.ReLU(), nn.Linear(6, D)).to(cuda_device)
        x, y = torch.randn(samples, M, device=cuda_device), torch.randint(D, (samples,), device=cuda_device)
        if kind == "head":

            def step(net=net, x=x, y=y):
                pf.flatness_penalty(net[:2](x), net[2].weight, net[2].bias, y).backward()
        else:
            penalty = pf.FlatnessPenalty(net, "0", nn.CrossEntropyLoss())

            def step(net=net, x=x, y=y, penalty=penalty):
                penalty(net(x), y).backward()

        step()
        counted.append(waits(step))
    print(f"{kind}: the host waits {counted} times")
    assert counted[0] == counted[1] <= 6
