"""The loss Hessian's trace and diagonal in layers' outputs and inputs, against nested autograd in these."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflatness as pf
from pyflatness.passes.recorder import Recorder
from support import cases, truth
from support.brute_force import network
from support.combinations import every
from support.grid import Case, batches, classes, made, method, normal
from support.networks import CASES, mlp, networks_in_turn

# --- truth: hooks add tensors to what a layer puts out, or takes in, in every call ------------------------------------


@contextlib.contextmanager
def moved(layer: nn.Module, of: str, parts: Sequence[Tensor]) -> Iterator[None]:
    """Let each call of a layer put out, or take in, one of the parts more; those of recomputation the same again."""
    calls = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return tensor + parts[(calls - 1) % len(parts)]

    if of == "outputs":
        handle = layer.register_forward_hook(lambda _, args, output: add(output))
    else:
        handle = layer.register_forward_pre_hook(lambda _, args: (add(args[0]), *args[1:]))
    with handle, sdpa_kernel(SDPBackend.MATH):
        yield


def shapes(model: nn.Module, layer: nn.Module, of: str, inputs: Tensor) -> list[torch.Size]:
    """Return the shape of every call's output or input."""
    found: list[torch.Size] = []
    with layer.register_forward_hook(
        lambda _, args, output: found.append(output.shape if of == "outputs" else args[0].shape)
    ):
        model(inputs)
    return found


def diagonal(model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], name: str, of: str, curvature: str):
    """Return the diagonal of ∂²E/∂z² of each call's outputs, or inputs, z: tensors of their shapes."""
    (inputs, targets), layer = data, model.get_submodule(name)
    made = shapes(model, layer, of, inputs)
    sizes = [shape.numel() for shape in made]

    def outputs(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), made, strict=True)]
        with moved(layer, of, parts):
            return model(inputs)

    none = torch.zeros(sum(sizes), dtype=torch.float64)
    if curvature == "ggn":
        flat, f = truth.jacobian(outputs, none), outputs(none).detach()
        inner = truth.hessian(lambda f: loss(f, targets), f).view(len(flat), -1)
        found = (flat * (inner @ flat)).sum(dim=0)
    else:
        found = truth.hessian(lambda flat: loss(outputs(flat), targets), none).diagonal()
    return [part.view(shape) for part, shape in zip(found.split(sizes), made, strict=True)]


def by_channel(layer: nn.Module, parts: Sequence[Tensor]) -> Tensor:
    """Return a diagonal summed over samples, positions and calls, (channels,)."""
    dim = 1 if isinstance(layer, (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase)) else -1
    return torch.stack([part.movedim(dim, -1).flatten(0, -2).sum(dim=0) for part in parts]).sum(dim=0)


@functools.cache
def of_case(case: Case, name: str, of: str, curvature: str = "hessian") -> Tensor:
    """Return the diagonal of a case's layer by channel."""
    model = case.build()
    parts = diagonal(model, case.loss, (case.inputs, case.targets), name, of, curvature)
    return by_channel(model.get_submodule(name), parts)


# --- against it ------------------------------------------------------------------------------------------------------

OF = {"output_trace": "outputs", "input_trace": "inputs"}
X, Y = normal(1, 7, 5), classes(2, 7)
IMAGES, LABELS = normal(3, 3, 4, 5, 5), classes(4, 3)


def with_inputs(case):
    model = case.build()
    return [name for name in case.layers if not isinstance(model.get_submodule(name), (nn.Embedding, nn.Bilinear))]


def check(case, report, curvature="hessian", names=None):
    for name in names or case.layers:
        for measure, of in OF.items():
            expected, found = of_case(case, name, of, curvature), report[name, measure]
            size = float(expected.abs().sum())
            assert found.value == pytest.approx(float(expected.sum()), rel=1e-9, abs=1e-11 * size + 1e-15)
            torch.testing.assert_close(found.per_neuron, expected, rtol=1e-9, atol=1e-11 * size + 1e-15)
            assert found.method == ("ggn" if curvature == "ggn" else method(case, name, measure))
            assert found.exact == (curvature != "ggn" or name in case.linear)


def check_every_layer(name, curvature):
    case = CASES[name]
    names = with_inputs(case)
    options = {"layers": names, "curvature": curvature, "per_sample": True}
    report = pf.measure(case.build(), case.loss, batches(case, 2), measures=[*OF], **options)
    check(case, report, "ggn" if curvature == "ggn" else "hessian", names)
    for layer in names:
        found = report[layer, "input_trace"]
        assert float(found.per_sample.mean()) == pytest.approx(found.value, rel=1e-9, abs=1e-15)


@networks_in_turn(3)
def test_every_layer(name):
    check_every_layer(name, "auto")


@networks_in_turn(8)
def test_gauss_newton_values_of_every_layer(name):
    check_every_layer(name, "ggn")


def tail(channels, pixels):
    return nn.ReLU(), nn.Flatten(), nn.Linear(channels * pixels, cases.C)


CONVOLUTIONS = {
    "groups, stride, padding": (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), 9),
    "circular": (nn.Conv2d(4, 3, 3, padding=1, padding_mode="circular"), 25),
    "reflect, dilation": (nn.Conv2d(4, 3, 3, padding=2, dilation=2, padding_mode="reflect"), 25),
    "same, even": (nn.Conv2d(4, 2, 2, padding="same"), 25),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4), 9),
    "leaves pixels out": (nn.Conv2d(4, 3, 2, stride=3), 4),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), 100),
    "pointwise": (nn.Conv2d(4, 5, 1), 25),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@every(together=1, conv=["filter", "affine"], name=[*CONVOLUTIONS])
def test_convolutions(name, conv):
    layer, pixels = CONVOLUTIONS[name]
    case = made(name, lambda: nn.Sequential(layer, *tail(layer.out_channels, pixels)), IMAGES, LABELS, "0 3")
    report = pf.measure(case.build(), case.loss, batches(case, 2), measures=[*OF], conv=conv)
    check(case, report)


def test_half_of_a_residual_path():
    """What a layer takes in is moved for that layer, and not for the path around it."""

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner, self.head = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, cases.C)

        def forward(self, x):
            h = torch.relu(self.first(x))
            return self.head(torch.relu(h + self.inner(h)))

    check(case := made("residual", Residual, X, Y, "first inner head"), measured(case))


def measured(case, size=2, **options):
    return pf.measure(case.build(), case.loss, batches(case, size), measures=[*OF], **options)


def test_one_sample_and_a_ragged_batch():
    case = made("few", lambda: mlp(5, 6, cases.C), X, Y, "0 2")
    check(case, measured(case, 3))
    one = made("one", lambda: mlp(5, 6, cases.C, activation=nn.Tanh), X[:1], Y[:1], "0 2", curved="0")
    check(one, measured(one))


def test_targets_that_are_ignored():
    """Of tokens, and of one sample all."""
    targets = torch.where(torch.arange(4) < 2, cases.TOKEN_TARGETS, -100)
    targets[1] = -100
    case = made("ignored", cases.Tokens, cases.TOKENS, targets, "mix head", curved="mix")
    report = measured(case, layers=["mix", "head"], per_sample=True)
    check(case, report)
    assert report["mix", "output_trace"].per_sample[1] == 0


def test_embeddings_have_outputs_and_no_inputs():
    case = made("tokens", cases.Tokens, cases.TOKENS, cases.TOKEN_TARGETS, "embed", curved="embed")
    found = pf.measure(case.build(), case.loss, batches(case), layers="embed", measures="output_trace")
    expected = of_case(case, "embed", "outputs")
    torch.testing.assert_close(found["embed", "output_trace"].per_neuron, expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(pf.errors.InputError, match="input_trace: layer 'embed' has no input with a derivative"):
        pf.measure(case.build(), case.loss, batches(case), measures="input_trace")


def test_parameters_that_attention_uses_in_functions():
    """Queries, keys and values are moved as the products that use the packed weight put them out."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.head = nn.Linear(4, cases.C)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(dim=1))

    torch.manual_seed(0)
    model, data = Block().double().eval(), (normal(5, 2, 3, 4), classes(6, 2))
    name = "attention.in_proj_weight[v]"
    report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=[*OF], layers=name)
    outer = model.attention.in_proj_weight[8:]

    def values(e):
        split = []
        for sample, moved in zip(data[0], e, strict=True):
            q, k, v = (sample @ part.t() for part in model.attention.in_proj_weight.chunk(3))
            heads = [t.view(3, 2, 2).transpose(0, 1) for t in (q, k, v + moved)]
            weights = (heads[0] @ heads[1].mT / 2**0.5).softmax(-1)
            split.append((weights @ heads[2]).transpose(0, 1).reshape(3, 4))
        h = model.attention.out_proj(torch.stack(split))
        return nn.functional.cross_entropy(model.head(h.mean(dim=1)), data[1])

    hessian = torch.autograd.functional.hessian(values, torch.zeros(2, 3, 4, dtype=torch.float64))
    matrix = hessian.reshape(24, 24).detach()
    assert report[name, "output_trace"].value == pytest.approx(float(matrix.trace()), rel=1e-9)
    spread = torch.block_diag(*[outer.detach()] * 6)
    assert report[name, "input_trace"].value == pytest.approx(float((spread.t() @ matrix @ spread).trace()), rel=1e-9)


def test_a_loss_that_is_not_convex():
    def loss(outputs, targets):
        return (torch.sin(outputs).square() - outputs.square() * targets.square()).sum(dim=1).mean()

    targets = normal(7, 7, cases.C)
    case = made("sine", lambda: mlp(5, 6, cases.C), X, targets, "0 2", loss=loss, convex=False)
    check(case, measured(case))
    assert any(float(of_case(case, "0", of).min()) < 0 for of in OF.values())


def test_relative_flatness_of_one_position_is_the_input_trace_weighted_by_the_input():
    case = made("one position", lambda: mlp(5, 6, cases.C, activation=nn.Tanh), X, Y, "0 2", curved="0")
    names = ["input_trace", "relative_flatness"]
    report = pf.measure(case.build(), case.loss, batches(case), measures=names, per_sample=True)
    traces = report["0", "input_trace"].per_sample
    found = report["0", "relative_flatness"].per_sample
    torch.testing.assert_close(found, X.square().sum(dim=1) * traces, rtol=1e-9, atol=1e-13)


def test_normalised_inputs_are_in_units_of_their_deviations():
    case = made("normalised", lambda: mlp(5, 6, cases.C), X, Y, "0")
    found = measured(case, layers="0", normalize="std")
    expected = of_case(case, "0", "inputs") * X.var(dim=0, correction=0)
    torch.testing.assert_close(found["0", "input_trace"].per_neuron, expected, rtol=1e-9, atol=1e-13)
    outputs = of_case(case, "0", "outputs")
    torch.testing.assert_close(found["0", "output_trace"].per_neuron, outputs, rtol=1e-9, atol=1e-13)


def test_other_measures_and_activations_share_their_backward_passes(monkeypatch):
    sent = []
    own = Recorder.gradients

    def gradients(self, *args, **kwargs):
        sent.append(kwargs)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, "gradients", gradients)
    model, data = network(5, 6, 6, cases.C), (X, Y)
    counts = {}
    for names in ((*OF,), (*OF, "trace", "neuron_flatness")):
        sent.clear()
        report = pf.measure(model, nn.CrossEntropyLoss(), data, measures=names)
        counts[names] = len(sent)
    assert [*counts.values()] == [cases.C - 1] * 2
    alone = pf.measure(model, nn.CrossEntropyLoss(), data, measures=["trace", "neuron_flatness"])
    for name in ("0", "2", "4"):
        for measure in ("trace", "neuron_flatness"):
            assert report[name, measure].value == pytest.approx(alone[name, measure].value, rel=1e-12)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_sampled_values(activation):
    """Their mean is right, their standard errors are, and the diagonal is that of the same probes."""
    case = made("sampled", lambda: mlp(5, 6, cases.C, activation=activation), X, Y, "0 2")
    expected = {(n, m): of_case(case, n, of) for n in case.layers for m, of in OF.items()}
    away, diagonals = ({key: [] for key in expected} for _ in range(2))
    for seed in range(24):
        report = measured(case, len(X), probes=16, seed=seed)
        for key, true in expected.items():
            found = report[key]
            assert found.method == ("hessian-sampled" if activation is nn.Tanh and key[0] == "0" else "ggn-sampled")
            assert not found.exact
            assert float(found.per_neuron.sum()) == pytest.approx(found.value, rel=1e-9)
            if math.isnan(found.stderr):  # of a head |S r|² is the same for all signs
                assert key[0] == "2"
                assert found.value == pytest.approx(float(true.sum()), rel=1e-9)
            else:
                away[key].append((found.value - float(true.sum())) / found.stderr)
            diagonals[key].append(found.per_neuron - true)
    for key in expected:  # Student's t of 15 degrees of freedom has the variance 15/13
        errors, parts = torch.tensor(away[key]), torch.stack(diagonals[key])
        if len(errors) > 0:
            assert abs(float(errors.mean())) < 4 * (15 / 13 / 24) ** 0.5
            assert 0.4 < float(errors.square().mean()) < 2.6
        assert bool((parts.mean(dim=0).abs() < 5 * parts.std(dim=0) / 24**0.5).all())


def test_no_class_but_one():
    model = network(5, 6, 1)
    report = pf.measure(model, nn.CrossEntropyLoss(), (X, torch.zeros(7, dtype=torch.int64)), measures=[*OF])
    for measure, channels in (("output_trace", 6), ("input_trace", 5)):
        assert report["0", measure].value == 0
        assert torch.equal(report["0", measure].per_neuron, torch.zeros(channels, dtype=torch.float64))


def test_a_sample_that_is_omitted():
    x = X.clone()
    x[2, 0] = torch.nan
    kept = torch.arange(7) != 2
    model, loss = network(5, 6, cases.C), nn.CrossEntropyLoss()
    found = pf.measure(model, loss, (x, Y), measures=[*OF], nan_policy="omit")
    for measure, of in OF.items():
        expected = by_channel(model[0], diagonal(model, loss, (X[kept], Y[kept]), "0", of, "hessian"))
        assert found["0", measure].omitted == 1
        torch.testing.assert_close(found["0", measure].per_neuron, expected, rtol=1e-9, atol=1e-13)


def test_what_does_not_apply_is_refused_by_name():
    model, loss = network(5, 6, cases.C), nn.CrossEntropyLoss()
    for name in OF:
        with pytest.raises(pf.errors.InputError, match=f"{name} has no value by probes='adaptive'"):
            pf.measure(model, loss, (X, Y), measures=name, probes="adaptive")
    smooth = network(5, 6, cases.C, activation=nn.Tanh)
    with pytest.raises(
        pf.errors.InputError, match=r"layer '0': exact values of its activations take 6 Hessian products"
    ):
        pf.measure(smooth, loss, (X, Y), layers="0", measures="output_trace", max_passes=5)
