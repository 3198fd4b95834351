"""The streaming metric: over batches it gives what ``pf.head_flatness`` gives on all data, and is one like others."""

import builtins
import copy
import pickle
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

import pyflatness as pf
from pyflatness.integrations.torchmetrics import RelativeFlatness
from support import rank_cases, ranks

N, M, C = 37, 6, 4
CUTS = [1, 11, 4, 20, 1]


def tensors(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    features, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((N, M), (C, M), (C,)))
    return features, weight, bias, torch.randint(C, (N,), generator=draw)


FEATURES, WEIGHT, BIAS, TARGETS = tensors()
VALUES = torch.rand(N, C, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
CLASS_WEIGHTS = torch.tensor([1.0, 0.5, 3.0, 0.0], dtype=torch.float64)
IGNORED = torch.where(torch.arange(N) % 3 == 0, -100, TARGETS)
IGNORED[1:12] = -100  # all of a batch
PROBLEMS = {
    "cross-entropy": ("cross_entropy", TARGETS),
    "no targets": ("cross_entropy", None),
    "ignored": (nn.CrossEntropyLoss(), IGNORED),
    "class weights": (nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1), IGNORED),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), TARGETS),
    "probabilities": (F.cross_entropy, VALUES.softmax(1)),
    "squared error": ("mse_loss", VALUES),
    "binary": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), VALUES.round()),
    "callable": (lambda f, y: (f - y).cosh().mean(), VALUES),
}


def head(dtype=torch.float64):
    layer = nn.Linear(M, C).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
        layer.bias.copy_(BIAS)
    return layer


def updated(metric, features=FEATURES, targets=TARGETS, cuts=CUTS):
    parts = (None,) * len(cuts) if targets is None else targets.split(cuts)
    for phi, y in zip(features.split(cuts), parts, strict=True):
        metric.update(phi, y)
    return metric


def expected(features=FEATURES, weight=WEIGHT, bias=BIAS, targets=TARGETS, **options):
    return pf.head_flatness(features, weight, bias, targets, **options).value


@pytest.mark.parametrize("cuts", [CUTS, [N], [1] * N], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_value_is_that_of_all_data_at_once(problem, cuts):
    loss, targets = PROBLEMS[problem]
    metric = updated(RelativeFlatness(head(), loss=loss), targets=targets, cuts=cuts)
    found = metric.compute()
    assert (found.dtype, found.shape) == (torch.float64, ())
    assert found.item() == pytest.approx(expected(targets=targets, loss=loss), rel=1e-12)


def test_a_weight_without_a_module_and_tokens():
    features = torch.randn(8, 5, M, dtype=torch.float64)
    targets = torch.where(torch.rand(8, 5) < 0.3, -100, torch.randint(C, (8, 5)))
    metric = updated(RelativeFlatness(WEIGHT, BIAS), features, targets, [3, 5])
    assert metric.compute().item() == pytest.approx(expected(features, targets=targets), rel=1e-12)
    metric = updated(RelativeFlatness(WEIGHT), features, targets, [3, 5])
    assert metric.compute().item() == pytest.approx(expected(features, bias=None, targets=targets), rel=1e-12)


def test_the_reduction_that_is_asked_for_and_the_backend():
    metric = updated(RelativeFlatness(head(), reduction="sum", backend="reference"))
    assert metric.compute().item() == pytest.approx(expected(reduction="sum"), rel=1e-12)
    assert metric.compute().item() == pytest.approx(N * expected(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_float64_whatever_the_features_are(dtype):
    features = tensors(dtype)[0]
    metric = updated(RelativeFlatness(head(dtype)).half().set_dtype(torch.float16), features)
    value = expected(features, WEIGHT.to(dtype), BIAS.to(dtype))
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(value, rel=1e-5)


def test_forward_gives_the_values_of_batches_and_adds_them_up():
    metric = RelativeFlatness(head())
    for phi, y in zip(FEATURES.split(CUTS), TARGETS.split(CUTS), strict=True):
        assert metric(phi, y).item() == pytest.approx(expected(phi, targets=y), rel=1e-12)
    assert metric.compute().item() == pytest.approx(expected(), rel=1e-12)
    assert metric.update_count == len(CUTS)
    metric.reset()
    assert metric(features=FEATURES[:3]).item() == pytest.approx(expected(FEATURES[:3], targets=None), rel=1e-12)


def test_the_validation_of_a_training():
    """Under inference mode, by graphs, and with new weights after each reset."""
    layer = head()
    metric = RelativeFlatness(layer)
    for _ in range(3):
        with torch.inference_mode():
            updated(metric)
            assert metric.compute().item() == pytest.approx(expected(weight=layer.weight, bias=layer.bias), rel=1e-12)
        metric.reset()
        with torch.no_grad():
            layer.weight *= 1.5
    metric.update(FEATURES.clone().requires_grad_() * 1.0, TARGETS)
    assert not metric.compute().requires_grad
    assert layer.weight.grad is None


@pytest.mark.parametrize("by_forward", [True, False])
@pytest.mark.parametrize(
    "change", [lambda layer: layer.weight[2, 3].mul_(1 + 1e-15), lambda layer: layer.bias[0].add_(1)]
)
def test_a_weight_that_moves_within_an_epoch_is_refused(change, by_forward):
    layer = head()
    metric = RelativeFlatness(layer)
    take = metric if by_forward else metric.update
    take(FEATURES[:5], TARGETS[:5])
    before = [tensor.clone() for tensor in metric.metric_state.values()]
    with torch.no_grad():
        change(layer)
    with pytest.raises(pf.errors.InputError, match=r"weight: it has changed since the first update .* call reset\(\)"):
        take(FEATURES[5:], TARGETS[5:])
    assert all(map(torch.equal, before, metric.metric_state.values()))
    metric.reset()
    take(FEATURES[5:], TARGETS[5:])
    value = expected(FEATURES[5:], layer.weight, layer.bias, TARGETS[5:])
    assert metric.compute().item() == pytest.approx(value, rel=1e-12)


@pytest.mark.skipif(not hasattr(MeanMetric, "merge_state"), reason="this torchmetrics merges no states")
def test_sums_of_two_weights_are_not_merged():
    ours, theirs = updated(RelativeFlatness(WEIGHT)), updated(RelativeFlatness(2 * WEIGHT))
    with pytest.raises(pf.errors.InputError, match="weight: it has changed"):
        ours.merge_state(theirs)
    one = updated(RelativeFlatness(WEIGHT, BIAS), FEATURES[:12], TARGETS[:12], CUTS[:2])
    one.merge_state(updated(RelativeFlatness(WEIGHT, BIAS), FEATURES[12:], TARGETS[12:], CUTS[2:]))
    assert one.compute().item() == pytest.approx(expected(), rel=1e-12)


def test_in_a_collection_beside_others_and_averaged_weights():
    layer, average = head(), head()  # equal at first, as an average is
    collection = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(C),
            "kappa": RelativeFlatness(layer),
            "average": RelativeFlatness(average),
            "loss": RelativeFlatness(layer, loss=nn.CrossEntropyLoss(reduction="sum")),
        }
    )
    for _ in range(2):
        for phi, y in zip(FEATURES.split(CUTS), TARGETS.split(CUTS), strict=True):
            collection.update(features=phi, preds=layer(phi), target=y)
        found = collection.compute()
        assert found["accuracy"] == MulticlassAccuracy(C)(layer(FEATURES), TARGETS)
        value, other = (expected(weight=of.weight, bias=of.bias) for of in (layer, average))
        assert found["kappa"].item() == pytest.approx(value, rel=1e-12)
        assert found["average"].item() == pytest.approx(other, rel=1e-12)
        assert found["loss"].item() == pytest.approx(N * value, rel=1e-12)
        collection.reset()
        with torch.no_grad():
            layer.weight *= 2


def test_pickled_it_goes_on_where_it_was():
    metric = updated(RelativeFlatness(head()), FEATURES[:12], TARGETS[:12], CUTS[:2])
    read = pickle.loads(pickle.dumps(metric))
    assert updated(read, FEATURES[12:], TARGETS[12:], CUTS[2:]).compute().item() == pytest.approx(expected(), rel=1e-12)
    assert metric.compute().item() == pytest.approx(expected(FEATURES[:12], targets=TARGETS[:12]), rel=1e-12)


def test_clones_are_of_the_same_head_and_have_sums_of_their_own():
    layer = head()
    metric = updated(RelativeFlatness(layer), FEATURES[:12], TARGETS[:12], CUTS[:2])
    others = [metric.clone(), MetricCollection([metric]).clone(prefix="val_")["RelativeFlatness"]]
    metric.reset()
    for clone in others:
        updated(clone, FEATURES[12:], TARGETS[12:], CUTS[2:])
        assert clone.compute().item() == pytest.approx(expected(), rel=1e-12)
    with torch.no_grad():
        layer.weight *= 2
    for clone in others:
        clone.reset()
        clone.update(FEATURES)
        assert clone.compute().item() == pytest.approx(expected(weight=layer.weight, targets=None), rel=1e-12)


def test_a_model_that_is_copied_takes_its_metric_along():
    model = nn.Module()
    model.head = head()
    model.kappa = RelativeFlatness(model.head)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight *= 2
    for each in (model, copied):
        each.kappa.update(FEATURES)
        assert each.kappa.compute().item() == pytest.approx(expected(weight=each.head.weight, targets=None), rel=1e-12)
    assert copied.head.weight is not model.head.weight


def test_the_head_is_no_part_of_the_metric():
    metric = updated(RelativeFlatness(head()))
    assert [*metric.parameters(), *metric.children(), *metric.state_dict()] == []
    metric.persistent(True)
    kept = metric.state_dict()
    other = RelativeFlatness(head())
    other.load_state_dict(kept)
    assert updated(other).compute().item() == pytest.approx(expected(), rel=1e-12)
    assert other.normaliser == 2 * N
    for device in ("cpu", torch.device("cpu")):
        assert metric.to(device).compute().item() == pytest.approx(expected(), rel=1e-12)
    metric.to("meta")
    assert {tensor.device.type for tensor in metric.metric_state.values()} == {"meta"}


def test_facts_that_torchmetrics_asks_for():
    metric = RelativeFlatness(head())
    assert (metric.is_differentiable, metric.higher_is_better, metric.full_state_update) == (False, False, False)


def test_plot(tmp_path):
    metric = updated(RelativeFlatness(head()))
    figure, axes = metric.plot()
    assert axes.get_lines()[0].get_ydata()[0] == pytest.approx(expected())
    values = [metric(phi, y) for phi, y in zip(FEATURES.split(CUTS), TARGETS.split(CUTS), strict=True)]
    _, again = metric.plot(values, ax=axes)
    assert again is axes
    figure.savefig(tmp_path / "kappa.png")


def test_weights_that_are_made_anew_at_each_access():
    layer = parametrizations.spectral_norm(head())  # in training mode each access is a step towards the norm
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    metric = updated(RelativeFlatness(layer))
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    assert layer.training
    weight = layer.eval().weight.detach()
    assert metric.compute().item() == pytest.approx(expected(weight=weight), rel=1e-2)


def test_an_epoch_without_samples():
    metric = RelativeFlatness(head())
    with pytest.warns(UserWarning, match="was called before the ``update`` method"):
        assert metric.compute().isnan()
    metric.reset()
    metric.update(FEATURES[1:12], IGNORED[1:12])  # no target counts
    assert metric.compute().isnan()
    assert F.cross_entropy(FEATURES[1:12] @ WEIGHT.t(), IGNORED[1:12]).isnan()


def test_numbers_that_are_not_finite():
    features = FEATURES.clone()
    features[14] = torch.nan
    metric = RelativeFlatness(head())
    metric.update(*(held[:12] for held in (features, TARGETS)))
    with pytest.raises(pf.errors.NonFiniteError, match="batch 1: 1 of 25 rows have NaN"):
        metric.update(*(held[12:] for held in (features, TARGETS)))
    with pytest.raises(pf.errors.NonFiniteError, match="batch 2: 1 of 25 rows have NaN"):
        metric(*(held[12:] for held in (features, TARGETS)))
    assert updated(RelativeFlatness(head(), nan_policy="propagate"), features).compute().isnan()
    found = updated(RelativeFlatness(head(), nan_policy="omit"), features).compute()
    assert found.item() == pytest.approx(expected(features, nan_policy="omit"), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativeFlatness(nn.Conv2d(3, 4, 1)), "weight: a Conv2d is no linear head; pass the nn.Linear"),
        (lambda: RelativeFlatness(nn.Sequential(nn.Linear(3, 4))), "weight: a Sequential is no linear head"),
        (lambda: RelativeFlatness(nn.Embedding(3, 4)), "weight: a Embedding is no linear head"),
        (lambda: RelativeFlatness(nn.LayerNorm(4)), "weight: a LayerNorm is no linear head"),
        (lambda: RelativeFlatness("head"), "weight: a tensor or an nn.Linear is wanted, got str"),
        (lambda: RelativeFlatness(BIAS), r"weight: 2 dimensions are wanted, got shape \(4,\)"),
        (lambda: RelativeFlatness(WEIGHT, WEIGHT), r"bias: 1 dimensions are wanted, got shape \(4, 6\)"),
        (lambda: RelativeFlatness(WEIGHT, 0.0), "bias: a tensor .* got float"),
        (lambda: RelativeFlatness(head(), BIAS), "bias: the module has its own"),
        (lambda: RelativeFlatness(head(), loss="hinge"), "loss='hinge' is not known"),
        (lambda: RelativeFlatness(head(), nan_policy="skip"), "nan_policy='skip' does not exist"),
        (lambda: RelativeFlatness(head()).update(FEATURES[:, :3]), r"features \(37, 3\) do not fit weight \(4, 6\)"),
        (lambda: RelativeFlatness(head()).update(FEATURES[:0]), "features: there are no samples"),
        (
            lambda: RelativeFlatness(head()).update(FEATURES.float()),
            "weight is torch.float64 .* features are torch.float32",
        ),
        (lambda: RelativeFlatness(head()).update(FEATURES.numpy()), "features: a tensor is wanted, got ndarray"),
        (lambda: RelativeFlatness(head())(FEATURES.tolist()), "features: a tensor is wanted, got list"),
        (lambda: RelativeFlatness(head()).update(FEATURES, TARGETS[:5]), r"class indices of shape \(37,\) are wanted"),
        (lambda: RelativeFlatness(head()).update(FEATURES, TARGETS + 1), "class 4 does not exist among 4 classes"),
        (lambda: RelativeFlatness(WEIGHT, BIAS[:2]).update(FEATURES), "bias has 2 entries for 4 rows"),
        (
            lambda: RelativeFlatness(head(), loss=nn.CrossEntropyLoss(CLASS_WEIGHTS)).update(FEATURES),
            "cannot do without",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(pf.errors.InputError, match=message):
        make()


def test_options_of_torchmetrics():
    assert RelativeFlatness(head(), dist_sync_on_step=True, sync_on_compute=False).dist_sync_on_step
    with pytest.raises(ValueError, match="Unexpected keyword arguments: `normalise`"):
        RelativeFlatness(head(), normalise="std")


def test_without_torchmetrics(monkeypatch):
    real = builtins.__import__

    def refused(name, *args):
        if name == "torchmetrics":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refused)
    monkeypatch.delitem(sys.modules, "pyflatness.integrations.torchmetrics")
    with pytest.raises(pf.errors.MissingExtraError, match=r"pip install 'pyflatness\[torchmetrics\]'"):
        __import__("pyflatness.integrations.torchmetrics")


def test_over_two_ranks_of_uneven_data():
    names = ["streamed", "streamed_on_one_rank", "streamed_with_other_weights"]
    found = ranks.outcomes("support.rank_cases", names, 2)
    whole, _ = rank_cases.streamed(0, 1)
    features, targets = rank_cases.data()
    weight = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    assert whole == pytest.approx(expected(features, weight, None, targets, loss=rank_cases.WEIGHTED), rel=1e-12)
    for name in names[:2]:
        for value, restored in found[name]:
            assert value == pytest.approx(whole, rel=1e-12)
            assert restored
        assert len({value for value, _ in found[name]}) == 1
    for error in found["streamed_with_other_weights"]:
        assert isinstance(error, pf.errors.InputError)
        assert "is another on another rank" in str(error)


def test_mean_metrics_of_torchmetrics_are_what_it_is_not():
    """A mean of batches' values is another number: batches differ in size."""
    mean = MeanMetric()
    metric = RelativeFlatness(head())
    for phi, y in zip(FEATURES.split(CUTS), TARGETS.split(CUTS), strict=True):
        mean.update(metric(phi, y))
    assert abs(mean.compute().item() / metric.compute().item() - 1) > 1e-3
