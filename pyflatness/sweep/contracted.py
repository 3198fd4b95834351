"""The contractions of several layers in one run: a signal goes backward once for all of them."""

import functools
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from .. import contractions
from ..contractions import DenseGradients, WeightGradients
from ..contractions.layer import Contraction, Share
from ..contractions.stacked import Stacked
from ..passes.layer_form import LayerForm
from ..passes.runner import Run

_HELD = 48 * 2**20  # bytes of signals of all layers that are held back; half of it of one layer


class Contracted:
    """What layers add for each signal that is sent.

    Args:
        run: recorded.
        forms: the layers, by name.
        signals: about how many will come.
        stack: whether shares may come late, of several signals together; :meth:`rest` then has to be asked.
    """

    def __init__(self, run: Run, forms: Mapping[str, LayerForm], signals: int, *, stack: bool = False) -> None:
        self._run, self._forms = run, forms
        self._contract: dict[str, Contraction | Stacked] = {}
        self._gradients: Mapping[str, list[Tensor]] = {}
        self._left = _HELD if stack else 0
        with contractions.full_precision(run.outputs):
            for name, form in forms.items():
                self._contract[name] = self._contraction(form.gradients(run), form.inputs(run), signals)

    def of(self, signal: Tensor, sign: Tensor | float | None = None) -> list[tuple[str, Share]]:
        """Each layer's share of a signal of the run's outputs."""
        shares = []
        with contractions.full_precision(self._run.outputs):
            # The last signal's are kept meanwhile: the C library would give their pages back to the system.
            self._gradients = self._run.recorder.gradients(self._run.outputs, signal, self._contract)
            for name, contract in self._contract.items():
                share = contract(self._forms[name].signal(self._run, self._gradients[name]), sign)
                if share is not None:
                    shares.append((name, share))
        return shares

    def rest(self) -> Iterator[tuple[str, Share]]:
        """Shares that did not come yet."""
        self._gradients = {}
        for name, contract in self._contract.items():
            if isinstance(contract, Stacked):
                with contractions.full_precision(self._run.outputs):
                    share = contract.rest()
                if share is not None:
                    yield name, share

    def _contraction(
        self, gradients: WeightGradients | DenseGradients, inputs: Sequence[Tensor], signals: int
    ) -> Contraction | Stacked:
        """Of several signals at a time where that is better and the memory for what is held back suffices."""
        if self._left and isinstance(gradients, WeightGradients):
            count = gradients.together(inputs, signals, min(self._left, _HELD // 2))
            if count > 1:
                self._left -= count * gradients.signal_bytes(inputs[0])
                buffer = functools.partial(gradients.buffer, count)
                return Stacked(gradients.of_several(inputs, signals), buffer)
        return gradients.of(inputs, signals)
