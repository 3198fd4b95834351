"""Walk over a model's modules at once: torch's own walks enter a frame for each module and all that it is in."""

from torch import Tensor, nn


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what ``model.named_modules()`` yields."""
    found: dict[nn.Module, str] = {}
    waiting = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in found:
            continue
        found[module] = name
        start = f"{name}." if name else ""
        for own, part in reversed(module._modules.items()):
            if part is not None:
                waiting.append((start + own, part))
    return [(name, module) for module, name in found.items()]


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
