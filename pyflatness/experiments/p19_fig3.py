"""P19, Figure 3: κ_τ of each hidden layer, ‖w‖² Tr(H), against the gap."""

from . import p19_mnist
from .experiment import Bench, Experiment, Found


def run(bench: Bench) -> Found:
    """Train, measure, and correlate."""
    shown = [f"scaled_trace {layer}" for layer in p19_mnist.HIDDEN]
    return p19_mnist.figure(bench, shown, dict.fromkeys(shown, "≥ 0.7"))


EXPERIMENT = Experiment(
    name="p19-fig3",
    figure="P19, Figure 3",
    title="κ_τ of each hidden layer, ‖w‖² Tr(H), against the gap",
    claim="Each of the four hidden layers' κ_τ correlates strongly with the generalisation error (ρ ≥ 0.7), and "
    "it is hard to say which layer matters most.",
    run=run,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
