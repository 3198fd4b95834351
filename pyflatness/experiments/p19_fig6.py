"""P19, Figure 6: flatness of whole networks, made of their layers' and neurons', against the gap."""

from . import p19_mnist
from .experiment import Bench, Experiment, Found

SHOWN = ("largest_scaled_trace", "scaled_trace", "neuron_flatness_max", "neuron_flatness")


def run(bench: Bench) -> Found:
    """Train, measure, and correlate."""
    shown = [f"{measure} network" for measure in SHOWN]
    return p19_mnist.figure(bench, shown, dict.fromkeys(shown, "larger than the layers'"))


EXPERIMENT = Experiment(
    name="p19-fig6",
    figure="P19, Figure 6",
    title="κ_τ^max, κ_τ^Σ, ρ^max and ρ^Σ of whole networks against the gap",
    claim="Each of the network-wise measures has a larger correlation with the generalisation error than those of "
    "layers and neurons.",
    run=run,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
