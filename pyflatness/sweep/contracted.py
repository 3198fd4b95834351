"""Contract several layers in one run: a cotangent goes backward once for all of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..contractions.layer import Contraction, Sign
from ..contractions.quantities import Contribution
from ..passes.layer_form import LayerForm
from ..passes.runner import Run
from ..passes.tail import Tail

Found = Iterator[tuple[str, Contribution]]

_TOGETHER = 16
"""Cotangents that go through a model's last operations at once, at most."""


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
        self._gradients: Mapping[str, Sequence[Tensor]] = {}
        self._waiting: list[tuple[Tensor, Sign]] = []
        left = hold
        with contractions.full_precision(run.outputs):
            for name in names:
                self._contractions[name] = found = self._at(name, count, min(left, hold // 2))
                left -= found.held
        self._contract = {name: one.of if one.stack_size == 1 else one.hold for name, one in self._contractions.items()}
        self._tail = self._small_tail() if hold and count > 1 else None
        sizes = [self._contractions[name].stack_size for name in self._tail.names] if self._tail else []
        most = min([size for size in sizes if size > 1] or [_TOGETHER], default=1)
        self._together = -(-count // max(1, -(-count // min(most, _TOGETHER))))  # there may be none to send

    def of(self, cotangent: Tensor, sign: Sign = None) -> list[tuple[str, Contribution]]:
        """Return each layer's contribution for a cotangent of the run's outputs; none of one that holds it back."""
        if self._tail is None:
            return list(self._of_one(cotangent, sign))
        self._waiting.append((cotangent, sign))
        return list(self._of_waiting()) if len(self._waiting) == self._together else []

    def rest(self) -> Found:
        """Yield the contributions that did not come yet."""
        yield from self._of_waiting()
        self._gradients = {}
        for name, contraction in self._contractions.items():
            with contractions.full_precision(self._run.outputs):
                contribution = contraction.rest()
            if contribution is not None:
                yield name, contribution

    def _at(self, name: str, count: int, hold: int) -> Contraction:
        """Return a layer's contraction at its inputs, of cotangents from behind max-pooling where that serves."""
        form, run = self._forms[name], self._run
        layer, inputs, pooled = form.contraction(run), form.inputs(run), form.pooled(run)
        if pooled is None or not layer.gathers(inputs, count, hold, pooled.elements):
            return layer.at(inputs, count, hold)
        self._elsewhere[name] = pooled.edge
        return layer.at(inputs, count, hold, pooled.positions())

    def _small_tail(self) -> Tail | None:
        """Return the model's last operations if several cotangents go through them at once.

        Every layer has to be called once, on a path to the outputs.
        """
        outputs, users = self._run.outputs, self._run.users
        calls = {name: self._run.calls(name) for name in self._contractions}
        if any(len(made) != 1 for made in calls.values()):
            return None
        edges = {name: self._elsewhere.get(name, made[0].edge) for name, made in calls.items()}
        if any(edge.node not in users and edge.node != outputs.grad_fn for edge in edges.values()):
            return None
        tail = Tail(outputs, users, edges)
        return tail if tail.names else None

    def _of_one(self, cotangent: Tensor, sign: Sign) -> Found:
        with contractions.full_precision(self._run.outputs):
            # The last cotangent's are kept meanwhile: the C library would give their pages back to the system.
            self._gradients = self._run.recorder.gradients(
                self._run.outputs, cotangent, self._contract, elsewhere=self._elsewhere
            )
            yield from self._contracted(self._gradients, sign)

    def _contracted(self, gradients: Mapping[str, Sequence[Tensor]], sign: Sign) -> Found:
        for name, gradient in gradients.items():
            contribution = self._contract[name](self._forms[name].cotangent(self._run, gradient), sign)
            if contribution is not None:
                yield name, contribution

    def _of_waiting(self) -> Found:
        """Yield contributions of the cotangents that wait to go through the tail together."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        assert self._tail is not None
        signs = [sign for _, sign in waiting]
        with contractions.full_precision(self._run.outputs):
            try:
                gradients, others = self._tail.send(torch.stack([cotangent for cotangent, _ in waiting]))
            except RuntimeError:  # a hook of the user's, say, that takes one cotangent at a time; an error comes again
                self._tail = None
                for cotangent, sign in waiting:
                    yield from self._of_one(cotangent, sign)
                return
            for name, several in gradients.items():
                yield from self._of_several(name, several, signs)
            for sign, each in zip(signs, others, strict=False):
                self._gradients = {name: [gradient] for name, gradient in each.items()}
                yield from self._contracted(self._gradients, sign)

    def _of_several(self, name: str, gradients: Tensor, signs: Sequence[Sign]) -> Found:
        contraction, form = self._contractions[name], self._forms[name]
        together = form.cotangents(self._run, gradients) if contraction.stack_size > 1 else None
        if together is not None:
            yield name, contraction.of_several(together, signs)
            return
        for gradient, sign in zip(gradients, signs, strict=True):
            yield from self._contracted({name: [gradient]}, sign)
