"""Define a measure as a row of the table of measures."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ..options import Options
from ..passes.task import Task
from ..report import Estimate
from ..sweep.jacobians import Samples

Estimates = dict[str, Estimate]  # of one measure, by layer; "" is the network


WHOLE = "of the whole model"
LARGEST = "the largest of the layers"
TOGETHER = "of the layers together"
OF_JACOBIANS = "one forward pass and one backward pass per output of the model, shared by all measures of Jacobians"


@dataclass(frozen=True)
class Measure:
    """Represent a measure of the loss around a trained network: of a layer, or of all its parameters.

    It is a sum over a quantity of the weight gradients, taken by the sweep; or computed by itself; or of the Jacobians,
    whose sweep such measures share; or derived from another measure. ``quantity`` is a name of
    :data:`pyflatness.contractions.quantities.QUANTITIES`, or :data:`pyflatness.sweep.activations.ACTIVATIONS`;
    ``of_summands`` is for a quantity whose summands are not to be summed: (layer, weight (G, d, m), summands) -> the
    layer's value, and a note if that is not the definition's up to rounding. ``of_network`` gives the network's value
    where that is not the sum over layers, or where there is no other. ``invariant`` names the reparameterisations that
    change the network's weights but neither its function nor the measure: ``"none"``, ``"layer-wise"``,
    ``"layer-wise, neuron-wise"``.
    """

    name: str  # in reports, tables and on the command line
    formula: str  # in one line
    source: str  # where it is defined
    quantity: str | None = None
    normalize: str | None = None  # the option of relative_flatness that gives it
    of_summands: Callable[[str, Tensor, Tensor], tuple[float, str]] | None = None
    of_network: Callable[[Task], Estimate] | None = None
    compute: Callable[[Task], Estimates] | None = None  # its values, for a measure that no sweep is shared for
    of_jacobians: Callable[[Samples], Estimates] | None = None  # its values from the result of sweep.jacobians.measured
    needs: tuple[str, ...] = ()  # quantities of the Jacobians that it needs and not all measures do
    base: str | None = None  # the measure from whose values it follows without reading the data again
    derive: Callable[[nn.Module, Options, Estimates], Estimates] | None = None
    of_layers: bool = True  # the network's value is of its measured layers; otherwise of all parameters or the input
    network_of: str = "the sum over layers"
    granularity: str = "layer, network"  # what it is a number of: "layer", "network", "layer, network"
    invariant: str = "none"
    cost: str = ""  # by default that of the sweep or of the other measure, which are shared
    reads: int = 1  # how often the data are read

    def __post_init__(self) -> None:
        of_network = self.of_network
        if of_network is not None and self.quantity is None:
            object.__setattr__(self, "compute", lambda task: {"": of_network(task)})
            object.__setattr__(self, "granularity", "network")
            object.__setattr__(self, "of_layers", False)
        ways = self.quantity, self.compute, self.of_jacobians, self.derive
        assert sum(how is not None for how in ways) == 1, self.name
        assert (self.base is None) == (self.derive is None), self.name
        if not self.cost:
            of_sweep = "one sweep, shared" if self.of_jacobians is None else OF_JACOBIANS
            object.__setattr__(self, "cost", of_sweep if self.base is None else f"that of {self.base}, shared")
        if not self.of_layers:
            object.__setattr__(self, "network_of", WHOLE)

    @property
    def of_network_alone(self) -> bool:
        """Return whether there is one value for the whole network and none for a layer."""
        return self.granularity == "network"


__all__ = ["Estimates", "Measure", "Task"]
