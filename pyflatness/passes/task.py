"""What a measure that is computed by itself is asked about."""

from dataclasses import dataclass

from torch import nn

from ..losses import Loss
from ..model.calling import Forward
from ..model.data import Batches
from ..model.selectors import Selection
from ..options import Options


@dataclass(frozen=True)
class Task:
    """A model, its layers, its loss and data, and how they are to be measured.

    Attributes:
        model: inside :func:`.state.observing`.
        selection: the chosen layers.
        loss: the user's.
        batches: the data, to be read as often as the measure says.
        forward: see :func:`.calling.run`.
        options: of the user.
    """

    model: nn.Module
    selection: Selection
    loss: Loss
    batches: Batches
    forward: Forward | None
    options: Options
