"""Do the linear operations with a parameter by calls of its stand-ins."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ... import private
from .. import calling, kinds
from ..kinds import LINEAR, TRANSPOSED_LINEAR, Convolution, Linear, Together
from . import watched
from .experts import Route
from .operations import LinearOperation
from .watched import Watched

_LISTED = 6  # experts in a message
_OF_A_PART = "an operation on a part of it"


class Use(kinds.AnyUse):
    """Stand for the use of a parameter, or of some of its rows: None stands for all, a number for one of its matrices.

    ``routed`` marks an expert of a mixture. With a ``home`` kind, uses of all kinds count as one layer, whose matrix is
    that of this kind.
    """

    kind: Linear  # how the weight is a matrix; a guess by its shape before the layer ran
    weight: Tensor  # detached, in the operation's shape
    bias: Tensor | None  # of the last call

    def __init__(
        self,
        name: str,
        source: "Source",
        rows: slice | int | None = None,
        *,
        routed: bool = False,
        home: Linear | None = None,
    ) -> None:
        super().__init__()
        self.name, self.source, self.rows, self.routed = name, source, rows, routed
        self.refusal, self.ran = "", False
        self.named = self._several = self._settled = False
        weight = source.parameter.detach()
        self.weight, self.bias = weight if rows is None else weight[rows], None
        self.kind = _by_shape(self.weight) if home is None else Together(home)
        self._together = home is not None
        row = weight[0].numel()
        chosen = slice(rows, rows + 1) if isinstance(rows, int) else rows or slice(None)
        start, stop, _ = chosen.indices(len(weight))
        self.entries = range(start * row, stop * row)  # numbers of the parameter's entries
        self._run: Callable[[Tensor], Tensor] | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the result of the operation for which the layer stands."""
        assert self._run is not None, f"the use of {self.name} is called by nothing but the operation itself"
        return self._run(inputs)

    def takes(self, kind: Linear, weight: Tensor, inputs: Tensor, bias: Tensor | None) -> bool:
        """Return whether a call is possible for a layer, and has the same kind and shape as earlier ones.

        A layer that the user named, and that has several kinds in a dry run, counts all kinds from then on.
        """
        if self.ran and not self._together and kind is not self.kind and weight.shape == self.weight.shape:
            self._several = self.rows is None and not self.source.effective
            if self._several and self.named and not self._settled:
                self._together, self.kind = True, Together(self.kind)
        return (
            (self._together or not self.ran or kind is self.kind)
            and (weight.shape == self.weight.shape or not (self._together or self.ran))
            and inputs.is_floating_point() != kind.tokens
            and inputs.ndim >= kind.least_dims
            and (bias is None or (bias.ndim == 1 and bias.dtype == self.source.parameter.dtype))
        )

    @property
    def hint(self) -> str:
        """Return advice on uses of several kinds; empty if there are none, or if they count together already."""
        if not self._several or self._together:
            return ""
        return f" (in operations of several kinds; layers={self.name!r} takes all of its linear uses together)"

    def call(
        self, kind: Linear, weight: Tensor, inputs: Tensor, bias: Tensor | None, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return ``run(inputs)``, run as a call of this layer with this kind, weight and bias, so that hooks see it."""
        if not self.ran:
            self.kind, self.weight, self.ran = self.kind if self._together else kind, weight, True
        self.called_as = kind if self._together else None
        self._settled |= not calling.now.dry
        self.bias, self._run = bias, run
        try:
            outputs: Tensor = self(inputs)
        finally:
            self._run = None
        return outputs


@dataclass(eq=False)
class Source:
    """Hold a parameter of the model, and the stand-ins for its uses."""

    parameter: Tensor
    places: list[tuple[nn.Module, str]]  # the modules that hold it, each with its name there
    of_module: bool = False  # whether the layer has the name of the module that holds it
    effective: bool = False  # whether a tensor computed from it, with as many entries, counts as the weight
    uses: dict[str, Use] = field(default_factory=dict)  # by name; those of parts follow that of the whole
    shared: bool = False  # whether modules that are layers hold it too
    behind: "set[Source]" = field(default_factory=set)  # the parameters from which the weight was computed
    nodes: set[Node] = field(default_factory=set)  # of autograd's graph, reached only by uses outside of stand-ins
    _flag: bool = False  # whether the parameter required a gradient before
    route: Route | None = None  # the samples of the rows of an expert's next operation; None if it is no expert
    varies: bool = False  # whether the tensor computed from it differed between calls
    attached: Mapping[str, Use] = field(default_factory=dict)  # the uses for which the parameter is watched now
    _of_entries: dict[range, Use] = field(default_factory=dict)  # the attached uses by the entries of the parameter
    _watched: dict[str, Use] = field(default_factory=dict)  # all uses that were ever attached
    _functions: dict[str, None] = field(default_factory=dict)  # other functions that use it

    def attach(self, uses: Mapping[str, Use]) -> None:
        """Watch the parameter for these uses; without any, put the parameter back."""
        self.attached = dict(uses)
        self._watched |= uses
        self._of_entries = {use.entries: use for use in uses.values()}
        if bool(uses) == bool(self.nodes):
            return
        held, self.nodes = self.parameter, set()
        if uses:
            self._flag = self.parameter.requires_grad
            held, node = watched.leaf(self.parameter, self)
            self.nodes.add(node)
            if not self.shared:
                self.nodes.add(get_gradient_edge(self.parameter.requires_grad_()).node)
        else:
            self.parameter.requires_grad_(self._flag)
        for module, key in self.places:
            module._parameters[key] = held  # type: ignore[assignment]

    def why_left_out(self) -> str:
        """Return why layers do not have all of a parameter that was watched; empty if that is not known."""
        parts = [use for use in self.uses.values() if use.rows is None or use.routed]
        refusal = next((use.refusal for use in parts if use.refusal), "")
        asked = [use for use in parts if use.name in self._watched]
        idle = [use.name.rpartition("[")[2].rstrip("]") for use in asked if use.routed and not use.ran]
        if not refusal and 0 < len(idle) < len(parts):
            more = f" and {len(idle) - _LISTED} more" if len(idle) > _LISTED else ""
            experts = "expert" if len(idle) == 1 else "experts"
            return f"no token of the data is routed to {experts} {', '.join(idle[:_LISTED])}{more}"
        if refusal or not self._watched or any(use.ran for use in self.uses.values()):
            return refusal
        return self.why_otherwise() if self._functions else "the forward pass has no operation with it"

    @property
    def name(self) -> str:
        """Return the name of the layer, or of the first of several parts."""
        return next(iter(self.attached or self.uses), "")

    def is_attached(self, part: Tensor) -> bool:
        """Return whether the parameter is watched for exactly this view of it."""
        start = part.storage_offset() - self.parameter.storage_offset()
        return range(start, start + part.numel()) in self._of_entries

    def refuse(self, use: Use, why: str) -> None:
        """Leave a use out from now on."""
        use.refusal = use.refusal or why
        if use.name in self.attached:
            self.attach({name: other for name, other in self.attached.items() if other is not use})

    def used(self, operation: LinearOperation) -> Tensor | None:
        """Return the result of an operation on the weight, or None to let it run as any other."""
        if not self.attached:  # the model has kept a watched tensor from before
            return None
        if private.is_wrapped(operation.inputs):
            return None  # hooks do not work under vmap
        weight = operation.weight if calling.now.accounting else operation.weight.detach()
        part = watched.view_of(operation.weight)  # type: ignore[arg-type]
        if part is not None:
            return self._part(operation, weight, part)
        return self._computed(operation, weight) if self.effective else None

    def note(self, name: str) -> None:
        """Note another function that used the weight, by its name and why it is no layer's operation."""
        self._functions[name] = None

    def why_otherwise(self) -> str:
        """Return which other functions use the weight, as a reason."""
        parts = [name for name, use in self.uses.items() if isinstance(use.rows, slice)]
        hint = f" ({', '.join(parts)} may be measured instead)" if parts else ""
        hint += "".join(use.hint for use in self.uses.values())
        return f"its weight is used in {', '.join(self._functions) or 'what torch does not tell of'}{hint}"

    def _part(self, operation: LinearOperation, weight: Tensor, part: Tensor) -> Tensor | None:
        """Do an operation on a view of the parameter."""
        kind, rows = operation.kind, operation.rows(part)
        if kind is LINEAR:
            if _is_broadcast(operation.inputs, rows):
                return None
            while rows.ndim > 2 and (rows.shape[0] == 1 or rows.stride(0) == 0):
                rows = rows[0]
            if rows.ndim != 2:
                return None
            if not rows.is_contiguous() and rows.t().is_contiguous():
                kind, rows = TRANSPOSED_LINEAR, rows.t()
        if not rows.is_contiguous() or rows.untyped_storage()._cdata != self.parameter.untyped_storage()._cdata:
            if part.numel() < self.parameter.numel():
                self._functions[_OF_A_PART] = None
            return None
        start = rows.storage_offset() - self.parameter.storage_offset()
        entries = range(start, start + rows.numel())
        exact = self._of_entries.get(entries)
        if exact is not None:
            return self._called(exact, kind, rows, operation, weight)
        touched = [
            use
            for use in self.attached.values()
            if use.entries.start < entries.stop and entries.start < use.entries.stop
        ]
        inside = [use for use in touched if use.entries.start in entries and use.entries.stop <= entries.stop]
        if not touched:  # the result has a graph, or it would look as if the model detached it
            weight = operation.weight.detach().requires_grad_(not operation.inputs.requires_grad)
            return operation.back(operation.run(operation.inputs, weight, operation.bias))
        if not inside or kind is not LINEAR or weight.shape != rows.shape:
            self._functions[_OF_A_PART] = None
            return None
        return self._cut(sorted(inside, key=lambda use: use.entries.start), entries, rows, operation, weight)

    def _cut(
        self, uses: Iterable[Use], entries: range, rows: Tensor, operation: LinearOperation, weight: Tensor
    ) -> Tensor | None:
        """Do an operation on several parts of the parameter's rows, one by one."""
        width, results, done = rows.shape[1], [], 0
        parts: list[tuple[Use | None, slice]] = []
        for use in uses:
            start, stop = ((place - entries.start) // width for place in (use.entries.start, use.entries.stop))
            parts += [(None, slice(done, start))] * (start > done) + [(use, slice(start, stop))]
            done = stop
        parts += [(None, slice(done, len(rows)))] * (len(rows) > done)
        for part, place in parts:
            bias = None if operation.bias is None else operation.bias[place]
            if part is None:
                results.append(operation.run(operation.inputs, weight[place].detach(), bias))
                continue
            some = LinearOperation(operation.weight, operation.inputs, bias, operation.kind, operation.run)
            result = self._called(part, LINEAR, rows[place], some, weight[place])
            if result is None:
                return None
            results.append(result)
        return operation.back(torch.cat(results, dim=-1))

    def _computed(self, operation: LinearOperation, weight: Tensor) -> Tensor | None:
        """Do an operation on a tensor that was computed from the parameter, if it is the same at every call."""
        (use,) = self.uses.values()
        if operation.rows(weight) is not weight or use.name not in self.attached:
            return None
        if use.ran and not (weight.shape == use.weight.shape and torch.equal(weight, use.weight)):
            self.varies = True
            return None
        behind = _leaves(operation.weight.grad_fn)
        if not all(isinstance(leaf, nn.Parameter) for leaf in behind):
            return None
        sources = {leaf.source for leaf in behind if isinstance(leaf, Watched)}
        if self not in sources and torch.is_grad_enabled():
            return None
        self.behind |= sources - {self}
        return self._called(use, operation.kind, weight.detach(), operation, weight)

    def _called(
        self, use: Use, kind: Linear, rows: Tensor, operation: LinearOperation, weight: Tensor
    ) -> Tensor | None:
        if not use.takes(kind, rows, operation.inputs, operation.bias):
            return None
        inputs, bias = operation.inputs, operation.bias
        return operation.back(use.call(kind, rows, inputs, bias, lambda given: operation.run(given, weight, bias)))


def _leaves(node: Node | None) -> list[Tensor | None]:
    """Return the leaves of a node's graph, up to the first that is no parameter; None is an unknown leaf."""
    leaves: list[Tensor | None] = []
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            leaves.append(getattr(node, "variable", None))
            if not isinstance(leaves[-1], nn.Parameter):
                break
        stack += [source for source, _ in node.next_functions]
    return leaves


def _by_shape(weight: Tensor) -> Linear:
    """Return the most likely kind of a layer with such a weight."""
    space = weight.ndim - 2
    if space not in (1, 2, 3):
        return LINEAR
    return Convolution(weight.shape[2:], (1,) * space, (0,) * space, (1,) * space, 1, "zeros")


def _is_broadcast(inputs: Tensor, rows: Tensor) -> bool:
    """Return whether a product has leading dimensions that its inputs lack, or have with size 1."""
    sizes = inputs.shape[:-2]
    return rows.ndim > 2 and torch.broadcast_shapes(sizes, rows.shape[:-2]) != sizes
