"""Make rows of a linear head that is given as tensors."""

from collections.abc import Generator
from dataclasses import dataclass

from torch import Tensor

from .. import losses
from ..contractions import product, promoted, promoted_dtype
from ..errors import InputError, NotYetError
from ..head import HeadBatch, terms_of
from ..losses.parameter_dependence import REFUSAL, depends_on_more
from ..messages import check_tensor
from ..model import fingerprint, layers
from ..model.spread import is_spread
from ..numerics.ranks import ALONE, Ranks
from ..numerics.shard import WHOLE, Shard


@dataclass
class TensorHead:
    """Hold a head given as tensors: one batch of rows."""

    weight: Tensor
    bias: Tensor | None
    batch: HeadBatch
    name: str = ""
    shard: Shard = WHOLE
    classes: Ranks = ALONE

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight (d, m) and the bias (d,)."""
        return self.weight, self.bias

    def expected_rows(self, first: HeadBatch) -> int:
        """Return how many rows there are."""
        return first.features.shape[0]

    def notes(self) -> tuple[str, ...]:
        """Return no notes: nothing is known of a model around these tensors."""
        return ()

    def batches(self) -> Generator[HeadBatch, None, None]:
        """Yield the one batch."""
        yield self.batch


def from_tensors(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    loss: losses.Loss,
    ranks: Ranks = ALONE,
) -> TensorHead:
    """Check the tensors of a head (features (n, …, m), weight (d, m), bias (d,)) and make rows of them.

    They are those of one of some ranks, of which single ones may have no samples. Where the weight is a ``DTensor``,
    the ranks have its rows in place of samples.
    """
    total, classes = weight.shape[0] if isinstance(weight, Tensor) and weight.ndim else 0, ALONE
    if isinstance(weight, Tensor) and is_spread(weight):
        features, weight, bias, targets = _own_rows(features, weight, bias, targets, loss, ranks)
        classes, ranks = ranks, ALONE
    check_head(features, weight, bias, total)
    counts = features.numel() > 0
    if not ranks.alone:
        named = (("weight", weight), ("bias", weight[:0] if bias is None else bias))
        ranks.check_alike("the beginning of the call", {"weights": fingerprint.of_tensors(named)})
    if not (counts if ranks.alone else any(ranks.exchange("the sizes of the shards", counts))):
        raise InputError(f"features: there are no samples in {tuple(features.shape)}")
    if not counts:  # a sample that adds nothing stands for those of the others
        features = features.new_zeros(1, *features.shape[1:])
        targets = None if targets is None else targets.new_zeros(1, *targets.shape[1:])
    rows, shape = _detached(features), (*features.shape[:-1], total)
    if targets is not None:
        targets = _detached(check_tensor("targets", targets)).to(features.device)
    if loss.known and rows.ndim > 2:
        rows = rows.reshape(-1, weight.shape[1])

    def outputs(count: int) -> Tensor:
        if loss.known:  # it does not look at their values
            return features.new_zeros(()).expand(shape)
        return product(promoted(rows[:count]), promoted(weight).t()) + (0 if bias is None else bias)

    def made() -> losses.Terms:
        return loss.terms(outputs(len(features)), targets, len(shape) - 1)

    terms, labels = terms_of(loss, shape, features.device, targets, len(shape) - 1, made)
    if not loss.known and targets is not None:
        head = (weight,) if bias is None else (weight, bias)
        if depends_on_more(loss, outputs(1), targets[:1], head):
            raise InputError(REFUSAL)
    samples = features.shape[0]
    batch = HeadBatch(rows, samples, rows.shape[0] // samples, 0, terms, labels)
    shard = WHOLE if ranks.alone else Shard(ranks, counts)
    return TensorHead(_detached(weight), None if bias is None else _detached(bias), batch, shard=shard, classes=classes)


def _own_rows(
    features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None, loss: losses.Loss, ranks: Ranks
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return features, this rank's rows of weight and bias, and targets."""
    mesh, placements = weight.device_mesh, weight.placements  # type: ignore[attr-defined]
    if len(placements) != 1 or not placements[0].is_shard(0) or mesh.mesh.flatten().tolist() != ranks.processes:
        raise InputError(
            f"weight: a DTensor with {placements} over {mesh}; one whose rows are spread over the ranks that make the "
            "call is wanted, (Shard(0),), and process_group=weight.device_mesh.get_group() where that is not all ranks"
        )
    if not loss.by_rows:
        raise NotYetError("weight: its rows can be spread over ranks (a DTensor) for cross-entropy alone")
    rows: Tensor = weight.to_local()  # type: ignore[attr-defined]
    counts = ranks.exchange("the rows of the weight", len(rows))
    features, targets = _whole(features), None if targets is None else _whole(targets)
    if bias is not None:
        bias = _whole(bias)
        if bias.shape != (len(weight),):
            raise InputError(f"bias has shape {tuple(bias.shape)} for {len(weight)} rows of weight")
        bias = bias.split(counts)[ranks.rank]
    given = [(name, tensor) for name, tensor in (("features", features), ("targets", targets)) if tensor is not None]
    ranks.check_alike("the beginning of the call", {"features or targets": fingerprint.of_tensors(given)})
    return features, rows, bias, targets


def _whole(tensor: Tensor) -> Tensor:
    """Return what all ranks have of a tensor together."""
    if not (isinstance(tensor, Tensor) and is_spread(tensor)):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor  # a call for nothing takes as long as a check


def check_head(features: Tensor, weight: Tensor, bias: Tensor | None, total: int | None = None) -> None:
    """Raise an InputError unless features (n, …, m), weight (d, m) and bias (d,) are tensors of one kind and fit.

    ``total`` is the number of all ranks' rows of a weight that is spread.
    """
    given = [("features", features, 2), ("weight", weight, 2)]
    for what, tensor, ndim in given if bias is None else [*given, ("bias", bias, 1)]:
        tensor = check_tensor(what, tensor)
        layers.check_dtype(what, tensor.dtype)
        if tensor.ndim < ndim or (tensor.ndim > ndim and what != "features"):
            raise InputError(f"{what}: {ndim} dimensions are wanted, got shape {tuple(tensor.shape)}")
        same = tensor.dtype == features.dtype or promoted_dtype(tensor.dtype) == promoted_dtype(features.dtype)
        if not same or tensor.device != features.device:
            raise InputError(
                f"{what} is {tensor.dtype} on {tensor.device}, features are {features.dtype} on {features.device}; "
                "they must be of one kind"
            )
    d, m = weight.shape
    if features.shape[-1] != m or (d if total is None else total) == 0:
        raise InputError(f"features {tuple(features.shape)} do not fit weight {tuple(weight.shape)}: (n, m) and (d, m)")
    if bias is not None and bias.shape[0] != d:
        raise InputError(f"bias has {len(bias)} entries for {d} rows of weight")
