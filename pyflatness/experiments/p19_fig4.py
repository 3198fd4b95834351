"""P19, Figure 4: ρ_σ of each hidden layer, the sum of its neurons' flatness, against the gap."""

from . import p19_mnist
from .experiment import Bench, Experiment, Found


def run(bench: Bench) -> Found:
    """Train, measure, and correlate."""
    shown = [f"neuron_flatness {layer}" for layer in p19_mnist.HIDDEN]
    return p19_mnist.figure(bench, shown, dict.fromkeys(shown, "significant"))


EXPERIMENT = Experiment(
    name="p19-fig4",
    figure="P19, Figure 4",
    title="ρ_σ of each hidden layer, the sum of its neurons' flatness, against the gap",
    claim="The correlation is again significant, but differs considerably between layers.",
    run=run,
    small=p19_mnist.SMALL,
    paper=p19_mnist.PAPER,
    data=p19_mnist.DATA,
)
