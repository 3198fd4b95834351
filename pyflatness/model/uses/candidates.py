"""Find the parameters of a model that may be weights of linear operations, without running it."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import kinds, walk
from ..spread import is_spread
from . import experts, recurrent
from .use import Source, Use

_MOST_DIMENSIONS = 5  # of a weight, as of filters in three dimensions of space
_MOST_MATRICES = 64  # matrices in one parameter, each of which may be a weight
Places = dict[tuple[nn.Module, str], list[tuple[str, nn.Module, str]]]
"""By the module that holds a parameter and its name there: name, module and parameter's name of all its places."""
_WITH_FUNCTIONS = (nn.MultiheadAttention, nn.Module, nn.ParameterList, nn.ParameterDict)  # classes of torch's


def sources(model: nn.Module) -> list[Source]:
    """Return the parameters of a model that may have stand-ins, in its order."""
    named = walk.named_modules(model)
    outputs = {module.out_proj for _, module in named if isinstance(module, nn.MultiheadAttention)}
    layers = [module for _, module in named if kinds.is_plain(module) and module not in outputs]
    computed = [module for _, module in named if isinstance(module, parametrize.ParametrizationList)]
    others = {part for module in (*layers, *computed) for part in walk.modules(module)}
    others |= {module for _, module in named if _is_of_torch(module) and module not in outputs}
    own = {id(parameter) for module in others for parameter in module._parameters.values()}
    vectors = {id(vector) for vector in may_be_flat_weights(model)}
    found: dict[int, Source] = {}
    for prefix, module in named:
        for key, parameter in module._parameters.items() if module not in others else ():
            if parameter is None or not _is_candidate(module, key, parameter, vectors):
                continue
            effective = key == "weight" and kinds.base(module) is not None and module not in outputs
            if id(parameter) in own and not effective:
                continue
            if id(parameter) in found and not effective:
                found[id(parameter)].places.append((module, key))
                continue
            of_module = effective or module in outputs
            source = Source(parameter, [(module, key)], of_module, effective)
            name = prefix if of_module else ".".join(filter(None, (prefix, key)))
            parts = {"": None} if of_module else _parts(module, key, parameter)
            routed = key in experts.weights(module)
            source.uses = {
                name + label: Use(name + label, source, rows, routed=routed) for label, rows in parts.items()
            }
            found[id(source) if effective else id(parameter)] = source
    holders = walk.holders(module for _, module in named) if found else {}
    for source in found.values():
        source.shared = holders[id(source.parameter)] > len(source.places)
    return [*found.values()]


def places(model: nn.Module) -> Places:
    """Return all places of each parameter, by each of its places."""
    of_parameters: dict[int, list[tuple[str, nn.Module, str]]] = {}
    found: Places = {}
    for name, module in walk.named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found[module, key] = of_parameters.setdefault(id(parameter), [])
                found[module, key].append((name, module, key))
    return found


def whole(name: str, holder: nn.Module, key: str, places: list[tuple[nn.Module, str]]) -> Use | None:
    """Return a stand-in for all uses of a layer's weight, in all modules and functions; None for another parameter."""
    parameter = holder._parameters.get(key)
    if parameter is None or key != "weight" or not kinds.is_plain(holder):
        return None
    home = kinds.find(holder)
    if home is None or not _is_candidate(holder, key, parameter):
        return None
    source = Source(parameter, places)
    source.uses = {name: Use(name, source, home=home)}
    return source.uses[name]


def runs_with_its_module(use: Use) -> bool:
    """Return whether a module of torch's uses a stand-in's weight in each of its calls, such as attention's q, k, v."""
    module, key = use.source.places[0]
    if use.source.of_module:
        return not use.source.effective
    if isinstance(module, nn.MultiheadAttention):
        return key.endswith("proj_weight") and (key == "in_proj_weight") == (use.rows is not None)
    return key in recurrent.weights(module)


def _is_of_torch(module: nn.Module) -> bool:
    """Return whether a module is one of torch's layers that computes with its parameters in ways no stand-in sees."""
    kind = type(module)
    own = kind.__module__.startswith("torch.nn.modules") and kind not in _WITH_FUNCTIONS
    return own and not recurrent.weights(module)


def _is_candidate(module: nn.Module, key: str, parameter: Tensor, vectors: Collection[int] = ()) -> bool:
    """Return whether a parameter may be the weight of a linear operation, by its class, shape and layout.

    ``vectors`` are the identities of vectors that may be scales of features.
    """
    return (
        not nn.parameter.is_lazy(parameter)
        and not is_spread(parameter)
        and not kinds.is_packed(parameter)
        and (is_weight(module, key, parameter) or id(parameter) in vectors)
        and parameter.is_floating_point()
        and parameter.ndim <= _MOST_DIMENSIONS
        and parameter.layout == torch.strided
        and parameter.is_contiguous()
        and parameter.numel() > 0
    )


def _parts(module: nn.Module, key: str, parameter: Tensor) -> dict[str, slice | int | None]:
    """Return by label the rows of a parameter that may be used, and measured, alone; None stands for all rows."""
    if key in experts.weights(module):
        return {f"[{expert}]": expert for expert in range(len(parameter))}
    if not isinstance(module, nn.MultiheadAttention) or key != "in_proj_weight":
        several = parameter.ndim == 3 and 1 < len(parameter) <= _MOST_MATRICES
        return {"": None, **({f"[{place}]": place for place in range(len(parameter))} if several else {})}
    size = module.embed_dim
    return {"": None, **{f"[{label}]": slice(place * size, (place + 1) * size) for place, label in enumerate("qkv")}}


_NORMS = (nn.LayerNorm, nn.RMSNorm)


def uncovered(
    model: nn.Module,
    covered: Mapping[tuple[nn.Module, str], int],
    outside: Collection[tuple[nn.Module, str]] = (),
    flat: Collection[Tensor] = (),
) -> dict[str, float]:
    """Return the weights that no measured layer has, each as a fraction of all; those used ``outside`` count twice.

    Weights are parameters of two dimensions or more, real or complex, those of one dimension in ``flat``, and weights
    that modules keep in integers. If some parameters require a gradient, the others count only in so far as layers
    measure them.
    """
    held = [
        (prefix, module, *item) for prefix, module in walk.named_modules(model) for item in module._parameters.items()
    ]
    trained = any(parameter is not None and parameter.requires_grad for *_, parameter in held)
    of_vectors, sizes, left = {id(parameter) for parameter in flat}, 0, {}
    for prefix, module, name, parameter in held:
        if parameter is None or not (is_weight(module, name, parameter) or id(parameter) in of_vectors):
            continue
        count, own = (1 + ((module, name) in outside)) * parameter.numel(), covered.get((module, name), 0)
        if trained and not (parameter.requires_grad or kinds.is_packed(parameter)):
            count = min(count, own)
        sizes += max(count, own)
        if count > own:
            left[f"{prefix}.{name}" if prefix else name] = count - own
    for prefix, module in walk.named_modules(model):
        for name, size in packed(module).items():
            sizes += size
            left[f"{prefix}.{name}" if prefix else name] = size
    return {name: size / sizes for name, size in left.items()}


def packed(module: nn.Module) -> dict[str, int]:
    """Return the weights that a quantised module keeps in integers, by name, with the entries of the real weight."""
    found = {}
    for name, held in (*module._parameters.items(), *module._buffers.items()):
        if held is None or held.ndim < 2 or held.is_floating_point() or held.is_complex():
            continue
        if name in module._parameters or "weight" in name:
            found[name] = held.numel()
    is_packed = hasattr(module, "_packed_params")  # in torch's own quantised layers
    if not (found or is_packed):
        return found
    size = getattr(module, "in_features", 0) * getattr(module, "out_features", 0)
    if size and is_packed:
        found["weight"] = size
    return dict.fromkeys(found, size) if size and len(found) == 1 else found


def is_weight(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Return whether a parameter with this name in its module is a weight."""
    return (
        (parameter.is_floating_point() or parameter.is_complex())
        and parameter.ndim >= 2
        and not _is_bias(module, name, parameter)
        and not _is_of_normalisation(module, name)
    )


def _is_bias(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Return whether a parameter called a bias is one: a vector, up to dimensions of 1, or vectors beside a weight.

    These have sizes that a weight of their module has in this order, as (E, outputs) beside (E, outputs, inputs).
    """
    sizes = [size for size in parameter.shape if size > 1]
    others = (held for key, held in module._parameters.items() if held is not None and not _is_called_bias(key))
    beside_weight = any(all(size in left for size in sizes) for left in (iter(held.shape) for held in others))
    return _is_called_bias(name) and (len(sizes) < 2 or beside_weight)


def _is_called_bias(name: str) -> bool:
    return name.startswith("bias") or name.endswith("_bias")


def _is_of_normalisation(module: nn.Module, name: str) -> bool:
    """Return whether a parameter is a scale or bias of a normalisation, of torch's or of vectors alone and so named."""
    if isinstance(module, _NORMS) and name in ("weight", "bias"):
        return True
    return "norm" in type(module).__name__.lower() and all(held.ndim < 2 for held in walk.parameters(module))


def may_be_flat_weights(model: nn.Module) -> list[Tensor]:
    """Return the parameters of one dimension that may be weights, by which the forward pass multiplies.

    They are those of PReLUs and parameter lists, and of the user's modules, except biases and normalisations.
    """
    return [
        parameter
        for module in walk.modules(model)
        if type(module) in (nn.PReLU, nn.ParameterList, nn.ParameterDict)
        or not type(module).__module__.startswith("torch.nn.modules")
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim == 1 and parameter.numel() > 1
        if not (_is_called_bias(name) or _is_of_normalisation(module, name))
        if parameter.is_floating_point() or parameter.is_complex()
    ]
