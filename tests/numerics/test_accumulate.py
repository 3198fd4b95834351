"""The reduction over samples, by hand: what each policy for NaN makes of a batch, and what sums are divided by."""

import pytest
import torch

from pyflatness.errors import InputError, NonFiniteError
from pyflatness.numerics.accumulate import (
    Accumulator,
    check_followed,
    check_together,
    counting,
    masked,
    non_finite,
    normaliser,
)

FINE = torch.tensor([True, False, True, True])


def error():
    return non_finite(3, FINE, "in their outputs")


def taken(policy, reduction="mean", by_sample=None):
    """An accumulator that has a batch of weights 1, 2, 4, 8 with one bad row, and which of its samples count."""
    over = Accumulator(policy, reduction)
    kept = over.kept(FINE, error, by_sample)
    over.add(len(FINE), float(masked(torch.tensor([1.0, 2.0, 4.0, 8.0]), kept).sum()))
    return over, kept


def test_an_error_says_where():
    with pytest.raises(
        NonFiniteError, match=r"batch 3: 1 of 4 samples have NaN or infinity in their outputs; pass nan"
    ):
        taken("raise")


def test_all_count_where_nan_is_propagated():
    over, kept = taken("propagate")
    assert kept is None
    assert (over.samples, over.omitted, over.normaliser) == (4, 0, 15.0)


@pytest.mark.parametrize(("reduction", "whole"), [("mean", 13.0), ("sum", 1.0)])
def test_bad_samples_are_left_out_and_counted(reduction, whole):
    over, kept = taken("omit", reduction)
    assert kept.tolist() == [True, False, True, True]
    assert (over.samples, over.omitted, over.normaliser) == (3, 1, whole)


def test_a_sample_goes_with_all_of_its_rows():
    over, kept = Accumulator("omit"), None
    kept = over.kept(FINE, error, lambda fine: fine.view(2, 2).all(dim=1))
    over.add(2, 12.0)
    assert kept.tolist() == [False, True]
    assert (over.samples, over.omitted) == (1, 1)


@pytest.mark.parametrize("policy", ["raise", "propagate", "omit"])
def test_nothing_is_asked_about_a_batch_that_is_fine(policy):
    over = Accumulator(policy)
    assert over.kept(torch.ones(3, dtype=torch.bool), pytest.fail, pytest.fail) is None


def test_an_error_of_the_weights_comes_before_leaving_out():
    def weights():
        raise NonFiniteError("weights")

    with pytest.raises(NonFiniteError, match="weights"):
        Accumulator("omit").kept(FINE, weights)


def test_samples_of_several_batches_have_the_mean_as_theirs():
    over, parts = Accumulator("omit"), [torch.tensor([1.0, 2.0]), torch.tensor([6.0])]
    over.add(2, 2.0)
    over.add(1, 4.0)
    assert over.per_sample(parts).mean() == pytest.approx(9.0 / 6.0)


def test_nothing_that_counts():
    over = Accumulator("omit")
    over.kept(torch.zeros(2, dtype=torch.bool), error)
    over.add(2)
    for ask in (over.check, lambda: over.normaliser):
        with pytest.raises(NonFiniteError, match="all 2 samples have NaN or infinity"):
            ask()
    with pytest.raises(InputError, match="every one is ignored"):
        normaliser(0.0, "sum")


def test_the_loss_of_no_number_is_none_of_either_reduction():
    assert [normaliser(torch.nan, reduction) != normaliser(torch.nan, reduction) for reduction in ("mean", "sum")] == [
        True
    ] * 2


def test_values_of_all_samples_together():
    check_together("propagate", False, error)
    check_together("omit", True, error)
    for policy in ("raise", "omit"):
        with pytest.raises(NonFiniteError, match="batch 3"):
            check_together(policy, False, error)


def test_an_error_that_a_measure_has_by_itself():
    check_followed("omit", error())
    check_followed("raise", InputError("another"))
    with pytest.raises(NonFiniteError, match="batch 3"):
        check_followed("raise", error())


def test_which_samples_will_count():
    values = torch.tensor([[1.0, torch.inf, 3.0], [1.0, 2.0, torch.nan]])
    assert counting("omit", values).tolist() == [True, False, False]
    assert counting("propagate", values).all()
