"""Whether the GGN value of a layer is the Hessian's: whether the model is locally linear in the layer's weight.

κ of the GGN equals κ of the Hessian exactly where f is locally linear in w: behind ReLUs, pooling, eval BatchNorm,
sums. Comparing the two values would prove nothing: they agree at a trained minimum whatever the network is (the
residual vanishes there). It is read off autograd's graph where every operation behind the layer is known to be linear
in pieces; elsewhere second derivatives are taken: on a few samples, or on all where an operation may be curved at some
and not at others. A layer that is called on its own output is not linear in its weight whatever is behind it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .tape import Call

Calls = Mapping[str, Sequence[Call]]
Gradients = Mapping[str, Sequence[Tensor]]


@torch.enable_grad()
def bent_layers(calls: Calls, gradients: Gradients) -> set[str]:
    """Layers in whose output second derivatives of ⟨v, f⟩ along a random direction do not vanish exactly.

    All layers are moved at once first: behind ReLUs f is linear in all outputs jointly. Where that gives more than zero
    for a layer (it may be multiplied by another), the layer is moved alone.

    Args:
        calls: of each layer, in one forward pass.
        gradients: of ⟨v, f⟩ in the calls' outputs, with a graph.
    """
    return {name for name in _bent(calls, gradients, list(calls)) if _bent(calls, gradients, [name])}


# As autograd's graph names them (a function of a user's has no number at its end). Linear in pieces on any inputs:
_PIECEWISE = re.compile(
    r"(Relu|LeakyRelu|Hardtanh|Threshold|PreluKernel|Abs|Clamp\w*|Max|Min|Amax|Amin|Maximum|Minimum|Where|MaskedFill|"
    r"Gather|Sort|Topk|Add|Sub|Rsub|Neg|Sum|Mean|Cumsum|\w*Pool[123]?D?\w*|\w*Pad\w*|Upsample\w+|PixelShuffle|"
    r"View|UnsafeView|ReshapeAlias|Reshape|Alias|T|Transpose|Permute|Movedim|Unsqueeze|Squeeze|Expand|Repeat|Flatten|"
    r"Unflatten|Cat|Stack|Split\w*|UnsafeSplit\w*|Chunk|Slice|Select|Narrow|Index|IndexSelect|Unbind|Unfold|Flip|Roll|"
    r"Diagonal|AsStrided|Clone|ToCopy|Col2Im|Im2Col)Backward\d+|torch::autograd::CopySlices|CopyBackwards"
)
# Products: linear in each of their inputs.
_PRODUCT = re.compile(r"(\w*Convolution|Addmm|Mm|Bmm|Baddbmm|Addbmm|Mv|Dot|Mul|Div|Linear|MkldnnLinear)Backward\d+")


@dataclass(frozen=True)
class Reading:
    """What autograd's graph says of layers.

    Attributes:
        proven: f is linear in pieces in their outputs.
        open: nothing is said, but samples are all alike (products of two things that depend on the layer).
        sampled: nothing is said, and one sample may be curved where another is not.
    """

    proven: frozenset[str]
    open: frozenset[str]
    sampled: frozenset[str]


def read(outputs: Tensor, calls: Calls) -> Reading:
    """What is behind each layer's output, by the names of the graph's nodes."""
    users = _users(outputs)
    kinds: dict[str, set[str]] = {"proven": set(), "open": set(), "sampled": set()}
    for name, made in calls.items():
        behind: set[Node] = set()
        stack = [user for call in made for user in users.get(call.edge.node, ())]
        while stack:
            node = stack.pop()
            if node not in behind:
                behind.add(node)
                stack += users.get(node, ())
        found = {_kind(node) for node in behind}
        kinds["sampled" if "sampled" in found else "open" if "open" in found else "proven"].add(name)
    return Reading(*(frozenset(names) for names in kinds.values()))


def _kind(node: Node) -> str:
    name = node.name()
    if _PIECEWISE.fullmatch(name):
        return "proven"
    inputs = [place for place, (source, _) in enumerate(node.next_functions) if source is not None]
    if _PRODUCT.fullmatch(name):
        alone = len(inputs) == 1 and not (name.startswith("Div") and inputs == [1])
        return "proven" if alone else "open"
    if re.fullmatch(r"NativeBatchNormBackward\d+", name):
        return "proven" if not getattr(node, "_saved_training", True) and inputs == [0] else "open"
    return "sampled"


def _users(outputs: Tensor) -> dict[Node, list[Node]]:
    """For each node of the outputs' graph, the nodes that take its result."""
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


def _bent(calls: Calls, gradients: Gradients, moved: Sequence[str]) -> set[str]:
    """Layers in ``moved`` whose gradient changes when all of these layers' outputs are moved."""
    pushed = torch.zeros((), dtype=torch.float64)
    for name in moved:
        for gradient in gradients[name]:
            if gradient.requires_grad:
                pushed = pushed.to(gradient.device) + (gradient * torch.randn_like(gradient)).sum(dtype=torch.float64)
    if not pushed.requires_grad:
        return set()
    edges = [call.edge for name in moved for call in calls[name]]
    try:
        changes = torch.autograd.grad(pushed, edges, retain_graph=True, allow_unused=True)
    except RuntimeError:  # an operation without a second derivative: nothing is certified
        return set(moved)
    owners = [name for name in moved for _ in calls[name]]
    return {name for name, change in zip(owners, changes, strict=True) if _nonzero(change)}


@torch.enable_grad()
def feed_themselves(calls: Calls) -> set[str]:
    """Layers of which the input of a call depends on the output of an earlier one."""
    return {name for name, made in calls.items() if _feeds_itself(made)}


def _feeds_itself(calls: Sequence[Call]) -> bool:
    """Whether the input of a call depends on the output of an earlier one."""
    edges = [call.edge for call in calls]
    for number, call in enumerate(calls):
        if number == 0 or call.inputs.grad_fn is None:
            continue
        found = torch.autograd.grad(call.inputs.sum(), edges[:number], retain_graph=True, allow_unused=True)
        if any(gradient is not None for gradient in found):
            return True
    return False


def _nonzero(change: Tensor | None) -> bool:
    return change is not None and bool((change.nan_to_num(0.0) != 0).any())
