"""Choose layers of a model: by qualified name, glob, ``re:…``, ``type:…`` or the module itself."""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..messages import near, shown
from . import spread, uses, walk
from .checks import check_classes
from .kinds import CLASSES, SUPPORTED, is_plain, is_scale
from .layers import parts_not_compiled, unwrap, why_not_supported, without_compile
from .uses import Use

Selector = str | nn.Module


@dataclass(frozen=True)
class Selection:
    """Hold the selected layers."""

    modules: dict[str, nn.Module]  # name -> module, in the model's order
    named: frozenset[str]  # layers selected by their own name (or module), each of which has to run
    optional: bool = False  # whether none has to run; otherwise at least one has to


def select(model: nn.Module, selectors: Selector | Sequence[Selector] | None) -> Selection:
    """Return the supported layers that selectors match; None selects all except scales of features.

    A pattern selects scales, of normalisations or layers, only if it matches no other layer. The name of a layer's
    weight selects the weight in all of its uses.
    """
    with parts_not_compiled(model):
        return _select(model, selectors)


def _select(model: nn.Module, selectors: Selector | Sequence[Selector] | None) -> Selection:
    every, usable, scales = _every(model)
    if selectors is None:
        found = {name: layer for name, layer in usable.items() if not (isinstance(layer, Use) and layer.refusal)}
        if not found:
            own = next((name for name, module in every.items() if isinstance(module, CLASSES)), None)
            why = "" if own is None else f"; {own!r} {why_not_supported(every[own])}"
            raise InputError(f"layers: the model has none that can be measured ({SUPPORTED}){why}")
        return Selection(found, frozenset())
    if not isinstance(selectors, Iterable) or isinstance(selectors, (str, bytes, type, nn.Module, Tensor)):
        selectors = [selectors]
    selectors = [*selectors]
    if not selectors:
        raise InputError("layers: an empty list; pass None for all layers")
    chosen: set[str] = set()
    named = set()
    whole: dict[str, nn.Module] = {}
    first_name = {module: name for name, module in reversed(every.items())}
    for given in selectors:
        selector = without_compile(given) if isinstance(given, str) else given
        use = uses.whole(model, selector) if isinstance(selector, str) and selector not in every else None
        if use is not None:
            whole[use.name] = use
            continue
        if isinstance(selector, nn.Module):
            selector = unwrap(selector)
            if selector not in first_name:
                raise InputError(f"layer: this {type(selector).__name__} is not a part of the model")
            selector = first_name[selector]
        matching = _matching(model, every, (usable.keys(), scales.keys()), selector)
        names = [first_name[every[name]] for name in matching]  # a shared module has several names
        if selector in every:
            named.update(names)
        meant = usable.keys() & names or scales.keys() & names
        if not meant:
            raise InputError(f"layer {names[0]!r} {why_not_supported(every[names[0]])}{_inside(usable, names[0])}")
        chosen |= meant
        if meant & scales.keys():
            spread.refuse("a scale of features")
    both = usable | scales
    found = {name: both[name] for name in every if name in chosen} | whole
    for use in (layer for name, layer in found.items() if name in named and isinstance(layer, Use)):
        use.named = True
    return Selection(found, frozenset(named | whole.keys()))


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that are, or may turn out to be, measured by default, by name, in the model's order."""
    with parts_not_compiled(model):
        return _every(model)[1]


def _every(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module], dict[str, nn.Module]]:
    """Return all modules and stand-ins by each of their names; and by their first name layers, and scales."""
    check_classes(walk.named_modules(model))
    stand_ins = uses.of(model)
    every: dict[str, nn.Module] = {}
    usable: dict[str, nn.Module] = {}
    scales: dict[str, nn.Module] = {}
    behind: dict[str, list[str]] = {}
    for name in stand_ins:
        behind.setdefault(name.rpartition(".")[0], []).append(name)
    modules = dict(walk.named_modules(model, each_name=True))
    seen: set[nn.Module] = set()
    for name, module in modules.items():
        every[name] = module
        if module not in seen and (name in stand_ins or is_plain(module)):
            usable[name] = stand_ins.get(name) or module
        elif module not in seen and is_scale(module):
            scales[name] = module
        for parameter in behind.get(name, ()) if module not in seen else ():
            if parameter not in modules:
                use = every[parameter] = stand_ins[parameter]
                (scales if use.source.parameter.ndim == 1 else usable)[parameter] = use
        seen.add(module)
    return every, usable, scales


def one(model: nn.Module, selector: Selector) -> str:
    """Return the name of the one layer that a selector matches, or raise."""
    matches = [*select(model, selector).modules]
    if len(matches) > 1:
        raise InputError(f"layer: {selector!r} matches {len(matches)} layers, one is wanted: {', '.join(matches[:8])}")
    return matches[0]


def _matching(
    model: nn.Module, every: Mapping[str, nn.Module], usable: tuple[Collection[str], ...], selector: Any
) -> list[str]:
    """Return the names that a selector matches; of a glob in the first group of ``usable`` that has a match."""
    if not isinstance(selector, str):
        wanted = "a name, glob, 're:…', 'type:…' or module is wanted"
        if isinstance(selector, type):
            raise InputError(f"layer: {wanted}, got a class; 'type:{selector.__name__}' is for all layers of it")
        hint = f"; {str(selector)!r} is the name of one" if str(selector) in every else ""
        raise InputError(f"layer: {wanted}, got {type(selector).__name__} {shown(selector)}{hint}")
    names = [selector] if selector in every else _by_pattern(every, usable, selector)
    if not names:
        layers = [name for names in usable for name in names]
        _check_no_parameter(model, layers, selector)
        listed = near(selector, filter(None, layers or every))
        raise InputError(f"layer: nothing in the model matches {selector!r}; did you mean {listed}?")
    return names


def _check_no_parameter(model: nn.Module, usable: Collection[str], name: str) -> None:
    """Raise if a name that is no layer's is a parameter's, and say which layers have it or why none has."""
    if name not in dict(model.named_parameters(remove_duplicate=False)):
        return
    parts = [layer for layer in usable if layer.startswith(f"{name}[")]
    holder = name.rpartition(".")[0]
    if parts:
        why = f"its parts are layers: {parts[0]!r} to {parts[-1]!r}, and {name + '*'!r} is all of them"
    elif holder in usable:
        why = f"the layer that it belongs to is {holder!r}"
    else:
        why = uses.reasons(model, [name]).get(name, "it is no weight of a linear operation")
    raise InputError(f"layer: {name!r} is a parameter and no layer; {why}")


def _inside(usable: Collection[str], name: str) -> str:
    """Return the end of an error that names the layers inside a module that is no layer itself."""
    inside = [layer for layer in usable if layer.startswith(f"{name}.")]
    return f"; the layers inside of it are {name + '.*'!r} ({inside[0]!r}, …)" if inside else ""


def _by_pattern(every: Mapping[str, nn.Module], usable: tuple[Collection[str], ...], pattern: str) -> list[str]:
    kind, _, rest = pattern.partition(":")
    if kind == "type" and rest:
        return [name for name, module in every.items() if name and type(module).__name__ == rest]
    if kind == "re" and rest:
        try:
            expression = re.compile(rest)
        except re.error as error:
            raise InputError(f"layer: {pattern!r} is not a regular expression ({error})") from None
        return [name for name in every if name and expression.fullmatch(name)]
    found = ([name for name in names if fnmatch.fnmatchcase(name, pattern)] for names in usable)
    return next(filter(None, found), [])
