"""P19, Figure 6: flatness of whole networks, made of their layers' and neurons', against the gap."""

from . import p19_mnist
from .experiment import Experiment, Found, Points

OF = {
    "largest_scaled_trace": "scaled_trace",
    "scaled_trace": "scaled_trace",
    "neuron_flatness_max": "neuron_flatness_max",
    "neuron_flatness": "neuron_flatness",
}
"""Measures of whole networks, and the measure of layers that each is made of."""


def judge(points: Points) -> Found:
    """Hold them against the gap, and against those of the layers."""
    than = {f"{measure} network": [f"{part} {layer}" for layer in p19_mnist.HIDDEN] for measure, part in OF.items()}
    return p19_mnist.judge(points, [*than], "larger than the layers'", than=than)


EXPERIMENT = Experiment(
    name="p19-fig6",
    figure="P19, Figure 6",
    title="κ_τ^max, κ_τ^Σ, ρ^max and ρ^Σ of whole networks against the gap",
    claim="Each of the network-wise measures has a larger correlation with the generalisation error than those of "
    "layers and neurons.",
    measure=p19_mnist.measure,
    judge=judge,
    seconds=34,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
