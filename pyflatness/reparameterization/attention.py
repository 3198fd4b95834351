"""Give attention other weights for the same function: q, k by A and A⁻ᵀ, v, o by B and B⁻¹, in each head.

    ⟨A q, A⁻ᵀ k⟩ = ⟨q, k⟩        (o B⁻¹) Σ a (B v) = o Σ a v        for invertible A, B (h, h)

Heads that share keys and values (grouped queries) share A and B. Rotary embeddings rotate pairs of entries of q and k
by angles that depend on the position, so that A has to commute with these rotations: on each pair it is a rotation
times a factor. With norms of q and k it is one factor for each head. B is free in all cases.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError
from ..messages import shown
from ..model import layers
from . import flow

GROUPS = {
    "any": "any invertible matrix of each head",
    "pairs of halves": "a rotation and a factor of each pair of entries (j, j + h/2), as rotary embeddings leave it",
    "pairs of neighbours": "a rotation and a factor of each pair of entries (2j, 2j + 1), as some rotary ones do",
    "one factor": "a factor of each head",
}
"""What A may be, larger groups first."""

_OUTPUTS = ("o_proj", "out_proj")  # of modules with q_proj, k_proj and v_proj


@dataclass(frozen=True)
class HeadRows:
    """Hold which rows of a matrix (d, m) are the heads', or which columns of the outputs': ``heads`` of ``size``."""

    module: str  # the module that holds the weight
    weight: str
    bias: str
    first: int
    heads: int
    size: int


@dataclass(frozen=True)
class Attention:
    """Hold where the heads of one attention module are in its matrices."""

    name: str
    q: HeadRows
    k: HeadRows
    v: HeadRows
    o: HeadRows

    @property
    def groups(self) -> int:
        """Return how many heads have keys and values of their own."""
        return self.k.heads

    def matrices(self, what: str, given: object, device: torch.device) -> Tensor:
        """Return A (``"qk"``) or B (``"vo"``) of each group, (groups, h, h) float64."""
        size = (self.q if what == "qk" else self.v).size
        wanted = f"attention {self.name!r}, {what!r}: an invertible matrix ({size}, {size}), or one for each of "
        wanted += f"{self.groups} heads with keys of their own, is wanted"
        try:
            found = torch.as_tensor(given, dtype=torch.float64, device=device).detach()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"{wanted}, got {given!r:.80}") from None
        if found.shape not in {(size, size), (self.groups, size, size)}:
            raise InputError(f"{wanted}, got shape {tuple(found.shape)}")
        found = found.expand(self.groups, size, size)
        if not bool(found.isfinite().all() and (torch.linalg.matrix_rank(found) == size).all()):
            raise InputError(f"{wanted}, got one that is not")
        return found

    def change(self, model: nn.Module, qk: Tensor | None, vo: Tensor | None) -> None:
        """Multiply the weights in place by A and B of each group."""
        if qk is not None:
            _multiply_rows(model, self.q, qk)
            _multiply_rows(model, self.k, torch.linalg.inv(qk).mT)
        if vo is not None:
            _multiply_rows(model, self.v, vo)
            _multiply_columns(model, self.o, torch.linalg.inv(vo))


def attentions(model: nn.Module) -> dict[str, Attention]:
    """Return the attention modules whose heads are known, by name: torch's, and those like Llama's or GPT-2's."""
    found = {name: _of_module(name, module) for name, module in model.named_modules()}
    return {name: one for name, one in found.items() if one is not None}


def named(model: nn.Module, selector: object) -> Attention:
    """Return an attention module by its name or itself."""
    known = attentions(model)
    for name, one in known.items():
        if selector == name or model.get_submodule(name) is selector:
            for rows in (one.q, one.k, one.v, one.o):
                _check(model, rows)
            return one
    raise InputError(
        f"factors: matrices 'qk' and 'vo' are for attention modules (nn.MultiheadAttention, or those of transformers "
        f"with q_proj, k_proj, v_proj and o_proj, or c_attn and c_proj), got {selector!r:.80}; there are "
        f"{shown([*known])}"
    )


def drawn(group: str, one: HeadRows, groups: int, random: np.random.Generator, factors: tuple[float, float]) -> Tensor:
    """Return random matrices (groups, h, h) of one of :data:`GROUPS`, with singular values between the factors."""
    h = one.size
    if group == "one factor":
        identity = torch.eye(h, dtype=torch.float64, device="cpu")
        return identity * torch.from_numpy(random.uniform(*factors, (groups, 1, 1)))
    if group == "any":
        left, right = (torch.linalg.qr(torch.from_numpy(random.standard_normal((groups, h, h)))).Q for _ in range(2))
        found: Tensor = left @ (torch.from_numpy(random.uniform(*factors, (groups, h, 1))) * right)
        return found
    angles, sizes = random.uniform(0, 2 * np.pi, (groups, h // 2)), random.uniform(*factors, (groups, h // 2))
    a, b = (torch.diag_embed(torch.from_numpy(sizes * ratios)) for ratios in (np.cos(angles), np.sin(angles)))
    turned = torch.cat([torch.cat([a, -b], dim=2), torch.cat([b, a], dim=2)], dim=1)
    if group == "pairs of neighbours":
        order = torch.arange(h, device="cpu").view(2, -1).t().flatten()
        turned = turned[:, order][:, :, order]
    return turned


def largest_group(
    one: Attention,
    random: np.random.Generator,
    factors: tuple[float, float],
    keeps: Callable[[Mapping[str, Tensor]], bool],
) -> tuple[str, dict[str, Tensor]]:
    """Return the largest of :data:`GROUPS` whose A leave the function alone, found by trial, and random A and B.

    ``keeps`` returns whether matrices leave the function alone. If no A does, the group is "", and B may be missing
    too.
    """
    values = {"vo": drawn("any", one.v, one.groups, random, factors)}
    values = values if keeps(values) else {}
    for group in GROUPS:
        if group.startswith("pairs") and one.q.size % 2:
            continue
        keys = {"qk": drawn(group, one.q, one.groups, random, factors)}
        if keeps(keys):
            return group, keys | values
    return "", values


def _of_module(name: str, module: nn.Module) -> Attention | None:
    """Return where a module has the heads of its attention; None for another module, or one of an unknown kind."""
    size = getattr(module, "head_dim", None)
    if not isinstance(size, int):
        return None

    def rows(child: str, heads: int, first: int = 0, weight: str = "weight", bias: str = "bias") -> HeadRows:
        return HeadRows(".".join(filter(None, (name, child))), weight, bias, first * heads * size, heads, size)

    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None:
            return None  # it has a key that no projection makes
        packed = module.in_proj_weight is not None
        weights = ["in_proj_weight" if packed else f"{key}_proj_weight" for key in "qkv"]
        q, k, v = (rows("", module.num_heads, first, weight, "in_proj_bias") for first, weight in enumerate(weights))
        return Attention(name, q, k, v, rows("out_proj", module.num_heads))
    children = dict(module.named_children())
    output = next((key for key in _OUTPUTS if key in children), "")
    if {"q_proj", "k_proj", "v_proj"} <= children.keys() and output:
        linear = [children[key] for key in ("q_proj", "k_proj", "v_proj", output)]
        heads = [layers.without_entries(layer).shape[0] // size for layer in linear if layers.is_linear(layer)]
        if len(heads) < len(linear):
            return None
        q, k, v = (rows(f"{key}_proj", count) for key, count in zip("qkv", heads, strict=False))
        return Attention(name, q, k, v, rows(output, heads[0]))
    if {"c_attn", "c_proj"} <= children.keys() and not getattr(module, "is_cross_attention", False):
        count = len(layers.matrix(children["c_attn"])[0]) // 3 // size
        q, k, v = (rows("c_attn", count, first) for first in range(3))
        return Attention(name, q, k, v, rows("c_proj", count))
    return None


def _check(model: nn.Module, rows: HeadRows) -> None:
    module = model.get_submodule(rows.module)
    if rows.weight == "weight":
        flow.check_plain(model, rows.module, module)
    elif not isinstance(module._parameters.get(rows.weight), nn.Parameter):
        raise InputError(
            f"attention {rows.module!r}: its {rows.weight} is made by a parametrisation; remove that first"
        )


def _multiply_rows(model: nn.Module, rows: HeadRows, matrices: Tensor) -> None:
    """Multiply the rows of each head, (h, m), by its group's matrix, and of the bias."""
    module, count = model.get_submodule(rows.module), rows.heads * rows.size
    weight, bias, of_layer = getattr(module, rows.weight), getattr(module, rows.bias), rows.weight == "weight"
    matrix = layers.as_matrix(module, weight).double() if of_layer else weight.double()
    each = matrices.repeat_interleave(rows.heads // len(matrices), dim=0)
    some = slice(rows.first, rows.first + count)
    own = slice(None) if len(matrix) == count else some  # where q, k and v have one bias and a weight each
    matrix[own] = (each @ matrix[own].unflatten(0, (rows.heads, -1))).flatten(0, 1)
    weight.copy_(layers.as_weight(module, matrix) if of_layer else matrix)
    if bias is not None:
        changed = bias.double()
        changed[some] = (each @ changed[some].view(rows.heads, -1, 1)).flatten()
        bias.copy_(changed)


def _multiply_columns(model: nn.Module, rows: HeadRows, matrices: Tensor) -> None:
    """Multiply the columns of each head, (d, h), by its group's matrix."""
    module = model.get_submodule(rows.module)
    weight = layers.weight_of(module)
    each = matrices.repeat_interleave(rows.heads // len(matrices), dim=0)
    columns = layers.as_matrix(module, weight).double().unflatten(1, (rows.heads, -1))
    weight.copy_(layers.as_weight(module, torch.einsum("dhi,hij->dhj", columns, each).flatten(1)))
