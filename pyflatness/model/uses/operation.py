"""Hold a linear operation of torch's, taken apart."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..kinds import Linear

Transform = Callable[[Tensor], Tensor]
LINEAR = Linear()


@dataclass(frozen=True)
class Operation:
    """Hold a linear operation, taken apart.

    Attributes:
        weight: as the operation has it.
        inputs: in the form that layers of the kind take.
        bias: what is added to each row of the output, or None.
        kind: of a layer that does the same.
        run: (inputs, weight, bias) -> the operation's result, in the form of such a layer's output.
        rows: the weight -> a view of it, as layers of the kind keep theirs; of a linear layer with a row of the output
            to a row.
        back: the result in this form -> as the operation gives it.
    """

    weight: Tensor
    inputs: Tensor
    bias: Tensor | None
    kind: Linear
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rows: Transform = lambda weight: weight
    back: Transform = lambda result: result


Found = Operation | str
"""An operation, or why one is not linear in its weight, or not in a way that a layer has."""
