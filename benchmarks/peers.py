"""Other ways to relative flatness of one linear layer of a ReLU network, each as its library would have it done.

All of them get the layer's inputs from forward passes without gradients, and differentiate what is behind alone.
"""

import copy
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batches = Sequence[tuple[Tensor, Tensor]]


class Around:
    """A sequential network cut in front of one of its linear layers, by name."""

    def __init__(self, model: nn.Sequential, name: str) -> None:
        place = [own for own, _ in model.named_children()].index(name)
        network = copy.deepcopy(model).requires_grad_(False)
        self._front, self.behind = network[:place], network[place:]
        self.name, self.layer = name, self.behind[0]

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return the layer's inputs."""
        return self._front(x)

    def contracted(self, hessian: Tensor) -> Tensor:
        """Return Σ ⟨w_s, w_t⟩ Tr(H_st) of a Hessian (d, m, d, m)."""
        w = self.layer.weight.detach()
        return torch.einsum("sjtj,st->", hessian, w @ w.t())


def nested_autograd(around: Around, batches: Batches) -> Tensor:
    """Return the value as the code of the 2021 paper does: a backward pass for every weight."""
    w = around.layer.weight.requires_grad_()
    gram, total = (w @ w.t()).detach(), torch.zeros(())
    for x, y in batches:
        loss = F.cross_entropy(around.behind(around.features(x)), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, w, create_graph=True)
        for s in range(len(w)):
            for j in range(w.shape[1]):
                (row,) = torch.autograd.grad(gradient[s, j], w, retain_graph=True)
                total += gram[s] @ row[:, j]
    return total / _samples(batches)


def functional_hessian(around: Around, batches: Batches) -> Tensor:
    """``torch.func.hessian`` of the layer, contracted."""
    total = torch.zeros(())
    for x, y in batches:
        features = around.features(x)

        def loss(w: Tensor, features: Tensor = features, y: Tensor = y) -> Tensor:
            outputs = torch.func.functional_call(around.behind, {f"{around.name}.weight": w}, (features,))
            return F.cross_entropy(outputs, y, reduction="sum")

        hessian = torch.func.hessian(loss)(around.layer.weight.detach())
        total += around.contracted(hessian)
    return total / _samples(batches)


def curvlinops_hessian(around: Around) -> Callable[[Batches], Tensor]:
    """Return the operator of curvlinops times the unit vectors, contracted.

    Raises:
        ImportError: curvlinops is not installed.
    """
    import curvlinops

    w = around.layer.weight.requires_grad_()
    d, m = w.shape

    def measured(batches: Batches) -> Tensor:
        data = [(around.features(x), y) for x, y in batches]
        operator = curvlinops.HessianLinearOperator(
            around.behind, nn.CrossEntropyLoss(), [w], data, check_deterministic=False
        )
        return around.contracted((operator @ torch.eye(d * m)).view(d, m, d, m))

    return measured


def backpack_identity(around: Around) -> Callable[[Batches], Tensor]:
    """BackPACK's diagonal of the GGN of an identity matrix in front of the layer: its sum is κ.

    Raises:
        ImportError: BackPACK is not installed.
    """
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    # Features need no gradient here, and are not given one for the warning's sake.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    width = around.layer.weight.shape[1]
    identity = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(width))
    tail, loss = extend(nn.Sequential(identity, *around.behind)), extend(nn.CrossEntropyLoss(reduction="sum"))

    def measured(batches: Batches) -> Tensor:
        total = torch.zeros(())
        for x, y in batches:
            features = around.features(x)
            with backpack(DiagGGNExact()):
                loss(tail(features), y).backward()
            total += identity.weight.diag_ggn_exact.sum()
            identity.weight.grad = None
        return total / _samples(batches)

    return measured


def _samples(batches: Batches) -> int:
    return sum(len(x) for x, _ in batches)
