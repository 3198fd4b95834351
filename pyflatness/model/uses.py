"""Stand in for weights that no layer of a known kind has: parameters that modules use in functions, as attention does.

A stand-in is a module that is no part of the model, named after the parameter, and it is hooked, selected and measured
as layers are. While it is :func:`attached` the parameter's place in the model holds a watched tensor (:mod:`.watched`),
and each linear operation with it, or with some of its rows, is done by a call of the stand-in. The result is the same.
What the weight is used in first says of which kind the layer is.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils import parametrize

from ..report import coverage
from . import calling, experts, kinds, watched
from .experts import Route
from .kinds import Convolution, Linear, TransposedLinear
from .operations import LINEAR, Operation
from .watched import Watched

_TRANSPOSED = TransposedLinear()
_LISTED = 6  # experts in a message
_MOST_DIMENSIONS = 5  # of a weight: those of filters in three dimensions
_WITH_FUNCTIONS = (nn.MultiheadAttention, nn.Module, nn.ParameterList, nn.ParameterDict)  # classes of torch's


class Use(kinds.Use):
    """Stand for the use of a parameter, or of some of its rows.

    Args:
        name: of the layer.
        source: the parameter.
        rows: which of its rows; None: all. A number is an expert of a mixture.

    Attributes:
        weight: detached, as the operation has it that the parameter is used in.
        bias: of the last call.
        kind: how the weight is a matrix: as its shape says, until the layer ran.
        routed: whether the layer is an expert, which runs where a token is routed to it.
        ran: whether it did.
        refusal: why it cannot be measured; empty as long as it can.
    """

    kind: Linear
    weight: Tensor
    bias: Tensor | None

    def __init__(self, name: str, source: "Source", rows: slice | int | None = None) -> None:
        super().__init__()
        self.name, self.source, self.rows, self.refusal, self.ran = name, source, rows, "", False
        weight = source.parameter.detach()
        self.weight, self.bias = weight if rows is None else weight[rows], None
        self.kind, self.routed = _by_shape(self.weight), isinstance(rows, int)
        row = weight[0].numel()
        start, stop, _ = _as_slice(rows).indices(len(weight))
        self.entries = range(start * row, stop * row)  # of the parameter
        self._run: Callable[[Tensor], Tensor] | None = None

    @property
    def route(self) -> Route | None:
        """Return which rows of the last call are of which sample, of an expert."""
        return self.source.route

    def forward(self, inputs: Tensor) -> Tensor:
        """Do the operation that the layer stands for."""
        assert self._run is not None, f"the use of {self.name} is called by nothing but the operation itself"
        return self._run(inputs)

    def takes(self, kind: Linear, weight: Tensor, inputs: Tensor, bias: Tensor | None) -> bool:
        """Return whether a call of this kind is one that layers can have, and of the kind that the others are."""
        return (
            (not self.ran or (kind is self.kind and weight.shape == self.weight.shape))
            and inputs.is_floating_point()
            and inputs.ndim >= kind.space + 2
            and (bias is None or (bias.ndim == 1 and bias.dtype == self.source.parameter.dtype))
        )

    def call(
        self, kind: Linear, weight: Tensor, inputs: Tensor, bias: Tensor | None, run: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return ``run(inputs)``, seen by the hooks of a layer of this kind, weight and bias."""
        if not self.ran:
            self.kind, self.weight, self.ran = kind, weight, True
        self.bias, self._run = bias, run
        try:
            outputs: Tensor = self(inputs)
        finally:
            self._run = None
        return outputs


@dataclass(eq=False)
class Source:
    """Hold a parameter of the model's, and what stands for its uses.

    Attributes:
        parameter: the user's.
        places: the modules that hold it, each with its name there.
        uses: by name; of parts of it behind that of the whole.
        effective: whether a weight that is computed of it counts as it, as of parametrised layers.
        shared: whether modules beside these have it, as layers of their own.
        behind: the parameters that the weight was computed of.
        nodes: where uses that are not followed end in autograd's graph, while it is watched: by way of the module, or
            of a reference that was kept elsewhere, in a list or a function.
        route: see :class:`.watched.Source`.
    """

    parameter: Tensor
    places: list[tuple[nn.Module, str]]
    effective: bool = False
    uses: dict[str, Use] = field(default_factory=dict)
    shared: bool = False
    behind: "set[Source]" = field(default_factory=set)
    nodes: set[Node] = field(default_factory=set)
    _flag: bool = False  # whether the parameter required a gradient before
    route: Route | None = None
    _attached: dict[str, Use] = field(default_factory=dict)
    _of_entries: dict[range, Use] = field(default_factory=dict)  # the same by the entries of the parameter
    _watched: bool = False  # ever
    _functions: dict[str, None] = field(default_factory=dict)  # that it takes part in besides

    def attach(self, uses: Mapping[str, Use]) -> None:
        """Watch the parameter for these of its uses, or for none."""
        self._attached, self._watched = dict(uses), self._watched or bool(uses)
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

    def why_unused(self) -> str:
        """Return why a parameter that was watched has no layer; empty if it has, or was not watched."""
        if not self._watched or any(use.ran for use in self.uses.values()):
            return ""
        return self.why_otherwise() if self._functions else "the forward pass has no operation with it"

    def why_left_out(self) -> str:
        """Return why layers do not have all of a parameter that was watched; empty if that is not known."""
        parts = [use for use in self.uses.values() if use.rows is None or use.routed]
        refusal = next((use.refusal for use in parts if use.refusal), "")
        idle = [use.name.rpartition("[")[2].rstrip("]") for use in parts if use.routed and not use.ran]
        if not refusal and 0 < len(idle) < len(parts):
            more = f" and {len(idle) - _LISTED} more" if len(idle) > _LISTED else ""
            return f"no token of the data is routed to expert {', '.join(idle[:_LISTED])}{more}"
        return refusal or self.why_unused()

    @property
    def attached(self) -> dict[str, Use]:
        """Return the uses that are watched for now."""
        return dict(self._attached)

    def is_attached(self, part: Tensor) -> bool:
        """See :class:`.watched.Source`."""
        start = part.storage_offset() - self.parameter.storage_offset()
        return range(start, start + part.numel()) in self._of_entries

    def refuse(self, use: Use, why: str) -> None:
        """Leave a use out from now on."""
        use.refusal = use.refusal or why
        if use.name in self._attached:
            self.attach({name: other for name, other in self._attached.items() if other is not use})

    def used(self, operation: Operation) -> Tensor | None:
        """See :class:`.watched.Source`."""
        if torch._C._functorch.is_functorch_wrapped_tensor(operation.inputs):
            return None  # vmap does not go with hooks
        weight = operation.weight.detach()
        part = watched.view_of(operation.weight)  # type: ignore[arg-type]
        if part is not None:
            return self._part(operation, weight, part)
        return self._computed(operation, weight) if self.effective else None

    def note(self, name: str) -> None:
        """See :class:`.watched.Source`."""
        self._functions[name.strip("_")] = None

    def why_otherwise(self) -> str:
        """Return in what else the weight takes part."""
        parts = [name for name, use in self.uses.items() if isinstance(use.rows, slice)]
        hint = f" ({', '.join(parts)} may be measured instead)" if parts else ""
        return f"its weight is used in {', '.join(self._functions) or 'what torch does not tell of'}{hint}"

    def _part(self, operation: Operation, weight: Tensor, part: Tensor) -> Tensor | None:
        """Do an operation on a view of the parameter."""
        kind, rows = operation.kind, part
        if not kind.space:
            rows = operation.rows(part)
            if _is_broadcast(operation.inputs, rows):
                return None
            while rows.ndim > 2 and (rows.shape[0] == 1 or rows.stride(0) == 0):
                rows = rows[0]
            if rows.ndim != 2:
                return None
            if not rows.is_contiguous() and rows.t().is_contiguous():
                kind, rows = _TRANSPOSED, rows.t()
        if not rows.is_contiguous() or rows.untyped_storage()._cdata != self.parameter.untyped_storage()._cdata:
            return None
        start = rows.storage_offset() - self.parameter.storage_offset()
        entries = range(start, start + rows.numel())
        exact = self._of_entries.get(entries)
        if exact is not None:
            return self._called(exact, kind, rows, operation, weight)
        touched = [use for use in self._attached.values() if _overlap(use.entries, entries)]
        inside = [use for use in touched if use.entries.start in entries and use.entries.stop <= entries.stop]
        if not touched:
            return operation.back(operation.run(operation.inputs, weight, operation.bias))
        if not inside or kind is not LINEAR or weight.shape != rows.shape:
            self._functions["an operation on a part of it"] = None
            return None
        return self._cut(sorted(inside, key=lambda use: use.entries.start), entries, rows, operation, weight)

    def _cut(
        self, uses: Iterable[Use], entries: range, rows: Tensor, operation: Operation, weight: Tensor
    ) -> Tensor | None:
        """Do an operation on several parts of the parameter's rows one by one."""
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
                results.append(operation.run(operation.inputs, weight[place], bias))
                continue
            some = Operation(operation.weight, operation.inputs, bias, operation.kind, operation.run)
            result = self._called(part, LINEAR, rows[place], some, weight[place])
            if result is None:
                return None
            results.append(result)
        return operation.back(torch.cat(results, dim=-1))

    def _computed(self, operation: Operation, weight: Tensor) -> Tensor | None:
        """Do an operation on what was computed of the parameter, the same at every call."""
        (use,) = self.uses.values()
        if operation.rows(weight) is not weight or use.name not in self._attached:
            return None
        if use.ran and not (weight.shape == use.weight.shape and torch.equal(weight, use.weight)):
            return None
        behind = _leaves(operation.weight.grad_fn)
        if not all(isinstance(leaf, nn.Parameter) for leaf in behind):
            return None
        sources = {leaf.source for leaf in behind if isinstance(leaf, Watched)}
        if self not in sources and torch.is_grad_enabled():
            return None
        self.behind |= {source for source in sources if isinstance(source, Source) and source is not self}
        return self._called(use, operation.kind, weight, operation, weight)

    def _called(self, use: Use, kind: Linear, rows: Tensor, operation: Operation, weight: Tensor) -> Tensor | None:
        if not use.takes(kind, rows, operation.inputs, operation.bias):
            return None
        inputs, bias = operation.inputs, operation.bias
        return operation.back(use.call(kind, rows, inputs, bias, lambda given: operation.run(given, weight, bias)))


def _leaves(node: Node | None) -> list[Tensor]:
    """Return the leaves that a node's result depends on, or enough of them."""
    leaves: list[Tensor] = []
    seen: set[Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            leaves.append(getattr(node, "variable", torch.empty(0)))
            if not isinstance(leaves[-1], nn.Parameter):
                break
        stack += [source for source, _ in node.next_functions]
    return leaves


def _by_shape(weight: Tensor) -> Linear:
    """Return the kind that a layer with such a weight has most likely."""
    space = weight.ndim - 2
    if space not in (1, 2, 3):
        return LINEAR
    return Convolution(weight.shape[2:], (1,) * space, (0,) * space, (1,) * space, 1, "zeros")


def _is_broadcast(inputs: Tensor, rows: Tensor) -> bool:
    """Return whether a product has dimensions in front that its inputs have not, or not at that length."""
    sizes = inputs.shape[:-2]
    return rows.ndim > 2 and torch.broadcast_shapes(sizes, rows.shape[:-2]) != sizes


def _as_slice(rows: slice | int | None) -> slice:
    return slice(rows, rows + 1) if isinstance(rows, int) else rows or slice(None)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


# ----------------------------------------------------------------------------------------------------------- a model's

_held: "weakref.WeakKeyDictionary[nn.Module, dict[str, Use] | None]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Let :func:`of` return the same stand-ins for a model inside."""
    if model in _held:
        yield
        return
    _held[model] = None
    try:
        yield
    finally:
        del _held[model]


def of(model: nn.Module) -> dict[str, Use]:
    """Return the stand-ins for a model's weights by name, in its order."""
    found = _held.get(model)
    if found is None:
        found = {name: use for source in _sources(model) for name, use in source.uses.items()}
        if model in _held:
            _held[model] = found
    return found


def layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of this name: a stand-in, or a module of the model."""
    found = of(model).get(name)
    return model.get_submodule(name) if found is None else found


@contextlib.contextmanager
def attached(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let the weights be used by way of those modules that stand in for them, inside."""
    by_source: dict[Source, dict[str, Use]] = {}
    for name, module in modules.items():
        if isinstance(module, Use) and not module.refusal:
            by_source.setdefault(module.source, {})[name] = module
    before = {source: source.attached for source in by_source}
    mixtures = {module for source in by_source for module, _ in source.places if experts.weights(module)}
    try:
        with contextlib.ExitStack() as stack:
            for module in mixtures:
                stack.enter_context(calling.replaced_forward(module, experts.Forward(module)))
            for source, uses in by_source.items():
                source.attach(before[source] | uses)
            yield
    finally:
        for source, outer in before.items():
            source.attach({name: use for name, use in outer.items() if not use.refusal})


def otherwise(modules: Mapping[str, nn.Module], called: Collection[str], nodes: Collection[Node]) -> dict[str, str]:
    """Return the stand-ins among some layers that do not have all uses of their weights in a run, and why.

    Args:
        modules: the layers, inside :func:`attached`.
        called: names of those that were called.
        nodes: of the outputs' graph.
    """
    found = {}
    stand_ins = {name: use for name, use in modules.items() if isinstance(use, Use) and not use.refusal}
    behind = {source: name for name, use in stand_ins.items() if name in called for source in use.source.behind}
    for name, use in stand_ins.items():
        parts = [other for other in use.source.uses if other in called and other != name]
        if not use.source.nodes.isdisjoint(nodes):
            found[name] = use.source.why_otherwise()
        elif name in called and use.source in behind:
            found[name] = f"the weight of {behind[use.source]} is computed of it too"
        elif name in called and use.rows is None and parts:
            found[name] = f"its weight is used whole in one place and in parts in another: {', '.join(parts)}"
    return found


def with_siblings(modules: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return why some layers are to be left out, and with an expert of a mixture all others, whose rows are as its own.

    Args:
        modules: the layers.
        reasons: of some, by name.
    """
    found = dict(reasons)
    routed = {name: use.source.places for name, use in modules.items() if isinstance(use, Use) and use.routed}
    mixtures = {place[0]: why for name, why in reasons.items() for place in routed.get(name, ())}
    for name, places in routed.items() if mixtures else ():
        why = next((mixtures[module] for module, _ in places if module in mixtures), None)
        if why is not None:
            found.setdefault(name, why)
    return found


def entries(layers: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], int]:
    """Return how many entries of parameters some layers have, by the module that holds one and its name there.

    Of a parametrised layer the parameters behind its weight count as its own.
    """
    found: dict[tuple[nn.Module, str], int] = {}
    for layer in layers:
        if isinstance(layer, Use):
            for place in layer.source.places:
                found[place] = found.get(place, 0) + len(layer.entries)
            behind = [source for source in layer.source.behind if not any(u.refusal for u in source.uses.values())]
            found |= {place: source.parameter.numel() for source in behind for place in source.places}
            continue
        for part in layer.modules():
            found |= {(part, name): p.numel() for name, p in part._parameters.items() if p is not None}
    return found


def reasons(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return why no layer has some of a model's parameters, where that is known, by their names.

    Args:
        model: inside of :func:`held`, after it was measured.
        names: of the parameters.
    """
    modules = dict(model.named_modules())
    by_place = {place: use.source for use in of(model).values() for place in use.source.places}
    found = {}
    for name in names:
        module = modules[name.rpartition(".")[0]]
        source = by_place.get((module, name.rpartition(".")[2]))
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            found[name] = f"nn.{type(module).__name__} computes with it in a kernel of its own"
        elif source is not None and (why := source.why_left_out()):
            found[name] = why
    return found


def _sources(model: nn.Module) -> list[Source]:
    """Return the parameters of a model that stand-ins may have, in its order."""
    named = [*model.named_modules()]
    outputs = {module.out_proj for _, module in named if isinstance(module, nn.MultiheadAttention)}
    layers = [module for _, module in named if kinds.is_plain(module) and module not in outputs]
    computed = [module for _, module in named if isinstance(module, parametrize.ParametrizationList)]
    others = {part for module in (*layers, *computed) for part in module.modules()}
    others |= {module for _, module in named if _is_of_torch(module) and module not in outputs}
    own = {id(parameter) for module in others for parameter in module._parameters.values()}
    found: dict[int, Source] = {}
    for prefix, module in named:
        for key, parameter in module._parameters.items() if module not in others else ():
            if parameter is None or not _is_candidate(module, key, parameter):
                continue
            effective = key == "weight" and kinds.base(module) is not None and module not in outputs
            if id(parameter) in own and not effective:
                continue
            if id(parameter) in found and not effective:
                found[id(parameter)].places.append((module, key))
                continue
            source = Source(parameter, [(module, key)], effective)
            of_module = effective or module in outputs
            name = prefix if of_module else ".".join(filter(None, (prefix, key)))
            parts = _parts(module, key, parameter)
            source.uses = {name + label: Use(name + label, source, rows) for label, rows in parts.items()}
            found[id(source) if effective else id(parameter)] = source
    holders = Counter(id(p) for _, module in named for p in module._parameters.values())
    for source in found.values():
        source.shared = holders[id(source.parameter)] > len(source.places)
    return [*found.values()]


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch's that computes with parameters of its own, not in functions of torch."""
    kind = type(module)
    return kind.__module__.startswith("torch.nn.modules") and kind not in _WITH_FUNCTIONS


def _is_candidate(module: nn.Module, key: str, parameter: Tensor) -> bool:
    """Return whether a parameter may turn out to be the weight of a linear operation, by its shape."""
    return (
        coverage.is_weight(module, key, parameter)
        and parameter.ndim <= _MOST_DIMENSIONS
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and not parameter.is_meta
        and parameter.numel() > 0
    )


def _parts(module: nn.Module, key: str, parameter: Tensor) -> dict[str, slice | int | None]:
    """Return the rows of a parameter that may be used, and measured, by themselves, and with None the whole of it."""
    if key in experts.weights(module):
        return {f"[{expert}]": expert for expert in range(len(parameter))}
    if not isinstance(module, nn.MultiheadAttention) or key != "in_proj_weight":
        return {"": None}
    size = module.embed_dim
    return {"": None, **{f"[{label}]": slice(place * size, (place + 1) * size) for place, label in enumerate("qkv")}}
