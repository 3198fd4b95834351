"""Make changes of layers' weights, for :func:`pyflatness.cost_of_change`: what quantisation or pruning would do.

A :class:`Format` is a way to keep a weight: :func:`pyflatness.allocate` chooses one for each layer. By name there are::

    name        a weight is kept as                                                bits of each entry
    int2…int8   integers times a scale for each row, as by rounded()               the integers': no row's scale counts
    int4-g128   integers times a scale of 16 bits for each 128 entries of a row    4.125: with that of the scales
    fp8         E4M3 numbers times a scale for each row                            8
    mxfp4       E2M1 numbers times a power of two for each 32 entries of a row     4.25: with 8 for each scale
    nvfp4       E2M1 numbers times an fp8 scale for each 16, and one of all        4.5
    2:4         itself, but for the two smallest of every four of a row, 0         half its dtype's and 1 for places
    rank-16     two factors of the nearest matrix of that rank                     the factors', of its dtype
    keep        itself                                                             its dtype's

A :class:`Copy` is a format whose weights are those of a quantised model.

They are torchao's, mxfp4 and nvfp4 llm-compressor's; ``"modelopt:int4"`` is another tool's (docs/allocation.md).

Each function returns a mapping from names of layers to Δ, of the shape of the layer's weight, so that w + Δ is the
changed weight; Δ is in float32 for weights of half precision. ``uncovered`` of the mapping names the weights without a
change. No model is changed. Rows of a weight are its outputs: filters of a convolution, tokens of an embedding.

``layers=None`` takes every layer that :func:`pyflatness.layers` lists, experts of a mixture one by one; of a parameter
that may be used whole or in parts it is the whole, but for torch's attention, of which the rows for queries, keys and
values are layers of their own. A weight that several modules share is one layer, called by the parameter's name
(``"lm_head.weight"``): a change of it is one of all its uses, by whatever name. Whether a parameter that no module
calls is a layer shows when the model runs; its rows are those of the first dimension until then.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..contractions import promoted
from ..errors import InputError
from ..messages import check_choice, check_module
from ..model import layers as kinds
from ..model import selectors, uses
from ..model.selectors import Selector
from ..model.uses import Use, runs_with_its_module
from ..options import check_count, check_number
from .formats import Copy, Format, by_groups, integers, less, named, two_of_four
from .formats import of_rank as nearest_of_rank

__all__ = ["Changes", "Copy", "Format", "between", "named", "of_format", "of_rank", "pruned", "pruned_2_4", "rounded"]

Layers = Selector | Sequence[Selector] | None
_PER = ("tensor", "channel", "group")


class Changes(dict[str, Tensor]):
    """Hold the change of each layer's weight, and in ``uncovered`` the model's weights that have none here.

    ``uncovered`` goes by the name of the parameter, and has its share of the entries of all weights.
    """

    uncovered: Mapping[str, float]


def of_format(model: nn.Module, format: str | Format, *, layers: Layers = None) -> Changes:  # noqa: A002
    """Return what keeping weights in a format changes.

    Args:
        model: any module.
        format: a name, see the module's text, or a format of your own.
        layers: selectors; None: see the module's text.

    Raises:
        InputError: no such format or layers; what a format makes of a layer is of another shape, or not finite.

    Example:
        >>> import torch, pyflatness as pf
        >>> layer = torch.nn.Linear(4, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[6.0, 2.4, -0.7, 0.2]]))
        >>> pf.changes.of_format(layer, "mxfp4")[""]
        tensor([[ 0.0000, -0.4000,  0.2000, -0.2000]])
    """
    return _of_layers(model, layers, named(format).change)


def rounded(
    model: nn.Module, bits: int = 8, *, per: str = "channel", group_size: int = 128, layers: Layers = None
) -> Changes:
    """Return what rounding weights to the nearest of 2^bits levels changes: symmetric uniform quantisation.

    w is replaced by s · round(w / s), from -2^(bits - 1) s to (2^(bits - 1) - 1) s, with s = max |w| · 2 / (2^bits - 1)
    over a tensor, a row, or a group, as torchao does.

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
        tensor([[-0.3333, -0.3000]])
    """
    bits = check_count("bits", bits, 2, "a number of bits", 16)
    group_size = check_count("group_size", group_size, 1, "a number of entries")
    check_choice("per", per, _PER)
    size = group_size if per == "group" else None

    def change(matrix: Tensor) -> Tensor:
        rows = matrix.reshape(1, -1) if per == "tensor" else matrix
        return less(by_groups(rows, size, partial(integers, bits=bits)).view_as(matrix), promoted(matrix))

    return _of_layers(model, layers, change)


def pruned(model: nn.Module, sparsity: float = 0.5, *, layers: Layers = None) -> Changes:
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
        matrix = promoted(matrix)
        smallest = matrix.abs().flatten().argsort(stable=True)[: round(sparsity * matrix.numel())]
        found = torch.zeros_like(matrix).flatten()
        return found.index_copy_(0, smallest, -matrix.flatten()[smallest]).view_as(matrix)

    return _of_layers(model, layers, change)


def pruned_2_4(model: nn.Module, *, layers: Layers = None) -> Changes:
    """Return what setting the two smallest of every four weights of a row to zero changes: 2:4 sparsity.

    Args:
        model: any module.
        layers: selectors; None: see the module's text. A row's last entries beyond a multiple of four stay.

    Raises:
        InputError: no such layers.
    """
    return _of_layers(model, layers, lambda matrix: two_of_four(promoted(matrix)))


def of_rank(model: nn.Module, rank: int, *, layers: Layers = None) -> Changes:
    """Return what replacing each weight matrix by the nearest one of a rank changes: the truncated SVD.

    Args:
        model: any module.
        rank: the largest rank; a matrix of a smaller rank stays. A row of a convolution's matrix is a filter.
        layers: selectors; None: see the module's text.

    Raises:
        InputError: a rank below 1, or no such layers.
    """
    rank = check_count("rank", rank, 1, "a rank")

    return _of_layers(model, layers, lambda matrix: nearest_of_rank(promoted(matrix), rank))


def add(model: nn.Module, made: Mapping[str, Tensor]) -> None:
    """Add changes to the weights of a model; one that layers share has one change."""
    done: set[Tensor] = set()
    for name, module in _layers(model, [*made]).items():
        weight = module.source.parameter if isinstance(module, Use) else module.weight
        if not isinstance(weight, nn.Parameter):
            raise InputError(
                f"layer {name!r}: its weight is computed of others; make it a parameter first, "
                "torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
            )
        if made[name] not in done:
            done.add(made[name])
            own = weight.data if not isinstance(module, Use) or module.rows is None else weight.data[module.rows]
            own.copy_(own + made[name])


def between(model: nn.Module, other: nn.Module | Mapping[str, Tensor], *, layers: Layers = None) -> dict[str, Tensor]:
    """Return the weights of another checkpoint less the model's.

    Args:
        model: any module.
        other: one of the same structure, or a state dict.
        layers: selectors; None: those of the module's text whose weight ``other`` has.

    Raises:
        InputError: no such layers, no such weights, or of another shape.
    """
    own, found = _layers(model, layers), {}
    if isinstance(other, Mapping):
        state: Mapping[str, Any] = other
    else:  # weights as parametrisations make them
        others = _layers(other, None if layers is None else [*own]).items()
        state = {_key(name, one): one.source.parameter if isinstance(one, Use) else one.weight for name, one in others}
    state = {kinds.without_compile(name): value for name, value in state.items()}
    for name, module in own.items():
        key, weight = _key(name, module), kinds.weight_of(module)
        value = state.get(key)
        if value is None and isinstance(module, Use):  # files have a weight that is shared under one of its names
            named = kinds.unwrap(model).named_parameters(remove_duplicate=False)
            own_names = [other for other, parameter in named if parameter is module.source.parameter]
            value = next((state[other] for other in own_names if other in state), None)
        if value is not None and isinstance(module, Use) and module.rows is not None:
            value = value[module.rows]
        if value is None and layers is None:
            continue
        if value is None or value.shape != weight.shape:
            got = "none" if value is None else f"one of shape {tuple(value.shape)}"
            raise InputError(f"other: a weight {key!r} of shape {tuple(weight.shape)} is wanted, got {got}")
        found[name] = promoted(value.detach().to(weight)) - promoted(weight)
    if not found:
        raise InputError("other: it has the weight of no layer of the model; it has " + ", ".join([*state][:5]))
    return found


def _key(name: str, module: nn.Module) -> str:
    """Return the key of a layer's weight in a state dict; a part of a parameter has the key of the whole."""
    if isinstance(module, Use) and not module.source.of_module:
        return name if module.rows is None else name.rpartition("[")[0]
    return f"{name}.weight" if name else "weight"


def of_layer(name: str, module: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the change of a layer's weight by a function of its matrix, whose rows have a scale each."""
    kind = kinds.kind_of(module)
    try:
        return kind.from_rows(change(kind.as_rows(kinds.weight_of(module)))).contiguous()
    except InputError as error:
        raise InputError(f"layer {name!r}: {error}") from None


def _of_layers(model: nn.Module, chosen: Layers, change: Callable[[Tensor], Tensor]) -> Changes:
    """Return the changes of layers by a function of their matrices; a weight that several layers share has one."""
    modules = _layers(model, chosen)
    found: dict[str, Tensor] = {}
    for sharing in _sharing(modules):
        name = _owner(modules, sharing)
        found |= dict.fromkeys(sharing, of_layer(name, modules[name], change))
    made = Changes({name: found[name] for name in modules})
    made.uncovered = uses.left_out(kinds.unwrap(model), [*modules.values()])
    return made


def _layers(model: nn.Module, chosen: Layers) -> dict[str, nn.Module]:
    """Return layers by name; None takes all that may be layers, a parameter either whole or in its parts."""
    model = kinds.unwrap(check_module("model", model))
    found = selectors.select(model, chosen).modules
    if chosen is not None:
        return found
    found = {name: module for name, module in found.items() if not isinstance(module, Use) or _is_meant(module)}
    for sharing in _sharing(found):
        use = uses.whole(model, f"{_owner(found, sharing)}.weight") if len(sharing) > 1 else None
        if use is not None:
            found = {use.name if name == sharing[0] else name: found[name] for name in found if name not in sharing[1:]}
            found[use.name] = use
    return found


def _is_meant(use: Use) -> bool:
    """Return whether a use is among those, as the model most likely has them, that cover each parameter once."""
    module, _ = use.source.places[0]
    if use.routed or use.source.of_module or runs_with_its_module(use):
        return True
    return use.rows is None and not isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase))


def _sharing(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return for each weight the names of the layers that have it."""
    found: dict[Tensor, list[str]] = {}
    for name, module in modules.items():
        assert isinstance(module.weight, Tensor)
        found.setdefault(module.weight, []).append(name)
    return [*found.values()]


def _owner(modules: Mapping[str, nn.Module], sharing: Sequence[str]) -> str:
    """Return the layer that tells the rows of a shared weight: the first that is no embedding, if there is one."""
    others = (n for n in sharing if isinstance(modules[n], Use) or not kinds.kind_of(modules[n]).tokens)
    return next(others, sharing[0])
