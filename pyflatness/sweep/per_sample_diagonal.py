"""Sum a_j² ∂²ℓ_i/∂θ_j² over the entries of :mod:`.per_sample_parameters`, sample by sample.

By columns s_ic of square-root factors the sum is Σ_c σ_ic |a ∘ ∂⟨s_ic, f_i⟩/∂θ_i|². By second derivatives an exact
value needs a Hessian product for every entry of the parameters; a sampled one is ⟨a∘r, H_i (a∘r)⟩ for random signs r,
all parameters together. Its summands are unbiased estimates of the entries (Bekas, Kokiopoulou and Saad 2007).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ..contractions import promoted
from ..hessian import block_traces
from ..hessian.entries_and_neurons import batch_of
from ..losses import Loss
from ..numerics.signs import Signs
from ..passes import cotangents, linearity
from ..passes.limit import check_passes
from .entry_sums import Draw, EntrySums
from .layer_gradients import signed
from .per_sample_parameters import Group


class PerSampleDiagonal:
    """Sum for one group of samples, whose numbers in the data are ``numbers``; ``scales`` has a by name, 1 if not.

    ``entries`` gets the single entries too. More than ``most`` passes are an error.
    """

    def __init__(
        self,
        group: Group,
        numbers: Tensor,
        loss: Loss,
        scales: Mapping[str, Tensor],
        most: int,
        entries: EntrySums | None = None,
    ) -> None:
        self._group, self._numbers, self._loss, self._scales, self._most = group, numbers, loss, scales, most
        self._single = entries

    def by_factors(self, names: Sequence[str], signs: Signs | None) -> Tensor:
        """Return the sum (probes, n) float64 over the parameters of these names; exact without signs."""
        group, values = self._group, self.zeros(signs)
        leaves = [group.leaves[name] for name in names]
        sent = cotangents.prepare(group.outputs, group.targets.detach(), self._loss, group.samples)

        def send(cotangent: Tensor) -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(group.outputs, leaves, cotangent, retain_graph=True, allow_unused=True)

        for draw, cotangent, sign in sent.sent(signs, self._numbers, self._most, send):
            found = send(cotangent)
            for name, gradient in zip(names, found, strict=True):
                if gradient is not None:
                    squares = signed(self._scaled(name, gradient).double().square(), sign)
                    values[draw] += squares.reshape(len(squares), -1).sum(dim=1)
                    self._add(draw if signs is not None else slice(None), name, squares)
        return values

    def by_hessian(self, streams: Mapping[str, int], signs: Signs | None, custom: Sequence[str] = ()) -> Tensor:
        """Return the sum (probes, n) float64 over parameters, the keys of ``streams``; exact without signs."""
        names, values = [*streams], self.zeros(signs)
        with block_traces.differentiable(names, what="parameter"), torch.enable_grad():
            value = self._loss.value(self._group.outputs, self._group.targets.detach())
            leaves = [self._group.leaves[name] for name in names]
            found = torch.autograd.grad(value, leaves, create_graph=True, allow_unused=True)
            gradients = {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}
            for name in custom:
                if name in gradients:
                    linearity.check_complete(f"parameter {name!r}", [gradients[name]])
            nonconstant = {name: gradient for name, gradient in gradients.items() if gradient.requires_grad}
            if signs is None:
                self._check_products(streams, nonconstant)
                for name, gradient in nonconstant.items():
                    values[0] += self._entries(name, gradient)
            elif nonconstant:
                for draw, number in enumerate(signs.draws):
                    values[draw] += self._along(draw, nonconstant, streams, Signs(signs.seed, [number]))
        return values

    def _check_products(self, streams: Mapping[str, int], gradients: Mapping[str, Tensor]) -> None:
        names, samples = [*streams], self._group.samples
        products = sum(self._group.leaves[name][0].numel() for name in names)
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = (
            f"the model is not known to be locally linear in {listed}: an exact value takes {products} Hessian "
            "products, one for every entry"
        )
        one = partial(self._along, None, gradients, streams, Signs(0, [0]))
        check_passes(products, self._most, what, one, samples, by_hessian=True)

    def _entries(self, name: str, gradient: Tensor) -> Tensor:
        """Return the sum over one parameter, (n,), by a Hessian product for every entry."""
        leaf = self._group.leaves[name]
        size, second = leaf[0].numel(), block_traces.derivatives(gradient, [leaf])
        single = torch.zeros(len(leaf), size, dtype=torch.float64, device=leaf.device)
        for chosen in torch.arange(size, device=leaf.device).split(batch_of(leaf.nbytes)):
            rows = torch.arange(len(chosen), device=leaf.device)
            units = leaf.new_zeros(len(chosen), 1, size)
            units[rows, 0, chosen] = 1.0
            directions = units.expand(-1, len(leaf), -1).reshape(len(chosen), *leaf.shape)
            (products,) = second(directions)
            if products is not None:
                entries = self._scaled(name, self._scaled(name, products)).reshape(len(chosen), len(leaf), size)
                single[:, chosen] = entries[rows, :, chosen].t().double()
        self._add(slice(None), name, single.view(leaf.shape))
        return single.sum(dim=1)

    def _along(
        self, draw: int | None, gradients: Mapping[str, Tensor], streams: Mapping[str, int], signs: Signs
    ) -> Tensor:
        """Return the sum over all parameters for one probe, (n,); add its summands to probe ``draw``, if not None."""
        total, directions = self.zeros(None)[0], []
        leaves = [self._group.leaves[name] for name in gradients]
        for name, leaf in zip(gradients, leaves, strict=True):
            drawn = signs(streams[name], self._numbers, leaf[0].numel()).view_as(leaf).to(leaf.dtype)
            directions.append(self._scaled(name, drawn).to(leaf.dtype))
        products = torch.autograd.grad([*gradients.values()], leaves, directions, retain_graph=True, allow_unused=True)
        for name, direction, change in zip(gradients, directions, products, strict=True):
            if change is not None:
                summands = (promoted(direction) * change).double()
                total += summands.reshape(len(summands), -1).sum(dim=1)
                if draw is not None:
                    self._add(draw, name, summands)
        return total

    def _add(self, draw: Draw, name: str, values: Tensor) -> None:
        """Add a parameter's single entries, (n, *shape), summed over samples."""
        if self._single is not None:
            self._single.add(draw, name, values.sum(dim=0))

    def _scaled(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor times a, in float32 at least."""
        tensor = promoted(tensor)
        return tensor * self._scales[name] if name in self._scales else tensor

    def zeros(self, signs: Signs | None) -> Tensor:
        """Return zeros (probes, n) float64."""
        draws = 1 if signs is None else len(signs.draws)
        return torch.zeros(draws, self._group.samples, dtype=torch.float64, device=self._group.outputs.device)
