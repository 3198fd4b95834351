"""Contract several layers in one run: a cotangent goes backward once for all of them."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..contractions.layer import Contraction, Sign
from ..contractions.quantities import Contribution
from ..passes.layer_form import LayerForm
from ..passes.runner import Run


class Contracted:
    """Collect what layers contribute for each cotangent that is sent.

    Args:
        run: recorded.
        forms: layers by name.
        names: of those that are contracted.
        count: about how many cotangents will come.
        hold: bytes of cotangents of all layers that may be held back, at most half of them of one layer; contributions
            then come late, of several cotangents together, and :meth:`rest` has to be asked.
    """

    def __init__(
        self, run: Run, forms: Mapping[str, LayerForm], names: Iterable[str], count: int, *, hold: int = 0
    ) -> None:
        self._run, self._forms = run, forms
        self._contractions: dict[str, Contraction] = {}
        self._elsewhere: dict[str, GradientEdge] = {}
        self._gradients: Mapping[str, list[Tensor]] = {}
        left = hold
        with contractions.full_precision(run.outputs):
            for name in names:
                self._contractions[name] = found = self._at(name, count, min(left, hold // 2))
                left -= found.held
        self._contract = {name: one.of if one.stack_size == 1 else one.hold for name, one in self._contractions.items()}

    def of(self, cotangent: Tensor, sign: Sign = None) -> list[tuple[str, Contribution]]:
        """Return each layer's contribution for a cotangent of the run's outputs; none of one that holds it back."""
        found = []
        with contractions.full_precision(self._run.outputs):
            # The last cotangent's are kept meanwhile: the C library would give their pages back to the system.
            self._gradients = self._run.recorder.gradients(
                self._run.outputs, cotangent, self._contract, elsewhere=self._elsewhere
            )
            for name, contract in self._contract.items():
                contribution = contract(self._forms[name].cotangent(self._run, self._gradients[name]), sign)
                if contribution is not None:
                    found.append((name, contribution))
        return found

    def _at(self, name: str, count: int, hold: int) -> Contraction:
        """Return a layer's contraction at its inputs, of cotangents from behind max-pooling where that serves."""
        form, run = self._forms[name], self._run
        layer, inputs, pooled = form.contraction(run), form.inputs(run), form.pooled(run)
        if pooled is None or not layer.gathers(inputs, count, hold, pooled.elements):
            return layer.at(inputs, count, hold)
        self._elsewhere[name] = pooled.edge
        return layer.at(inputs, count, hold, pooled.positions())

    def rest(self) -> Iterator[tuple[str, Contribution]]:
        """Yield the contributions that did not come yet."""
        self._gradients = {}
        for name, contraction in self._contractions.items():
            with contractions.full_precision(self._run.outputs):
                contribution = contraction.rest()
            if contribution is not None:
                yield name, contribution
