"""Contract several layers in one run: a cotangent goes backward once for all of them."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import contractions
from ..contractions.layer import Contraction, Sign
from ..contractions.quantities import Contribution
from ..contractions.routes import PreparedWeight
from ..passes.layer_form import GatheredContraction, LayerForm
from ..passes.runner import Run
from ..passes.tail import Tail

Arrivals = Iterator[tuple[str, Callable[[Any, Any], Contribution | None], Any, Any]]
"""A layer's name, the function that contracts cotangents at it, and one cotangent with its sign or several."""

_AT_ONCE = 16  # the most cotangents that go through a model's last operations at once


class Contracted:
    """Compute the layers' contributions for each of about ``count`` cotangents of a run.

    ``hold`` bytes of cotangents may be held back; :meth:`rest` yields the contributions of these. For layers in
    ``whole``, ``gradients`` has those of the last cotangent at their outputs, and at ``input_edges``.
    """

    def __init__(
        self,
        run: Run,
        forms: Mapping[str, LayerForm],
        names: Iterable[str],
        count: int,
        *,
        hold: int = 0,
        whole: Collection[str] = (),
        input_edges: Mapping[str, GradientEdge] = {},
    ) -> None:
        self._run, self._forms, self._whole, self._input_edges = run, forms, whole, input_edges
        self._contract: dict[str, Callable[[Any, Any], Contribution | None]] = {}
        self._contractions: dict[str, Contraction] = {}
        self._elsewhere: dict[str, GradientEdge] = {}
        self.gradients: Mapping[str, list[Tensor]] = {}
        self.at_inputs: Mapping[str, Tensor] = {}
        self._waiting: list[tuple[Tensor, Sign]] = []
        left = hold
        with contractions.full_precision(run.outputs):
            shares = _even_shares(run, names, hold) if run.outputs.is_cuda else {}
            layers = {
                name: (forms[name].contraction(run), forms[name].inputs(run, forms[name].memory[0])) for name in names
            }
            carried = {name: None if whole else forms[name].of_carried(run, layers[name][1], count) for name in layers}
            factored = (layer.factored(inputs, count) for name, (layer, inputs) in layers.items() if not carried[name])
            PreparedWeight.make_factors(weight for weight in factored if weight is not None)
            for name, (layer, inputs) in layers.items():
                pooled, taken = None if whole else forms[name].pooled(run), carried[name]
                if taken is not None:
                    self._elsewhere[name], self._contractions[name] = taken
                    self._contract[name] = taken[1].of
                    continue
                share, positions = shares.get(name, min(left, hold // 2)), None
                if pooled is not None and layer.gathers(inputs, count, share, pooled.elements):
                    self._elsewhere[name], positions = pooled.edge, pooled.positions()
                found = layer.at(inputs, count, share, positions)
                left -= found.held
                self._contract[name] = found.of
                if isinstance(found, GatheredContraction):
                    continue
                self._contractions[name] = found
                if found.stack_size > 1:
                    self._contract[name] = found.hold
        self._tail = self._small_tail() if hold and count > 1 and not whole else None
        self._at_once = self._most_at_once(count, left)

    def of(self, cotangent: Tensor, sign: Sign = None) -> list[tuple[str, Contribution]]:
        """Return the layers' contributions for a cotangent of the run's outputs, without layers that hold it back."""
        self._waiting.append((cotangent, sign))
        if len(self._waiting) < self._at_once:
            return []
        waiting, self._waiting = self._waiting, []
        arrived = self._arrived(waiting) if self._tail is None else self._together(self._tail, waiting)
        found = []
        with contractions.full_precision(self._run.outputs):
            for name, contract, gradients, signs in arrived:
                contribution = contract(gradients, signs)
                if contribution is not None:
                    found.append((name, contribution))
        return found

    def rest(self) -> Iterator[tuple[str, Contribution]]:
        """Yield the contributions of cotangents that are held back."""
        if self._waiting:  # the last, incomplete stack of cotangents
            self._at_once = len(self._waiting)
            yield from self.of(*self._waiting.pop())
        self.gradients = {}
        with contractions.full_precision(self._run.outputs):
            left = [(name, contraction.rest()) for name, contraction in self._contractions.items()]
        yield from ((name, contribution) for name, contribution in left if contribution is not None)

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

    def _most_at_once(self, count: int, memory: int) -> int:
        """Return how many cotangents go through the tail at once: about equal stacks, which layers can hold back."""
        if self._tail is None:
            return 1
        sizes = [self._contractions[name].stack_size for name in self._tail.names]
        most = min([size for size in sizes if size > 1], default=_AT_ONCE)
        most = max(1, min(most, _AT_ONCE, memory // max(1, self._tail.bytes)))
        return -(-count // -(-count // most))

    def _arrived(self, sent: Iterable[tuple[Tensor, Sign]]) -> Arrivals:
        """Yield the arrivals at layers for cotangents that are sent one after the other."""
        for cotangent, sign in sent:
            # The last cotangent's gradients stay until then, or the C library would return their pages to the system.
            self.gradients = self._run.recorder.gradients(
                self._run.outputs,
                cotangent,
                dict.fromkeys([*self._contract, *self._whole]),
                elsewhere=self._elsewhere,
                at_edges=self._input_edges,
            )
            self.at_inputs = {name: self.gradients[name].pop() for name in self._input_edges}
            yield from self._in_form(self.gradients, sign)

    def _together(self, tail: Tail, waiting: Sequence[tuple[Tensor, Sign]]) -> Arrivals:
        """Yield the arrivals at layers for cotangents that go through the tail at once."""
        gradients, others = tail.send(torch.stack([cotangent for cotangent, _ in waiting]))
        signs = [sign for _, sign in waiting]
        for name, several in gradients.items():
            stack = self._forms[name].cotangents(self._run, several) if self._contractions[name].takes_several else None
            if stack is not None:
                yield name, self._contractions[name].of_several, stack, signs
                continue
            for gradient, sign in zip(several, signs, strict=True):
                yield from self._in_form({name: [gradient]}, sign)
        for sign, each in zip(signs, others, strict=False):  # no others if the tail is the whole model
            self.gradients = {name: [gradient] for name, gradient in each.items()}
            yield from self._in_form(self.gradients, sign)

    def _in_form(self, gradients: Mapping[str, Sequence[Tensor]], sign: Sign) -> Arrivals:
        for name, gradient in gradients.items():
            if name in self._contract:
                form = self._forms[name]
                yield name, self._contract[name], form.cotangent(self._run, gradient, form.memory[1]), sign


def _even_shares(run: Run, names: Iterable[str], memory: int) -> dict[str, int]:
    """Return each layer's share of the memory for equally many cotangents of all layers; empty if not even two fit."""
    outputs = {name: [call.output for call in run.calls(name)] for name in names}
    needed = {
        name: sum(output.numel() * contractions.promoted_dtype(output.dtype).itemsize for output in each)
        for name, each in outputs.items()
    }
    together = memory // max(1, sum(needed.values()))
    return {name: together * each for name, each in needed.items()} if together > 1 else {}
