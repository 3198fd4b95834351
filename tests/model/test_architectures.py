"""Every weight of twenty architectures on small configurations: measured as the dense Hessian says, or named.

Also the table of them in docs/models.md, against what is measured; and full configurations, on the meta device.
"""

import functools

import pytest
import torch

import pyflatness as pf

pytest.importorskip("transformers", reason="transformers is not installed")

from support import known_stderr, models_page, weight_truth
from support.architectures import MEASURES, Architecture, exact, lora
from support.combinations import in_turn
from support.full_architectures import BY_NAME, coverage, of_full


def check_layers(architecture: Architecture, model: torch.nn.Module, report: pf.results.Report, rel: float) -> None:
    """Hold each layer's value against the truth, the network's against their sum; all that may be exact are."""
    for layer in report.layers:
        expected = weight_truth.relative_flatness_and_trace(model, architecture.risk, layer)
        found = [report[layer, measure] for measure in MEASURES]
        assert [estimate.value for estimate in found] == pytest.approx(expected, rel=rel, abs=rel * 1e-3), layer
        for estimate in found:  # of a layer that is the head, relative flatness needs no derivative
            assert estimate.exact != any("out of autograd's graph" in note for note in estimate.notes), layer
    for measure in MEASURES:
        assert report[measure].value == pytest.approx(sum(report[layer, measure].value for layer in report.layers))
        every = all(report[layer, measure].exact for layer in report.layers)
        assert report[measure].exact == (every and not report.uncovered)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_weight_is_measured_as_the_hessian_says_or_named(name: str) -> None:
    model, report = exact(BY_NAME[name])
    rel = 1e-5 if name == "Mixtral" else 1e-9  # it routes in float32
    check_layers(BY_NAME[name], weight_truth.with_effective_weights(model), report, rel)
    assert all(report[layer, measure].exact for layer in report.layers for measure in MEASURES)
    weights = weight_truth.weights(model)
    covered = {weight_truth.parameter_of(model, layer)[0] for layer in report.layers}
    assert covered.isdisjoint(report.uncovered)
    assert weights.keys() == (covered | report.uncovered.keys()) & weights.keys()
    total = sum(weight.numel() for weight in weights.values())
    assert report.uncovered == pytest.approx({name: weights[name].numel() / total for name in report.uncovered})


@pytest.mark.parametrize("name", BY_NAME)
def test_the_row_of_the_table_is_what_is_measured_and_every_weight_in_it_or_named(name: str) -> None:
    found = of_full(name)
    measured = sum(layer.entries for layer in found.layers.values())
    assert measured / found.entries + sum(found.uncovered.values()) == pytest.approx(1)
    rows = models_page.on_page().splitlines()[2:]
    expected = dict(zip(BY_NAME, rows, strict=True))[name]
    assert models_page.row(BY_NAME[name]) == expected, "python tests/support/models_page.py --write"


@in_turn(3, "name", BY_NAME)
def test_sampled_values_are_within_their_errors(name: str) -> None:
    model, truth = exact(BY_NAME[name])
    report = BY_NAME[name].measured(model, probes=96)
    assert report.layers == truth.layers
    for layer in report.layers:
        for measure in MEASURES:
            estimate, expected = report[layer, measure], truth[layer, measure].value
            assert abs(estimate.value - expected) <= 5 * known_stderr(estimate) + 1e-5 * abs(expected), (layer, measure)


@pytest.mark.parametrize("name", BY_NAME)
def test_exact_values_take_as_many_passes_as_the_table_counts(name: str) -> None:
    """Read them off the error of a call that may take one less."""
    architecture, (model, report) = BY_NAME[name], exact(BY_NAME[name])
    counted = coverage(model, architecture.batch(), architecture.forward)
    for layer in {report.layers[0], report.layers[len(report.layers) // 2]}:
        method = report[layer, "relative_flatness"].method
        if method == "head":  # one forward pass
            continue
        by_hessian = method == "hessian"
        passes = counted.layers[layer].products if by_hessian else counted.passes
        said = rf"\b{passes} {'Hessian products' if by_hessian else 'backward passes'} "
        with pytest.raises(pf.errors.InputError, match=said):
            architecture.measured(model, ["relative_flatness"], layers=layer, max_passes=passes - 1)
    assert counted.uncovered == report.uncovered


LORA = {
    "merged": {},
    "of another rank and scale": {"r": 3, "use_rslora": True},
    "on the embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "a module saved whole": {"modules_to_save": ["lm_head"]},
    "DoRA": {"use_dora": True},
}


@pytest.mark.parametrize("how", LORA)
def test_adapters_of_peft(how: str) -> None:
    """Merged adapters are a part of the layer below, and do not run; DoRA takes the norm of a row for a constant."""
    llama = BY_NAME["Llama with LoRA"]
    architecture = Architecture(how, functools.partial(lora, **LORA[how]), llama.batch, llama.forward)
    model = architecture.model()
    if how == "merged":
        before = architecture.risk(model).item()
        model.merge_adapter()
        assert architecture.risk(model).item() == pytest.approx(before)
    report = architecture.measured(model)
    check_layers(architecture, model, report, 1e-9)
    adapters = {name for name in weight_truth.weights(model) if "lora_" in name}
    if how == "merged":
        layer, plain = "base_model.model.model.layers.0.self_attn.q_proj.base_layer", exact(llama)[1]
        assert report[layer, "trace"].value == pytest.approx(plain[layer, "trace"].value)
        assert report[layer, "relative_flatness"].value != pytest.approx(plain[layer, "relative_flatness"].value)
        assert {name for name in report.uncovered if "lora_" in name} == adapters
    assert any(not report[layer, "trace"].exact for layer in report.layers) == (how == "DoRA")
