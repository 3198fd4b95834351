"""Find the weights that no measured layer has.

A weight is a floating-point parameter of two or more dimensions at the module that holds it: the matrix of a linear
map, a kernel, an embedding. Biases and the scales of normalisation layers are none. A parameter that several modules
hold (tied weights) is a weight of each, since a measured layer has the derivative through its own use only.
"""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

_NORMS = (nn.LayerNorm, nn.RMSNorm)


def uncovered(
    model: nn.Module, covered: Mapping[tuple[nn.Module, str], int], besides: Collection[tuple[nn.Module, str]] = ()
) -> dict[str, float]:
    """Return the weights that no measured layer has, by name, each with its share of all the weights' entries.

    Args:
        model: the whole.
        covered: how many entries layers have of parameters, by the module that holds one and its name there.
        besides: parameters that are used outside of their layers too, which is one more weight of each.
    """
    sizes, left = 0, {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_weight(module, name, parameter):
                continue
            count = (1 + ((module, name) in besides)) * parameter.numel()
            sizes += count
            missing = count - covered.get((module, name), 0)
            if missing > 0:
                left[f"{prefix}.{name}" if prefix else name] = missing
    return {name: size / sizes for name, size in left.items()}


def is_weight(module: nn.Module, name: str, parameter: Tensor) -> bool:
    """Return whether a parameter, of this name in its module, is a weight."""
    return (
        parameter.is_floating_point()
        and parameter.ndim >= 2
        and not name.startswith("bias")
        and not name.endswith("_bias")
        and not isinstance(module, _NORMS)
    )
