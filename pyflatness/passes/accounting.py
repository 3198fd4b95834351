"""Account for every use of the layers' weights: walk the outputs' graph to find uses outside of recorded calls.

A layer's value is computed from the inputs and output gradients of its recorded calls. A weight may have other uses: in
a function outside of the layer, or in the backward pass of a model that differentiates itself (forces of an energy, a
score, a physics-informed residual), which no hook and no function mode sees. Every use is an edge in autograd's graph.
So some samples are run with the layers' parameters requiring gradients, and the graph is walked from the outputs; at
the output of a recorded call the walk goes on at the call's inputs. A parameter that it still reaches has a use that no
call accounts for. If this may be a derivative of the calls, one more pass gives the calls leaves of their own: a
parameter that is still reached is used outside of them.
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .. import private
from ..model import calling, layers, parameters, spread, state, uses, walk
from ..model.uses import Use, candidates
from ..model.uses.operations import each_of
from ..model.uses.watched import COPIES, TRANSPOSES, VIEWS
from . import graph, linearity
from .guards import TAKEN_AS_CONSTANT, Detached
from .recorder import Recorder

_UNSEEN = "whether the model uses its weights outside of the layers' calls is not known: "
UNSEEN = _UNSEEN + "with weights that require gradients its forward pass raises an error"
SHARED = _UNSEEN + "layers share a weight that is spread over ranks"
_DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


@dataclass(frozen=True)
class Account:
    """Hold what one pass showed about the uses of the layers' weights."""

    differentiated: frozenset[str] = frozenset()  # layers whose weight is used in a derivative that the model takes
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # by layer, functions outside that use its weight
    flat: Mapping[Tensor, str] = field(default_factory=dict)  # weights of one dimension, and operations on them
    doubts: tuple[str, ...] = ()  # why values may miss uses of the weights
    # Whether a pass with the weights as constants has to follow, for uses outside of the calls and a sample's memory.
    is_partial: bool = True


class Accounting:
    """Run a model with the layers' weights in the graph, recorded, and account for their uses.

    A weight is a leaf of autograd's graph, or is computed from leaves. A weight that several modules share gets a leaf
    for each layer, since a value is of this layer's use alone. The leaf of a weight that is spread over ranks is the
    tensor that it is gathered in.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        recorder: Recorder,
        batch: Any,
        forward: calling.Forward | None,
    ) -> None:
        self._model, self._modules, self._recorder = model, modules, recorder
        self._batch, self._forward = batch, forward
        places, owners = uses.places(model), spread.owners()
        found = ((vector, owners.get(id(vector), vector)) for vector in candidates.may_be_flat_weights(model))
        self._vectors = {vector: leaf for vector, owner in found if (leaf := spread.used(owner)) is not None}
        self._required = [part for pair in self._vectors.items() for part in pair]
        self._are_shared = False  # whether weights spread over ranks are shared, without leaves of their own
        self._are_computed = False  # whether weights are computed from the leaves
        self._places: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # with the parameter, and the leaf of the place
        self._leaves: dict[str, list[Tensor]] = {name: [] for name in modules}
        for name, module in modules.items():
            if isinstance(module, Use):  # its parameter is the leaf
                self._are_computed |= module.source.effective
                continue
            parts = walk.modules(module)
            self._are_computed |= len(parts) > 1
            for part in parts:
                for key, parameter in part._parameters.items():
                    if parameter is None or key == "bias" or not _is_real(parameter):
                        continue
                    is_shared, owner = len(places.get((part, key), ())) > 1, owners.get(id(parameter), parameter)
                    leaf = spread.used(owner)
                    if leaf is None or (is_shared and spread.is_held()):  # FSDP puts one tensor in all places
                        self._are_shared |= is_shared
                        continue
                    if is_shared:
                        leaf = _twin(parameter)
                        self._places.append((part, key, parameter, leaf))
                    self._required += {leaf, owner}
                    self._leaves[name].append(leaf)

    def run(self, samples: int) -> Tensor:
        """Return the outputs for the batch, which has so many samples, with their graph; the recorder has the calls."""
        recorder = self._recorder
        self._watch, self._detached = _Functions(self._leaves, recorder), Detached()
        with recorder.recording(samples, checking=True), self._in_graph():
            with calling.watched_by(self._watch, self._detached):
                outputs, _ = calling.run(self._model, self._batch, self._forward)
            self._nodes = self._nodes_of(recorder.calls)
            self._of_vectors = [(vector, get_gradient_edge(leaf).node) for vector, leaf in self._vectors.items()]
        return outputs

    def account(self, outputs: Tensor) -> Account:
        """Return what the last run showed."""
        recorder, watch, nodes = self._recorder, self._watch, self._nodes
        reached = _reached(outputs, recorder)
        unaccounted = {name for name, ends in nodes.items() if not ends.isdisjoint(reached)}
        elsewhere = {name: ", ".join(watch.functions[name]) for name in unaccounted if watch.functions[name]}
        differentiated = {name for name in unaccounted if watch.differentiates or name not in elsewhere}
        if differentiated and not spread.is_held():
            others, own = self._without_calls(differentiated)
            for name in differentiated:
                functions = elsewhere.pop(name, "a function that torch did not write")
                if not own[name].isdisjoint(others):
                    elsewhere[name] = functions
        acting = ((vector, _functions_of(node, reached, vector.shape)) for vector, node in self._of_vectors)
        flat = {vector: ", ".join(functions) for vector, functions in acting if functions}
        ends = {name: [GradientEdge(node, 0) for node in nodes[name]] for name in differentiated}
        doubts = {
            SHARED: self._are_shared,
            TAKEN_AS_CONSTANT: self._detached.is_cut(outputs, self._again),
            linearity.TAKEN_AS_THEY_ARE: ends and linearity.with_custom_functions(linearity.users_of(outputs), ends),
        }
        why = tuple(doubt for doubt, holds in doubts.items() if holds)
        stand_ins = (module.source.nodes for module in self._modules.values() if isinstance(module, Use))
        is_partial = self._are_computed or not all(map(reached.keys().isdisjoint, stand_ins))
        return Account(frozenset(differentiated), elsewhere, flat, why, bool(is_partial or differentiated))

    def _again(self) -> Tensor:
        with calling.aside(), torch.enable_grad(), self._in_graph():
            return calling.run(self._model, self._batch, self._forward)[0]

    def _without_calls(self, names: Collection[str]) -> tuple[Collection[Node], Mapping[str, set[Node]]]:
        """Return the graph if calls of some layers have leaves of their own, and the nodes of the layers' weights."""
        with calling.aside(), torch.enable_grad(), self._in_graph(), contextlib.ExitStack() as stack:
            for module in map(self._modules.__getitem__, names):
                own = layers.with_weight(module, lambda weight: weight.detach().requires_grad_())
                stack.enter_context(calling.replaced_forward(module, own))
            outputs, _ = calling.run(self._model, self._batch, self._forward)
            return linearity.users_of(outputs), self._nodes_of(names)

    @contextlib.contextmanager
    def _in_graph(self) -> Iterator[None]:
        """Have the weights in the graph of runs inside: put leaves in their places, which require gradients."""
        with (
            calling.accounting(),
            parameters.requiring(self._required, flag=True),
            state.made_anew(self._model),
            warnings.catch_warnings(),
        ):
            # Torch warns of numbers taken out of weights, which may require gradients only here.
            warnings.filterwarnings("ignore", "Converting a tensor with requires_grad=True to a scalar")
            try:
                for part, key, _, leaf in self._places:
                    part._parameters[key] = leaf  # type: ignore[assignment]
                yield
            finally:
                for part, key, parameter, leaf in self._places:
                    if part._parameters.get(key) is leaf:  # otherwise the forward pass has put another one there
                        part._parameters[key] = parameter  # type: ignore[assignment]

    def _nodes_of(self, names: Collection[str]) -> dict[str, set[Node]]:
        """Return the nodes of some layers' weights in autograd's graph; called inside :meth:`_in_graph`."""
        return {
            name: module.source.nodes if isinstance(module, Use) else {get_gradient_edge(leaf).node for leaf in leaves}
            for (name, module), leaves in zip(self._modules.items(), self._leaves.values(), strict=True)
            if name in names
        }


def _is_real(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and not parameter.is_inference()


def _twin(parameter: Tensor) -> Tensor:
    """Return another leaf with a parameter's memory, class and attributes."""
    twin: Tensor = private.as_subclass(type(parameter), parameter.detach())
    twin.__dict__.update(parameter.__dict__)
    return twin


def _reached(outputs: Tensor, recorder: Recorder) -> dict[Node, list[tuple[Node, int]]]:
    """Return the nodes of the outputs' graph, without those inside recorded calls, each with the nodes that use it.

    A user comes with the place of the input that is used.
    """
    inputs = {call.edge.node: call.sources for calls in recorder.calls.values() for call in calls}
    takers: dict[Node, list[tuple[Node, int]]] = {}
    stack = []
    if outputs.grad_fn is not None:
        takers[outputs.grad_fn] = []
        stack.append(outputs.grad_fn)
    while stack:
        node = stack.pop()
        sources = inputs[node] if node in inputs else [source for source, _ in node.next_functions]
        for place, source in enumerate(sources):
            if source is None:
                continue
            if source not in takers:
                takers[source] = []
                stack.append(source)
            takers[source].append((node, place))
    return takers


def _functions_of(leaf: Node, takers: Mapping[Node, Sequence[tuple[Node, int]]], shape: torch.Size) -> list[str]:
    """Return the operations that use a parameter other than as a bias.

    It is followed through views, copies, casts and sums of its own shape, as in ``1 + g``.
    """
    found: dict[str, None] = {}
    stack, seen = [*takers.get(leaf, ())], set()
    while stack:
        node, place = stack.pop()
        if node in seen:
            continue
        operation = graph.of(node.name())
        if operation.same_entries or (place in operation.biases and graph.shape(node, 0) == shape):
            seen.add(node)
            stack += takers.get(node, ())
        elif place not in operation.biases:
            found[operation.name.lower()] = None
    return [*found]


class _Functions(calling.Watcher):
    """Note the functions that use weights outside of their layers, and whether the model takes derivatives."""

    def __init__(self, owned: Mapping[str, Sequence[Tensor]], recorder: Recorder) -> None:
        self.functions: dict[str, dict[str, None]] = {name: {} for name in owned}
        self.differentiates = False
        self._recorder = recorder
        self._weights: dict[int, tuple[Tensor, list[str]]] = {}  # and their views, by id, with the layers' names
        for name, held in owned.items():
            for parameter in held:
                self._weights.setdefault(id(parameter), (parameter, []))[1].append(name)

    def see(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """See :class:`.calling.Watcher`."""
        self.differentiates |= func in _DERIVATIVES
        names: set[str] = set()
        for several in (*args, *kwargs.values()):
            for part in several if isinstance(several, (list, tuple)) else (several,):
                if id(part) in self._weights:
                    names.update(self._weights[id(part)][1])
        if names and (outside := names.difference(self._recorder.running)):
            self._take(func, name, outside, result)

    def _take(self, func: Any, function: str, names: set[str], result: Any) -> None:
        parts = [part for part in each_of(result) if isinstance(part, Tensor) and part.is_floating_point()]
        if function in VIEWS | COPIES or func in TRANSPOSES:
            self._weights |= {id(part): (part, [*names]) for part in parts}
        else:
            for name in names if parts else ():
                self.functions[name][function.strip("_")] = None
