"""Take each weight in all of its uses: a change of a tensor is a change wherever the model uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..model import kinds, layers, selectors, uses
from ..model.kinds import Linear
from ..model.selectors import Selection
from ..model.uses import Use
from ..passes.runner import Runner
from ..passes.task import Task
from .formats import Copy, Format

_COMPUTED = (
    "its weight is computed of parameters, so that no change of one is a change of it; make it a parameter, as by "
    "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
)


def of_layer(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Return the :class:`.Use` that stands for all uses of a layer's weight; the layer itself if it needs none.

    Its rows are those of the first module that has the weight and is no embedding, if there is one.
    """
    others = [name, *uses.ties(model, module)]
    if len(others) == 1 and not uses.elsewhere(module):
        return module
    plain = [other for other, layer in model.named_modules() if other in others and kinds.is_plain(layer)]
    plain.sort(key=lambda other: kinds.base(model.get_submodule(other)) in (nn.Embedding, nn.EmbeddingBag))
    found = (uses.whole(model, f"{other}.weight" if other else "weight") for other in plain)
    return next(filter(None, found), module)


def taken(task: Task) -> tuple[Task, dict[str, str]]:
    """Return the task with each chosen weight in all of its uses, and the new name of each layer that was chosen.

    A dry run of the first batch shows which weights are used outside of their layers too.
    """
    names = {name: name for name in task.selection.modules}
    for look in (False, True):
        if look:
            Runner(task, certify=False).look()
        modules: dict[str, nn.Module] = {}
        new = {}
        for name, module in task.selection.modules.items():
            if isinstance(module, Use) and module.refusal and name not in task.selection.named:
                continue
            whole = of_layer(task.model, name, module)
            new[name] = whole.name if whole is not module and isinstance(whole, Use) else name
            modules[new[name]] = whole
        named = frozenset(new[name] for name in task.selection.named)
        names = {name: new[own] for name, own in names.items() if own in new}
        task = replace(task, selection=Selection(modules, named, task.selection.optional))
    for name, module in modules.items():
        missing = [other for other in uses.ties(task.model, module) if other not in modules]
        elsewhere = f"used in {uses.elsewhere(module)} too" if uses.elsewhere(module) else ""
        if missing or elsewhere:
            why = elsewhere or f"that of {', '.join(map(repr, missing))} too"
            raise InputError(
                f"layer {name!r}: its weight is {why}, so that what a change of it costs is not that of this use; "
                "choose layers without it"
            )
    return task, names


def stored(task: Task) -> tuple[Task, dict[str, str]]:
    """Return the task with the layers whose weight is a parameter, and for each other layer the reason.

    Raises:
        InputError: a layer that was named, or every layer, has a weight that is computed.
    """
    computed = {name: _COMPUTED for name, module in task.selection.modules.items() if parameter(module) is None}
    return without(task, computed), computed


def without(task: Task, reasons: Mapping[str, str]) -> Task:
    """Return the task without the layers that have a reason for it; raise if one was named, or if none is left."""
    chosen = task.selection
    kept = {name: module for name, module in chosen.modules.items() if name not in reasons}
    for name, reason in reasons.items():
        if name in chosen.named or not kept:
            raise InputError(f"layer {name!r}: {reason}")
    return replace(task, selection=Selection(kept, chosen.named, chosen.optional))


def refuse_computed(task: Task) -> None:
    """Raise for a weight that the forward pass computes of a parameter, of which a change was made."""
    for name, module in task.selection.modules.items():
        if isinstance(module, Use) and module.ran and parameter(module) is None:
            raise InputError(
                f"changes[{name!r}]: the forward pass computes the layer's weight of the parameter (a mask, a "
                "standardisation), and its second order is that of what it computes, not of the parameter; leave it out"
            )


def modules_of(model: nn.Module, name: str, module: nn.Module) -> list[str]:
    """Return the names of the layers that have a weight, in the model's order."""
    if not isinstance(module, Use) or module.source.of_module or module.rows is not None:
        return [name]
    found = {other: layer for other, layer in selectors.layers(model).items() if getattr(layer, "rows", None) is None}
    return [other for other, layer in found.items() if parameter(layer) is module.source.parameter] or [name]


@dataclass(frozen=True)
class Weight:
    """Hold where a model has the weight of a layer that ran, and how it is a matrix."""

    name: str
    modules: tuple[str, ...]  # the layers that have it
    kinds: tuple[str, ...]  # of these layers, "" of a weight that no module calls
    parameters: tuple[str, ...]  # all names of the parameter
    shape: torch.Size  # of the parameter
    rows: slice | int | None  # of the parameter, None all
    size: torch.Size
    stride: tuple[int, ...]
    kind: Linear
    matrix: Tensor  # of the form of its rows and of its dtype, without entries

    @property
    def key(self) -> object:
        """Return a key that two layers of one weight have in common."""
        return self.parameters, str(self.rows)

    @classmethod
    def of(cls, model: nn.Module, name: str, module: nn.Module) -> "Weight":
        """Return the weight of a layer."""
        weight, held = layers.weight_of(module), parameter(module)
        assert held is not None
        places = module.source.places if isinstance(module, Use) else [(module, "weight")]  # attached or not
        parameters = tuple(
            f"{path}.{own}" if path else own
            for path, holder in model.named_modules(remove_duplicate=False)
            for other, own in places
            if other is holder
        )
        modules, named = modules_of(model, name, module), selectors.layers(model)
        kinds_ = tuple(kind_name(named.get(other, module)) for other in modules)
        kind, rows = layers.kind_of(module), module.rows if isinstance(module, Use) else None
        none = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
        matrix, stride = kind.as_rows(none), tuple(weight.stride())
        return cls(name, tuple(modules), kinds_, parameters, held.shape, rows, weight.shape, stride, kind, matrix)

    def in_model(self, model: nn.Module) -> Tensor:
        """Return the weight in a model, as a view of its parameter.

        Raises:
            InputError: the model has no such parameter, or one of another shape.
        """
        found = self._found(dict(model.named_parameters(remove_duplicate=False)))
        if found is None or found.shape != self.shape:
            raise self._wrong("model: a parameter", "as in the plan", found)
        return self._viewed(found.data)

    def keep(self, own: Tensor, held: Format) -> None:
        """Write into a weight of a model, as :meth:`in_model` returns it, what a format keeps of it."""
        with torch.no_grad():
            own.copy_(self.kind.from_rows(held.kept(self.kind.as_rows(own))))

    def format_of(self, one: Format | Copy, own: Tensor) -> Format:
        """Return a format for this weight; the format of a copy keeps the weight of the copy.

        Raises:
            InputError: the copy has no such weight, or one of another shape, or packed numbers.
        """
        if isinstance(one, Format):
            return one
        as_it_is = torch.equal(self._in_copy(one), own)
        bits = (lambda d, m, of_dtype: of_dtype) if as_it_is else one.bits
        return Format(one.name, bits, lambda matrix: self.kind.as_rows(self._in_copy(one)), native=True)

    def _in_copy(self, held: Copy) -> Tensor:
        copy = held.model
        if isinstance(copy, nn.Module):
            copy = dict(layers.unwrap(copy).named_parameters(remove_duplicate=False))
        found = self._found(copy)
        if found is None or found.shape != self.shape or not found.is_floating_point() or found.itemsize < 2:
            whose = f"layer {self.name!r}: format {held.name!r}: a weight"
            raise self._wrong(whose, f"of shape {tuple(self.shape)} in floating point", found)
        values = found.detach() if type(found.detach()) is Tensor else found.detach().dequantize()
        return self._viewed(values.to(self.matrix).contiguous())

    def _found(self, named: Mapping[str, Tensor]) -> Tensor | None:
        """Return the parameter, which a checkpoint may have under one of its names only."""
        named = {layers.without_compile(name): value for name, value in named.items()}
        return next((named[key] for key in map(layers.without_compile, self.parameters) if key in named), None)

    def _viewed(self, values: Tensor) -> Tensor:
        own = values if self.rows is None else values[self.rows]
        return own if own.shape == self.size else own.as_strided(self.size, self.stride)

    def _wrong(self, what: str, how: str, got: Tensor | None) -> InputError:
        is_there = "none" if got is None else f"one of shape {tuple(got.shape)} and {got.dtype}"
        return InputError(f"{what} {self.parameters[0]!r} {how} is wanted, got {is_there}")


def kind_name(module: nn.Module) -> str:
    """Return the name of the kind of a layer; empty for a parameter that no module calls, or a part of one."""
    if isinstance(module, Use) and not module.source.of_module:
        return ""
    return type(layers.kind_of(module)).__name__


def parameter(module: nn.Module) -> Tensor | None:
    """Return the parameter that is a layer's weight; None if the weight is computed, as far as runs have shown."""
    if not isinstance(module, Use):
        return module._parameters.get("weight")
    own, weight = module.source.parameter, module.weight
    computed = module.source.effective and not (module.ran and weight.data_ptr() == own.data_ptr())
    return None if computed else own
