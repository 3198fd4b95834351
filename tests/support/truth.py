"""Truth for tests, in float64: dense Hessians and Gauss-Newton matrices by nested autograd, and what they define.

A layer's matrix here is (d, m, d, m): entry [s, j, t, k] belongs to the weights w_sj and w_tk, filters flattened.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Loss = Callable[..., Tensor]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def hessian(risk: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the dense Hessian of ``risk`` in ``weight`` (d, m), as (d, m, d, m)."""
    weight = weight.detach().clone().requires_grad_()
    value = risk(weight)
    if not value.requires_grad:
        return value.new_zeros(*weight.shape, *weight.shape)
    (gradient,) = torch.autograd.grad(value, weight, create_graph=True, materialize_grads=True)
    return rows(gradient, weight).view(*weight.shape, *weight.shape)


def jacobian(outputs: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    """Return the derivative of all outputs in ``weight``, (outputs, *weight.shape)."""
    weight = weight.detach().clone().requires_grad_()
    return rows(outputs(weight), weight)


def rows(f: Tensor, x: Tensor, chunk: int = 256) -> Tensor:
    """Return the derivative of each entry of ``f`` in ``x``, (entries, *x.shape): those of many entries at once.

    They are held against the derivative of a random combination of all entries by itself. Where that is another, or
    torch cannot do several at once, each is taken by itself.
    """
    if not f.requires_grad:
        return x.new_zeros(f.numel(), *x.shape)
    basis = torch.eye(f.numel(), dtype=f.dtype).view(-1, *f.shape)
    back = functools.partial(torch.autograd.grad, f, x, retain_graph=True, allow_unused=True)
    direction = torch.randn(f.shape, generator=torch.Generator().manual_seed(0), dtype=f.dtype)
    (alone,) = back(direction)
    if alone is None:
        return x.new_zeros(f.numel(), *x.shape)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
        found = torch.cat([back(part, is_grads_batched=True)[0] for part in basis.split(chunk)])
        together = torch.tensordot(direction.flatten(), found, 1)
        if torch.allclose(together, alone, rtol=1e-10, atol=1e-12 * float(found.abs().max())):
            return found
    return torch.stack([back(entry)[0] for entry in basis])


def relative_flatness(risk: Callable[[Tensor], Tensor], weight: Tensor) -> float:
    """Return Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(H_ss'), the definition, from the dense Hessian."""
    weight = weight.detach().double()
    return relative_flatness_of(hessian(risk, weight), weight)


def of_model(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, name: str) -> float:
    """Return κ of one layer of a float64 model."""
    layer = model.get_submodule(name)

    def risk(weight: Tensor) -> Tensor:
        changed = {f"{name}.weight": weight.reshape(layer.weight.shape)}
        return loss(torch.func.functional_call(model, changed, (inputs,)), targets)

    return relative_flatness(risk, layer.weight.detach().flatten(1))


def softmax_variance(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return |φ_i|² Σ_s p_s |w_s - μ_i|² in float64, from differences, with the tail of p summed apart."""
    features, weight = features.double(), weight.double()
    logits = features @ (weight - weight[0]).t() + (0 if bias is None else bias.double())
    p = torch.softmax(logits, dim=1)
    pairs = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist").square()
    return features.square().sum(dim=1) * ((p @ pairs) * p).sum(dim=1) / 2


def tolerance(dtype: torch.dtype, formula_error: float = 0.0) -> float:
    """What a head's values may be off by, relatively; in float32 twice what the exact formula is off by there."""
    return max(1e-5, 2 * formula_error) if dtype == torch.float32 else 1e-12


def exact_formula_error(features: Tensor, weight: Tensor, bias: Tensor | float, expected: Tensor) -> float:
    """Return the error of the exact formula on float32 logits: what no float32 method can be asked to beat."""
    logits = (features @ weight.t() + bias).double()
    p = torch.softmax(logits, 1)
    pairs = torch.cdist(weight.double(), weight.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    values = features.double().square().sum(1) * ((p @ pairs) * p).sum(1) / 2
    return float(((values - expected).abs() / expected).max())


# --- any layer --------------------------------------------------------------------------------------------------------


def weight_of(model: nn.Module, name: str) -> Tensor:
    """The effective weight of a layer as a matrix (d, m): what a parametrisation makes of its parts, detached."""
    layer, key = place_of(model, name)
    weight = getattr(layer, key).detach()
    return as_matrix(layer, weight).clone() if (part := _part(name)) is None else weight[part].clone()


def place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a layer's weight, and the weight's name there: of a module, or of a parameter by itself.

    Of an expert, as ``weights[2]``, it is the parameter that has all.
    """
    name = name.partition("[")[0]
    parent, _, key = name.rpartition(".")
    held = key in model.get_submodule(parent)._parameters
    return (model.get_submodule(parent), key) if held else (model.get_submodule(name), "weight")


def _part(name: str) -> int | None:
    """Which of a parameter's matrices a layer is; None: all of it."""
    return int(name.partition("[")[2].rstrip("]")) if "[" in name else None


def is_called(model: nn.Module, name: str) -> bool:
    """Whether a layer is a module that is called: attention uses its parameters, and its out_proj's, in functions."""
    parent = model.get_submodule(name.rpartition(".")[0])
    return place_of(model, name)[1] == "weight" and not isinstance(parent, nn.MultiheadAttention)


def as_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """A weight, or a gradient in it, as (d, m): a row for each output, or for each channel of outputs."""
    if isinstance(layer, TRANSPOSED):  # (groups · channels, d / groups, *kernel)
        return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):  # a row for each token
        return weight.t()
    if is_norm(layer):  # diag(γ): a matrix of one entry for each feature
        return weight.reshape(-1, 1)
    return weight.flatten(1)


def is_norm(layer: nn.Module) -> bool:
    """Whether a layer is a normalisation, whose weight multiplies features entry by entry."""
    return isinstance(layer, NORMS) or "Norm" in type(layer).__name__


def groups_of(layer: nn.Module) -> int:
    """How many separate matrices a layer's weight is made of."""
    return layer.weight.numel() if is_norm(layer) else getattr(layer, "groups", 1)


def as_weight(layer: nn.Module, matrix: Tensor, key: str = "weight") -> Tensor:
    """A matrix (d, m) in the shape of the layer's weight."""
    shape = getattr(layer, key).shape
    places = as_matrix(layer, torch.arange(matrix.numel()).view(shape)).flatten()
    return matrix.flatten()[places.argsort()].view(shape)


@contextlib.contextmanager
def outputs_of(
    model: nn.Module, name: str, inputs: Tensor, sample: int | None = None
) -> Iterator[Callable[[Tensor], Tensor]]:
    """The model's outputs as a function of the weight matrix of layer ``name``; with ``sample``, of its row alone.

    Every call of the layer takes the given matrix for its weight, parametrised or not; modules tied to it keep theirs.
    The last matrix stays in force until the end, since activation checkpointing calls the layer again in a backward
    pass.
    """
    layer, key = place_of(model, name)
    called = is_called(model, name)

    def in_parameter(weight: Tensor) -> Tensor:
        if (part := _part(name)) is None:
            return as_weight(layer, weight, key)
        others = enumerate(getattr(layer, key))  # as another part's function has set them
        return torch.stack([weight if place == part else own for place, own in others])

    def outputs(weight: Tensor) -> Tensor:
        def forward(*args, **kwargs) -> Tensor:
            if isinstance(layer, nn.Linear):
                return F.linear(*args, weight, layer.bias)
            if isinstance(layer, CONVOLUTIONS):
                return layer._conv_forward(*args, weight.view(layer.weight.shape), layer.bias)
            plain = copy.copy(layer)
            del plain.forward
            if isinstance(layer, nn.EmbeddingBag):  # which torch differentiates once only
                identity = {"weight": torch.eye(layer.num_embeddings, dtype=weight.dtype)}
                return torch.func.functional_call(plain, identity, args, kwargs) @ weight.t()
            return torch.func.functional_call(plain, {"weight": as_weight(layer, weight)}, args, kwargs)

        if called:
            layer.forward = forward
        else:
            layer.__dict__[key] = in_parameter(weight)  # in front of it
        f = model(inputs)
        if sample is None:
            return f
        live = torch.zeros_like(f, dtype=torch.bool)
        live[sample] = True
        return torch.where(live, f, f.detach())

    try:
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels of attention have no second derivative
            yield outputs
    finally:
        layer.__dict__.pop("forward" if called else key, None)


def layer_hessian(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, name: str, sample: int | None = None
) -> Tensor:
    """The Hessian (d, m, d, m) of E in the weight of layer ``name``; with ``sample``, that sample's share in it."""
    with outputs_of(model, name, inputs, sample) as outputs:
        return hessian(lambda weight: loss(outputs(weight), targets), weight_of(model, name))


def layer_ggn(
    model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, name: str, sample: int | None = None
) -> Tensor:
    """JᵀH_fJ (d, m, d, m): J of all outputs in the weight of ``name``, H_f dense over them; or a sample's share."""
    weight = weight_of(model, name)
    with outputs_of(model, name, inputs, sample) as outputs:
        f = outputs(weight).detach()
        j = jacobian(outputs, weight)
    curvature = hessian(lambda z: loss(z, targets), f).view(f.numel(), f.numel())
    return torch.einsum("asj,ab,btk->sjtk", j, curvature, j)


def joint_hessian(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, names: Sequence[str]) -> Tensor:
    """Return the Hessian (N, N) of E in the weights of several layers, one after the other, each a row-major matrix."""
    outputs, weights = outputs_of_all(model, inputs, names)
    return hessian(lambda vector: loss(outputs(vector), targets), weights)


def joint_ggn(model: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, names: Sequence[str]) -> Tensor:
    """Return JᵀH_fJ (N, N) in the weights of several layers."""
    outputs, weights = outputs_of_all(model, inputs, names)
    f, j = outputs(weights).detach(), jacobian(outputs, weights)
    curvature = hessian(lambda z: loss(z, targets), f).view(f.numel(), f.numel())
    return j.t() @ curvature @ j


def outputs_of_all(model: nn.Module, inputs: Tensor, names: Sequence[str]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return the model's outputs as a function of all weights of some layers, joined; and these."""
    weights = [weight_of(model, name) for name in names]

    def outputs(vector: Tensor) -> Tensor:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            parts = vector.split([weight.numel() for weight in weights])
            for name, weight, part in zip(names[:-1], weights, parts, strict=False):
                set_weight = stack.enter_context(outputs_of(model, name, inputs))
                set_weight(part.view(weight.shape))
            last = stack.enter_context(outputs_of(model, names[-1], inputs))
            return last(parts[-1].view(weights[-1].shape))

    return outputs, torch.cat([weight.flatten() for weight in weights])


def block_traces(matrix: Tensor, groups: int = 1) -> Tensor:
    """T[s,s'] = Tr(H_ss') (d, d); rows of two groups of a convolution belong to two weight matrices and have none."""
    traces = torch.einsum("sjtj->st", matrix)
    group = torch.arange(len(traces)) * groups // len(traces)
    return torch.where(group[:, None] == group, traces, 0.0)


def relative_flatness_of(matrix: Tensor, weight: Tensor, groups: int = 1) -> float:
    """Return κ = ⟨w wᵀ, T⟩."""
    return float((weight @ weight.t() * block_traces(matrix, groups)).sum())


def relative_flatness_columns_of(matrix: Tensor, weight: Tensor, groups: int = 1) -> float:
    """Return κ_col = Σ_ij ⟨w_:i, w_:j⟩ Σ_t H[(t,i),(t,j)], summed over groups of rows."""
    parts = zip(torch.arange(len(weight)).chunk(groups), weight.chunk(groups), strict=True)
    return float(
        sum((part.t() @ part * torch.einsum("titj->ij", matrix[rows][:, :, rows])).sum() for rows, part in parts)
    )


def trace_of(matrix: Tensor) -> float:
    """Return Σ_s Tr(H_ss)."""
    return float(torch.einsum("sjsj->", matrix))


def diagonal_of(matrix: Tensor) -> Tensor:
    """Return ∂²E/∂w_sj², (d, m)."""
    return torch.einsum("sjsj->sj", matrix)


def adaptive_sharpness_of(matrix: Tensor, weight: Tensor) -> float:
    """Return Σ w_sj² ∂²E/∂w_sj²."""
    return float((weight.square() * diagonal_of(matrix)).sum())


def rows_of(matrix: Tensor, weight: Tensor) -> Tensor:
    """w_sᵀ ∂²E/∂w_s² w_s for every row."""
    return torch.einsum("sj,sjsk,sk->s", weight, matrix, weight)


def columns_of(matrix: Tensor, weight: Tensor, groups: int = 1, taps: int = 1) -> Tensor:
    """w(c)ᵀ ∂²E/∂w(c)² w(c) for the weights w(c) on every input channel: of all rows of its group, and all taps."""
    forms = []
    for rows in torch.arange(len(weight)).chunk(groups):
        for columns in torch.arange(weight.shape[1]).split(taps):
            own = torch.zeros_like(weight)
            own[rows[:, None], columns] = weight[rows[:, None], columns]
            forms.append(torch.einsum("sj,sjtk,tk->", own, matrix, own))
    return torch.stack(forms)


# --- a convolution as one dense matrix --------------------------------------------------------------------------------


def dense_layer(conv: nn.Module, input_size: tuple[int, ...]) -> nn.Linear:
    """A convolution on inputs (channels, *pixels) as a Linear on flattened ones, padding and groups written out."""
    size = tuple(input_size)
    with torch.no_grad():
        basis = torch.eye(torch.Size(size).numel(), dtype=torch.float64)
        at_zero = conv(torch.zeros(1, *size, dtype=torch.float64))
        columns = (conv(basis.unflatten(1, size)) - at_zero).flatten(1)
        linear = nn.Linear(columns.shape[0], columns.shape[1], dtype=torch.float64)
        linear.weight.copy_(columns.t())
        linear.bias.copy_(at_zero.flatten())
    return linear


class Dense(nn.Module):
    """A convolution replaced by its dense matrix, ``linear``."""

    def __init__(self, conv: nn.Module, input_size: tuple[int, ...]):
        super().__init__()
        self.linear = dense_layer(conv, input_size)
        self.size = conv(torch.zeros(1, *input_size, dtype=torch.float64)).shape[1:]

    def forward(self, x):
        return self.linear(x.flatten(1)).unflatten(1, self.size)


def affine(model: nn.Module, name: str, inputs: Tensor) -> tuple[nn.Module, str]:
    """Return a copy of the model with convolution ``name`` as one dense Linear, and the name of that Linear.

    κ, trace and T by ``conv="affine"`` are the ordinary ones of that layer.
    """
    (size,) = {x.shape[1:] for x in layer_inputs(model, name, inputs)}
    model = copy.deepcopy(model)
    conv = model.get_submodule(name)
    dense = Dense(conv, size)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is conv:
                parent._modules[key] = dense
    return model, f"{name}.linear"


# --- normalised -------------------------------------------------------------------------------------------------------


def layer_inputs(model: nn.Module, name: str, inputs: Tensor) -> list[Tensor]:
    """Return what each call of the layer took, as it came."""
    seen: list[Tensor] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
        stack.callback(handle.remove)
        model(inputs)
    return seen


def deviations(rows: Tensor) -> Tensor:
    """Return σ_j, biased, of (rows, features): |c| for a feature that is c throughout, 0 for one that drops out."""
    deviation, largest = rows.std(dim=0, correction=0), rows.abs().amax(dim=0)
    return torch.where(deviation <= 1e-12 * largest, largest, deviation)


def layer_deviations(model: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """σ of a layer's features, or of its input channels over unpadded pixels, over samples, positions and calls."""
    layer = model.get_submodule(name)
    if is_norm(layer):
        return deviations(torch.cat(_normalised(model, layer, inputs)))
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag, nn.Bilinear)):
        return deviations(torch.cat(_features(model, layer, inputs)))
    dim = -1 if isinstance(layer, nn.Linear) else 1
    calls = layer_inputs(model, name, inputs)
    return deviations(torch.cat([x.movedim(dim, -1).reshape(-1, x.shape[dim]) for x in calls]))


def _features(model: nn.Module, layer: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The φ (rows, m) of each call of an embedding or bilinear layer: what it gives with the identity for a weight."""
    seen: list[Tensor] = []
    m = as_matrix(layer, layer.weight).shape[1]
    weight = torch.eye(m, dtype=layer.weight.dtype)
    if isinstance(layer, nn.Bilinear):
        weight = weight.view(m, layer.in1_features, layer.in2_features)

    def features(_, args, kwargs):
        parameters = {"weight": weight} if layer._parameters.get("bias") is None else {"weight": weight, "bias": zeros}
        seen.append(torch.func.functional_call(plain, parameters, args, kwargs).detach().reshape(-1, m))

    zeros = torch.zeros(m, dtype=layer.weight.dtype)

    plain = copy.deepcopy(layer)
    handle = layer.register_forward_pre_hook(features, with_kwargs=True)
    try:
        model(inputs)
    finally:
        handle.remove()
    return seen


def _normalised(model: nn.Module, layer: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The x̂ (rows, m) of each call of a normalisation: what it gives with 1 for γ and 0 for β."""
    seen: list[Tensor] = []
    plain, channels = copy.deepcopy(layer), isinstance(layer, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
    with torch.no_grad():
        plain.weight.fill_(1.0)
        if getattr(plain, "bias", None) is not None:
            plain.bias.zero_()

    def features(_, args):
        found = plain(*args).detach()
        seen.append((found.movedim(1, -1) if channels else found).reshape(-1, layer.weight.numel()))

    handle = layer.register_forward_pre_hook(features)
    try:
        model(inputs)
    finally:
        handle.remove()
    return seen


def scaled(layer: nn.Module, matrix: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix of a layer in the coordinates w'_j = w_j σ_j, and w' (d, m): κ_n is κ of the two (Theorem 4).

    ``deviation`` is of the layer's features, or input channels: each tap has its channel's. A feature of deviation 0
    drops out: its column of w' and its rows of the matrix are 0.
    """
    weight, groups = as_matrix(layer, layer.weight.detach()), groups_of(layer)
    (d, m), inside = weight.shape, len(deviation) // groups  # channels that a filter sees
    spread = deviation.view(groups, 1, inside, 1).expand(groups, d // groups, inside, m // inside).reshape(d, m)
    inverse = torch.where(spread > 0, 1 / spread, 0.0)
    return inverse[:, :, None, None] * matrix * inverse, weight * spread
