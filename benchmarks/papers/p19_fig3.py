"""P19, Figure 3: κ_τ of each hidden layer, ‖w‖² Tr(H), against the gap."""

from . import p19_mnist
from .experiment import Experiment, Found, Points


def judge(points: Points) -> Found:
    """Hold them against the gap."""
    shown = [f"scaled_trace {layer}" for layer in p19_mnist.HIDDEN]
    return p19_mnist.judge(points, shown, "≥ 0.7", least=0.7)


EXPERIMENT = Experiment(
    name="p19-fig3",
    figure="P19, Figure 3",
    title="κ_τ of each hidden layer, ‖w‖² Tr(H), against the gap",
    claim="Each of the four hidden layers' κ_τ correlates strongly with the generalisation error (ρ ≥ 0.7), and "
    "it is hard to say which layer matters most.",
    measure=p19_mnist.measure,
    judge=judge,
    seconds=34,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
