"""P19, Figure 5: ρ of each hidden layer, its largest neuron's flatness, against the gap."""

from . import p19_mnist
from .experiment import Experiment, Found, Points


def judge(points: Points) -> Found:
    """Hold them against the gap."""
    shown = [f"neuron_flatness_max {layer}" for layer in p19_mnist.HIDDEN]
    return p19_mnist.judge(points, shown, "significant")


EXPERIMENT = Experiment(
    name="p19-fig5",
    figure="P19, Figure 5",
    title="ρ of each hidden layer, its largest neuron's flatness, against the gap",
    claim="The correlation is again significant, but differs considerably between layers.",
    measure=p19_mnist.measure,
    judge=judge,
    seconds=34,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
