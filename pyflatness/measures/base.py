"""Define a measure as a row of the table of measures."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ..options import Options
from ..passes.task import Task
from ..report import Estimate
from ..sweep.jacobians import Samples

Values = dict[str, Estimate]
"""By layer, ``""`` the network; those of a measure's granularity."""


WHOLE = "of the whole model"
LARGEST = "the largest of the layers"
TOGETHER = "of the layers together"


@dataclass(frozen=True)
class Measure:
    """Represent a measure of the loss around a trained network: of a layer, or of all its parameters.

    Either a sum over quantities of the weight gradients, and so one of the sweep's, or computed by itself, or of the
    Jacobians, whose sweep such measures share, or derived from another measure.

    Attributes:
        name: in reports, tables and on the command line.
        formula: in one line.
        source: where it is defined.
        quantity: what of the weight gradients it is, a name of
            :data:`pyflatness.contractions.quantities.QUANTITIES`, or what of the activations, one of
            :data:`pyflatness.sweep.activations.ACTIVATIONS`. None: it is computed.
        normalize: the option of :func:`pyflatness.relative_flatness` that gives it.
        of_parts: of a quantity with parts that are not to be summed: layer, weight (G, d, m) and the parts -> the
            layer's value, and a note if that is not the definition's to rounding.
        of_network: of a quantity whose network value is not the sum of its layers': that, from a sweep of its own.
        compute: its values, if it is not one of the sweep's.
        of_jacobians: its values from those of :func:`pyflatness.sweep.jacobians.measured`.
        needs: which quantities these must have that not all measures need.
        base: the measure from whose values it follows without reading the data again.
        derive: its values, from the model, the user's options and its base's values.
        of_layers: whether the network's value is of its measured layers together; else it is of all parameters, or of
            the model's input.
        network_of: what the network's value is of, in words.
        granularity: what it is a number of: ``"layer"``, ``"network"``, ``"layer, network"``.
        invariant: reparameterisations that change the network's weights but neither its function nor the measure:
            ``"none"``, ``"layer-wise"``, ``"layer-wise, neuron-wise"``.
        cost: in one line.
        reads: how often it reads the data.
    """

    name: str
    formula: str
    source: str
    quantity: str | None = None
    normalize: str | None = None
    of_parts: Callable[[str, Tensor, Tensor], tuple[float, str]] | None = None
    of_network: Callable[[Task], Estimate] | None = None
    compute: Callable[[Task], Values] | None = None
    of_jacobians: Callable[[Samples], Values] | None = None
    needs: tuple[str, ...] = ()
    base: str | None = None
    derive: Callable[[nn.Module, Options, Values], Values] | None = None
    of_layers: bool = True
    network_of: str = "the sum over layers"
    granularity: str = "layer, network"
    invariant: str = "none"
    cost: str = "one sweep, shared"
    reads: int = 1

    def __post_init__(self) -> None:
        ways = self.quantity, self.compute, self.of_jacobians, self.derive
        assert sum(how is not None for how in ways) == 1, self.name
        assert (self.base is None) == (self.derive is None), self.name
        if not self.of_layers:
            object.__setattr__(self, "network_of", WHOLE)

    @property
    def of_network_alone(self) -> bool:
        """Return whether there is one value for the whole network and none for a layer."""
        return self.granularity == "network"


__all__ = ["Measure", "Task", "Values"]
