"""Relative flatness of a head as a metric of torchmetrics: exact over an epoch, from the features as they pass by.

    κ(w) = Σ_i scale_i |φ_i|² ⟨w wᵀ, ∂²ℓ_i/∂z_i²⟩ / Σ_i ω_i        (Petzka et al. 2021, Definition 3, at a head)

Given the weight w, both sums go over samples, so they are states that are added up over batches and ranks.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import losses
from ..errors import InputError, MissingExtraError, NotYetError
from ..measures import head_sums, tensor_head
from ..model import fingerprint, layers, state
from ..model.spread import is_spread
from ..numerics.accumulate import normaliser_or_nan
from ..options import Options

try:
    from torchmetrics import Metric
except ImportError:
    raise MissingExtraError("a metric needs torchmetrics: pip install 'pyflatness[torchmetrics]'") from None

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_numbers = itertools.count()


class RelativeFlatness(Metric):
    """Measure the relative flatness of a linear head over an epoch, without a second read of the data.

    The value is that of :func:`pyflatness.head_flatness` on all features and targets of the epoch together, up to
    rounding, however they are cut into batches and spread over ranks. An update costs that
    call for a batch, and some tenths of a millisecond.

    A value is of one weight. Every update reads the weight, which has to be that of the first update since
    :meth:`reset`, so the metric is for epochs in which weights do not change, as in validation. In a training loop call
    :meth:`reset` after every step of the optimiser; each value is then of one batch at the weights of that step. For a
    value over the whole training data at one point of the training use :func:`pyflatness.track`.

    Args:
        weight: the head, an ``nn.Linear`` (or the ``Conv1D`` of transformers), or its weight (d, m). It is no part of
            the metric's ``state_dict`` and ``parameters()``; copies of the metric are of the same head, unless that is
            copied along with them.
        bias: (d,), beside a weight that is a tensor.
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, an ``nn``
            loss module with its options, or a callable (outputs, targets) -> scalar.
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        nan_policy: ``"raise"``, ``"propagate"`` or ``"omit"``, sample by sample.
        backend: ``"auto"``, ``"compiled"``, ``"triton"`` or ``"reference"``.
        options: of ``torchmetrics.Metric``: ``process_group``, ``sync_on_compute``, ``dist_sync_on_step``, …

    Raises:
        InputError: a module that is no linear head, a weight that is none, or an option that does not exist.
        MissingExtraError: without torchmetrics (when this module is imported).

    Example:
        >>> import torch
        >>> from pyflatness.integrations.torchmetrics import RelativeFlatness
        >>> head = torch.nn.Linear(2, 2, bias=False)
        >>> _ = head.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> kappa = RelativeFlatness(head)
        >>> for features in (torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 1.0]])):
        ...     kappa.update(features)
        >>> kappa.compute()
        tensor(1.4746, dtype=torch.float64)
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    total: Tensor
    normaliser: Tensor
    weights_read: Tensor

    def __init__(
        self,
        weight: Tensor | nn.Module,
        bias: Tensor | None = None,
        *,
        loss: Any = "cross_entropy",
        reduction: str | None = None,
        nan_policy: str = "raise",
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._head = _checked(weight, bias)  # a tuple: as an attribute it would become a part of this module
        self._loss = losses.resolve(loss, reduction)
        self._options = Options(nan_policy=nan_policy, backend=backend)
        self._updates = 0  # before the batch that forward() is at
        # A MetricCollection takes metrics of equal states for one, as those of a head and of its average are at first.
        # Some releases, of 1.4 among them, compare the first state alone.
        number = torch.tensor(next(_numbers), dtype=torch.int64, device=self.device)
        self.add_state("number", number, "max")
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        self.add_state("total", zero, "sum")
        self.add_state("normaliser", zero, "sum")
        self.add_state("weights_read", torch.zeros((), dtype=torch.int64, device=self.device), _the_same)

    def update(self, features: Tensor, target: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            features: φ, the head's inputs, (n, m) or (n, …, m).
            target: what the loss takes, with classes last: class indices (n, …), or values (n, …, d). None where the
                curvature does not depend on them.

        Raises:
            InputError: shapes, dtypes or targets that do not fit, or a weight that has changed since the first update.
            NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.
        """
        with torch.inference_mode(False), torch.no_grad():
            weight, bias = self._matrix(features)
            read = self._checked_weights(weight, bias)
            source = tensor_head.from_tensors(features, weight, bias, target, self._loss)
            source.batch.number = self._updates + self.update_count - 1
            found = head_sums.Total(source, self._loss, self._options)
        self.total = self.total + found.value
        self.normaliser = self.normaliser + found.weight
        self.weights_read = torch.full_like(self.weights_read, read)

    def compute(self) -> Tensor:
        """Return κ, a float64 tensor without dimensions; NaN where no target counts, as the mean of the loss is."""
        return self.total / normaliser_or_nan(self.normaliser.item(), self._loss.reduction)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch, and return its own value; see :meth:`update`."""
        self._checked_weights(*self._matrix(args[0] if args else kwargs.get("features")))
        self._updates = self.update_count
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._updates = 0

    def plot(self, val: "Tensor | Sequence[Tensor] | None" = None, ax: "Axes | None" = None) -> "tuple[Figure, Axes]":
        """Draw a value, or several in a row.

        Args:
            val: what ``compute`` or ``forward`` returned, or a list of such; None: ``compute()``.
            ax: axes of matplotlib to draw into; None: those of a new figure.

        Returns:
            Figure and axes.
        """
        return self._plot(val, ax)  # type: ignore[return-value]

    def set_dtype(self, dst_type: str | torch.dtype) -> "RelativeFlatness":
        """Return the metric as it is: its sums are float64, whatever the features are."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "RelativeFlatness":
        """Return a copy that is of the same head, or of its copy if the head is copied too, in front of the metric."""
        alive = {id(held): held for held in self._head if id(held) not in memo}
        copied = type(self).__new__(type(self))
        memo |= {id(self): copied, **alive}
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for key in alive:
            del memo[key]
        return copied

    def _matrix(self, features: Any) -> tuple[Tensor, Tensor | None]:
        """Return the weight (d, m) and the bias (d,) as they are now, where the features are."""
        weight, bias = self._head
        if isinstance(weight, nn.Module):
            with state.observing(weight) as (module, _):
                weight, bias = layers.matrix(module)
        if is_spread(weight):
            raise NotYetError(
                "weight: it is spread over ranks (a DTensor); pf.head_flatness(features, weight, …) takes such a head"
            )
        device = features.device if isinstance(features, Tensor) else weight.device
        return weight.to(device), None if bias is None else bias.to(device)

    def _checked_weights(self, weight: Tensor, bias: Tensor | None) -> int:
        """Return a checksum of the weights; raise if it is not that of the first update."""
        read = 1 + fingerprint.of_all_entries([weight] if bias is None else [weight, bias])
        _the_same(torch.stack([self.weights_read, torch.full_like(self.weights_read, read)]))
        return read


def _checked(weight: Any, bias: Any) -> tuple[Any, Any]:
    """Return a head as the metric holds it: a module and None, or a weight and a bias."""
    if not isinstance(weight, nn.Module):
        for what, tensor, ndim in (("weight", weight, 2), ("bias", bias, 1)):
            if not isinstance(tensor, Tensor) and (what == "weight" or bias is not None):
                raise InputError(f"{what}: a tensor or an nn.Linear is wanted, got {type(tensor).__name__}")
            if isinstance(tensor, Tensor) and tensor.ndim != ndim:
                raise InputError(f"{what}: {ndim} dimensions are wanted, got shape {tuple(tensor.shape)}")
        return weight, bias
    module = layers.unwrap(weight)
    if not (layers.is_pointwise(module) and layers.kind_of(module).class_dim == -1):
        raise InputError(
            f"weight: a {type(module).__name__} is no linear head; pass the nn.Linear whose outputs are the model's, "
            "or its weight (d, m) and bias"
        )
    if bias is not None:
        raise InputError("bias: the module has its own; pass one only beside a weight that is a tensor")
    return module, None


def _the_same(read: Tensor) -> Tensor:
    """Return the one checksum of the weights among several, 0 for none; torchmetrics reduces the state by this."""
    numbers: Tensor = read[read != 0].unique()
    if len(numbers) > 1:
        raise InputError(
            "weight: it has changed since the first update (or is another on another rank), and a value is of one "
            "weight; call reset() behind each step of the optimiser, or update in epochs in which the weights rest, as "
            "in validation"
        )
    return numbers.sum()
