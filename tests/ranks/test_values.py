"""Values over the ranks of a process group, held against one process that has all data."""

import dataclasses
import math

import pytest
import torch

import pyflatness as pf
from support import rank_cases, ranks

CASES = (
    *("head", "head_of_weighted_terms", "head_normalized", "head_from_tensors", "hidden_layer"),
    *("hidden_layer_normalized", "probes", "one_probe", "part_of_the_data", "block_traces"),
    *("every_measure", "sampled_measures", "sum_of_losses", "representation", "bounds", "adaptive_sharpness_mc"),
    *("pac_bayes", "as_large_a_part_as_it_takes"),
    *(
        "tracked",
        "feature_robustness",
        "generalization_gap",
        "cost_of_change",
        "allocate",
        "importance",
        "spectrum",
        "tokens",
        "worst_cases",
    ),
    *("landscape", "linear_interpolation"),
    *("nan_propagated", "nan_omitted"),
    *("nan_omitted_at_the_head", "nan_omitted_of_every_measure", "nan_omitted_normalized", "wrapped", "subgroup"),
    *("by_sampler", "without_the_rest", "counted_first", "callable_loss", "detached_on_some_ranks"),
    *("vocabulary_of_7", "vocabulary_of_2", "vocabulary_at_a_minimum", "vocabulary_of_weighted_terms"),
    "vocabulary_with_nan",
)
FLOAT32 = "head_of_float32", "hidden_layer_of_float32", "vocabulary_of_many"
WITH_TWO = "head", "hidden_layer_normalized", "probes", "one_probe", "every_measure", "nan_omitted", "by_sampler"
OF_TWO = "layers_of_some_ranks", "by_sampler_shuffled", "with_repeats"  # cases that are for two ranks


@pytest.fixture(scope="module")
def found():
    """By number of ranks and case, what each rank returned."""
    return {
        2: ranks.outcomes("support.rank_cases", [*WITH_TWO, *OF_TWO, "twice", "alone"], 2),
        3: ranks.outcomes("support.rank_cases", [*CASES, *FLOAT32], 3),
    }


def plain(result):
    """Return a result as nested dicts and lists of numbers and strings."""
    if isinstance(result, pf.results.Estimate | pf.results.Report):
        return plain(result.to_dict())
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if dataclasses.is_dataclass(result):
        return {entry.name: plain(getattr(result, entry.name)) for entry in dataclasses.fields(result)}
    if isinstance(result, dict):
        return {key: plain(held) for key, held in result.items()}
    return [plain(held) for held in result] if isinstance(result, list | tuple) else result


def assert_same(one, other, rtol, where=""):
    """Raise unless nested results are the same, numbers to within ``rtol`` of the larger ones of their list."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            if key not in ("notes", "backend"):  # a certificate has a residual in it, which is rounding
                of_differences = isinstance(key, str) and key.endswith("mls_adversarial")  # over √ε: of rounding / √ε
                assert_same(one[key], other[key], max(rtol, 1e-7 * of_differences), f"{where}.{key}")
    elif isinstance(one, list) and one and isinstance(one[0], float):
        scale = rtol * max(map(abs, one))
        assert one == pytest.approx(other, rel=rtol, abs=scale, nan_ok=True), where
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for place, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, rtol, f"{where}[{place}]")
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=rtol, nan_ok=True), where
    else:
        assert one == other, where


def without_refused(result):
    return (
        {
            name: without_refused(held) if name == "network_of" else held
            for name, held in result.items()
            if name not in rank_cases.REFUSED
        }
        if isinstance(result, dict)
        else result
    )


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 3) for name in (*CASES, *FLOAT32)), *((name, 2) for name in WITH_TWO)]
)
def test_ranks_have_the_value_of_one_process(found, name, size):
    every, tolerance = found[size][name], 1e-5 if name in FLOAT32 else 1e-10
    for result in every:
        if isinstance(result, Exception):
            raise result
    one, *others = map(plain, every)
    expected = plain(getattr(rank_cases, name)(0, 1))
    if "skipped" in expected or "skipped" in one:
        one.pop("skipped"), expected.pop("skipped", None)
        for other in others:
            other.pop("skipped")
    assert_same(without_refused(one), without_refused(expected), 1e-5 if name == "bounds" else tolerance)
    if name != "subgroup":
        for other in others:
            assert repr(other) == repr(one)  # bit for bit, NaN too


@pytest.mark.parametrize("name", OF_TWO)
def test_two_ranks_have_the_value_of_one_process(found, name):
    for result in found[2][name]:
        assert_same(plain(result), plain(getattr(rank_cases, name)(0, 1)), 1e-10)


def test_values_have_the_same_bits_in_every_run(found):
    first, second = map(plain, found[2]["twice"][0])
    assert repr(first) == repr(second)


def test_measures_that_are_not_there_over_ranks_are_skipped_with_a_reason(found):
    for report in found[2]["every_measure"]:
        assert report.skipped.keys() >= rank_cases.REFUSED
        assert all("process_group=False" in report.skipped[name] for name in rank_cases.REFUSED)
    assert len({str(report.skipped) for report in found[2]["every_measure"]}) == 1


def test_one_rank_measures_alone(found):
    estimate, nothing = found[2]["alone"]
    assert nothing is None
    assert estimate.samples == rank_cases.SAMPLES
    assert estimate == rank_cases.alone(0, 1)


def test_a_sampler_that_repeats_or_leaves_out_samples_is_named(found):
    (notes,) = {estimate.notes for estimate in found[2]["with_repeats"]}
    assert any("DistributedSampler repeats 1 of the 25 samples" in note for note in notes)
    (notes,) = {estimate.notes for estimate in found[3]["without_the_rest"]}
    assert any("leaves out 1 of the 25 samples" in note for note in notes)
    assert not any("DistributedSampler" in note for note in found[2]["by_sampler"][0].notes)


def test_values_of_samples_are_in_the_order_of_the_data_set(found):
    """A sampler deals samples out in turn; the whole is in order again, with the repeated ones behind it."""
    expected = pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, rank_cases.data(samples=25), "2").value
    values = found[2]["with_repeats"][0].per_sample
    assert values[25].item() == pytest.approx(values[0].item(), rel=1e-12)
    n, m = 26, 25  # each value is n times its sample's contribution to a mean over n
    assert float(values[:25].sum()) / m == pytest.approx(expected, rel=1e-10)
    assert n == found[2]["with_repeats"][0].samples
    assert not math.isnan(float(values.sum()))
