"""Layers measured with the CUDA kernels, on a GPU and emulated on the CPU, by every route and out of whole models."""

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions import LayerContraction, backends
from pyflatness.contractions.backends import cuda, reference
from support.combinations import every
from support.cuda_layers import CASES, KINDS, in_one_order, layer
from support.layer_cases import ONE

FORMS = {
    "convolution": ((2, 1, 20, 70, (1, 6, 6), (1, 3, 3), ONE, ONE), "direct"),
    "convolution by its Gram matrix": ((2, 1, 20, 70, (1, 6, 6), (1, 3, 3), ONE, ONE), "gram"),
    "groups": ((2, 2, 4, 6, (1, 6, 6), (1, 3, 3), ONE, ONE), "direct"),
    "groups by their Gram matrices": ((2, 2, 4, 6, (1, 6, 6), (1, 3, 3), ONE, ONE), "gram"),
    "sequence": ((2, 1, 80, 72, (9, 1, 1), ONE, ONE, ONE), "gram"),
    "sequence by M": ((2, 1, 80, 72, (9, 1, 1), ONE, ONE, ONE), "direct"),
    "one position": ((4, 1, 30, 20, ONE, ONE, ONE, ONE), "gram"),
    "one position by M": ((4, 1, 30, 20, ONE, ONE, ONE, ONE), "direct"),
}
QUANTITIES = {
    "gram_weighted": ("gram_weighted",),
    "both": ("squares", "gram_weighted"),
    "all": ("squares", "gram_weighted", "weighted", "by_column", "by_row", "diagonal"),
}


@every(
    cuda_device=["cuda", "emulated"],
    kind=["float32", "float64", "bfloat16", "float16"],
    quantities=QUANTITIES,
    form=FORMS,
)
def test_routes(cuda_device, kind, quantities, form):
    case, route = form
    inputs, signal, geometry, _, weight = layer(case, kind, cuda_device)
    if geometry.kernel_elements == 1:  # a linear layer's rows, as they lie in memory
        inputs, signal = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (inputs, signal))
    weight = weight.to(KINDS[kind])
    sign = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64, device=cuda_device)[: len(inputs)]
    ours = LayerContraction(weight, geometry, cuda, quantities, memory=1 << 20, route=route)
    truth = LayerContraction(weight.double(), geometry, reference, quantities, memory=1 << 20, route="direct")
    found = ours.at([inputs], 9).of([signal], sign)
    expected = truth.at([inputs.double()], 9).of([signal.double()], sign)
    limit = {"float32": 1e-5, "float64": 1e-12}.get(kind, 2e-3)
    assert float(((found.values - expected.values) / expected.values).abs().max()) < limit
    assert found.summands.keys() == expected.summands.keys()
    for name, part in expected.summands.items():
        assert float((found.summands[name] - part).abs().max() / part.abs().max()) < limit
    pairs = [
        g.traces([x], [d], sign) for g, x, d in ((ours, inputs, signal), (truth, inputs.double(), signal.double()))
    ]
    assert float((pairs[0] - pairs[1]).abs().max() / pairs[1].abs().max()) < limit


@in_one_order
@pytest.mark.parametrize("columns", [1024, 1100])
@pytest.mark.parametrize("places", [1, 3])
def test_wide_layers_in_bfloat16(cuda_device, columns, places):
    """R δ is a product of bfloat16: one row of the signal alone, where R's own rounding would show most."""
    _, _, geometry, _, weight = layer((1, 1, columns, 1040, ONE, ONE, ONE, ONE), "bfloat16", cuda_device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, places, columns, generator=generator).bfloat16().to(cuda_device)
    signal = torch.randn(4, places, 1040, generator=generator).bfloat16().to(cuda_device)
    for alone in (False, True):
        if alone:
            signal[:, :, 1:] = 0
        phi, delta = (t.transpose(1, 2)[..., None, None] for t in (inputs, signal))
        found, expected = (
            LayerContraction(w, geometry, backend, ("gram_weighted",), memory=1 << 24, route=route)
            .at([x], 1)
            .of([d])
            .values
            for w, x, d, backend, route in (
                (weight.bfloat16(), phi, delta, cuda, "gram"),
                (weight.bfloat16().double(), phi.double(), delta.double(), reference, "direct"),
            )
        )
        assert float(((found - expected) / expected).abs().max()) < 1e-3


@in_one_order
def test_inputs_and_signals_of_two_dtypes(cuda_device):
    """As autocast leaves them."""
    inputs, signal, geometry, _, weight = layer(CASES["groups"], "float32", cuda_device)
    truth = LayerContraction(weight.double(), geometry, reference, ("gram_weighted",), memory=1 << 20, route="direct")
    for route in ("direct", "gram"):
        ours = LayerContraction(weight, geometry, cuda, ("gram_weighted",), memory=1 << 20, route=route)
        for x, delta in ((inputs.bfloat16(), signal), (inputs, signal.bfloat16()), (inputs.half(), signal.bfloat16())):
            expected = truth.at([x.double()], 9).of([delta.double()]).values
            found = ours.at([x], 9).of([delta]).values
            assert float(((found - expected) / expected).abs().max()) < 2e-3


def take_for_cpu(monkeypatch, device):
    """Emulated, the kernels are those of the CPU."""
    if device.type == "cpu":
        monkeypatch.setattr(backends, "compiled", cuda)


@pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)
def test_a_network(cuda_device, monkeypatch):
    take_for_cpu(monkeypatch, cuda_device)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(5, 6, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(54, 7), torch.nn.ReLU(), torch.nn.Linear(7, 4),
    ).eval().to(cuda_device)  # fmt: skip
    data = torch.randn(5, 3, 8, 8), torch.arange(5) % 4
    options = {"layers": ["0", "2", "5"], "progress": False}
    names = ["relative_flatness", "trace", "adaptive_sharpness", "neuron_flatness"]
    ours, truth = (
        pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=names, backend=backend, **options)
        for backend in ("compiled", "reference")
    )
    for name in ("0", "2", "5"):
        for measure in names:
            assert ours[name, measure].value == pytest.approx(truth[name, measure].value, rel=1e-4)
    for conv in ("filter", "affine"):
        traces = [
            pf.block_traces(model, torch.nn.CrossEntropyLoss(), data, "2", conv=conv, backend=name, progress=False)
            for name in ("compiled", "reference")
        ]
        torch.testing.assert_close(*traces, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)
def test_jacobians(cuda_device, monkeypatch):
    """Their Gram matrices' eigenvalues."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).eval().to(cuda_device)
    data = torch.randn(5, 6), torch.arange(5) % 4
    measures = ["mls", "log_volume", "local_dimension"]
    truth, ours = (
        pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=measures, backend=backend, progress=False)
        for backend in ("reference", "compiled")
    )
    take_for_cpu(monkeypatch, cuda_device)
    kernels = pf.measure(
        model, torch.nn.CrossEntropyLoss(), data, measures=measures, backend="compiled", progress=False
    )
    for name in measures:
        assert kernels[name].value == pytest.approx(truth[name].value, rel=1e-4)
        assert ours[name].value == pytest.approx(truth[name].value, rel=1e-4)
