"""Models under FSDP2 over the ranks of a process group, held against one process that has all weights and data."""

import re

import pytest
import torch
from torch import nn

import pyflatness as pf
from ranks.test_values import assert_same, plain
from support import rank_cases, rank_fsdp, ranks

# Sampled columns of a callable loss are of its Hessian's eigenvectors. One eigenvalue of cross-entropy's is 0: rounding
# makes it ±1e-16, in another order of sums of the other sign, and its root, 1e-8, is in the column.
OF_ROOTS = torch.finfo(torch.float64).eps ** 0.5
TOLERANCES = {
    **dict.fromkeys(("mlp", "certified", "all_of_ggn", "head", "head_normalized", "vocabulary"), 1e-10),
    "callable_loss": OF_ROOTS,
    **dict.fromkeys(("transformer", "transformer_run_again", "convolutions", "convolutions_exactly"), 1e-10),
    **{"gathered_before": 1e-10, "mlp_of_float32": 1e-5, "transformer_of_bfloat16": 1e-2},
}
OTHERS = "left_as_found", "failing", "interrupted", "bad_data", "other_layers", "refused", "every_measure", "elsewhere"


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("support.rank_fsdp", [*TOLERANCES, *OTHERS], 2)


@pytest.mark.parametrize("name", TOLERANCES)
def test_ranks_have_the_value_of_one_process(found, name):
    for result in found[name]:
        if isinstance(result, Exception):
            raise result
    one, other = map(plain, found[name])
    assert repr(one) == repr(other)  # bit for bit
    assert_same(one, plain(getattr(rank_fsdp, name)(0, 1)), TOLERANCES[name])


def test_the_model_is_left_as_it_was_found(found):
    for before, after, trained, expected in found["left_as_found"]:
        assert before == after
        assert all(map(torch.equal, trained, expected))
    _, _, alone, _ = rank_fsdp.left_as_found(0, 1)
    assert all(map(torch.allclose, trained, alone))


def test_an_error_in_one_rank_s_forward_pass_ends_all_and_leaves_the_model_as_it_was(found):
    (first, *_), (second, *_) = found["failing"]
    assert isinstance(first, pf.errors.RankError)
    assert str(first).startswith("rank 1: ValueError: no more")
    assert isinstance(second, pf.errors.InputError)
    assert "raised ValueError: no more" in str(second)
    expected = pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, rank_cases.data(), "0", **rank_fsdp.SAMPLED)
    for _, as_found, value in found["failing"]:
        assert as_found
        assert float(value) == pytest.approx(float(expected), rel=1e-10)


def test_an_interrupt_of_one_rank_ends_all_where_errors_of_the_user_s_loss_are_passed_over(found):
    assert found["interrupted"] == ["RankError('rank 1: KeyboardInterrupt: ')", "KeyboardInterrupt()"]


def test_an_error_in_one_rank_s_data_is_one_of_all(found):
    for error in found["bad_data"]:
        assert isinstance(error, pf.errors.NonFiniteError)
        assert str(error).startswith("rank 1: batch ")
    for error in found["other_layers"]:
        assert isinstance(error, pf.errors.RankError)
        assert "other layers" in str(error)


REFUSED = {
    "second derivatives": "second derivatives, as of layer '0', .* pass curvature='ggn'",
    "lambda_max": "lambda_max cannot be had yet of a model whose parameters are spread .* full_state_dict=True",
    "mls": "mls.* cannot be had yet of a model whose parameters are spread",
    "conv='affine'": "conv='affine' cannot be had yet .* pass conv='filter'",
    "adaptive": "probes='adaptive' .* pass probes=k",
    "one rank": r"'0.weight' is spread over the processes \[0, 1\], which have to make the call together",
    "other calls": "'0.weight' is a DTensor, spread over processes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(found, name):
    for errors in found["refused"]:
        assert re.search(REFUSED[name], str(errors[name]))


def test_measures_that_are_not_there_are_skipped_with_a_reason(found):
    for report in found["every_measure"]:
        assert {"relative_flatness", "trace", "neuron_flatness", "weight_norm"} <= {*report.measures}
        assert "spread over ranks" in report.skipped["lambda_max"]


def test_weights_that_act_outside_of_their_layers_are_accounted_for_as_in_one_process(found):
    alone, _, refused = rank_fsdp.elsewhere(0, 1)
    assert "the model takes a derivative in its forward pass" in refused
    for outside, shared, forces in found["elsewhere"]:
        assert forces == refused
        assert outside.uncovered == alone.uncovered == {"head.weight": pytest.approx(18 / 66)}
        noted, expected = (report.by_measure()["trace"] for report in (outside, alone))
        assert {name: value.notes for name, value in noted.items()} == {n: v.notes for n, v in expected.items()}
        for name in ("first", "second", ""):
            assert any("not known: layers share a weight" in note for note in shared.by_measure()["trace"][name].notes)


def test_fsdp1_is_refused():
    kind = type("FullyShardedDataParallel", (nn.Sequential,), {})  # torch's own takes an accelerator to be made
    with pytest.raises(pf.errors.InputError, match=r"it is a FullyShardedDataParallel .*fully_shard"):
        pf.relative_flatness(kind(rank_cases.model()), rank_cases.LOSS, rank_cases.data())


def test_parameters_of_zero_3_are_refused():
    model = rank_cases.model()
    model[0].weight.ds_id = 0  # as DeepSpeed marks them
    with pytest.raises(pf.errors.InputError, match=r"'0.weight' is spread over processes by DeepSpeed ZeRO-3"):
        pf.relative_flatness(model, rank_cases.LOSS, rank_cases.data())
