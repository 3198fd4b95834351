"""Perturb the features or the weight of a layer, and evaluate the model's outputs and its loss there.

The kernel k_h(0, z) ∝ exp(-|z|²/2h²) on |z| < h (Petzka et al. 2021, Eq. 6, with a width of 1 in units of h = δ|φ|) is
induced by matrices A = rO, O Haar-distributed on the orthogonal group (Proposition 2): ξ = Aφ = r |φ| u with u uniform
on the sphere and r = δt, t of density proportional to t^(m-1) exp(-t²/2) on (0, 1].
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import head
from ..contractions import promoted, promoted_dtype
from ..errors import InputError
from ..losses import risk
from ..messages import check_tensor
from ..model import calling, layers, uses
from ..model.data import size
from ..model.selectors import Selector
from ..numerics.accumulate import Accumulator
from ..options import check_number, check_probes, check_seed
from ..passes.task import Risk, Task

_TOGETHER = 2**18  # entries of the noise that is drawn at once


def truncated_normal_noise(features: Tensor, rho: float, *, probes: int = 1, seed: int = 0) -> Tensor:
    """Return feature noise ξ of the truncated normal kernel with bandwidth δ|φ|.

    The kernel is that of Petzka et al. (2021), Eq. 6 and Proposition 2.

    ξ = r |φ| u, u uniform on the unit sphere of R^m, r on (0, δ] of density proportional to (r/δ)^(m-1) exp(-(r/δ)²/2).

    Args:
        features: φ, (…, m), floating-point.
        rho: δ, positive.
        probes: how many for each feature vector.
        seed: of the noise, which differs between devices; torch's global random state stays as it is.

    Returns:
        (probes, …, m), of the features' dtype (at least float32) and device; 0 where φ is.

    Raises:
        InputError: no such tensor, or numbers that do not fit.

    Example:
        >>> import torch, pyflatness as pf
        >>> phi = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
        >>> noise = pf.theory.truncated_normal_noise(phi, 0.1, probes=1000)
        >>> noise.shape, bool((noise.norm(dim=-1) <= 0.1 * phi.norm(dim=-1)).all())
        (torch.Size([1000, 2, 2]), True)
    """
    check_tensor("features", features)
    if features.ndim == 0 or features.shape[-1] == 0:
        raise InputError(f"features: a tensor of shape (…, m) is wanted, got {tuple(features.shape)}")
    layers.check_dtype("features", features.dtype)
    rho, probes = check_number("rho", rho), check_probes("probes", probes, 1)
    generator = torch.Generator(features.device).manual_seed(check_seed("seed", seed))
    return torch.stack([*kernel_noise(features.detach(), rho, probes, generator)])


def kernel_noise(features: Tensor, rho: float, probes: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield probes of ξ, each of the shape of the features (…, m), in at least float32."""
    together = max(1, _TOGETHER // max(1, features.numel()))
    for start in range(0, probes, together):
        yield from _noise(features.expand(min(together, probes - start), *features.shape), rho, generator)


def _noise(features: Tensor, rho: float, generator: torch.Generator) -> Tensor:
    dtype = promoted_dtype(features.dtype)
    features = features.to(dtype)
    direction: Tensor = torch.randn(features.shape, generator=generator, dtype=torch.float32, device=features.device)
    direction = direction.to(dtype)  # float32 is fine enough for a random direction, and is drawn faster
    lengths = direction.norm(dim=-1, keepdim=True)
    radius = radii(lengths.numel(), features.shape[-1], generator).to(dtype).view_as(lengths)
    scale: Tensor = rho * radius * features.norm(dim=-1, keepdim=True) / lengths
    return direction * scale


def radii(count: int, m: int, generator: torch.Generator) -> Tensor:
    """Return t (count,) float64 on (0, 1] of density proportional to t^(m-1) exp(-t²/2), by exact rejection.

    A proposal u^(1/m) has density m t^(m-1) and is kept with probability exp(-t²/2) ≥ 0.61 for every m. The inverse of
    the distribution function would underflow from a few hundred features on.
    """
    kept: list[Tensor] = []
    missing = count
    while missing > 0:
        size = int(1.7 * missing) + 16
        u = torch.rand(2, size, generator=generator, dtype=torch.float64, device=generator.device)
        t = (1 - u[0]) ** (1 / m)
        kept.append(t[u[1] < (-t.square() / 2).exp()][:missing])
        missing -= len(kept[-1])
    return torch.cat(kept) if kept else torch.empty(0, dtype=torch.float64, device=generator.device)


def orthonormal(groups: int, rows: int, m: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Return the first rows (groups, rows, m) of Haar-distributed orthogonal matrices, independent by group.

    They are the Q factor of a Gaussian matrix with the signs of R's diagonal fixed, without which Q is not uniform.
    They are drawn on the generator's device, and have the dtype and device of ``like``.
    """
    normal = torch.randn(groups, m, rows, generator=generator, dtype=like.dtype, device=generator.device)
    q, r = torch.linalg.qr(normal.to(like.device))
    signs = torch.where(r.diagonal(dim1=1, dim2=2) < 0, -1.0, 1.0).to(like.dtype)
    rows_of: Tensor = (q * signs.unsqueeze(1)).transpose(1, 2)
    return rows_of


class Perturbed:
    """Run a model with one of its layers perturbed.

    If the layer is the model's head, the model runs once a batch, and the perturbation is added to its outputs.
    ``matrix`` is the layer's weight (groups, d / groups, m), in at least float32.
    """

    def __init__(self, task: Task, layer: Selector | None) -> None:
        self.name, source = head.find(task, layer)
        self._task, self._head = task, source is not None
        self.layer = uses.layer(task.model, self.name)
        layers.check_measurable(self.name, self.layer)
        kind = layers.kind_of(self.layer)
        self.matrix = promoted(layers.matrix(self.layer)[0].detach()).unflatten(0, (kind.groups, -1))
        if not kind.has_input:
            raise InputError(
                f"layer {self.name!r} is of type {type(self.layer).__name__}: there is no feature vector in front of "
                "it to perturb; choose a linear layer or a convolution"
            )
        self._batch: Any = None
        self._call: calling.Call | None = None  # the layer's call, if there is only one

    def outputs(self, batch: Any) -> tuple[Tensor, Any]:
        """Return outputs and targets of the unperturbed model for a batch, which :meth:`displaced` then perturbs."""
        with calling.Calls({self.name: self.layer}) as calls, self._attached():
            outputs, targets = self._task.run(batch)
            if self.name not in calls.last:
                raise layers.did_not_run([self.name], {self.name: self.layer})
            call = calls.last[self.name]
            single = calls.count[self.name] == 1 and calling.version(call.inputs) == call.versions[0]
            self._call = call if single else None
            self._at_head = self._head and single and not call.changed()
        self._batch, self._outputs = batch, outputs
        return outputs, targets

    def inputs(self) -> Tensor:
        """Return φ of the batch, for a layer that is called once."""
        if self._call is None:
            raise InputError(
                f"layer {self.name!r} runs several times in one forward pass, or its input is modified in place: "
                "there is no one set of features to put noise on"
            )
        return self._call.inputs.detach()

    def displaced(self, weight: Tensor, scales: Sequence[float], features: Tensor | None = None) -> Iterator[Tensor]:
        """Yield outputs of the batch at z + s Δz for each s, where Δz is what a weight makes of features.

        The weight has the shape of the layer's own. Without ``features`` they are the layer's inputs, in each call.
        """
        affine, call = layers.kind_of(self.layer).affine, self._call

        def change(inputs: Tensor, output: Tensor) -> Tensor:
            return affine((inputs if features is None else features).to(weight.dtype), weight, None, output)

        delta = None if call is None else change(call.inputs.detach(), call.output)
        shift = None if delta is None else self._of_outputs(delta)

        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            added = change(args[0] if args else kwargs["input"], output) if delta is None else delta
            return (promoted(output) + scale * added).to(output.dtype)

        for scale in scales:
            if shift is not None:
                yield self._outputs.double() + scale * shift
                continue
            with calling.dry_run(), self._attached(), self.layer.register_forward_hook(add, with_kwargs=True):
                outputs, _ = self._task.run(self._batch)
            yield outputs

    def risks(self, changes: Sequence[Tensor], scales: Sequence[float] = (1.0,)) -> tuple[Tensor, Risk]:
        """Return E(w + s Δw) for each Δw and s, (changes, scales) float64, and E(w), by one read of the data.

        Changes have the weight's shape. If a change requires a gradient, the gradient of the summed loss, which is E
        times the normaliser, is added to its ``grad``.
        """
        task, policy = self._task, self._task.options.nan_policy
        values = torch.zeros(len(changes), len(scales), dtype=torch.float64, device="cpu")
        own, over = 0.0, Accumulator(policy, task.loss.reduction)
        for number, batch in enumerate(task.batches):
            outputs, targets = self.outputs(batch)
            over.add(size(batch), risk.weight(outputs, targets, task.loss, number))
            own += risk.finite(task.loss.value(outputs, targets), policy, number)
            for row, change in zip(values, changes, strict=True):
                with torch.set_grad_enabled(change.requires_grad):
                    for place, outputs in enumerate(self.displaced(change, scales)):
                        value = task.loss.value(outputs, targets)
                        if change.requires_grad:
                            self._add_gradient(value, change, number)
                        row[place] += risk.finite(value.detach(), policy, number, " with changed features")
        sums = {"values": values, "own": torch.tensor(own, dtype=torch.float64, device="cpu")}
        sums = over.together(task.batches.shard, sums)
        return sums["values"] / over.normaliser, Risk(float(sums["own"]) / over.normaliser, over.samples)

    def _add_gradient(self, value: Tensor, change: Tensor, number: int) -> None:
        if not value.requires_grad:
            raise InputError(
                f"batch {number}: the loss does not come from the outputs by operations that torch differentiates, so "
                f"it has no gradient behind layer {self.name!r}"
            )
        (found,) = torch.autograd.grad(value, change)
        change.grad = found if change.grad is None else change.grad + found

    def _attached(self) -> contextlib.AbstractContextManager[None]:
        return uses.attached({self.name: self.layer})

    def _of_outputs(self, delta: Tensor) -> Tensor | None:
        """Return Δz in the layout of the model's outputs, float64, where these are a view of z; else None."""
        assert self._call is not None
        z, outputs = self._call.output, self._outputs
        if (
            not self._at_head
            or outputs.untyped_storage()._cdata != z.untyped_storage()._cdata
            or outputs.dtype != z.dtype
        ):
            return None
        like_z = torch.empty_strided(z.shape, z.stride(), dtype=torch.float64, device=z.device)
        like_z.copy_(delta)
        return like_z.as_strided(outputs.shape, outputs.stride(), outputs.storage_offset() - z.storage_offset())


def turns(layer: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield wA in the shape of the weight, for random A, Haar on O(m), drawn anew for each group of a convolution.

    With w = Rᵀ Q, Q of orthonormal rows, wA = Rᵀ (QA), and QA are the first rows of a Haar-distributed matrix again. So
    min(d, m) rows are drawn, not m.
    """
    matrix = promoted(layers.matrix(layer)[0]).unflatten(0, (layers.kind_of(layer).groups, -1))
    left = torch.linalg.qr(matrix.transpose(1, 2)).R.transpose(1, 2)  # (groups, d / groups, rows)
    while True:
        rows = orthonormal(len(left), left.shape[2], matrix.shape[2], generator, left)
        yield layers.as_weight(layer, (left @ rows).flatten(0, 1))
