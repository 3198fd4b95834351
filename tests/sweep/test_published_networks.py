"""Published weights on real data, from ``../shared``: ResNets on CIFAR-10 and a language model on stories."""

import sys

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import ROOT

SHARED = ROOT.parent / "shared"
LOSS = nn.CrossEntropyLoss()
GGN = {"curvature": "ggn", "measures": "relative_flatness"}

pytestmark = pytest.mark.skipif(not (SHARED / "models").is_dir(), reason="../shared has no models")


@pytest.fixture
def benchmarks(monkeypatch):
    """Import modules of the benchmarks, which read these files, by their names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)

    def load(name):
        monkeypatch.delitem(sys.modules, name, raising=False)  # another file of this name
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if not name.startswith(("torch", "numpy", "PIL", "transformers", "matplotlib", "safetensors")):
            del sys.modules[name]


def gradients(model: nn.Module, x: torch.Tensor, names: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return by sample the gradients M (C, d, m) of ⟨s_c, f⟩, s_c = √p_c (e_c - p), in the layers' weights."""
    weights = [model.get_submodule(name).weight for name in names]
    found = []
    for image in x:
        logits = model(image.unsqueeze(0)).squeeze(0)
        p = torch.softmax(logits.detach(), dim=0)
        columns = p.sqrt().unsqueeze(1) * (torch.eye(len(p), dtype=p.dtype) - p)
        each = [torch.autograd.grad(logits, weights, column, retain_graph=True) for column in columns]
        found.append({name: torch.stack([part[k].flatten(1) for part in each]) for k, name in enumerate(names)})
    return found


@pytest.mark.parametrize(("depth", "images"), [(20, 2), pytest.param(56, 4, marks=pytest.mark.soak)])
def test_all_layers_of_a_resnet(depth, images, benchmarks):
    """By weight gradients of every image and factor, the network in eval mode: piecewise linear, so exact."""
    networks = benchmarks("networks")
    model = networks.published(depth).double()
    x, y = networks.cifar10(images)
    x = x.double()
    report = pf.measure(
        model, LOSS, (x, y), measures=["relative_flatness", "trace", "adaptive_sharpness"], per_sample=True
    )
    names = networks.measurable(model)
    assert list(report.layers) == names
    assert len(names) == depth
    truth = gradients(model, x, names)
    for name in names:
        w = model.get_submodule(name).weight.detach().flatten(1)
        kappa = torch.stack([(w.t() @ one[name]).square().sum() for one in truth])  # ⟨w wᵀ, M Mᵀ⟩
        trace = torch.stack([one[name].square().sum() for one in truth])
        sharpness = torch.stack([(w * one[name]).square().sum() for one in truth])
        for measure, expected in (
            ("relative_flatness", kappa),
            ("trace", trace),
            ("adaptive_sharpness", sharpness),
        ):
            found = report[name, measure]
            assert found.exact
            torch.testing.assert_close(found.per_sample, expected, rtol=1e-8, atol=0)


@pytest.mark.soak
def test_all_layers_of_a_language_model(benchmarks):
    """One counted token a story: exact by 511 backward passes, against probes and against the head's formula."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    depth = benchmarks("depth")
    model, tokens = depth.model(), depth.stories(3)[:, :10]
    labels = torch.full_like(tokens, -100)
    labels[:, -1] = tokens[:, -1]
    data = [{"input_ids": tokens, "labels": labels}]
    exact = pf.measure(model, data=data, **GGN)
    sampled = pf.measure(model, data=data, probes=100, **GGN)
    assert len(exact.layers) == 36
    for name in exact.layers[:-1]:
        known, found = exact[name, "relative_flatness"], sampled[name, "relative_flatness"]
        assert (known.method, found.method) == ("ggn", "ggn-sampled")
        assert abs(found.value - known.value) < 5 * found.stderr
    head = exact["lm_head", "relative_flatness"]
    assert (head.method, sampled["lm_head", "relative_flatness"].method) == ("head", "head")
    features = model.model(tokens)[0][:, -2].detach().double()
    weight = model.lm_head.weight.detach().double()
    p = torch.softmax(features @ weight.t(), dim=1)
    spread = p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1)  # var_p(w), Definition 3
    assert head.value == pytest.approx(float((features.square().sum(dim=1) * spread).mean()), rel=1e-4)
