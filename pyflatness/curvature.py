"""Whether the GGN value of a layer is the Hessian's: whether the model is locally linear in the layer's weight.

κ of the GGN equals κ of the Hessian exactly where f is locally linear in w: behind ReLUs, pooling, eval BatchNorm,
sums. It is certified on a few samples rather than read off the module types, and not by comparing the two values, which
agree at a trained minimum whatever the network is (the residual vanishes there).
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .tape import Call

Calls = Mapping[str, Sequence[Call]]
Gradients = Mapping[str, Sequence[Tensor]]


@torch.enable_grad()
def linear_layers(calls: Calls, gradients: Gradients) -> dict[str, bool]:
    """For each layer, whether second derivatives of ⟨v, f⟩ in its output along a random direction vanish exactly.

    All layers are moved at once first: behind ReLUs f is linear in all outputs jointly. Where that gives more than zero
    for a layer (it may be multiplied by another), the layer is moved alone. A layer that is called on its own output is
    not linear in its weight even so.

    Args:
        calls: of each layer, in one forward pass.
        gradients: of ⟨v, f⟩ in the calls' outputs, with a graph.
    """
    everywhere = _bends(calls, gradients, list(calls))
    return {
        name: not _feeds_itself(calls[name]) and not (everywhere[name] and _bends(calls, gradients, [name])[name])
        for name in calls
    }


# Operations that are linear, bilinear or linear in pieces wherever they are evaluated, as autograd's graph names them.
# Those that are curved in a part of their domain only (ELU, Hardswish, softplus, a `where` between branches, functions
# of users) are not among them.
_SAME_EVERYWHERE = re.compile(
    r"(Relu|LeakyRelu|Hardtanh|Threshold|PreluKernel|Abs|Clamp\w*|Max|Min|Amax|Amin|Maximum|Minimum|Gather|Sort|Topk|"
    r"\w*Convolution|Addmm|Mm|Bmm|Baddbmm|Mv|Dot|Addbmm|Mul|Div|Add|Sub|Rsub|Neg|Sum|Mean|Cumsum|"
    r"\w*BatchNorm|\w*Pool[123]?D?\w*|\w*Pad\w*|Upsample\w+|GridSampler\w+|PixelShuffle|"
    r"View|UnsafeView|ReshapeAlias|Reshape|Alias|T|Transpose|Permute|Movedim|Unsqueeze|Squeeze|Expand|Repeat|Flatten|"
    r"Unflatten|Cat|Stack|Split\w*|Unsafe\w+|Chunk|Slice|Select|Narrow|Index|IndexSelect|Unbind|Unfold|Flip|Roll|Diagonal|"
    r"AsStrided|Clone|Copy|CopySlices|Contiguous|ToCopy|Detach|MaskedFill|Col2Im|Im2Col|Linear|MkldnnLinear)"
    r"Backward\d*"
)


def depends_on_sample(outputs: Tensor, calls: Calls) -> set[str]:
    """Layers behind which there is an operation that may be curved at some samples and not at others."""
    users = _users(outputs)
    found = set()
    for name, made in calls.items():
        behind, stack = set(), [user for call in made for user in users.get(call.edge.node, ())]
        while stack:
            node = stack.pop()
            if node not in behind:
                behind.add(node)
                stack += users.get(node, ())
        if not all(_SAME_EVERYWHERE.fullmatch(node.name()) for node in behind):
            found.add(name)
    return found


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


def _bends(calls: Calls, gradients: Gradients, moved: Sequence[str]) -> dict[str, bool]:
    """For each layer in ``moved``, whether its gradient changes when all of these layers' outputs are moved."""
    pushed = torch.zeros((), dtype=torch.float64)
    for name in moved:
        for gradient in gradients[name]:
            if gradient.requires_grad:
                pushed = pushed.to(gradient.device) + (gradient * torch.randn_like(gradient)).sum(dtype=torch.float64)
    if not pushed.requires_grad:
        return dict.fromkeys(moved, False)
    edges = [call.edge for name in moved for call in calls[name]]
    try:
        changes = torch.autograd.grad(pushed, edges, retain_graph=True, allow_unused=True)
    except RuntimeError:  # an operation without a second derivative: nothing is certified
        return dict.fromkeys(moved, True)
    owners = [name for name in moved for _ in calls[name]]
    bent = {name for name, change in zip(owners, changes, strict=True) if _nonzero(change)}
    return {name: name in bent for name in moved}


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
