"""The public calls on a model, by name: (model, loss, data, **options) -> their result."""

import torch
from torch import nn

import pyflatness as pf


def _measured(name):
    return lambda model, loss, data, **options: pf.measure(model, loss, data, measures=name, **options)


CALLS = {
    "relative_flatness": pf.relative_flatness,
    "relative_flatness, a layer": lambda model, loss, data, **options: pf.relative_flatness(
        model, loss, data, "body", **options
    ),
    "block_traces": pf.block_traces,
    "measure": pf.measure,
    "fisher_rao": _measured("fisher_rao"),
    "sharpness": _measured("sharpness"),
    "pac_bayes": pf.measures.pac_bayes,
    "pac_bayes_magnitude": _measured("pac_bayes_magnitude"),
    "normalized_mls_adversarial": lambda *args, **options: pf.measures.mls_adversarial(
        *args, normalized=True, **options
    ),
    "adaptive_sharpness_mc": lambda *args, **options: pf.measures.adaptive_sharpness_mc(*args, probes=2, **options),
    "mls_adversarial": pf.measures.mls_adversarial,
    "representation": pf.representation,
    "bounds": pf.theory.bounds,
    "feature_robustness": lambda *args, **options: pf.theory.feature_robustness(*args, probes=2, rho=[0.1], **options),
    "matrix_robustness": lambda *args, **options: pf.theory.matrix_robustness(
        *args, layer="*body", matrix=torch.eye(4), rho=[0.1], **options
    ),
    "largest_robustness": lambda *args, **options: pf.theory.largest_robustness(
        *args, layer="*body", rho=0.1, starts=1, steps=2, **options
    ),
    "generalization_gap": lambda model, loss, data, **options: pf.generalization_gap(
        model, loss, data, data, **options
    ),
    "generalization_bound": lambda *args, **options: pf.theory.generalization_bound(*args, probes=2, **options),
    "worst_case_sharpness": lambda *args, **options: pf.worst_case_sharpness(*args, steps=2, **options),
    "spectrum": lambda *args, **options: pf.spectrum(*args, k=1, **options),
    "cost_of_change": lambda model, loss, data, **options: pf.cost_of_change(
        model, loss, data, pf.changes.rounded(model, 4), **options
    ),
    "allocate": lambda *args, **options: pf.allocate(*args, ["int3", "int8"], bits=5, **options),
    "importance": pf.importance,
    "importance, sampled": lambda *args, **options: pf.importance(*args, kind="fisher", probes=2, **options),
    "landscape": lambda *args, **options: pf.landscape(*args, points=3, **options),
    "linear_interpolation": lambda model, loss, data, **options: pf.linear_interpolation(
        model, loss, data, {name: 2 * value for name, value in model.state_dict().items()}, points=3, **options
    ),
    "track": lambda *args, **options: pf.track(*args, **options).record().reports,
    "verify": pf.verify,
}

OF_TENSORS = {
    "head_flatness": lambda phi, weight, y, loss: pf.head_flatness(phi, weight, targets=y, loss=loss),
    "representativeness": lambda phi, weight, y, loss: pf.theory.representativeness(
        phi, weight, targets=y, loss=loss, probes=2
    ),
    "authors_representativeness": lambda phi, weight, y, loss: pf.theory.authors_representativeness(
        phi, weight, targets=y, loss=loss
    ),
}


def network():
    """A network with a layer ``body`` for these batches."""
    torch.manual_seed(0)
    net = nn.Sequential()
    net.add_module("body", nn.Linear(4, 6))
    net.add_module("act", nn.ReLU())
    net.add_module("head", nn.Linear(6, 3))
    return net.double().eval()


def batches(samples=12, inputs=4, classes=3, size=5):
    """Pairs of normal inputs in float64 and classes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    y = torch.randint(classes, (samples,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))
