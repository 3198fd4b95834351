"""Make changes of layers' weights, for :func:`pyflatness.cost_of_change`: what quantisation or pruning would do.

Each function returns a mapping from names of layers to Δ, of the shape of the layer's weight, so that w + Δ is the
changed weight; in float32 for weights of half precision. No model is changed. Rows of a weight are its outputs
(filters, of a convolution).

``layers=None`` takes every module that is a layer, and the weights of torch's attention and recurrent modules, in which
the rows for queries, keys and values are layers of their own. Other weights that no module of a known kind has, such as
those of experts or of a model's own functions, are taken by their names (``pyflatness layers`` lists them): whether
they are layers shows when the model runs.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..contractions import promoted
from ..errors import InputError
from ..messages import check_choice, check_module
from ..model import layers as kinds
from ..model import selectors
from ..model.selectors import Selector
from ..model.uses import Use, runs_with_its_module
from ..options import check_count, check_number

__all__ = ["between", "of_rank", "pruned", "pruned_2_4", "rounded"]

Layers = Selector | Sequence[Selector] | None
_PER = ("tensor", "channel", "group")


def rounded(
    model: nn.Module, bits: int = 8, *, per: str = "channel", group_size: int = 128, layers: Layers = None
) -> dict[str, Tensor]:
    """Return what rounding weights to the nearest of 2^bits - 1 levels changes: symmetric uniform quantisation.

    w is replaced by s · round(w / s), with s = max |w| / (2^(bits - 1) - 1) over a tensor, a row, or a group.

    Args:
        model: any module.
        bits: from 2 to 16.
        per: what has a scale s of its own: the whole ``"tensor"``, each ``"channel"`` (a row of the matrix), or each
            ``"group"`` of ``group_size`` entries of a row, the last of which may be shorter.
        group_size: entries of a group.
        layers: selectors, as for :func:`pyflatness.measure`; None: see the module's text.

    Raises:
        InputError: options that do not exist, or no such layers.

    Example:
        >>> import torch, pyflatness as pf
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.3]]))
        >>> pf.changes.rounded(layer, bits=2)[""]
        tensor([[ 0.0000, -0.3000]])
    """
    bits = check_count("bits", bits, 2, "a number of bits", 16)
    group_size = check_count("group_size", group_size, 1, "a number of entries")
    check_choice("per", per, _PER)
    steps = 2 ** (bits - 1) - 1

    def change(matrix: Tensor) -> Tensor:
        if per == "tensor":
            return _rounded(matrix.flatten(), steps).view_as(matrix)
        if per == "channel":
            return _rounded(matrix, steps)
        return torch.cat([_rounded(part, steps) for part in matrix.split(group_size, dim=1)], dim=1)

    return _of_layers(model, layers, change)


def pruned(model: nn.Module, sparsity: float = 0.5, *, layers: Layers = None) -> dict[str, Tensor]:
    """Return what setting the smallest weights of each layer to zero changes: magnitude pruning.

    Args:
        model: any module.
        sparsity: the share of each layer's weights that become zero, between 0 and 1; rounded to whole weights.
        layers: selectors; None: see the module's text.

    Raises:
        InputError: a share that is none, or no such layers.

    Example:
        >>> import torch, pyflatness as pf
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.3]]))
        >>> pf.changes.pruned(layer, 0.5)[""]
        tensor([[ 0.0000, -0.3000]])
    """
    sparsity = check_number("sparsity", sparsity, "a share between 0 and 1", lambda share: 0 < share <= 1)

    def change(matrix: Tensor) -> Tensor:
        smallest = matrix.abs().flatten().argsort(stable=True)[: round(sparsity * matrix.numel())]
        found = torch.zeros_like(matrix).flatten()
        return found.index_copy_(0, smallest, -matrix.flatten()[smallest]).view_as(matrix)

    return _of_layers(model, layers, change)


def pruned_2_4(model: nn.Module, *, layers: Layers = None) -> dict[str, Tensor]:
    """Return what setting the two smallest of every four weights of a row to zero changes: 2:4 sparsity.

    Args:
        model: any module.
        layers: selectors; None: see the module's text. A row's last entries beyond a multiple of four stay.

    Raises:
        InputError: no such layers.
    """

    def change(matrix: Tensor) -> Tensor:
        found, whole = torch.zeros_like(matrix), matrix.shape[1] // 4 * 4
        fours = matrix[:, :whole].unflatten(1, (-1, 4))
        smallest = fours.abs().argsort(dim=2, stable=True)[..., :2]
        found[:, :whole] = torch.zeros_like(fours).scatter(2, smallest, -fours.gather(2, smallest)).flatten(1)
        return found

    return _of_layers(model, layers, change)


def of_rank(model: nn.Module, rank: int, *, layers: Layers = None) -> dict[str, Tensor]:
    """Return what replacing each weight matrix by the nearest one of a rank changes: the truncated SVD.

    Args:
        model: any module.
        rank: at most; a matrix of a smaller rank stays. A convolution's matrix has a filter to a row.
        layers: selectors; None: see the module's text.

    Raises:
        InputError: a rank below 1, or no such layers.
    """
    rank = check_count("rank", rank, 1, "a rank")

    def change(matrix: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        lost: Tensor = (u[:, rank:] * s[rank:]) @ v[rank:]
        return -lost.to(matrix.dtype)

    return _of_layers(model, layers, change)


def between(model: nn.Module, other: nn.Module | Mapping[str, Tensor], *, layers: Layers = None) -> dict[str, Tensor]:
    """Return the weights of another checkpoint less the model's.

    Args:
        model: any module.
        other: one of the same structure, or a state dict.
        layers: selectors; None: of those in the module's text, the ones whose weight ``other`` has.

    Raises:
        InputError: no such layers, no such weights, or of another shape.
    """
    own, found = _layers(model, layers), {}
    state = other if isinstance(other, Mapping) else _state(other, None if layers is None else [*own])
    for name, module in own.items():
        key = _key(name, module)
        weight, value = module.weight, state.get(key)
        assert isinstance(weight, Tensor)
        if value is not None and isinstance(module, Use) and module.rows is not None:
            value = value[module.rows]
        if value is None and layers is None:
            continue
        if value is None or value.shape != weight.shape:
            got = "none" if value is None else f"one of shape {tuple(value.shape)}"
            raise InputError(f"other: a weight {key!r} of shape {tuple(weight.shape)} is wanted, got {got}")
        found[name] = promoted(value.detach().to(weight)) - promoted(weight.detach())
    if not found:
        raise InputError("other: it has the weight of no layer of the model; it has " + ", ".join([*state][:5]))
    return found


def _state(model: nn.Module, chosen: Layers) -> dict[str, Tensor]:
    """Return the weights of layers, as parametrisations make them, by their keys in a state dict without such."""
    found = {}
    for name, module in _layers(model, chosen).items():
        weight = module.source.parameter if isinstance(module, Use) else module.weight
        assert isinstance(weight, Tensor)
        found[_key(name, module)] = weight
    return found


def _key(name: str, module: nn.Module) -> str:
    """Return the key of a layer's weight in a state dict, of a part of a parameter that of the whole."""
    if isinstance(module, Use) and not module.source.of_module:
        return name if module.rows is None else name.rpartition("[")[0]
    return f"{name}.weight" if name else "weight"


def _rounded(rows: Tensor, steps: int) -> Tensor:
    """Return the change of entries that share a scale along their last dimension."""
    exact = rows.double()
    scale = exact.abs().amax(dim=-1, keepdim=True) / steps
    return torch.where(scale > 0, (exact / scale).round() * scale - exact, 0.0).to(rows.dtype)


def _of_layers(model: nn.Module, chosen: Layers, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the changes of layers that a function makes of their matrices (d, m).

    A weight that several layers share has one change, of the first one's matrix: the others may be its transpose.
    """
    found: dict[str, Tensor] = {}
    first: dict[Tensor, str] = {}
    for name, module in _layers(model, chosen).items():
        assert isinstance(module.weight, Tensor)
        owner = first.setdefault(module.weight, name)
        if owner == name:
            matrix, _ = kinds.matrix(module)
            found[name] = kinds.as_weight(module, change(promoted(matrix))).contiguous()
        else:
            found[name] = found[owner]
    return found


def _layers(model: nn.Module, chosen: Layers) -> dict[str, nn.Module]:
    """Return layers by name; of all, those that are layers without a look at how the model runs."""
    found = selectors.select(kinds.unwrap(check_module("model", model)), chosen).modules
    if chosen is not None:
        return found
    return {
        name: module for name, module in found.items() if not isinstance(module, Use) or runs_with_its_module(module)
    }
