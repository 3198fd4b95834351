"""Losses of log-probabilities: values by the GGN are those of cross-entropy on the logits behind them."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf

torch.manual_seed(0)
X, Y = torch.randn(12, 5, dtype=torch.float64), torch.arange(12) % 4
P = torch.rand(12, 4, dtype=torch.float64).softmax(dim=1)
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


class LogOfSoftmax(nn.Module):
    def forward(self, x):
        return torch.log(x.softmax(-1))


def network(*last):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), *last).double().eval()


ENDS = {"module": nn.LogSoftmax(1), "log of softmax": LogOfSoftmax()}
CASES = {
    "nll": (nn.NLLLoss(), nn.CrossEntropyLoss(), Y),
    "function": (F.nll_loss, nn.CrossEntropyLoss(), Y),
    "options": (nn.NLLLoss(WEIGHTS, ignore_index=2), nn.CrossEntropyLoss(WEIGHTS, ignore_index=2), Y),
    "partial": (functools.partial(F.nll_loss, weight=WEIGHTS), nn.CrossEntropyLoss(WEIGHTS), Y),
    "sum": (nn.NLLLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum"), Y),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), nn.CrossEntropyLoss(), P),
    "divergence, sum": (nn.KLDivLoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum"), P),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("case", CASES)
def test_is_cross_entropy_of_the_logits(case, end):
    loss, known, targets = CASES[case]
    model, logits = network(ENDS[end]), network()
    for kind in ("ggn", "hessian", "fisher"):
        found = pf.importance(model, loss, (X, targets), kind=kind)
        torch.testing.assert_close({**found}, {**pf.importance(logits, known, (X, targets), kind=kind)})
    found, wanted = (
        pf.measure(*given, (X, targets), layers="2", measures=["relative_flatness", "trace", "lambda_max"])
        for given in ((model, loss), (logits, known))
    )
    for (_, measure, one), (_, _, other) in zip(found, wanted, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-9), measure
        assert (one.method, one.exact) == (other.method, other.exact)
        assert "of the logits" in " ".join(one.notes)
    assert pf.verify(model, loss, (X, targets), "0")


@pytest.mark.parametrize("case", CASES)
def test_a_change_costs_what_the_loss_says(case):
    loss, _, targets = CASES[case]
    model, changes = network(nn.LogSoftmax(1)), {"0": torch.full((6, 5), 0.01, dtype=torch.float64)}
    before = loss(model(X), targets)
    found = pf.cost_of_change(model, loss, (X, targets), changes)["0", "loss_change"].value
    with torch.no_grad():
        model[0].weight += changes["0"]
    assert found == pytest.approx((loss(model(X), targets) - before).item(), rel=1e-6)


def test_a_divergence_that_is_a_mean_over_outputs_and_of_logarithms():
    model = network(nn.LogSoftmax(1))
    wanted = pf.importance(model, nn.KLDivLoss(reduction="batchmean"), (X, P))["0.weight"]
    found = pf.importance(model, nn.KLDivLoss(), (X, P))["0.weight"]
    torch.testing.assert_close(4 * found, wanted)
    loss = nn.KLDivLoss(reduction="batchmean", log_target=True)
    torch.testing.assert_close(pf.importance(model, loss, (X, P.log()))["0.weight"], wanted)


def test_a_plan_is_that_of_the_logits():
    found, wanted = (
        pf.allocate(*given, (X, Y), ["int2", "int4"], bits=3, measured=False)
        for given in ((network(nn.LogSoftmax(1)), nn.NLLLoss()), (network(), nn.CrossEntropyLoss()))
    )
    assert found.predicted.value == pytest.approx(wanted.predicted.value, rel=1e-9)
    assert found.choice == wanted.choice


@pytest.mark.parametrize("loss", [nn.NLLLoss(), nn.L1Loss()])
def test_without_curvature_plans_and_importances_are_refused(loss):
    targets = Y if isinstance(loss, nn.NLLLoss) else P
    for call in (
        lambda: pf.importance(network(), loss, (X, targets)),
        lambda: pf.allocate(network(), loss, (X, targets), ["int2", "int4"], bits=3, measured=False),
    ):
        with pytest.raises(pf.errors.InputError, match=r"loss: without curvature .* second derivative 0"):
            call()


def test_a_model_that_ends_in_a_log_softmax_for_some_batches_alone():
    class Sometimes(nn.Module):
        def forward(self, x):
            return x.log_softmax(1) if len(x) < 7 else x

    with pytest.raises(pf.errors.InputError, match="have it end in one for all batches"):
        pf.measure(network(Sometimes()), nn.NLLLoss(), [(X[:5], Y[:5]), (X, Y)], measures=["trace"])


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.mse_loss, nn.L1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()])
def test_targets_of_another_shape_than_outputs_are_refused(loss):
    """Torch broadcasts (12,) and (12, 1) to (12, 12)."""
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double().eval()
    with pytest.raises(pf.errors.InputError, match=r"the outputs' shape \(12,\) is wanted, got \(12, 1\)"):
        pf.relative_flatness(model, loss, (X, P[:, :1]), "0")
    with pytest.raises(pf.errors.InputError, match=r"the outputs' shape \(12, 1\) is wanted, got \(12,\)"):
        pf.relative_flatness(model[:1], loss, (X, P[:, 0]), "0")
