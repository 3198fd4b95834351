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
    """A counted token in each of 256 stories: exact by 511 backward passes, against 8 probes under each of 16 seeds.

    All layers have the same probes, so that under one seed their errors are as of few layers; seeds are independent.
    """
    pytest.importorskip("transformers", reason="transformers is not installed")
    depth = benchmarks("depth")
    model, data = depth.model(), depth.with_single_targets(256, 64)
    exact = pf.measure(model, data=data, **GGN)
    seeds = [pf.measure(model, data=data, probes=8, seed=seed, **GGN) for seed in range(16)]
    assert len(exact.layers) == 37  # of 36 weights: the table of tokens is the head's too
    for name in exact.layers[:-1]:
        known, found = exact[name, "relative_flatness"], [one[name, "relative_flatness"] for one in seeds]
        assert (known.method, {estimate.method for estimate in found}) == ("ggn", {"ggn-sampled"})
        off = torch.tensor([estimate.value - known.value for estimate in found])
        stderr = torch.tensor([estimate.stderr for estimate in found])
        assert (off / stderr).abs().max() < 5
        assert 16 * abs(off.mean()) < 4.5 * stderr.square().sum().sqrt()
        assert 0.2 < (off / stderr).square().mean() < 2.9  # of χ² with 16 degrees of freedom: 10⁻⁴ on either side
    head = exact["lm_head", "relative_flatness"]
    assert {estimate["lm_head", "relative_flatness"].method for estimate in (exact, *seeds)} == {"head"}
    value = 0.0
    for batch in data:
        features = model.model(batch["input_ids"])[0].detach().double()
        phi = features[:, :-1][batch["labels"][:, 1:] != -100]
        weight = model.lm_head.weight.detach().double()
        p = torch.softmax(phi @ weight.t(), dim=1)
        spread = p @ weight.square().sum(dim=1) - (p @ weight).square().sum(dim=1)  # var_p(w), Definition 3
        value += float(phi.square().sum(dim=1) @ spread)
    assert head.value == pytest.approx(value / 256, rel=1e-4)
