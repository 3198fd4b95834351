"""Run the experts of a mixture, as in transformers >= 5, one by one and with each sample's tokens together.

Such a module keeps a weight of all its experts in one tensor, (E, outputs, inputs) or (E, inputs, outputs). It gets the
tokens of all samples in a row, each with the k experts to which it is routed, so that an expert has different numbers
of tokens from each sample. Here they are laid out as (n, P, inputs), padded with zeros. Nothing reads the outputs for
padding, so that no cotangent reaches them.
"""

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import calling
from ..row_order import SampleRows
from .replaced import Replaced
from .watched import Watched

_ATTRIBUTES = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
_DECORATOR = "transformers.integrations.moe"  # the module of the decorator of such forwards


def weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the first and second weight of a mixture's experts; none for another module.

    Experts are recognised by their ``forward``, which is decorated by transformers' ``use_experts_implementation``.
    """
    written = getattr(type(module).forward, "__globals__", {}).get("__name__")
    replaced = not isinstance(vars(module).get("forward"), (Forward, type(None)))
    if written != _DECORATOR or replaced or not all(hasattr(module, name) for name in _ATTRIBUTES):
        return ()
    names = "gate_up_proj" if module.has_gate else "up_proj", "down_proj"
    held = [module._parameters.get(name) for name in names]
    fitting = all(weight is not None and weight.ndim == 3 and len(weight) == module.num_experts for weight in held)
    return names if fitting else ()


def compute_plainly(module: nn.Module) -> None:
    """Let a mixture's experts compute by the code of their class, which supports float64 and second derivatives."""
    if weights(module):
        config: Any = module.config
        config._experts_implementation = "eager"


@dataclass(frozen=True)
class Route(SampleRows):
    """Hold the tokens that are routed to one expert, and their places in the padded layout."""

    token: Tensor  # (r,) the place of each among all tokens of its sample
    tokens: int  # number of tokens of a sample

    def of_tokens(self, mask: Tensor) -> Tensor:
        """Return a ``mask`` of tokens, (n, T), as one of the padded layout, (n, P)."""
        return self.laid_out(mask[self.sample, self.token])


class Forward(Replaced):
    """Serve as a mixture's ``forward`` while its weights are watched, with a product for each expert in use."""

    def __init__(self, module: nn.Module) -> None:
        self._first, self._second = weights(module)
        super().__init__(module, (self._first, self._second), "the mixture")

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the module's outputs for tokens (T, m), their experts (T, k) and the experts' weights (T, k)."""
        own = type(self._module).forward
        if not [*self.watched()]:
            result: Tensor = own(self._module, *args, **kwargs)
            return result
        given = inspect.signature(own).bind(self._module, *args, **kwargs).args[1:]
        samples = calling.now.samples
        if len(given) != 3 or given[0].ndim != 2 or samples < 1 or len(given[0]) % samples:
            raise self.refusal(f"the experts' tokens are no (T, m) of {samples} samples in a row")
        mixed = functools.partial(self._mixed, samples=samples)
        self.check(mixed, functools.partial(own, self._module), *given)
        return self._mixed(*given, samples)

    def _mixed(self, tokens: Tensor, index: Tensor, shares: Tensor, samples: int) -> Tensor:
        """Return Σ_k shares_k · expert_k(token), for each token."""
        experts, each = index.shape[1], len(tokens) // samples
        if index.is_meta:  # any routing does, as there are no values
            index = (torch.arange(index.numel(), device="cpu") % self._count).view(index.shape)
        sorted_index, order = index.flatten().sort(stable=True)
        counts = torch.bincount(sorted_index, minlength=self._count).tolist()[: self._count]
        results = []
        for expert, pairs in enumerate(order[: sum(counts)].split(counts)):
            if len(pairs):
                route = Route.of(
                    (pairs // experts).div(each, rounding_mode="floor"),
                    samples,
                    token=pairs // experts % each,
                    tokens=each,
                )
                results.append(self._of_expert(expert, tokens[pairs // experts], route))
        elsewhere = len(order) - sum(counts)  # tokens of experts on other devices
        results += [tokens.new_zeros(elsewhere, tokens.shape[1])] if elsewhere else []
        outputs = torch.cat(results) * shares.flatten()[order, None]
        return outputs[order.argsort()].view(*index.shape, -1).sum(dim=1).to(tokens.dtype)

    def _of_expert(self, expert: int, rows: Tensor, route: Route) -> Tensor:
        """Return one expert's outputs for tokens (r, m)."""
        module: Any = self._module
        inner = self._product(self._first, expert, rows, route)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        outputs = self._product(self._second, expert, inner, route)
        normed: Tensor = module.post_expert_norm(outputs) if getattr(module, "has_post_expert_norm", False) else outputs
        return normed

    def _product(self, name: str, expert: int, rows: Tensor, route: Route) -> Tensor:
        weight, bias = getattr(self._module, name), None
        if isinstance(weight, Watched) and weight.part is not None:
            weight.source.route = route
            if not weight.source.is_attached(weight.part[expert]):  # its use must not count as one outside of layers
                weight = weight.part
        if self._module.has_bias:
            bias = getattr(self._module, f"{name}_bias")[expert]
        matrix = weight[expert].t() if self._module.is_transposed else weight[expert]
        return route.taken_back(F.linear(route.laid_out(rows), matrix, bias))

    @property
    def _count(self) -> int:
        return len(getattr(self._module, self._first))
