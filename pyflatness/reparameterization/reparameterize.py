"""Reparameterise a model to compute the same function: rows of a layer by λ, columns behind them by 1/λ.

    w_l -> diag(λ) w_l,  b_l -> λ b_l,    w_{l+1} -> w_{l+1} diag(1/λ)      (Petzka et al. 2019, Theorems 2 and 3)

For the heads of attention, whose weights are multiplied by matrices, see :mod:`.attention`.

With one factor for all rows this is the layer-wise reparameterisation, with one for each row the neuron-wise one. It
leaves the function alone if every operation between the two layers is positively homogeneous and keeps rows apart:
ReLU, LeakyReLU, pooling, flatten. For an eval BatchNorm between them the running mean and β are multiplied too, but not
γ and the running variance: γ (λz - λμ) / √(v + ε) + λβ is λ times what it was. Where the outputs go elsewhere, into a
residual sum say, there is no such reparameterisation of that layer alone.
"""

import copy
import pickle
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from .. import interrupts, private
from ..errors import InputError
from ..messages import check_module
from ..model import calling, layers, selectors, state, uses
from ..model.data import first
from ..model.selectors import Selector
from ..options import How, check_flag
from ..passes import normalize
from ..passes.guards import check_of_user
from ..session import public, session
from . import attention, flow
from .attention import Attention
from .flow import Flow, Label

_SAMPLES = 2  # samples that are followed through the model
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_HINTS = {
    "add": "a sum, as of a residual connection",
    "sub": "a difference",
    "cat": "a concatenation",
    "native_layer_norm": "a LayerNorm",
    "native_group_norm": "a GroupNorm",
}


@public("forward", "eval")
def reparameterize(
    model: nn.Module, factors: Mapping[Any, Any], data: Any, *, inplace: bool = False, **how: Unpack[How]
) -> nn.Module:
    """Return the model with other weights for the same function: rows of layers by λ, columns behind by 1/λ.

    Args:
        model: in eval mode; linear layers and convolutions with ReLU, LeakyReLU, pooling, reshapes, factors of other
            branches (so the ``up`` of a gated MLP) and eval BatchNorm between. How its layers are connected is observed
            on two samples.
        factors: layer (name or module) -> λ > 0: a number for all its rows (layer-wise), or (d,) numbers, one for each
            (neuron-wise). The layers that take its output get 1/λ on their columns; several layers at once are fine.
            Attention module (``nn.MultiheadAttention``, Llama's, GPT-2's and those like them) -> ``{"qk": A, "vo": B}``
            or one of these: in each head the rows of q by A and of k by A⁻ᵀ, the rows of v by B and the columns of the
            outputs by B⁻¹. A and B are invertible, (h, h), or (groups, h, h) for each head with keys of its own. Behind
            rotary embeddings A has to commute with the rotations of pairs of entries.
        data: a tuple of tensors (inputs, targets), an iterable of such batches, or a tensor of inputs. The function is
            compared on all of it.
        inplace: change the model's own weights; else a copy's.

    Returns:
        The reparameterised copy, or the model itself with ``inplace``.

    Raises:
        InputError: a factor that does not fit; a layer whose output goes where factors cannot follow (the message names
            the place); tied or parametrised weights; a function that did change.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> x = torch.randn(5, 4)
        >>> other = pf.reparameterize(model, {"0": 10.0}, x)
        >>> torch.allclose(other[0].weight, 10 * model[0].weight), torch.allclose(other(x), model(x), atol=1e-6)
        (True, True)
    """
    inplace = check_flag("inplace", inplace)
    batches = [(data, None)] if isinstance(data, Tensor) else data
    modes = [each.training for each in layers.unwrap(check_module("model", model)).modules()]
    with session(  # no loss has a part in it
        model, nn.MSELoss(), batches, how={**how, "process_group": False}, reads=2
    ) as task:
        module = task.model
        if not isinstance(factors, Mapping) or not factors:
            raise InputError(f"factors: a mapping from layers to numbers is wanted, got {factors!r:.80}")
        matrices = {selector: given for selector, given in factors.items() if isinstance(given, Mapping)}
        attentions = [_of_attention(module, selector, given) for selector, given in matrices.items()]
        wanted = _factors(module, {key: given for key, given in factors.items() if key not in matrices})
        batch = task.batches.peek()
        try:
            found = _followed(module, wanted, first(batch, _SAMPLES), task.forward)
        except Exception as error:  # the batch cannot be cut; an error of the model itself comes again
            check_of_user(error)
            found = _followed(module, wanted, batch, task.forward)
        changed = duplicate(module)
        _multiply(changed, wanted, found)
        for one, given in attentions:
            one.change(changed, given.get("qk"), given.get("vo"))
        for number, batch in enumerate(task.batches):
            check_same(module, changed, batch, task.forward, number)
        if not inplace:
            for each, mode in zip(changed.modules(), modes, strict=True):
                each.training = mode
            return changed
        with interrupts.shielded():
            for own, other in zip(*(chain(net.parameters(), net.buffers()) for net in (module, changed)), strict=True):
                if not torch.equal(own, other):
                    own.copy_(other)
        return model


def duplicate(model: nn.Module) -> nn.Module:
    """Return a copy of the user's model, within :func:`.state.observing`."""
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    made = [tensor for tensor in held if tensor.grad_fn is not None]  # by hooks of the older weight_norm, for one
    try:
        with state.made_anew(model):
            copied = copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in made})
    except (RuntimeError, TypeError, pickle.PickleError) as error:
        raise InputError(f"model: it cannot be copied ({error})") from None
    for own, other in zip(model.parameters(), copied.parameters(), strict=True):
        vars(other).update(vars(own))  # torch copies parameters without the attributes that libraries set on them
    return copied


def check_same(
    model: nn.Module, other: nn.Module, batch: Any, forward: calling.Forward | None, number: int = 0
) -> None:
    """Raise unless both models give the same outputs for a batch, up to rounding."""
    before, now = (calling.run(net, batch, forward)[0] for net in (model, other))
    if before.shape != now.shape or not bool(before.isfinite().all() and now.isfinite().all()):
        raise InputError(
            f"batch {number}: the outputs of the model or of the reparameterised one have NaN or infinity, so that "
            "they cannot be held against each other; leave such samples out of the data, or pass smaller factors"
        )
    off, size = float((now - before).abs().amax()), float(before.abs().amax())
    if off > _TOLERANCE.get(before.dtype, 1e-3) * size:
        raise InputError(
            f"batch {number}: the reparameterised model is another function, by up to {off:.2g} in outputs of up to "
            f"{size:.2g}; it has operations that are not seen in one run, or factors too large for its dtype"
        )


def scale_rows(module: nn.Module, factors: Tensor) -> None:
    """Multiply the rows of a layer's weight and bias, in place, by factors (d,) or (1,) float64."""
    weight, bias = layers.weight_of(module), getattr(module, "bias", None)
    rows = layers.as_matrix(module, weight).double() * factors.view(-1, 1)
    weight.copy_(layers.as_weight(module, rows))
    if isinstance(bias, Tensor):
        bias.copy_(bias.double() * factors)


def scale_columns(module: nn.Module, factors: Tensor) -> None:
    """Multiply the columns of a layer's weight, in place, by factors of its input features or channels, float64."""
    weight = layers.weight_of(module)
    columns = layers.as_matrix(module, weight).double().unflatten(0, (layers.kind_of(module).groups, -1))
    weight.copy_(layers.as_weight(module, (columns * normalize.of_columns(module, factors)).flatten(0, 1)))


def _of_attention(model: nn.Module, selector: Any, given: Mapping[str, Any]) -> tuple[Attention, dict[str, Tensor]]:
    """Return an attention module and its matrices by "qk" and "vo"."""
    one, device = attention.named(model, selector), state.device(model)
    wrong = [key for key in given if key not in ("qk", "vo")]
    if wrong or not given:
        raise InputError(f"factors of attention {one.name!r}: matrices 'qk' and 'vo' are wanted, got {[*given]}")
    return one, {what: one.matrices(what, matrix, device) for what, matrix in given.items()}


def _factors(model: nn.Module, factors: Mapping[Selector, Any]) -> dict[str, Tensor]:
    """Return λ by layer name, as (1,) or (d,) float64."""
    found: dict[str, Tensor] = {}
    for selector, given in factors.items():
        name = selectors.one(model, selector)
        module = uses.layer(model, name)
        if isinstance(module, uses.Use):
            raise InputError(
                f"layer {name!r} is no plain layer of the model's, but the use of a parameter, with which rescalings "
                "are not followed; choose other layers"
            )
        layers.check_measurable(name, module)
        flow.check_plain(model, name, module)
        d = len(layers.matrix(module)[0])
        try:
            values = torch.as_tensor(given, dtype=torch.float64, device=state.device(model)).detach()
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"factors of layer {name!r}: numbers are wanted, got {given!r:.80}") from None
        if values.ndim > 1 or values.numel() not in ({1, d} if values.ndim else {1}):
            raise InputError(f"factors of layer {name!r}: one number or {d}, got shape {tuple(values.shape)}")
        if not bool((values.isfinite() & (values > 0)).all()):
            raise InputError(f"factors of layer {name!r}: positive numbers are wanted, got {given!r:.80}")
        if name in found:
            raise InputError(f"factors: layer {name!r} is there twice")
        found[name] = values.reshape(-1)
    return found


def _followed(
    model: nn.Module, factors: Mapping[str, Tensor], batch: Any, forward: calling.Forward | None
) -> dict[str, Label]:
    """Return for each module that receives multiplied values which rows of which layer its features come from."""
    if not factors:
        return {}
    with Flow(model, {name: len(values) for name, values in factors.items()}, _refuse) as seen, calling.dry_run():
        outputs, _ = calling.run(model, batch, forward)
        seen.finish(outputs)
    missing = [name for name in factors if name not in seen.arrivals]
    if missing:
        raise InputError(f"layer {missing[0]!r} did not run in the model's forward pass, or inside of another layer")
    found: dict[str, Label] = {}
    for name, labels in seen.arrivals.items():
        module = model.get_submodule(name)
        held = [label for label in labels if label is not None]
        if not held:
            continue
        source = held[0].source
        dim = 1 if isinstance(module, private.BatchNorm) else layers.kind_of(module).class_dim
        channels = [label.channels(dim) for label in held]
        if any(rows is None for rows in channels):
            raise InputError(f"layer {source!r}: one feature of {name!r} behind it gets several of its rows")
        if len(held) < len(labels) or any(
            label.source != source or not torch.equal(rows, channels[0])  # type: ignore[arg-type]
            for label, rows in zip(held, channels, strict=True)
        ):
            raise InputError(
                f"layer {source!r}: {name!r} behind it is called {len(labels)} times, with inputs of other layers (or "
                "rows) too, which would need other factors"
            )
        if not isinstance(module, private.BatchNorm):
            flow.check_plain(model, name, module)
        found[name] = Label(source, channels[0])  # type: ignore[arg-type]
    return found


def _refuse(source: str, operation: str, place: str) -> None:
    if operation == "output":
        raise InputError(f"layer {source!r}: its output is the model's; there is no layer behind it to take 1/λ")
    hint = _HINTS.get(operation.rstrip("_"))
    raise InputError(
        f"layer {source!r}: its output goes into {operation!r}{f' ({hint})' if hint else ''} in "
        f"{f'module {place!r}' if place else 'the model itself'}, through which factors of this layer alone cannot be "
        "followed; between it and the layers behind may be ReLU, LeakyReLU, pooling, reshapes and eval BatchNorm"
    )


def _multiply(model: nn.Module, factors: Mapping[str, Tensor], found: Mapping[str, Label]) -> None:
    for name, values in factors.items():
        scale_rows(model.get_submodule(name), values)
    for name, label in found.items():
        module, values = model.get_submodule(name), factors[label.source][label.rows]
        if not isinstance(module, private.BatchNorm):
            scale_columns(module, 1 / values)
            continue
        for tensor in (module.running_mean, module.bias):
            if tensor is not None:
                tensor.copy_(tensor.double() * values)
