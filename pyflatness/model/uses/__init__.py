"""Stand in for weights of no known kind of layer: parameters that modules use in functions, such as in attention.

A stand-in is a module outside the model, named after the parameter, and it is hooked, selected and measured like a
layer. While it is :func:`attached`, a watched tensor (:mod:`.watched`) replaces the parameter in the model, and each
linear operation with it, or with some of its rows, is done by a call of the stand-in, with the same result. The first
operation with the weight determines the layer's kind.
"""

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import calling, kinds, spread, walk
from . import candidates, experts, recurrent
from .candidates import runs_with_its_module as runs_with_its_module
from .use import Source
from .use import Use as Use


@dataclass
class _Known:
    """Hold a model's stand-ins, and facts about its weights, while it is measured."""

    places: candidates.Places
    uses: dict[str, Use] | None = None  # None before they are first needed
    whole: dict[int, Use] = field(default_factory=dict)  # stand-ins for all uses, by the identity of ``places``' lists
    left_out: dict[nn.Module, str] = field(default_factory=dict)  # layers without a value, and why
    flat: dict[int, tuple[Tensor, str]] = field(default_factory=dict)  # weights of one dimension, and their functions


_held: dict[nn.Module, _Known] = {}  # of the models that are measured now
_elsewhere: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()  # by layer, see :func:`elsewhere`


@contextlib.contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Let :func:`of` and :func:`whole` return the same stand-ins for a model, inside the context."""
    if model in _held:
        yield
        return
    _held[model] = _known(model)
    try:
        yield
    finally:
        del _held[model]


def _known(model: nn.Module) -> _Known:
    return _held.get(model) or _Known(candidates.places(model))


def ties(model: nn.Module, layer: nn.Module) -> list[str]:
    """Return the names of other modules that own the same weight parameter as the layer."""
    place = (layer, "weight")
    if isinstance(layer, Use):
        if not layer.source.effective:  # it stands for the uses in all modules that own its parameter
            return []
        place = layer.source.places[0]
    return [name for name, module, _ in _known(model).places.get(place, ()) if module is not place[0]]


def places(model: nn.Module) -> candidates.Places:
    """Return all places of each parameter, by each of its places."""
    return _known(model).places


def of(model: nn.Module) -> dict[str, Use]:
    """Return the stand-ins for a model's weights by name, in its order."""
    known = _known(model)
    if known.uses is None:
        known.uses = {name: use for source in candidates.sources(model) for name, use in source.uses.items()}
    return known.uses


def whole(model: nn.Module, name: str) -> Use | None:
    """Return the stand-in for all uses of a layer's weight, by the weight's name; None if it is no layer's weight."""
    known, (prefix, _, key) = _known(model), name.rpartition(".")
    try:
        holder = model.get_submodule(prefix)
    except AttributeError:
        return None
    places = known.places.get((holder, key), [])
    found = known.whole.get(id(places)) or candidates.whole(name, holder, key, [(module, k) for _, module, k in places])
    if found is not None:
        known.whole[id(places)] = found
    return found


def layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of this name: a stand-in, or a module of the model."""
    found = of(model).get(name) or whole(model, name)
    return model.get_submodule(name) if found is None else found


@contextlib.contextmanager
def attached(modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Let operations with weights be done by those of the modules that are stand-ins, inside the context."""
    by_source: dict[Source, dict[str, Use]] = {}
    for name, module in modules.items():
        if isinstance(module, Use) and not module.refusal:
            by_source.setdefault(module.source, {})[name] = module
    before = {source: source.attached for source in by_source}
    holders = {module for source in by_source for module, _ in source.places}
    try:
        with contextlib.ExitStack() as stack:
            for weights, forward in ((experts.weights, experts.Forward), (recurrent.weights, recurrent.StepByStep)):
                for module in filter(weights, holders):
                    stack.enter_context(calling.replaced_forward(module, forward(module)))
            for source, uses in by_source.items():
                source.attach({**before[source], **uses})
            yield
    finally:
        for source, outer in before.items():
            source.attach({name: use for name, use in outer.items() if not use.refusal})


def leave_out(model: nn.Module, layer: nn.Module, why: str) -> None:
    """Note why a module that is a layer has no value, for :func:`reasons`."""
    if model in _held:
        _held[model].left_out[layer] = why


def note_flat(model: nn.Module, found: Mapping[Tensor, str]) -> None:
    """Note which parameters of one dimension a forward pass used as weights, and in which functions."""
    if model in _held:
        _held[model].flat |= {id(parameter): (parameter, functions) for parameter, functions in found.items()}


def note_elsewhere(found: Mapping[nn.Module, str]) -> None:
    """Note for layers the functions that use their weight outside of the layer; empty for none."""
    _elsewhere.update(found)


def elsewhere(layer: nn.Module) -> str:
    """Return the functions that use a layer's weight outside of the layer, as in ``F.linear(x, self.embed.weight)``.

    It is empty if none is known. A layer's value has the derivative through the layer's calls alone.
    """
    return _elsewhere.get(layer, "")


def otherwise(modules: Mapping[str, nn.Module], called: Collection[str], nodes: Collection[Node]) -> dict[str, str]:
    """Return the attached stand-ins that were not called for all uses of their weights in a run, and why.

    ``called`` has the names of layers that were called, and ``nodes`` are those of the outputs' graph.
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
    """Return why layers are left out; with an expert of a mixture, all its other experts are left out too."""
    found = dict(reasons)
    routed = {name: use.source.places for name, use in modules.items() if isinstance(use, Use) and use.routed}
    mixtures = {place[0]: why for name, why in reasons.items() for place in routed.get(name, ())}
    for name, places in routed.items() if mixtures else ():
        why = next((mixtures[module] for module, _ in places if module in mixtures), None)
        if why is not None:
            found.setdefault(name, why)
    return found


def covered_entries(layers: Iterable[nn.Module]) -> dict[tuple[nn.Module, str], int]:
    """Return how many entries of each parameter layers have, also of parameters behind their weights.

    Keys are a parameter's module and its name there.
    """
    found: dict[tuple[nn.Module, str], int] = {}
    for layer in layers:
        if isinstance(layer, Use):
            for place in layer.source.places:
                found[place] = found.get(place, 0) + len(layer.entries)
            behind = [source for source in layer.source.behind if not any(u.refusal for u in source.uses.values())]
            found |= {place: source.parameter.numel() for source in behind for place in source.places}
            continue
        for part in walk.modules(layer):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    found[part, name] = parameter.numel()
    return found


def left_out(model: nn.Module, layers: Collection[nn.Module]) -> dict[str, float]:
    """Return the weights that the measured layers do not have, see :func:`.candidates.uncovered`."""
    if not layers:
        return {}
    twice = {(layer, "weight") for layer in layers if elsewhere(layer)}
    flat = [parameter for parameter, _ in _known(model).flat.values()]
    return candidates.uncovered(model, covered_entries(layers), twice, flat)


def reasons(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return by name why no layer has some parameters of a measured model, if that is known."""
    modules, left_out, flat = dict(walk.named_modules(model)), _known(model).left_out, _known(model).flat
    by_place = {place: use.source for use in of(model).values() for place in use.source.places}
    found = {}
    for name in names:
        place, _, key = name.rpartition(".")
        module = modules[place]
        source, parameter = by_place.get((module, key)), module._parameters.get(key)
        if key in candidates.packed(module):
            found[name] = f"its {type(module).__name__} keeps it quantised, in integers"
        elif parameter is not None and parameter.is_complex():
            found[name] = "its numbers are complex"
        elif id(parameter) in flat:
            found[name] = f"its entries, in one dimension, are used in {flat[id(parameter)][1]}"
        elif source is None and isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            found[name] = f"nn.{type(module).__name__} computes with it in a kernel of its own"
        elif others := elsewhere(module):
            found[name] = f"its weight is used in {others} outside of the layer too"
        elif kinds.obstacle(module):
            found[name] = f"its {type(module).__name__} {kinds.obstacle(module)}"
        elif module in left_out:
            found[name] = left_out[module]
        elif source is not None and (why := source.why_left_out()):
            found[name] = why
        elif source is None and not kinds.is_plain(module) and spread.is_held():
            found[name] = "it is spread over ranks, and used otherwise than by a layer that is a module"
        elif source is None and not kinds.is_plain(module) and parameter is not None and not parameter.is_contiguous():
            found[name] = (
                "its entries are in another order in memory (channels_last, a transpose); copy it, .contiguous()"
            )
    return found
