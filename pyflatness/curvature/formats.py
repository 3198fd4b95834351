"""Keep weights in fewer bits, as tools that quantise do: the formats that plans choose from.

Tools use the same name for different roundings. A format says whose it is (:attr:`Format.tool`), and its weights are
bit for bit those that this tool gives back, for float32, bfloat16 and float16. Integers have a scale s for each row, or
for each group of entries of a row.

===============  ========================================================================================
tool             rule
===============  ========================================================================================
torchao          s = max |w| · 2 / (2^n - 1), and 2^n levels from -2^(n-1) to 2^(n-1) - 1; w · (1 / s) is rounded
llm-compressor   the same levels, but w / s is rounded; also mxfp4 and nvfp4. gptqmodel's grid is this one
auto-round       s = (the largest by size, with its sign) / -2^(n-1) in float16, where it does not tune (``iters=0``)
modelopt         s = max |w| / (2^(n-1) - 1), and 2^n - 1 levels
gguf             32 entries each: q4_0 and q5_0 with s = (the largest by size, with its sign) / -2^(n-1), q4_1 and q5_1
                 with a smallest value, q8_0 with s = max |w| / 127; scales in float16
bitsandbytes     nf4: the nearest of 16 quantiles of a normal distribution, for each 64 entries times their max |w|
===============  ========================================================================================

Names without a tool are torchao's, and where it has no such format llm-compressor's.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..contractions import promoted
from ..errors import InputError
from ..messages import shown

_FP8, _FP4 = 448.0, 6.0  # the largest numbers
_NAMES = "int2 … int8, int4-g128 (of groups), fp8, mxfp4, nvfp4, 2:4, rank-16, keep, gguf:q4_0, bitsandbytes:nf4"
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@dataclass(frozen=True)
class Format:
    """Represent a way to keep a layer's weight in fewer bits.

    Attributes:
        name: the name that choices and messages have for it.
        bits: of a weight: a number, or a function of the matrix's rows, its columns and the bits of its dtype.
        function: w (d, m), in float32 or float64 -> the matrix that is kept in its place, of the same shape.
        scheme: what exports tell other tools: ``type`` ``"int"`` or ``"float"``, ``bits``, ``group_size`` or None, and
            ``scale``, the dtype of groups' scales where they have one of their own; empty: the weight is left as it is;
            None: no tool is told.
        tool: the tool whose rounding it is, the only one that can be told of it; empty: any that reads the scheme.
        native: whether the function takes the weight in its own dtype, in which tools compute.

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
    tool: str = ""
    native: bool = False

    @property
    def changes(self) -> bool:
        """Return whether it may change a weight."""
        return self.scheme is None or bool(self.scheme)

    def bits_of(self, matrix: Tensor) -> float:
        """Return the bits a weight of a matrix (d, m) in the weight's dtype."""
        rows, columns = matrix.shape
        return float(self.bits(rows, columns, 8 * matrix.itemsize) if callable(self.bits) else self.bits)

    def kept(self, matrix: Tensor) -> Tensor:
        """Return what is kept of a matrix.

        Raises:
            InputError: it has another shape, or NaN or infinity.
        """
        kept = self.function(matrix if self.native else promoted(matrix))
        if not isinstance(kept, Tensor) or kept.shape != matrix.shape:
            got = f"one of shape {tuple(kept.shape)}" if isinstance(kept, Tensor) else shown(kept)
            raise InputError(f"format {self.name!r}: a matrix of shape {tuple(matrix.shape)} is wanted, got {got}")
        if not bool(kept.isfinite().all()):
            raise InputError(f"format {self.name!r}: what it makes of the weight has NaN or infinity")
        return kept.to(matrix.device)

    def change(self, matrix: Tensor) -> Tensor:
        """Return what is kept of a matrix less the matrix, in float32, or in float64 if the matrix is.

        Raises:
            InputError: see :meth:`kept`.
        """
        return less(self.kept(matrix), promoted(matrix))


@dataclass(frozen=True)
class Copy:
    """Represent the weights of a quantised copy of the model as a format, such as what GPTQ or HQQ made of it.

    Attributes:
        name: the name that choices and messages have for it.
        bits: of a weight, as of :class:`Format`. A layer that the copy leaves as it is takes the bits of its dtype.
        model: the copy, with weights in floating point, or its state dict.

    Example:
        >>> import copy, torch, pyflatness as pf
        >>> model = torch.nn.Linear(4, 2).eval()
        >>> rounded = copy.deepcopy(model)
        >>> _ = rounded.weight.data.round_()
        >>> data = torch.randn(20, 4), torch.randn(20, 2)
        >>> formats = ["int8", pf.changes.Copy("rounded", 3, rounded)]
        >>> pf.allocate(model, torch.nn.MSELoss(), data, formats, bits=4).choice
        {'': 'rounded'}
    """

    name: str
    bits: float | Callable[[int, int, int], float]
    model: nn.Module | Mapping[str, Tensor]
    changes: ClassVar[bool] = True


def named(name: "str | Format", tool: str | None = None) -> Format:
    """Return the format of a name, see :mod:`pyflatness.changes` and ``TOOL:NAME``; a format is returned as it is.

    Raises:
        InputError: no such format, or not of this tool.
    """
    if isinstance(name, Format):
        return name
    own, _, base = name.rpartition(":") if isinstance(name, str) and name != "2:4" else ("", "", name)
    whose = own or tool
    tools = [whose] if whose else ["torchao", "llm-compressor"]
    ranks = re.fullmatch(r"rank-([1-9]\d*)", str(base))
    if ranks:
        rank = int(ranks[1])
        return Format(base, partial(_of_two_factors, rank), partial(_to_rank, rank))
    if base == "2:4":
        return Format("2:4", _half, _with_two_of_four)
    if base == "keep":
        return Format("keep", 16, _as_half, {}, native=True) if whose == "gguf" else _KEEP
    for each in tools:
        if each not in TOOLS:
            raise InputError(f"tool: {shown(each)} is none of those with formats: {', '.join(TOOLS)}")
        found = next(
            ((read, make) for pattern, make in TOOLS[each].items() if (read := re.fullmatch(pattern, str(base)))), None
        )
        if found is not None:
            made: Format = found[1](*(int(part) if part else None for part in found[0].groups()))
            return replace(made, name=name, tool=each, native=True)
    patterns = ", ".join([*map(_readable, TOOLS[whose]), "keep"]) if whose else _NAMES
    known = f"of {whose}" if whose else "that is known"
    raise InputError(
        f"formats: {shown(name)} is no format {known}; {_hint(base)}there are {patterns}, and pf.changes.Format for "
        "your own"
    )


def _own(rows: int, columns: int, own: int) -> float:
    return own


def _half(rows: int, columns: int, own: int) -> float:
    return own / 2 + 1


def _itself(matrix: Tensor) -> Tensor:
    return matrix


def _as_half(matrix: Tensor) -> Tensor:
    """Return what a file of gguf calls f16."""
    return matrix.half().to(matrix.dtype)


def _with_two_of_four(matrix: Tensor) -> Tensor:
    return matrix + two_of_four(matrix)


_KEEP = Format("keep", _own, _itself, {}, native=True)


def _hint(name: object) -> str:
    """Return what is wrong with a name that is nearly one of a format; empty where it is not."""
    integers = re.fullmatch(r"int(\d+)(?:-g(\d+))?", str(name))
    if integers and not 2 <= int(integers[1]) <= 8:
        return "integers have 2 to 8 bits; "
    if integers and integers[2] and not int(integers[2]):
        return "a group has at least one weight; "
    owner = next((tool for tool, own in TOOLS.items() if any(re.fullmatch(pattern, str(name)) for pattern in own)), "")
    return f"{owner} has it, as {f'{owner}:{name}'!r} or with tool={owner!r}; " if owner else ""


def _readable(pattern: str) -> str:
    """Return a regular expression of names as a reader writes them: "int[2-8], with -gN for groups"."""
    name, groups, _ = pattern.partition("(?:-g")
    return name.replace("(", "").replace(")", "") + (", with -gN for groups" if groups else "")


def _integers(bits: int, group: int | None = None, *, rule: Callable[..., Tensor]) -> Format:
    """Return the format of integers, with a scale for each row, or one of 16 bits for each group of entries."""
    scheme = {"type": "int", "bits": bits, "group_size": group}
    held = partial(_with_scales, bits=bits, scale=16, size=group) if group else bits
    return Format("", held, partial(by_groups, size=group, kept=partial(rule, bits=bits)), scheme)


def _with_scales(rows: int, columns: int, own: int, *, bits: float, scale: int, size: int) -> float:
    """Return the bits of a weight with those of the scales of groups of ``size`` entries of a row."""
    return bits + scale * -(-columns // size) / columns


def _floats(size: int, scale: str, function: Callable[[Tensor], Tensor]) -> Format:
    """Return the format of numbers of 4 bits with a scale of 8 bits for each group."""
    scheme = {"type": "float", "bits": 4, "group_size": size, "scale": scale}
    held = partial(_with_scales, bits=4, scale=8, size=size)
    return Format("", held, partial(by_groups, size=size, kept=function), scheme)


def _blocks(kind: str, bits: float, function: Callable[[Tensor], Tensor]) -> Format:
    """Return a format of llama.cpp's, in blocks of 32."""
    return Format("", bits, partial(by_groups, size=32, kept=partial(_in_float32, function)), {"type": kind})


def _in_float32(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return function(rows.float()).to(rows)


def _fp8(rule: Callable[[Tensor], Tensor]) -> Format:
    return Format("", 8, rule, {"type": "float", "bits": 8, "group_size": None})


def _of_two_factors(rank: int, rows: int, columns: int, own: int) -> float:
    return own * min(1.0, rank * (rows + columns) / (rows * columns))


def _to_rank(rank: int, matrix: Tensor) -> Tensor:
    return matrix + of_rank(matrix, rank)


def integers(rows: Tensor, bits: int, *, divided: bool = False) -> Tensor:
    """Return rows as integers times their scale: torchao's, or with ``divided`` those of rows divided by the scale."""
    top = 2 ** (bits - 1)
    scale = largest(rows) / ((2**bits - 1) / 2)
    levels = rows / scale if divided else rows * (1.0 / scale)
    return torch.where(scale > 0, levels.round().clamp(-top, top - 1) * scale, 0.0)


def _narrow(rows: Tensor, bits: int) -> Tensor:
    exact = rows.float()
    scale = exact.new_tensor(2 ** (bits - 1) - 1) / largest(exact)
    return torch.where(scale.isfinite(), (exact * scale).round() / scale, 0.0).to(rows)


def _fp8_exact(matrix: Tensor) -> Tensor:
    scale = (largest(matrix) / _FP8).float()
    return (_as_fp8(matrix.float() / scale) * scale).to(matrix)  # a row of zeros becomes NaN, as in torchao


def _fp8_native(matrix: Tensor) -> Tensor:
    scale = largest(matrix) / _FP8
    return torch.where(scale > 0, _as_fp8(matrix / scale) * scale, 0.0)


def _as_fp8(numbers: Tensor) -> Tensor:
    return numbers.clamp(-_FP8, _FP8).to(torch.float8_e4m3fn).to(numbers.dtype)


def _as_fp4(numbers: Tensor) -> Tensor:
    """Return the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 with a sign, the even one of two: E2M1."""
    sizes = numbers.abs()
    step = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0)).to(numbers)
    return ((sizes / step).round() * step).clamp_max(_FP4) * numbers.sign()


def _mxfp4(groups: Tensor) -> Tensor:
    """Return groups times a power of two: that at or below their largest entry, or above it where 1.75 is reached."""
    mantissa, exponent = torch.frexp(largest(groups))  # the largest is mantissa · 2^exponent, of 0.5 to 1
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - 3 + (mantissa >= 0.875).int())
    return torch.where(largest(groups) > 0, _as_fp4(groups / scale) * scale, 0.0)


def _nvfp4(groups: Tensor) -> Tensor:
    whole = (_FP8 * _FP4 / groups.abs().amax().clamp_min(torch.finfo(groups.dtype).tiny)).float().view(1)
    scale = _as_fp8(whole * (largest(groups) / _FP4)) / whole
    return torch.where(scale > 0, _as_fp4(groups / scale) * scale, 0.0).to(groups)


def _signed(rows: Tensor, bits: int) -> Tensor:
    most = 2 ** (bits - 1)
    scale = rows.gather(-1, rows.abs().argmax(dim=-1, keepdim=True)) / -most
    levels: Tensor = (rows * torch.where(scale == 0, 0.0, 1 / scale) + (most + 0.5)).trunc().clamp(0, 2 * most - 1)
    kept: Tensor = (levels - most) * scale.half().float()
    return kept


def _from_least(rows: Tensor, bits: int) -> Tensor:
    least = rows.amin(dim=-1, keepdim=True)
    scale = (rows.amax(dim=-1, keepdim=True) - least) / (2**bits - 1)
    levels: Tensor = ((rows - least) * torch.where(scale == 0, 0.0, 1 / scale) + 0.5).trunc().clamp(0, 2**bits - 1)
    kept: Tensor = levels * scale.half().float() + least.half().float()
    return kept


def _signed_half(rows: Tensor, bits: int) -> Tensor:
    most, high, low = (
        2 ** (bits - 1),
        rows.amax(-1, keepdim=True).clamp_min(0),
        -rows.amin(-1, keepdim=True).clamp_max(0),
    )
    scale = (torch.where(high < low, 1, -1) * torch.maximum(high, low) / most).half()
    scale = torch.where(scale < 0, scale.clamp_max(-1e-5), scale.clamp_min(1e-5))
    return (scale * (rows / scale).round().clamp(-most, most - 1)).to(rows)


def _q8(rows: Tensor) -> Tensor:
    scale = largest(rows) / 127
    levels = rows * torch.where(scale == 0, 0.0, 1 / scale)
    sizes = levels.abs()
    rounded = levels.sign() * (sizes.floor() + (2 * (sizes - sizes.floor())).floor())
    return rounded * scale.half().float()


def _nf4(matrix: Tensor) -> Tensor:
    """Return a matrix in blocks of 64 that run over the ends of its rows."""
    code = torch.tensor(_NF4, dtype=torch.float32, device=matrix.device)

    def kept(blocks: Tensor) -> Tensor:
        exact = blocks.float()
        scale = largest(exact)
        level = torch.bucketize(exact * torch.where(scale == 0, 0.0, 1 / scale), (code[1:] + code[:-1]) / 2)
        return (code[level] * scale).to(blocks)

    return by_groups(matrix.reshape(1, -1), 64, kept).view_as(matrix)


_INT = r"int([2-8])(?:-g([1-9]\d*))?"
TOOLS: dict[str, dict[str, Callable[..., Format]]] = {
    "torchao": {_INT: partial(_integers, rule=integers), "fp8": lambda: _fp8(_fp8_exact)},
    "llm-compressor": {
        _INT: partial(_integers, rule=partial(integers, divided=True)),
        "fp8": lambda: _fp8(_fp8_native),
        "mxfp4": lambda: _floats(32, "uint8", _mxfp4),
        "nvfp4": lambda: _floats(16, "float8_e4m3fn", _nvfp4),
    },
    "gptqmodel": {r"int([2348])(?:-g([1-9]\d*))?": partial(_integers, rule=partial(integers, divided=True))},
    "auto-round": {_INT: partial(_integers, rule=_signed_half)},
    "modelopt": {_INT: partial(_integers, rule=_narrow)},
    "gguf": {
        "q4_0": lambda: _blocks("q4_0", 4.5, partial(_signed, bits=4)),
        "q4_1": lambda: _blocks("q4_1", 5, partial(_from_least, bits=4)),
        "q5_0": lambda: _blocks("q5_0", 5.5, partial(_signed, bits=5)),
        "q5_1": lambda: _blocks("q5_1", 6, partial(_from_least, bits=5)),
        "q8_0": lambda: _blocks("q8_0", 8.5, _q8),
    },
    "bitsandbytes": {"nf4": lambda: Format("", 4.5, _nf4, {"type": "nf4"})},
}
"""By tool, patterns of names and what makes the format of each."""


def less(kept: Tensor, matrix: Tensor) -> Tensor:
    """Return what is kept of a matrix less the matrix, in the matrix's dtype."""
    return (kept.double() - matrix.double()).to(matrix.dtype)


def by_groups(matrix: Tensor, size: int | None, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``kept`` of groups of ``size`` entries of a row, the last of which may be shorter; None: of whole rows."""
    if size is None:
        return kept(matrix)
    groups = F.pad(matrix, (0, -matrix.shape[1] % size)).unflatten(1, (-1, size))
    return kept(groups).flatten(1)[:, : matrix.shape[1]]


def largest(rows: Tensor) -> Tensor:
    """Return the largest absolute value along the last dimension."""
    return rows.abs().amax(dim=-1, keepdim=True)


def two_of_four(matrix: Tensor) -> Tensor:
    """Return what setting the two smallest of every four entries of a row to zero changes."""
    found, whole = torch.zeros_like(matrix), matrix.shape[1] // 4 * 4
    fours = matrix[:, :whole].unflatten(1, (-1, 4))
    smallest = fours.abs().argsort(dim=2, stable=True)[..., :2]
    found[:, :whole] = torch.zeros_like(fours).scatter(2, smallest, -fours.gather(2, smallest)).flatten(1)
    return found


def of_rank(matrix: Tensor, rank: int) -> Tensor:
    """Return the nearest matrix of a rank less the matrix."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    lost: Tensor = (u[:, rank:] * s[rank:]) @ v[rank:]
    return -lost.to(matrix.dtype)
