"""The contractions of several layers in one run: a signal goes backward once for all of them."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from . import contractions
from .contractions.layer import Contraction, Share, Stacked, WeightGradients
from .layer_form import LayerForm
from .runner import Run


class Contracted:
    """What layers add for each signal that is sent.

    Args:
        run: on tape.
        forms: the layers, by name.
        signals: about how many will come.
        stack: whether shares may come late, of several signals together; :meth:`rest` then has to be asked.
    """

    def __init__(self, run: Run, forms: Mapping[str, LayerForm], signals: int, *, stack: bool = False) -> None:
        self._run, self._forms = run, forms
        self._contract: dict[str, Contraction | Stacked] = {}
        with contractions.full_precision(run.outputs):
            for name, form in forms.items():
                gradients, inputs = form.gradients(run), form.inputs(run)
                contract = gradients.of(inputs, signals)
                late = stack and isinstance(gradients, WeightGradients) and gradients.stacks(inputs)
                self._contract[name] = Stacked(contract) if late else contract

    def of(self, signal: Tensor, sign: Tensor | float | None = None) -> Iterator[tuple[str, Share]]:
        """Each layer's share of a signal of the run's outputs."""
        with contractions.full_precision(self._run.outputs):
            gradients = self._run.tape.gradients(self._run.outputs, signal, self._contract)
        for name, contract in self._contract.items():
            with contractions.full_precision(self._run.outputs):
                share = contract(self._forms[name].signal(self._run, gradients.pop(name)), sign)
            if share is not None:
                yield name, share

    def rest(self) -> Iterator[tuple[str, Share]]:
        """Shares that did not come yet."""
        for name, contract in self._contract.items():
            if isinstance(contract, Stacked):
                with contractions.full_precision(self._run.outputs):
                    share = contract.rest()
                if share is not None:
                    yield name, share
