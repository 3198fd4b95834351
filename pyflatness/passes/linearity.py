"""Certify that a layer's GGN value is the Hessian value: that the model is locally linear in the layer's weight.

κ of the GGN equals κ of the Hessian exactly if f is locally linear in w: in front of ReLUs, pooling, eval BatchNorm,
sums. Comparing the two values would prove nothing: they agree at a trained minimum of any network, where the residual
vanishes. Autograd's graph shows it if every operation behind the layer is known to be piecewise linear; otherwise
second derivatives are taken at every sample. If a layer is called on its own output, f is never linear in its weight.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import interrupts, private
from ..errors import InputError
from ..model import spread
from ..numerics.normal_vectors import NormalVectors
from ..options import Options
from . import graph
from .recorder import RecordedCall, Recorder

Calls = Mapping[str, Sequence[RecordedCall]]
Edges = Mapping[str, Sequence[GradientEdge]]
Gradients = Mapping[str, Sequence[Tensor]]
Users = Mapping[Node, Sequence[Node]]  # for each node of a graph, the nodes that use its result


CUSTOM, RECURRENT, DIFFERENTIATED, NONLINEAR, UNASKED = "custom", "recurrent", "differentiated", "nonlinear", "unasked"
"""Why a layer is not certified: a custom autograd function is behind it; it is called on its own outputs; the model
takes a derivative that uses its weight; second derivatives are not zero; or the question was not asked.
"""


TAKEN_AS_THEY_ARE = "second derivatives of functions that torch did not write taken as they are"


def refuse_ggn_of_derivatives(options: Options, nonlinear: Mapping[str, str], what: str = "curvature='ggn'") -> None:
    """Raise if GGN values are asked for of layers whose weights the model also uses in a derivative."""
    names = [name for name, why in nonlinear.items() if why == DIFFERENTIATED]
    if names and options.by_ggn:
        raise InputError(
            f"layer {', '.join(map(repr, names[:6]))}: the model takes a derivative in its forward pass "
            f"(torch.autograd.grad, as for forces), in which the weight is used again, and {what} has no value of "
            "that: pass curvature='hessian', or choose other layers"
        )


def refuse_custom_functions(options: Options, nonlinear: Mapping[str, str], what: str = "layer") -> None:
    """Raise if ``curvature="auto"`` cannot tell, for lack of a second derivative, if a value is the Hessian's."""
    names = [name for name, why in nonlinear.items() if why == CUSTOM]
    if names and options.curvature == "auto":
        listed = ", ".join(map(repr, names[:6])) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        raise InputError(
            f"behind {what} {listed} is a function that torch did not write (a torch.autograd.Function, a kernel of "
            "another library), whose second derivative may be missing without a sign: curvature='hessian' takes it "
            "as it is, curvature='ggn' gives the GGN value, another number"
        )


class Certificate:
    """Hold why layers are not certified, by name: the model is not known to be locally linear in their weights."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._twice_differentiable = False  # whether attention runs by a kernel with second derivatives

    @property
    def differentiated(self) -> set[str]:
        """Return the layers whose weight is used in a derivative that the model takes in its forward pass."""
        return {name for name, why in self.reasons.items() if why == DIFFERENTIATED}

    def attention(self) -> contextlib.AbstractContextManager[None]:
        """Run attention by the kernel with second derivatives, inside, if these will be taken."""
        return sdpa_kernel(SDPBackend.MATH) if self._twice_differentiable else contextlib.nullcontext()

    def extend(self, outputs: Tensor, users: Users, recorder: Recorder) -> dict[str, str] | None:
        """Return the layers that this run is the first to show not linear, and why.

        The result is None if the run has to be repeated with another kernel of attention, see :meth:`attention`.
        """
        new = nonlinear_layers(outputs, users, recorder, [name for name in recorder.calls if name not in self.reasons])
        # Second derivatives are taken of layers of earlier batches too, and this one may be the first with attention.
        by_kernel = (graph.of(node.name()).rows == "attention" for node in users)
        if (new or self.reasons) and not self._twice_differentiable and any(by_kernel):
            self._twice_differentiable = True
            return None
        self.reasons.update(new)
        return new


@torch.enable_grad()
def nonlinear_layers(outputs: Tensor, users: Users, recorder: Recorder, names: Iterable[str]) -> dict[str, str]:
    """Return the layers among ``names`` in whose weight f is not certified linear at all samples of a run, and why.

    If autograd's graph does not prove it, second derivatives of ⟨v, f⟩ along a random direction have to vanish exactly:
    in all layers' outputs at once, since through ReLUs f is linear in all of them jointly. If they do not vanish for a
    layer, the graph tells whether that is only because its output is multiplied by another layer's.
    """
    calls = {name: recorder.calls[name] for name in names if name in recorder.calls}
    edges = edges_of(calls)
    found = {name: RECURRENT for name, made in calls.items() if len(made) > 1 and feeds_itself(made)}
    found |= dict.fromkeys(with_custom_functions(users, edges), CUSTOM)
    certain = proven(users, edges)
    rest = {name: edges[name] for name in edges if name not in certain | found.keys()}
    if rest and spread.is_held():  # weights are gathered in first backward passes only
        return found | dict.fromkeys(rest, NONLINEAR)
    if rest:
        random = NormalVectors()
        gradients = recorder.gradients(outputs, random.like(outputs), create_graph=True)
        moving = _changing(rest, gradients, list(rest), random, _is_change)
        alone = proven(users, {name: rest[name] for name in moving}, alone=True) if len(rest) > 1 else ()
        found |= dict.fromkeys(moving.difference(alone), NONLINEAR)
    return found


@torch.enable_grad()
def nonlinear_parameters(outputs: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the leaves of the outputs' graph in which f, varied in one alone, is not certified linear, and why.

    As in :func:`nonlinear_layers`, second derivatives have to vanish exactly if the graph does not prove it.
    """
    edges = {name: [get_gradient_edge(leaf)] for name, leaf in leaves.items()}
    users = users_of(outputs)
    found = dict.fromkeys(with_custom_functions(users, edges), CUSTOM)
    certain = proven(users, edges, alone=True)
    rest = [name for name in leaves if name not in certain | found.keys()]
    if rest:
        random = NormalVectors()
        first = torch.autograd.grad(
            outputs, [leaves[name] for name in rest], random.like(outputs), create_graph=True, allow_unused=True
        )
        gradients = {name: [g] for name, g in zip(rest, first, strict=True) if g is not None}
        found |= {name: NONLINEAR for name in gradients if _changing(edges, gradients, [name], random, _is_not_zero)}
    return found


def edges_of(calls: Calls) -> Edges:
    """Return the gradient edges of layers' outputs, one for each call."""
    return {name: [call.edge for call in made] for name, made in calls.items()}


def proven(users: Users, edges: Edges, *, alone: bool = False) -> set[str]:
    """Return the layers, or parameters, in which the graph's operations prove that f is piecewise linear.

    If each is varied ``alone``, an operation has to be linear only in the inputs that depend on its edges.
    """
    nodes = {name: {edge.node for edge in starts} for name, starts in edges.items()}
    if alone:
        return {name for name, starts in nodes.items() if _is_proven_alone(starts, users)}
    smooth = _in_front([node for node in _takers(users) if not _is_piecewise(node)])
    return {name for name, starts in nodes.items() if smooth.isdisjoint(starts)}


def with_custom_functions(users: Users, edges: Edges) -> set[str]:
    """Return the layers, or parameters, with a custom function behind them, whose second derivative may be missing."""
    custom = _in_front([node for node in _takers(users) if not _is_of_torch(node)])
    return {name for name, starts in edges.items() if any(edge.node in custom for edge in starts)}


def _takers(users: Users) -> set[Node]:
    """Return the nodes that use the result of another one."""
    return {user for several in users.values() for user in several}


def unreached(outputs: Tensor, users: Users, calls: Calls) -> dict[str, frozenset[int]]:
    """Return, for layers that have some, the numbers of the calls to whose outputs autograd has no path."""
    last = outputs.grad_fn
    found = {
        name: frozenset(n for n, call in enumerate(made) if call.edge.node not in users and call.edge.node != last)
        for name, made in calls.items()
    }
    return {name: numbers for name, numbers in found.items() if numbers}


def check_complete(what: str, gradients: Sequence[Tensor]) -> None:
    """Raise if the gradients in one layer or parameter lack the second derivative of a function behind it."""
    turning = [gradient for gradient in gradients if gradient.requires_grad]
    nodes = {node.name() for part in turning for node in (part.grad_fn, *users_of(part)) if node}
    if not turning or "torch::autograd::Error" in nodes:
        raise InputError(
            f"{what}: the second derivative of a function behind it is missing (its backward pass is not "
            "differentiable); write that in differentiable operations, or take relative flatness by curvature='ggn', "
            "another number"
        )


@torch.enable_grad()
def feeds_itself(calls: Sequence[RecordedCall]) -> bool:
    """Return whether the input of a call depends on the output of an earlier one."""
    edges = [call.edge for call in calls]
    for number, call in enumerate(calls):
        if number == 0 or call.inputs.grad_fn is None:
            continue
        found = torch.autograd.grad(call.inputs.sum(), edges[:number], retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in found):
            return True
    return False


def _is_piecewise(node: Node, varied: Collection[Node] | None = None) -> bool:
    """Return whether an operation is piecewise linear in its inputs from ``varied`` nodes, or for None in all."""
    kind = graph.of(node.name()).linear
    if not kind or not _is_of_torch(node):
        return False
    for entry in private.results_of(node):
        if entry.dtype.is_complex:
            return False
    if kind == "piecewise":
        return True
    inputs = []
    for place, (source, _) in enumerate(node.next_functions):
        if source and (varied is None or source in varied):
            inputs.append(place)
    if kind == "batch norm":
        return not getattr(node, "_saved_training", True) and len(inputs) == 1
    if kind == "norm":
        return inputs in ([1], [2])  # weight, bias
    if kind == "reduction":
        return getattr(node, "_saved_reduce", "prod") != "prod"
    return len(inputs) == 1 and not (kind == "quotient" and inputs == [1])


def _is_of_torch(node: Node) -> bool:
    held: Any = node  # torch's stubs say that no object is of both classes
    if isinstance(held, BackwardCFunction):
        made_by: type = type(held)._forward_cls  # type: ignore[attr-defined]
        return made_by.__module__.startswith(("torch.distributed.fsdp.", "torch.distributed.tensor."))
    return graph.of(node.name()).of_torch


def _is_proven_alone(starts: Collection[Node], users: Users) -> bool:
    """Return whether all operations behind some nodes are piecewise linear in the inputs that depend on these."""
    behind = _reached([user for start in starts for user in users.get(start, ())], lambda node: users.get(node, ()))
    varied = behind.union(starts)
    return all(_is_piecewise(node, varied) for node in behind)


def _in_front(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes that ``nodes`` depend on; one of ``nodes`` is among them only if another depends on it."""

    def sources(node: Node) -> list[Node]:
        return [source for source, _ in node.next_functions if source is not None]

    return _reached([source for node in nodes for source in sources(node)], sources)


def _reached(stack: list[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Return the nodes of a stack, and all that follow them."""
    reached: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack += following(node)
    return reached


def users_of(outputs: Tensor) -> Users:
    """Return, for each node of the outputs' graph but the last one, the nodes that use its result."""
    users: dict[Node, list[Node]] = {}
    stack = [] if outputs.grad_fn is None else [outputs.grad_fn]
    seen = set(stack)
    while stack:
        user = stack.pop()
        for node, _ in user.next_functions:
            if node is None:
                continue
            users.setdefault(node, []).append(user)
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return users


def behind(outputs: Tensor, calls: Calls) -> Users:
    """Return the part of :func:`users_of` for the layers' calls and the nodes that depend on them."""
    users = users_of(outputs)
    made = [call.edge.node for several in calls.values() for call in several]
    reached = _reached(made, lambda node: users.get(node, ()))
    return {node: several for node, several in users.items() if node in reached}


def _changing(
    edges: Edges,
    gradients: Gradients,
    varied: Sequence[str],
    random: NormalVectors,
    changes: Callable[[Tensor, Tensor], bool],
) -> set[str]:
    """Return the names in ``varied`` whose gradient changes when all are varied; ``changes`` tests one gradient."""
    pushed = torch.zeros((), dtype=torch.float64, device="cpu")
    for name in varied:
        for gradient in gradients[name]:
            if gradient.requires_grad:
                pushed = pushed.to(gradient.device) + (gradient * random.like(gradient)).sum(dtype=torch.float64)
    if not pushed.requires_grad:
        return set()
    where = [edge for name in varied for edge in edges[name]]
    try:
        found = torch.autograd.grad(pushed, where, retain_graph=True, allow_unused=True)
    except RuntimeError as error:  # an operation without a second derivative: nothing is certified
        interrupts.pass_on(error)
        return set(varied)
    owners = [name for name in varied for _ in edges[name]]
    first = [gradient for name in varied for gradient in gradients[name]]
    each = zip(owners, found, first, strict=True)
    return {name for name, change, gradient in each if change is not None and changes(change, gradient)}


def _is_not_zero(change: Tensor, _: Tensor) -> bool:
    """Return whether a gradient in a parameter changes; NaN counts, as samples cannot be told apart in it."""
    return bool((change != 0).any())


def _is_change(change: Tensor, gradient: Tensor) -> bool:
    """Return whether a gradient in outputs changes; NaN or infinity for a finite gradient, as at √0, counts."""
    undefined = ~change.isfinite() & gradient.isfinite()  # a gradient that is NaN itself proves nothing
    return bool(((change.nan_to_num(0.0) != 0) | undefined).any())
