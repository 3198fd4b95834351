"""Make changes of layers' weights, for :func:`pyflatness.cost_of_change`: what quantisation or pruning would do.

A :class:`Format` is a way to keep a weight: :func:`pyflatness.allocate` chooses one for each layer. By name there are::

    name        a weight is kept as                                                bits of each entry
    int2…int8   integers times a scale for each row, symmetric, as by rounded()    the integers': no row's scale counts
    int4-g128   integers times a scale of 16 bits for each 128 entries of a row    4.125: with that of the scales
    fp8         E4M3 numbers times a scale for each row                            8
    mxfp4       E2M1 numbers times a power of two for each 32 entries of a row     4.25: with 8 for each scale
    nvfp4       E2M1 numbers times an fp8 scale for each 16, and one of all        4.5
    2:4         itself, but for the two smallest of every four of a row, 0         half its dtype's and 1 for places
    rank-16     two factors of the nearest matrix of that rank                     the factors', of its dtype
    keep        itself                                                             its dtype's

Each function returns a mapping from names of layers to Δ, of the shape of the layer's weight, so that w + Δ is the
changed weight; in float32 for weights of half precision. No model is changed. Rows of a weight are its outputs
(filters, of a convolution).

``layers=None`` takes every module that is a layer, and the weights of torch's attention and recurrent modules, in which
the rows for queries, keys and values are layers of their own. A weight that several modules share is one layer in all
of its uses, called by the parameter's name (``"lm_head.weight"``), since no tool rounds one use of a tensor. That of an
embedding and a head has the head's rows, one for each token. Its uses have rows of their own where they are named:
``layers=["embed", "lm_head"]``. Other weights that no module of a known kind has, such as those of experts or of a
model's own functions, are taken by their names (``pyflatness layers`` lists them): whether they are layers shows when
the model runs.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contractions import promoted
from ..errors import InputError
from ..messages import check_choice, check_module, shown
from ..model import layers as kinds
from ..model import selectors, uses
from ..model.selectors import Selector
from ..model.uses import Use, runs_with_its_module
from ..options import check_count, check_number

__all__ = ["Format", "between", "named", "of_format", "of_rank", "pruned", "pruned_2_4", "rounded"]

Layers = Selector | Sequence[Selector] | None
_PER = ("tensor", "channel", "group")
_FP8, _FP4 = 448.0, 6.0  # the largest numbers
_SCALE = {"int": 16, "mxfp": 8, "nvfp": 8}  # bits of a group's
_SCALE_DTYPE = {"int": None, "mxfp": "uint8", "nvfp": "float8_e4m3fn"}
_NAMES = "int2 … int8, int4-g128 (of groups), fp8, mxfp4, nvfp4, 2:4, rank-16, keep"


@dataclass(frozen=True)
class Format:
    """Represent a way to keep a layer's weight in fewer bits.

    Attributes:
        name: by which a choice and messages call it.
        bits: that a weight takes: a number, or a function of the matrix's rows, its columns and the bits of its dtype.
        function: w (d, m), in float32 or float64 -> the matrix that is kept in its place, of the same shape.
        scheme: what exports tell other tools: ``type`` ``"int"`` or ``"float"``, ``bits``, ``group_size`` or None, and
            ``scale``, the dtype of groups' scales where they have one of their own; empty: the weight is left as it is;
            None: no tool is told.

    Example:
        >>> import torch, pyflatness as pf
        >>> signs = pf.changes.Format("signs", 1, lambda w: w.abs().mean(dim=1, keepdim=True) * w.sign())
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 0.5]]))
        >>> pf.changes.of_format(layer, signs)[""]
        tensor([[-0.2500,  0.2500]])
    """

    name: str
    bits: float | Callable[[int, int, int], float]
    function: Callable[[Tensor], Tensor]
    scheme: Mapping[str, Any] | None = None

    def bits_of(self, matrix: Tensor) -> float:
        """Return the bits a weight of a matrix (d, m) of the weight's own dtype."""
        rows, columns = matrix.shape
        return float(self.bits(rows, columns, 8 * matrix.itemsize) if callable(self.bits) else self.bits)

    def change(self, matrix: Tensor) -> Tensor:
        """Return what is kept of a matrix less the matrix.

        Raises:
            InputError: it has another shape, or NaN or infinity.
        """
        kept = self.function(matrix)
        if not isinstance(kept, Tensor) or kept.shape != matrix.shape:
            got = f"one of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else shown(kept)
            raise InputError(f"format {self.name!r}: a matrix of shape {tuple(matrix.shape)} is wanted, got {got}")
        if not bool(kept.isfinite().all()):
            raise InputError(f"format {self.name!r}: what it makes of the weight has NaN or infinity")
        return _less(kept.to(matrix.device, torch.float64), matrix)


def named(name: "str | Format") -> Format:
    """Return the format of a name, see the module's text; a format is returned as it is.

    Raises:
        InputError: no such format.
    """
    if isinstance(name, Format):
        return name
    found = re.fullmatch(r"(int)([2-8])(?:-g([1-9]\d*))?|(rank)-([1-9]\d*)|fp8|mxfp4|nvfp4|2:4|keep", str(name))
    if found is None or not isinstance(name, str):
        raise InputError(f"formats: {shown(name)} is none; there are {_NAMES}, and pf.changes.Format for your own")
    if found[1]:
        return _grouped(name, "int", int(found[2]), int(found[3]) if found[3] else None)
    if found[4]:
        return _of_factors(name, int(found[5]))
    return {
        "fp8": lambda: Format(name, 8, _fp8, {"type": "float", "bits": 8, "group_size": None}),
        "mxfp4": lambda: _grouped(name, "mxfp", 4, 32),
        "nvfp4": lambda: _grouped(name, "nvfp", 4, 16),
        "2:4": lambda: Format(name, lambda d, m, own: own / 2 + 1, lambda w: w + _two_of_four(w)),
        "keep": lambda: Format(name, lambda d, m, own: own, lambda w: w, {}),
    }[name]()


def of_format(model: nn.Module, format: str | Format, *, layers: Layers = None) -> dict[str, Tensor]:  # noqa: A002
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


def of_uses(model: nn.Module, kept: Format, layers: Layers) -> dict[str, Tensor]:
    """Return the same with ``layers=None`` by module: modules that share a weight have one change."""
    return _of_layers(model, layers, kept.change, by_module=True)


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
            return _less(_integers(matrix.double().flatten(), steps).view_as(matrix), matrix)
        return _less(
            _by_groups(matrix, group_size if per == "group" else None, partial(_integers, steps=steps)), matrix
        )

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
    return _of_layers(model, layers, _two_of_four)


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

    return _of_layers(model, layers, partial(_of_rank, rank=rank))


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
        layers: selectors; None: of those in the module's text, the ones whose weight ``other`` has.

    Raises:
        InputError: no such layers, no such weights, or of another shape.
    """
    own, found = _layers(model, layers), {}
    state = other if isinstance(other, Mapping) else _state(other, None if layers is None else [*own])
    state = {kinds.without_compile(name): value for name, value in state.items()}
    for name, module in own.items():
        key, weight = _key(name, module), module.weight
        assert isinstance(weight, Tensor)
        value = state.get(key)
        if value is None and isinstance(module, Use):  # files have a weight that is shared under one of its names
            value = next((state[other] for other in _names(model, module) if other in state), None)
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


def _names(model: nn.Module, use: Use) -> list[str]:
    """Return all names of a stand-in's parameter."""
    named = kinds.unwrap(model).named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if parameter is use.source.parameter]


def _less(kept: Tensor, matrix: Tensor) -> Tensor:
    """Return what a matrix is kept as, float64, less the matrix, in its dtype."""
    return (kept - matrix.double()).to(matrix.dtype)


def _by_groups(matrix: Tensor, size: int | None, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what ``kept`` makes of groups of so many entries of a row in float64, the last of which may be shorter."""
    exact = matrix.double()
    if size is None:
        return kept(exact)
    groups = F.pad(exact, (0, -matrix.shape[1] % size)).unflatten(1, (-1, size))
    return kept(groups).flatten(1)[:, : matrix.shape[1]]


def _scaled(rows: Tensor, scale: Tensor, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """Return entries kept in units of a scale; 0 where the scale is."""
    return torch.where(scale > 0, kept(rows / scale) * scale, 0.0)


def _largest(rows: Tensor) -> Tensor:
    return rows.abs().amax(dim=-1, keepdim=True)


def _integers(rows: Tensor, steps: int) -> Tensor:
    """Return entries that share a scale along their last dimension, as integers from -steps to steps times that."""
    return _scaled(rows, _largest(rows) / steps, torch.round)


def _grouped(name: str, kind: str, bits: int, size: int | None) -> Format:
    """Return the format of integers, or numbers of 4 bits, with a scale for each group of so many, or each row."""
    rounded_by: dict[str, Callable[[Tensor], Tensor]] = {"mxfp": _mxfp4, "nvfp": _nvfp4}
    kept = rounded_by.get(kind) or partial(_integers, steps=2 ** (bits - 1) - 1)

    def of_matrix(rows: int, columns: int, own: int) -> float:
        return bits + (_SCALE[kind] * -(-columns // size) / columns if size else 0)

    scheme = {
        "type": "int" if kind == "int" else "float",
        "bits": bits,
        "group_size": size,
        "scale": _SCALE_DTYPE[kind],
    }
    return Format(name, of_matrix, lambda matrix: _by_groups(matrix, size, kept), scheme)


def _of_factors(name: str, rank: int) -> Format:
    def bits(rows: int, columns: int, own: int) -> float:
        return own * min(1.0, rank * (rows + columns) / (rows * columns))

    return Format(name, bits, lambda matrix: matrix + _of_rank(matrix, rank))


def _fp8(matrix: Tensor) -> Tensor:
    return _scaled(matrix.double(), _largest(matrix.double()) / _FP8, _as_fp8)


def _as_fp8(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_FP8, _FP8).float().to(torch.float8_e4m3fn).to(numbers.dtype)


def _as_fp4(numbers: Tensor) -> Tensor:
    """Return the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 with a sign, the even one of two: E2M1."""
    sizes = numbers.abs()
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / step).round() * step).clamp_max(_FP4) * numbers.sign()


def _mxfp4(groups: Tensor) -> Tensor:
    _, exponent = torch.frexp(_largest(groups))  # the largest is below 2^exponent
    scale = torch.ldexp(torch.ones_like(groups[..., :1]), exponent - 3)
    return _scaled(groups, torch.where(_largest(groups) > 0, scale, 0.0), _as_fp4)


def _nvfp4(groups: Tensor) -> Tensor:
    whole = groups.abs().amax() / (_FP8 * _FP4)
    return _scaled(groups, _scaled(_largest(groups) / _FP4, whole, _as_fp8), _as_fp4)


def _two_of_four(matrix: Tensor) -> Tensor:
    found, whole = torch.zeros_like(matrix), matrix.shape[1] // 4 * 4
    fours = matrix[:, :whole].unflatten(1, (-1, 4))
    smallest = fours.abs().argsort(dim=2, stable=True)[..., :2]
    found[:, :whole] = torch.zeros_like(fours).scatter(2, smallest, -fours.gather(2, smallest)).flatten(1)
    return found


def _of_rank(matrix: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    lost: Tensor = (u[:, rank:] * s[rank:]) @ v[rank:]
    return -lost.to(matrix.dtype)


def _of_layers(
    model: nn.Module, chosen: Layers, change: Callable[[Tensor], Tensor], *, by_module: bool = False
) -> dict[str, Tensor]:
    """Return the changes of layers that a function makes of their matrices (d, m).

    A weight that several layers share has one change, of the matrix of :func:`_owner`: those of others may be its
    transpose.
    """
    modules = _layers(model, chosen, by_module=by_module)
    found: dict[str, Tensor] = {}
    for sharing in _sharing(modules):
        name = _owner(modules, sharing)
        matrix, _ = kinds.matrix(modules[name])
        try:
            made = kinds.as_weight(modules[name], change(promoted(matrix))).contiguous()
        except InputError as error:
            raise InputError(f"layer {name!r}: {error}") from None
        found |= dict.fromkeys(sharing, made)
    return {name: found[name] for name in modules}


def _layers(model: nn.Module, chosen: Layers, *, by_module: bool = False) -> dict[str, nn.Module]:
    """Return layers by name; of all, those that are layers without a look at how the model runs."""
    model = kinds.unwrap(check_module("model", model))
    found = selectors.select(model, chosen).modules
    if chosen is not None:
        return found
    found = {
        name: module for name, module in found.items() if not isinstance(module, Use) or runs_with_its_module(module)
    }
    for sharing in () if by_module else _sharing(found):
        use = uses.whole(model, f"{_owner(found, sharing)}.weight") if len(sharing) > 1 else None
        if use is not None:
            found = {use.name if name == sharing[0] else name: found[name] for name in found if name not in sharing[1:]}
            found[use.name] = use
    return found


def _sharing(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Return the names of the layers that have one weight, for each weight."""
    found: dict[Tensor, list[str]] = {}
    for name, module in modules.items():
        assert isinstance(module.weight, Tensor)
        found.setdefault(module.weight, []).append(name)
    return [*found.values()]


def _owner(modules: Mapping[str, nn.Module], sharing: Sequence[str]) -> str:
    """Return whose rows those of a shared weight are: of the first layer that is no embedding, if there is one."""
    others = (n for n in sharing if isinstance(modules[n], Use) or not kinds.kind_of(modules[n]).tokens)
    return next(others, sharing[0])
