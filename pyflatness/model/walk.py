"""Walk over a model's modules in one loop; torch's own walks are recursive generators, and slow."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn


def named_modules(model: nn.Module, *, each_name: bool = False) -> list[tuple[str, nn.Module]]:
    """Return ``model.named_modules()`` as a list; with ``each_name``, shared modules come under all their names."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen and not each_name:
            continue
        seen.add(module)
        found.append((name, module))
        if module._modules:
            start = f"{name}." if name else ""
            for own, part in reversed(module._modules.items()):
                if part is not None:
                    waiting.append((start + own, part))
    return found


def modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, each once."""
    if not model._modules:
        return [model]
    return [module for _, module in named_modules(model)]


def holders(modules: Iterable[nn.Module]) -> Counter[int]:
    """Return how many times modules hold each parameter, by the parameter's identity."""
    return Counter(id(parameter) for module in modules for parameter in module._parameters.values())


def parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a model, each once."""
    found = {}
    for _, module in named_modules(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
    return list(found.values())


def buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers of a model."""
    found = []
    for _, module in named_modules(model):
        found += [buffer for buffer in module._buffers.values() if buffer is not None]
    return found
