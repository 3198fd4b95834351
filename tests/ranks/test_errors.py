"""Errors in calls over the ranks of a process group: all ranks end, with the error of the one that has it."""

import math
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import pyflatness as pf
from pyflatness.measures import head_sums
from pyflatness.numerics import shard
from pyflatness.numerics.process_groups import joined
from support import rank_cases, ranks
from support.rank_cases import LOSS, data, model, part

# --- what each of the ranks does --------------------------------------------------------------------------------------

nan_raised = rank_cases.nan_raised
nan_raised_at_the_head = rank_cases.nan_raised_at_the_head
nan_raised_of_every_measure = rank_cases.nan_raised_of_every_measure


def error_in_reading(rank, size):
    """An error of the user's data on rank 1, in its second batch."""

    def batches():
        yield part(rank, size)
        if rank == 1:
            raise ValueError("no such file")

    return pf.measure(model(), LOSS, batches(), measures="all" if rank > size else None)


def error_in_the_model(rank, size):
    inputs, targets = part(rank, size)
    return pf.relative_flatness(model(), LOSS, (inputs[:, : 5 - rank], targets), "0")


def error_of_all(rank, size):
    return pf.relative_flatness(model(), LOSS, part(rank, size), "none")


def left_out_of_one_rank(rank, size):
    """Every sample of rank 0 is left out."""
    inputs, targets = part(rank, size)
    return pf.relative_flatness(model(), LOSS, (inputs * (math.nan if rank == 0 else 1), targets), nan_policy="omit")


def no_samples(rank, size):
    return pf.relative_flatness(model(), LOSS, tuple(held[:0] for held in data()))


def other_options(rank, size):
    return pf.relative_flatness(model(), LOSS, part(rank, size), "0", probes=2, seed=rank)


def other_weights(rank, size):
    network = model()
    with torch.no_grad():
        network[2].bias[0] += rank
    return pf.relative_flatness(network, LOSS, part(rank, size))


def other_buffers(rank, size):
    network = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    for parameter in network.parameters():
        nn.init.constant_(parameter, 0.5)
    network[1].running_mean += rank
    return pf.relative_flatness(network, LOSS, part(rank, size))


def other_layers(rank, size):
    return pf.measure(model(), LOSS, part(rank, size), layers=["0", "2"][rank], measures="sweep")


def other_calls(rank, size):
    if rank == 0:
        return pf.relative_flatness(model(), LOSS, part(rank, size))
    return pf.measure(model(), LOSS, part(rank, size), measures="sweep")


def other_measures(rank, size):
    return pf.measure(model(), LOSS, part(rank, size), measures=["trace", "relative_flatness"][rank])


def other_losses(rank, size):
    return pf.relative_flatness(model(), nn.CrossEntropyLoss(reduction=["mean", "sum"][rank]), part(rank, size), "2")


def other_head(rank, size):
    features, targets = part(rank, size)
    return pf.head_flatness(features, torch.ones(3, 5).double() * (rank + 1), targets=targets)


def columns_of_a_head(rank, size):
    weight = distribute_tensor(torch.ones(3, 6), init_device_mesh("cpu", (size,)), [Shard(1)])
    return pf.head_flatness(torch.ones(4, 6), weight)


def rows_of_another_loss(rank, size):
    weight = distribute_tensor(torch.ones(3, 6), init_device_mesh("cpu", (size,)), [Shard(0)])
    return pf.head_flatness(torch.ones(4, 6), weight, loss="mse_loss")


def other_features(rank, size):
    weight = distribute_tensor(torch.ones(3, 6), init_device_mesh("cpu", (size,)), [Shard(0)])
    return pf.head_flatness(torch.ones(4, 6) + rank, weight)


def wrong_bias(rank, size):
    weight = distribute_tensor(torch.ones(3, 6), init_device_mesh("cpu", (size,)), [Shard(0)])
    return pf.head_flatness(torch.ones(4, 6), weight, torch.ones(2))


def objects_in_batches(rank, size):
    """Rank 1 has no samples, and the batches of rank 0 cannot be sent there."""
    batches = [(*data(), lambda: None)] if rank == 0 else []
    return pf.relative_flatness(model(), LOSS, batches, forward=lambda net, batch: (net(batch[0]), batch[1]))


def adaptive(rank, size):
    return pf.measure(model(), LOSS, part(rank, size), probes="adaptive", measures="sweep")


def refused(rank, size):
    network, own = model(between=nn.ReLU), part(rank, size)
    calls = {
        "fraction='auto'": lambda: pf.relative_flatness(network, LOSS, own, "0", fraction="auto", rtol=0.01),
        "probes='adaptive'": lambda: pf.relative_flatness(network, LOSS, own, "0", rtol=0.01),
        "verify": lambda: pf.verify(model(), LOSS, part(rank, size)),
        "generalization_bound": lambda: pf.theory.generalization_bound(model(), LOSS, part(rank, size)),
        "representativeness": lambda: pf.theory.representativeness(data()[0], torch.ones(3, 5), targets=data()[1]),
        "authors_representativeness": lambda: pf.theory.authors_representativeness(
            data()[0], torch.ones(3, 5), targets=data()[1]
        ),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except pf.errors.FlatnessError as error:
            found[name] = error
    return found


def not_a_group(rank, size):
    return pf.relative_flatness(model(), LOSS, part(rank, size), process_group="world")


def afterwards(rank, size):
    """A call after all of the others, whose errors must not have left anything behind."""
    return float(pf.relative_flatness(model(), LOSS, part(rank, size)))


def on_one_rank(rank, size):
    """Rank 0 makes a call, and rank 1 does something else, which has messages of its own."""
    store, found = dist.distributed_c10d._get_default_store(), None
    store.set_timeout(timedelta(seconds=1))
    try:
        if rank == 0:
            pf.relative_flatness(model(), LOSS, data())
    except pf.errors.RankError as error:
        found = error
    sent = torch.tensor(float(rank))
    dist.all_reduce(sent)
    store.set_timeout(timedelta(seconds=60))
    return found, float(sent)


def in_parts(rank, size):
    """Long messages, and sums that are taken in parts."""
    with joined(None) as group, mock.patch.object(shard, "_CHUNK", 6):
        said = group.exchange("a long message", "a" * 9000 * (rank + 1))
        held = {("of", "tuples"): torch.arange(10.0) * (rank + 1), "one": torch.tensor(1)}
        held = held if rank == 0 else {**held, "more": torch.ones(2, 2)}
        sums = shard.Shard(group).sum("sums", held)
    with mock.patch.object(head_sums, "_SENT", 50):
        head = rank_cases.vocabulary_of_7(rank, size)
    return [len(text) for text in said], {key: tensor.tolist() for key, tensor in sums.items()}, float(head)


def interrupted(rank, size):
    def batches():
        yield part(rank, size)
        if rank == 1:
            raise KeyboardInterrupt

    try:
        return pf.relative_flatness(model(), LOSS, batches(), "0")
    except KeyboardInterrupt:
        return "interrupted"


# --- what that comes to -----------------------------------------------------------------------------------------------

# case -> the error of each of two ranks: its class, and what its message begins with
ERRORS = {
    "nan_raised": [(pf.errors.NonFiniteError, r"rank 1: batch 0: 1 of 14 samples have NaN")] * 2,
    "nan_raised_at_the_head": [(pf.errors.NonFiniteError, r"rank 1: batch 0: 1 of 14 rows have NaN")] * 2,
    "nan_raised_of_every_measure": [(pf.errors.NonFiniteError, r"rank 1: batch 0: ")] * 2,
    "error_in_reading": [(pf.errors.RankError, "rank 1: ValueError: no such file"), (ValueError, "no such file")],
    "error_in_the_model": [
        (pf.errors.RankError, "rank 1: RuntimeError: mat1 and mat2"),
        (pf.errors.InputError, r"model: model\(inputs\) on the inputs \(14, 4\)"),
    ],
    "error_of_all": [(pf.errors.InputError, "layer: nothing is called 'none'|layer")] * 2,
    "no_samples": [(pf.errors.InputError, "data: there are no samples in it")] * 2,
    "other_options": [(pf.errors.RankError, "rank 1 has other options than rank 0")] * 2,
    "other_weights": [(pf.errors.RankError, "rank 1 has other weights than rank 0")] * 2,
    "other_buffers": [(pf.errors.RankError, "rank 1 has other buffers than rank 0 .* BatchNorm")] * 2,
    "other_calls": [
        (pf.errors.RankError, "ranks have lost each other in this call: rank 0 is at the head, .* rank 1 at the")
    ]
    * 2,
    "other_layers": [(pf.errors.RankError, "rank 1 has other layers than rank 0")] * 2,
    "other_measures": [(pf.errors.RankError, "rank 1 has other measures than rank 0")] * 2,
    "other_losses": [(pf.errors.RankError, "rank 1 has other loss than rank 0")] * 2,
    "other_head": [(pf.errors.RankError, "rank 1 has other weights than rank 0")] * 2,
    "columns_of_a_head": [(pf.errors.InputError, r"weight: a DTensor with \(Shard\(dim=1\),\) over")] * 2,
    "rows_of_another_loss": [
        (pf.errors.NotYetError, "weight: its rows can be spread over ranks .* cross-entropy alone")
    ]
    * 2,
    "other_features": [(pf.errors.RankError, "rank 1 has other features or targets than rank 0")] * 2,
    "wrong_bias": [(pf.errors.InputError, r"bias has shape \(2,\) for 3 rows of weight")] * 2,
    "objects_in_batches": [
        (pf.errors.InputError, "rank 0: data: a rank has no samples, and a batch of rank 0 cannot be sent there")
    ]
    * 2,
    "adaptive": [(pf.errors.NotYetError, r"probes='adaptive' .* 2 ranks .* pass probes=k")] * 2,
    "not_a_group": [(pf.errors.InputError, "process_group='world': a torch.distributed.ProcessGroup")] * 2,
}
OTHERS = "left_out_of_one_rank", "refused", "interrupted", "on_one_rank", "in_parts", "afterwards"


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("ranks.test_errors", [*ERRORS, *OTHERS], 2)


@pytest.mark.parametrize("name", ERRORS)
def test_every_rank_ends_with_the_error_of_the_one_that_has_it(found, name):
    for (kind, beginning), error in zip(ERRORS[name], found[name], strict=True):
        assert isinstance(error, kind), error
        assert re.match(beginning, str(error)), error


def test_samples_of_one_rank_can_all_be_left_out(found):
    for estimate in found["left_out_of_one_rank"]:
        assert (estimate.omitted, estimate.samples) == (9, 14)
        assert estimate == found["left_out_of_one_rank"][0]
    inputs, targets = rank_cases.data()
    expected = pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, (inputs[9:], targets[9:]))
    assert float(found["left_out_of_one_rank"][0]) == pytest.approx(float(expected), rel=1e-12)


def test_calls_that_need_all_data_in_one_place_say_so(found):
    for calls in found["refused"]:
        for name, error in calls.items():
            assert isinstance(error, pf.errors.NotYetError), name
            assert name in str(error)
            assert "process_group=False" in str(error)


def test_what_is_sent_may_be_larger_than_a_message(found):
    expected = {("of", "tuples"): [3.0 * k for k in range(10)], "one": 2.0, "more": [[1.0, 1.0], [1.0, 1.0]]}
    for lengths, sums, head in found["in_parts"]:
        assert lengths == [9000, 18000]
        assert sums == expected
        assert head == pytest.approx(float(rank_cases.vocabulary_of_7(0, 1)), rel=1e-12)


def test_an_interrupt_of_one_rank_ends_all(found):
    error, interrupted = found["interrupted"]
    assert isinstance(error, pf.errors.RankError)
    assert str(error).startswith("rank 1: KeyboardInterrupt")
    assert interrupted == "interrupted"


def test_a_call_on_one_rank_ends_with_a_way_out(found):
    (error, first), (nothing, second) = found["on_one_rank"]
    assert nothing is None
    assert re.search("Rank 1 did not come within .* s$", str(error)), error
    assert "process_group=False" in str(error)
    assert first == second == 1.0  # what rank 1 sent was not taken for an answer


def test_nothing_is_left_of_calls_that_failed(found):
    expected = float(pf.relative_flatness(rank_cases.model(), rank_cases.LOSS, rank_cases.data()))
    assert found["afterwards"] == pytest.approx([expected] * 2, rel=1e-12)
