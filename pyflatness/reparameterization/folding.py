"""Fold eval-mode BatchNorm into the layers in front of it: the same function with fewer redundant scales.

γ (w φ + b - μ) / √(v + ε) + β  =  (s w) φ + (s (b - μ) + β),    s = γ / √(v + ε)
"""

from typing import Any

from torch import Tensor, nn

from .. import private
from ..model import calling, kinds, layers
from . import flow
from .flow import Flow
from .reparameterize import check_same, duplicate, scale_rows


class Folding:
    """Find out on a batch which BatchNorm layers can be folded ``into`` which layer, and which stay ``alone``.

    The latter keep a scale and a shift of their own, with mean 0 and variance 1.
    """

    def __init__(self, model: nn.Module, batch: Any, forward: calling.Forward | None) -> None:
        self.into: dict[str, str] = {}
        self.alone: tuple[str, ...] = ()
        self._batch, self._forward = batch, forward
        norms = [name for name, module in model.named_modules() if isinstance(module, private.BatchNorm)]
        if not norms:
            return
        kept: set[str] = set()  # layers whose output goes elsewhere
        plain = {name: module for name, module in model.named_modules() if kinds.is_plain(module)}
        sources = {name: 1 for name, module in plain.items() if not layers.kind_of(module).tokens}
        with Flow(model, sources, lambda source, *_: kept.add(source), through=False) as seen, calling.dry_run():
            outputs, _ = calling.run(model, batch, forward)
            seen.finish(outputs)
        followed = [label.source for labels in seen.arrivals.values() for label in labels if label is not None]
        for name in norms:
            calls = seen.arrivals.get(name, [])
            source = calls[0].source if len(calls) == 1 and calls[0] is not None else ""
            once = source and len(seen.arrivals[source]) == 1 == followed.count(source) and source not in kept
            if once and not flow.obstacle(model, source, model.get_submodule(source)):
                self.into[name] = source
        self.alone = tuple(name for name in norms if name not in self.into)

    def of(self, model: nn.Module) -> nn.Module:
        """Return a model of that structure with BatchNorm folded: a copy, or itself if it has no BatchNorm."""
        if not self.into and not self.alone:
            return model
        copy = duplicate(model)
        for name in (*self.into, *self.alone):
            norm = copy.get_submodule(name)
            assert isinstance(norm, private.BatchNorm)
            scale, shift = _affine(norm)
            if name in self.into:
                layer = copy.get_submodule(self.into[name])
                scale_rows(layer, scale)
                bias = shift + layer.bias.double() if isinstance(layer.bias, Tensor) else shift
                layer.bias = nn.Parameter(bias.to(layers.weight_of(layer).dtype))
                norm.weight = norm.bias = None  # type: ignore[assignment]
            elif norm.affine:
                norm.weight.copy_(scale)
                norm.bias.copy_(shift)
            else:
                continue  # it has no parameters
            assert norm.running_mean is not None
            assert norm.running_var is not None
            norm.running_mean.zero_()
            norm.running_var.fill_(1 - norm.eps)
        check_same(model, copy, self._batch, self._forward)
        return copy


def _affine(norm: private.BatchNorm) -> tuple[Tensor, Tensor]:
    """Return the scale s and shift β - s μ of a BatchNorm, float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.affine:
        scale = scale * norm.weight.double()
    shift = -scale * norm.running_mean.double()
    return scale, shift + norm.bias.double() if norm.affine else shift
