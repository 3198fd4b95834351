"""Record the inputs of chosen layers in a forward pass, and the edges of their outputs in autograd's graph.

Outputs are kept as gradient edges, so that an in-place operation behind a layer does no harm. An exception is an output
that is a view, as from ``F.linear`` with a bias in three dimensions or more: the operation becomes a part of the
history of the viewed tensor, and the view's edge is on no path to the model's outputs. So a view is replaced by an
alias with a history of its own.

The graph starts at the first chosen layer: parameters require no gradients, and an input that requires none is replaced
by an alias that does.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from .. import private
from ..errors import InputError, NoGraphError
from ..messages import check_tensor
from ..model import layers, spread, walk
from ..model.calling import end_transforms, is_transformed, now, only_ours, version
from ..model.kinds import Linear, is_of_torch
from ..model.parameters import requiring
from ..model.uses import Use
from ..model.uses.experts import Route
from . import backward


@dataclass(frozen=True)
class RecordedCall:
    """Hold one call of a layer."""

    inputs: Tensor  # with their graph
    version: int  # of the inputs' contents, as torch counts them, at the call
    edge: GradientEdge  # of the output
    input_edge: GradientEdge | None  # of the inputs; None for a view that is modified in place later
    output: Tensor  # an empty tensor of the output's shape and dtype, on the meta device
    kind: Linear
    coefficients: Tensor | None = None  # of tokens, see :meth:`.kinds.Linear.coefficients`
    route: Route | None = None  # the samples of the rows, of an expert that tokens are routed to
    sources: tuple[Node, ...] = ()  # of the tensors given; known if uses of weights are counted


class Recorder:
    """Hook layers and keep their calls, by name, of the last forward pass inside :meth:`recording`.

    Calls on an ``empty`` tensor, as of an expert without tokens, and ``transformed`` calls do not count.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules, self._active, self._checking = modules, False, False
        self.stand_ins = [module for module in modules.values() if isinstance(module, Use)]  # for uses of parameters
        # A stand-in for uses of a weight has the kind of its last call.
        self._kinds = {name: layers.kind_of(module) for name, module in modules.items() if not isinstance(module, Use)}
        self._weights = {name: module._parameters.get("weight") for name, module in modules.items()}
        self._copied: set[str] = set()
        self._shared: set[str] = set()
        self._samples = 1
        self._computed: list[tuple[str, nn.Module, Tensor | bool]] = []  # whether outputs are W φ + b
        self.calls: dict[str, list[RecordedCall]] = {}
        self.empty: set[str] = set()
        self.transformed: set[str] = set()
        self.running: list[str] = []  # the layers whose calls are under way

    @property
    def needs_samples(self) -> bool:
        """Return whether a layer's calls depend on the number of samples: shared embeddings, and routed experts."""
        return bool(self._shared) or any(use.routed for use in self.stand_ins)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks inside."""
        handles = []
        try:
            for name, module in self._modules.items():
                handles.append(module.register_forward_pre_hook(self._alias(name), with_kwargs=True))
                # Before the user's hooks, which may replace the layer's own output.
                handles.append(module.register_forward_hook(self._keep(name), with_kwargs=True, prepend=True))
            yield
        finally:
            self.calls.clear()
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def recording(self, samples: int = 1, *, checking: bool = False) -> Iterator[None]:
        """Keep calls inside, on so many samples, but not later recomputation; check that they are W φ + b if asked."""
        self.calls.clear()
        self.running.clear()
        self._computed.clear()
        self._active, self._checking, self._samples = True, checking, samples
        try:
            with torch.enable_grad():
                yield
            self._check_computed()
        finally:
            self._active = False

    def gradients(
        self,
        outputs: Tensor,
        cotangent: Tensor,
        names: Iterable[str] | None = None,
        *,
        create_graph: bool = False,
        elsewhere: Mapping[str, GradientEdge] = {},
        at_edges: Mapping[str, GradientEdge] = {},
    ) -> dict[str, list[Tensor]]:
        """Return gradients of ⟨cotangent, outputs⟩ in the output of every call of some layers, or of all.

        They are zeros without a path. For a layer in ``elsewhere``, called once, the gradient is at that edge instead;
        for one in ``at_edges`` the gradient at that edge comes after those of its calls.
        """
        made = {name: self.calls[name] for name in (self.calls if names is None else names)}
        edges = {name: [elsewhere.get(name, call.edge) for call in calls] for name, calls in made.items()}
        for name, edge in at_edges.items():
            edges[name].append(edge)
        flat = [edge for several in edges.values() for edge in several]
        found: Sequence[Tensor | None] = [None] * len(flat)
        if outputs.requires_grad:
            found = backward.gradients((outputs,), (cotangent,), flat, create_graph=create_graph)
        rest = iter([None if gradient is None else spread.full(gradient) for gradient in found])
        return {name: [or_zeros(next(rest), edge) for edge in several] for name, several in edges.items()}

    def overwritten(self) -> set[str]:
        """Return layers whose kept input was modified in place since; from now on a copy of it is kept."""
        names = {name for name, calls in self.calls.items() for c in calls if version(c.inputs) != c.version}
        self._copied |= names
        return names

    def share(self, name: str, *, shared: bool) -> None:
        """Set whether an embedding looks up tokens for all samples at once, and is recorded as if for each."""
        self._shared = self._shared | {name} if shared else self._shared - {name}

    def _kind(self, name: str, module: nn.Module) -> Linear:
        return self._kinds.get(name) or layers.kind_of_call(module)

    def _alias(self, name: str) -> Any:
        def alias(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.running.append(name)
            if now.aside or is_transformed((*args, *kwargs.values())):
                return None
            if self._active and not torch.is_grad_enabled():
                raise NoGraphError(
                    f"layer {name!r} runs without recording a graph: under torch.no_grad() inside the model, or in "
                    "reentrant activation checkpointing (pass use_reentrant=False to torch.utils.checkpoint)"
                ).about({name: "it runs without recording a graph"})
            if self._kind(name, module).tokens:
                return None
            key = next(iter(kwargs), None) if not args else None
            inputs = args[0] if args else kwargs.get(str(key))
            if not isinstance(inputs, Tensor):
                return None
            with private.without_functions():
                check_tensor(f"layer {name!r}: input", inputs, may_be_fake=True)  # in a planned dry run
                if inputs.requires_grad or not torch.is_grad_enabled():
                    return None  # otherwise also in backward passes: checkpointing recomputes it
                layers.check_dtype(f"layer {name!r}: input", inputs.dtype)
            inputs = (inputs.clone() if inputs.is_inference() else inputs.detach()).requires_grad_()
            return ((inputs, *args[1:]), kwargs) if args else (args, {**kwargs, str(key): inputs})

        return alias

    def _keep(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
            if name in self.running:
                self.running.remove(name)
            if is_transformed((output,)):
                self.transformed |= {name} if self._active else set()
                return None
            kind = self._kind(name, module)
            inputs = kind.inputs_of(args, kwargs)
            if now.aside or inputs is None or not isinstance(output, Tensor):
                return None
            own = with_own_history(output)  # also in a backward pass, see above
            with private.without_functions():
                coefficients = kind.coefficients(args, kwargs)
                is_shared = name in self._shared and torch.is_grad_enabled()
                is_leaf = kind.tokens and torch.is_grad_enabled() and not own.requires_grad
            if is_shared:
                inputs, own, coefficients = (self._repeated(part, inputs.ndim) for part in (inputs, own, coefficients))
            if is_leaf:  # an alias, since a leaf may not change in place
                own = private.alias(own.detach().requires_grad_(), own.shape)
            with private.without_functions():
                if self._active and output.numel() == 0:
                    self.empty.add(name)
                elif self._active:
                    self._record(name, module, kind, inputs, own, coefficients, (*args, *kwargs.values()))
            return None if own is output else own

        return keep

    def _repeated(self, part: Any, dims: int) -> Any:
        """Return a tensor of a call, whose tokens have ``dims`` dimensions, repeated for each sample in dimension 0."""
        if part is None:
            return None
        single = part if dims > 1 and len(part) == 1 else part.unsqueeze(0)
        return single.expand(self._samples, *single.shape[1:]).contiguous()

    def _record(
        self,
        name: str,
        module: nn.Module,
        kind: Linear,
        inputs: Tensor,
        output: Tensor,
        coefficients: Tensor | None,
        given: tuple[Any, ...],
    ) -> None:
        """Keep a call, and note whether the layer computes in it as its kind defines."""
        if inputs.ndim < kind.least_dims:
            raise InputError(
                f"layer {name!r} is called on an input {tuple(inputs.shape)} without a dimension for samples; give "
                f"it one, {(1, *inputs.shape)}. If the data are a list of single samples, wrap it: DataLoader(data, "
                "batch_size=256)"
            ).about({name: "its input has no dimension for samples"})
        whole, overwritten = spread.full(inputs), name in self._copied
        if self._checking:
            if not (is_of_torch(module) and only_ours()):
                computed = layers.computes(module, whole, spread.full(output), coefficients)
                self._computed.append((name, module, computed))
            self._check_weight(name, module)
        kept = whole.clone() if overwritten else whole
        has_edge = not kind.tokens and not (overwritten and inputs._is_view())
        shape = torch.empty_like(output, device="meta", requires_grad=False)
        if spread.is_spread(output):
            shape = torch.empty(output.shape, dtype=output.dtype, device="meta")
        call = RecordedCall(
            kept,
            version(kept),
            edge=get_gradient_edge(output),
            input_edge=get_gradient_edge(inputs) if has_edge else None,
            output=shape,
            kind=kind,
            coefficients=coefficients,
            route=module.source.route if isinstance(module, Use) else None,
            sources=_sources(module, given) if now.accounting else (),
        )
        self.calls.setdefault(name, []).append(call)

    def _check_computed(self) -> None:
        """Raise if a layer's output is not computed as its kind defines, with one wait for the device."""
        found = [one for _, _, one in self._computed if isinstance(one, Tensor)]
        if not found or bool(torch.stack([one.to(found[0].device) for one in found]).all()):
            return
        name, module, _ = next(made for made in self._computed if not bool(made[2]))
        raise InputError(
            f"layer {name!r} ({type(module).__name__}): its output is not {layers.kind_of_call(module).computes}; its "
            "forward is replaced (by an adapter, quantisation, …) and cannot be measured"
        )

    def _check_weight(self, name: str, module: nn.Module) -> None:
        """Raise if the forward pass has put another weight with other values into a layer."""
        before, now = self._weights[name], module._parameters.get("weight")
        if before is not None and spread.is_spread(before):  # it is whole in the forward pass
            return
        if before is not None and now is not before and not (now is not None and torch.equal(before, now)):
            raise InputError(
                f"layer {name!r} ({type(module).__name__}): its weight in the forward pass is not the model's "
                "(torch.func.functional_call with other parameters, or an assignment); load these into the model, or "
                "choose other layers"
            )


def _sources(module: nn.Module, given: tuple[Any, ...]) -> tuple[Node, ...]:
    """Return the nodes of the tensors given to a layer's call, with an operation's bias."""
    bias = (module.bias,) if isinstance(module, Use) else ()
    return tuple(part.grad_fn for part in (*given, *bias) if isinstance(part, Tensor) and part.grad_fn is not None)


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Have no parameter require a gradient inside."""
    held, depth = (*walk.parameters(model), *spread.parameters()), private.transforms()
    if any(parameter.is_inference() for parameter in held):
        raise InputError(
            "model: its parameters were made in inference mode and take no part in a graph; copy it outside"
        )
    with requiring(held, flag=False):
        try:
            yield
        finally:
            end_transforms(depth)


def or_zeros(gradient: Tensor | None, edge: GradientEdge) -> Tensor:
    """Return a gradient at an edge, with zeros for None."""
    if gradient is not None:
        return gradient
    like = private.results_of(edge.node)[edge.output_nr]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def with_own_history(output: Tensor) -> Tensor:
    """Return a layer's output; an alias if it is a view in a graph, or a copy if its layout allows no alias."""
    with private.without_functions():
        if not (output.requires_grad and output._is_view()):
            return output
        is_strided = output.layout == torch.strided
    return private.alias(output, output.shape) if is_strided else output.clone()
