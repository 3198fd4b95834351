"""Contract layers whose weights are spread over ranks: a weight is whole for one cotangent of one layer at a time."""

from collections.abc import Callable

from torch import Tensor

from ..contractions import Contractor
from ..contractions.layer import Contraction, Sign
from ..contractions.quantities import Contribution
from ..contractions.routes import Calls


class Gathered(Contractor):
    """Contract with the weight asked for when it is needed.

    Args:
        make: the contraction, of the whole weight.
    """

    def __init__(self, make: Callable[[], Contractor]) -> None:
        self._make = make

    def at(self, inputs: Calls, count: int, held: int = 0, positions: Tensor | None = None) -> "GatheredContraction":
        """Return the contraction at the inputs of a micro-batch; no cotangents are held back."""
        return GatheredContraction(lambda: self._make().at(inputs, 1))

    def nothing(self, samples: int) -> Contribution:
        """Return the contribution of no cotangent at all."""
        return self._make().nothing(samples)


class GatheredContraction(Contraction):
    """Contract one cotangent after another; none is held back."""

    stack_size, held = 1, 0

    def __init__(self, make: Callable[[], Contraction]) -> None:
        self._make = make

    def of(self, cotangent: Calls, sign: Sign = None) -> Contribution:
        """Return the contribution of a cotangent by itself."""
        return self._make().of(cotangent, sign)
