"""Give an estimate of the relative flatness of any layers as a term of a training loss.

    κ = (1/n) Σ_i Σ_c |wᵀ M_i^(c)|²,    M_i^(c) = Σ_p δ_ip^(c) φ_ipᵀ

is the layer's relative flatness in the GGN of the loss. δ^(c) is the gradient at the layer's outputs for column c of
the loss's square-root factor S_i (see :mod:`.sweep`). In place of the columns one cotangent v_i = S_i r_i with
independent random signs r_i goes backward, and the mean over signs is κ. That backward pass has a graph, so that the
gradient of the estimate is an unbiased estimate of the gradient of κ. One such pass serves several layers: the mean
over signs of each layer's term is its κ, whatever signs the others have. Plain torch, which can differentiate it any
number of times, computes

    |wᵀ M|² = ⟨M, w wᵀ M⟩ = Σ_pp' ⟨φ_p, φ_p'⟩ ⟨wᵀ δ_p, wᵀ δ_p'⟩
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import interrupts, losses
from ..contractions import Geometry, full_precision, product, promoted, promoted_dtype
from ..errors import InputError, NotYetError
from ..losses import auto
from ..messages import check_module, check_tensor, second_derivatives, shown
from ..model import checks, fsdp, kinds, selectors, walk
from ..model.layers import unwrap
from ..model.outputs import refusal, single
from ..model.selectors import Selector
from ..options import Options, check_probes
from ..passes import normalize
from ..passes.batch_layout import Layout
from ..passes.recorder import RecordedCall
from ..passes.second_derivatives import batch_norms, put_back, replace
from .layer_call import LayerCalls, graph_as_recorded, not_compiled


class FlatnessPenalty:
    """Represent the relative flatness of some layers as a term of a training loss, estimated by random cotangents.

    It hooks the layers, and when it is called with the outputs of the forward pass that the user made, it returns, for
    one layer,

        κ̂ = (1/n) Σ_i |wᵀ M_i|²,   M_i = Σ_p δ_ip φ_ipᵀ

    with φ the layer's inputs at its positions p (pixels, tokens), w its weight (d, m), and δ the gradient at the
    layer's outputs for a random cotangent v_i of the model's outputs, E v_i v_iᵀ = ∂²ℓ_i/∂f_i². Its expectation is the
    relative flatness κ of the layer on the batch (Petzka et al. 2021, Definition 3) in the generalised Gauss-Newton
    matrix, which is the Hessian where the model is piecewise linear behind the layer (ReLU, max-pooling, no smooth
    activations). It is never negative. Its gradient, by double backward, is an unbiased estimate of the gradient of κ
    in all parameters. For several layers it is the sum of theirs, by the same cotangent and one backward pass.

    With BatchNorm in training mode a sample's outputs depend on the batch. The value then is the curvature where the
    weight is varied for one sample at a time, and the batch's statistics with it; this differs from the curvature with
    these statistics held fixed by terms of order 1/n. The gradient goes through the statistics as the loss's does.

    Signs are drawn from torch's global generator of the outputs' device, as dropout does it, unless ``generator`` is
    given.

    Args:
        model: trained by the user; ``DistributedDataParallel`` and ``torch.compile`` are looked through. Under FSDP2
            (``fully_shard``) all ranks call the penalty in each step.
        layers: name, pattern or module of layers, or a sequence of these. The forward pass calls each of them once:
            linear, (transposed) convolutions, bilinear, transformers' ``Conv1D``.
        loss: ``nn.CrossEntropyLoss``, ``nn.MSELoss`` or ``nn.BCEWithLogitsLoss`` with their options, the ``F`` function
            or its name. ``"auto"`` is the loss that a model of Hugging Face's transformers computes of its labels; in
            the first call it is held against the ``.loss`` of the outputs, where these have one. Another scale of the
            loss is one of the penalty.
        probes: random cotangents of a call, each with a backward pass of its own; the variance falls as 1/probes.
        normalize: ``"std"`` for the measure of Theorem 4, of φ_j / σ_j and w_j σ_j with the deviations σ_j of the
            layer's input channels over the batch, which are differentiated too.
        generator: for the signs, on the device of the outputs.

    Raises:
        InputError: a layer that does not exist or has no weight matrix, a model or option that does not fit.
        NotYetError: a loss without differentiable factors; a layer of another kind; parameters that FSDP2 offloads, or
            spreads over several dimensions.

    Example:
        >>> import torch, pyflatness as pf
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        >>> loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1)
        >>> x, y = torch.randn(8, 1, 8, 8), torch.arange(8) % 3
        >>> with pf.FlatnessPenalty(net, "0", loss) as penalty:
        ...     outputs = net(x)
        ...     total = loss(outputs, y) + 0.1 * penalty(outputs, y)
        ...     total.backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Selector | Sequence[Selector],
        loss: Any = "cross_entropy",
        probes: int = 1,
        *,
        normalize: str | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(check_module("model", model), nn.DataParallel):
            raise InputError("model: nn.DataParallel copies its layers at every call; use DistributedDataParallel")
        if isinstance(model, nn.parallel.DistributedDataParallel) and model.static_graph:
            raise InputError(
                "model: DistributedDataParallel(static_graph=True) counts one backward pass a step, and a penalty "
                "makes another in it; leave static_graph out"
            )
        self._normalize = Options(normalize=normalize).normalize
        self._probes = check_probes("probes", probes, 1)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError(f"generator: a torch.Generator is wanted, got {shown(generator)}")
        self._generator = generator
        self._model = unwrap(model)
        self._loss = None if auto.is_auto(loss) else losses.known(loss, "sampled factors that can be differentiated")
        if self._loss is None:
            auto.of_transformers(self._model)
        checks.check_kinds([*self._model.named_modules()], spread=fsdp.is_sharded(self._model))
        fsdp.check_trained(self._model)
        if layers is None:
            raise InputError("layers=None: name the layers to penalise, such as those of pf.layers(model)")
        chosen = selectors.select(self._model, layers).modules
        for name, module in chosen.items():
            _check_kind(name, module)
        self._watched = [LayerCalls(name, module) for name, module in chosen.items()]
        self._names = f"layer{'s' * (len(chosen) > 1)} {', '.join(map(repr, chosen))}"
        self._is_new = True
        self._by_items = True  # whether the model's own loss is divided by the items that it is told of
        self._norms = batch_norms(self._model)
        # The model has the hooks, and these keep tensors.
        weakref.finalize(self, _remove, self._watched, self._norms).atexit = False
        try:
            with interrupts.shielded():
                for watched in self._watched:
                    watched.hook(self._model)
                replace(self._norms, in_eval=False)  # in eval mode layouts are read off torch's graph
        except BaseException:  # of a signal's handler: nobody has the penalty, to remove it
            self.remove()
            raise

    @not_compiled
    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return an estimate of κ for the batch that the model was called on last, with its graph.

        Args:
            outputs: what the model returned, or what the loss takes of it (logits that were cut or transposed). For
                the loss ``"auto"`` what the model returned.
            targets: what the loss takes. For the loss ``"auto"`` the labels, or the mapping that the model was called
                with: ``num_items_in_batch`` in it, by which ``Trainer`` accumulates gradients, then divides the sum
                over the loss terms as in the model's own loss.

        Returns:
            A tensor without dimensions, in the outputs' dtype, of half precision in float32. Where all targets are
            ignored it is what torch's losses are: NaN for the reduction "mean", 0 for "sum", with gradients of 0.

        Raises:
            InputError: the layer did not run, ran more than once, is frozen or has no part in the outputs; outputs or
                targets do not fit; an operation behind the layer has no second derivative; in the first call, a weight
                that acts outside of its layer's call too.
        """
        outputs, targets, loss, items = self._taken(outputs, targets)
        if not outputs.is_floating_point():
            raise InputError(f"outputs: got {outputs.dtype}; the order of arguments is penalty(outputs, targets)")
        terms = LossTerms(outputs, check_tensor("targets", targets), loss)
        calls = [watched.last(outputs) for watched in self._watched]
        contents = [(watched, watched.contents) for watched in self._watched]

        def check_contents() -> None:
            for watched, before in contents:
                watched.check_contents(before)

        with (
            interrupts.undone(),
            fsdp.passes(self._model, [watched.layer for watched in self._watched]) as gathered_before,
            torch.enable_grad(),
            full_precision(outputs),
            graph_as_recorded(),
            self._twice_differentiable(),
        ):
            check_contents()
            used = terms.used if self._normalize else None
            at_layers = [
                AtLayer(call, watched.laid_out(self._model, outputs), watched.samples_of(outputs))
                for watched, (call, _) in zip(self._watched, calls, strict=True)
            ]
            factors = [
                at_layer.factors(weight, watched.layer, used)
                for at_layer, watched, (_, weight) in zip(at_layers, self._watched, calls, strict=True)
            ]
            values = []
            for _ in range(self._probes):
                size, cotangent = terms.cotangent(self._signs)
                gradients = self._sent(outputs, [call for call, _ in calls], cotangent)
                values += [
                    size**2 * squared_norms(*of_layer, at_layer.deltas(gradient)).sum()
                    for of_layer, at_layer, gradient in zip(factors, at_layers, gradients, strict=True)
                ]
            total = torch.stack(values).sum() / self._probes / items
            value = terms.reduced(total).to(promoted_dtype(outputs.dtype))
            if self._is_new:
                self._check_twice_differentiable(value, [weight for _, weight in calls])
                self._check_uses(outputs, calls, cotangent, gradients)
                self._is_new = False
            gathered_before(value, check_contents)
        return value

    def _taken(self, outputs: Any, targets: Any) -> tuple[Tensor, Any, losses.Known, Any]:
        """Return outputs and targets as the loss takes them, the loss, and another divisor of its sum."""
        if self._loss is not None:
            return check_tensor("outputs", _one_tensor(outputs)), targets, self._loss, 1
        found = auto.Returned.of(self._model, outputs, targets, by_items=self._by_items)
        if self._is_new:
            try:
                found.check(self._model, outputs)
            except InputError:
                mean = auto.Returned.of(self._model, outputs, targets, by_items=False)
                with contextlib.suppress(InputError):
                    mean.check(self._model, outputs)
                    found, self._by_items = mean, False
                if self._by_items:
                    raise
        return found.outputs, found.targets, found.loss, 1 if found.items is None else found.items

    def remove(self) -> None:
        """Take the hooks off the model; the penalty cannot be called any more.

        A penalty that is deleted takes them off by itself.
        """
        _remove(self._watched, self._norms)

    def __enter__(self) -> "FlatnessPenalty":
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def _signs(self, like: Tensor) -> Tensor:
        """Return ±1 of the shape, dtype and device of a tensor."""
        return torch.empty_like(like).bernoulli_(0.5, generator=self._generator).mul_(2).sub_(1)

    def _sent(self, outputs: Tensor, calls: list[RecordedCall], cotangent: Tensor) -> list[Tensor]:
        """Return the gradient at the outputs of each layer for a cotangent of the model's outputs, with its graph."""
        edges = [call.edge for call in calls]
        found = torch.autograd.grad(outputs, edges, cotangent, create_graph=True, allow_unused=True)
        for watched, gradient in zip(self._watched, found, strict=True):
            if gradient is None:
                raise InputError(
                    f"layer {watched.name!r}: the outputs do not depend on its output in the model's last forward "
                    "pass; pass the outputs of that pass, before the next one is made"
                )
        return [promoted(gradient) for gradient in found]

    def _twice_differentiable(self) -> AbstractContextManager[None]:
        """Return a context that names the layers where an operation has no second derivative."""
        them = "it" if len(self._watched) == 1 else "them"
        return second_derivatives(
            f"{self._names}: an operation behind {them} has no second derivative",
            "run attention by torch's own operations (with torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), leave "
            "what is behind the layer out of torch.compile, or choose a layer behind that operation",
        )

    def _check_twice_differentiable(self, value: Tensor, weights: list[Tensor]) -> None:
        """Raise in the first call if the user's backward pass would fail."""
        with graph_as_recorded(), self._twice_differentiable():
            torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)

    def _check_uses(
        self, outputs: Tensor, calls: list[tuple[RecordedCall, Tensor]], cotangent: Tensor, gradients: list[Tensor]
    ) -> None:
        """Raise for a weight that acts outside of its layer's call too: its gradient is not the one through the call.

        A weight that several modules share is not checked, since the penalty is of the layer's own use.
        """
        if fsdp.is_sharded(self._model) or not all(weight.requires_grad for _, weight in calls):
            return
        holders = walk.holders(walk.modules(self._model))
        weights = [weight for _, weight in calls]
        gradients_of_all = torch.autograd.grad(outputs, weights, cotangent.detach(), retain_graph=True)
        each = zip(self._watched, calls, gradients, gradients_of_all, strict=True)
        for watched, (call, weight), gradient, whole in each:
            if holders[id(weight)] > 1 or call.edge.node is outputs.grad_fn:  # the outputs are those of the call
                continue
            arrived = gradient.detach().to(call.output.dtype)
            (through,) = torch.autograd.grad([call.edge], [weight], [arrived], retain_graph=True)
            off, size = (whole - through).norm(), whole.norm() + through.norm()
            if off > torch.finfo(weight.dtype).eps ** 0.5 * size:
                raise InputError(
                    f"layer {watched.name!r}: its weight acts outside of the layer's call too, in a function or in a "
                    "derivative that the model takes (forces of an energy), so that the penalty would not be of the "
                    "weight's relative flatness; choose another layer"
                )


def _remove(every: list[LayerCalls], norms: list[nn.Module]) -> None:
    for watched in every:
        watched.remove()
    put_back(norms)


def _one_tensor(outputs: Any) -> Tensor:
    """Return the logits in what a model returned."""
    tensor = single(outputs)
    if tensor is None:
        raise refusal(outputs, "pass the one that the loss takes, penalty(outputs, targets)")
    return tensor


def _check_kind(name: str, module: nn.Module) -> None:
    """Raise for a layer that is not called on one tensor which its weight matrix multiplies."""
    kind = kinds.find(module)
    use = isinstance(module, kinds.AnyUse)
    if use or kind is None or not kind.keeps_graph:
        what = "a weight that no module calls" if use else f"a {type(module).__name__}"
        raise NotYetError(
            f"layer {name!r} is {what}; FlatnessPenalty takes linear, bilinear, convolutional and transposed "
            "convolutional layers"
        )


class LossTerms:
    """Hold a batch's loss terms, which of them the loss does not ignore (terms,), and its outputs, with their graph.

    Outputs are (n, C, …), or (n,).
    """

    def __init__(self, outputs: Tensor, targets: Tensor, loss: losses.Known) -> None:
        self._outputs, self._loss, self._rows = outputs, loss, losses.rows(outputs, targets, loss)
        used = self._rows.terms.used
        self.used = torch.ones_like(self._rows.terms.scale, dtype=torch.bool) if used is None else used

    def reduced(self, total: Tensor) -> Tensor:
        """Return a sum over the terms as the loss reduces it; a mean over none is NaN, with gradients of 0."""
        if self._loss.reduction == "sum":
            return total
        weight = self._rows.terms.weights.sum()
        return torch.where(weight == 0, torch.nan, total) / weight

    def cotangent(self, signs: Callable[[Tensor], Tensor]) -> tuple[Tensor | float, Tensor]:
        """Return a number and a cotangent like the outputs, whose product is v; ``signs`` draws signs like a tensor."""
        rows, terms = promoted(self._rows.of(self._outputs)), self._rows.terms
        counted = (terms.scale != 0).unsqueeze(1)
        whole = bool(counted.all())
        rows = rows if whole else torch.where(counted, rows, 0.0)  # NaN in an ignored row goes nowhere
        mixed = self._loss.sampled(rows, terms, signs(rows.detach()))
        mixed = mixed if whole else torch.where(counted, mixed, 0.0)
        size: Tensor | float = 1.0
        if self._outputs.dtype is torch.float16:  # the small ones would underflow on their way
            size = mixed.detach().abs().amax().clamp_min(torch.finfo(mixed.dtype).tiny)
        return size, self._shaped(mixed / size).to(self._outputs.dtype)

    def _shaped(self, rows: Tensor) -> Tensor:
        if self._outputs.ndim == 1:
            return rows.view_as(self._outputs)
        return rows.view(self._outputs.movedim(self._rows.dim, -1).shape).movedim(-1, self._rows.dim)


@dataclass(frozen=True)
class AtLayer:
    """Bring a layer's call into the form that :func:`squared_norms` takes."""

    call: RecordedCall
    layout: Layout
    samples: int

    def factors(self, weight: Tensor, module: nn.Module, used: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return w (G, d, m) and φ (n, G, m, P), a column for each position.

        With ``used``, which loss terms are not ignored, both are rescaled by the deviations of the input's channels.
        """
        kind, inputs = self.call.kind, promoted(self.call.inputs)
        matrix = promoted(kind.as_matrix(weight)).unflatten(0, (kind.groups, -1))
        if used is not None:
            scale = self._deviations(inputs, used)
            matrix = matrix * normalize.of_columns(module, scale).to(matrix.dtype)
            inputs = kind.divided(inputs, scale)
        padded = self.layout.samples_first(kind.pad(inputs, self.call.output), self.samples)
        return matrix, _joined([columns(part, kind.geometry) for part in kind.in_common_form(padded)], 3)

    def deltas(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the layer's output as δ (n, G, P, d)."""
        kind = self.call.kind
        parts = kind.in_common_form(self.layout.samples_first(gradient, self.samples))
        return _joined([kind.geometry.rows(part) for part in parts], 2)

    def _deviations(self, inputs: Tensor, used: Tensor) -> Tensor:
        kind = self.call.kind
        rows = kind.input_rows(inputs, None, lambda tensor: self.layout.samples_first(tensor, self.samples))
        mask = normalize.rows_used(used.view(self.samples, -1), rows.shape[1], kind.pointwise)
        eps = torch.finfo(self.call.inputs.dtype).eps
        return normalize.differentiable_scale(rows.flatten(0, 1), mask.flatten(), eps)


def squared_norms(weight: Tensor, columns: Tensor, deltas: Tensor) -> Tensor:
    """Return |wᵀ M|² of each sample, summed over groups, (n,), for w (G, d, m), φ (n, G, m, P) and δ (n, G, P, d)."""
    groups, d, m = weight.shape
    if groups == 1:  # products with w are then one of matrices, for all samples together
        weight, columns, deltas = weight.squeeze(0), columns.squeeze(1), deltas.squeeze(1)
    positions, rank = deltas.shape[-2], min(d, m)
    if positions == 1:
        return _summed(columns.square().sum(dim=-2) * product(deltas, weight).square().sum(dim=-1))
    if positions**2 * (d + m) + rank * d * positions < positions * d * m + rank * d * m:
        if m <= d:
            left = right = product(deltas, weight)
        else:
            left, right = deltas, product(deltas, product(weight, weight.mT))
        return _summed(product(columns.mT, columns) * product(left, right.mT))
    gradients = product(columns, deltas)  # Mᵀ: so that the gradient in the columns comes in their own order
    if m < d:
        return _summed(product(gradients, weight).square())
    return _summed(gradients * product(gradients, product(weight, weight.mT)))


def columns(inputs: Tensor, geometry: Geometry) -> Tensor:
    """Return the patches of padded inputs as columns (n, G, m, P), of images by torch's own, faster function."""
    if geometry.kernel_elements == 1 or geometry.kernel[0] > 1 or inputs.shape[2] > 1:
        return geometry.patches(inputs).mT
    found = F.unfold(inputs.squeeze(2), geometry.kernel[1:], dilation=geometry.dilation[1:], stride=geometry.stride[1:])
    grouped: Tensor = found.unflatten(1, (geometry.groups, -1))
    return grouped


def _summed(values: Tensor) -> Tensor:
    return values.flatten(1).sum(dim=1)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
