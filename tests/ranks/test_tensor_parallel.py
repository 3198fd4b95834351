"""Tensor-parallel models over the ranks of a process group, held against one process that has the whole model."""

import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import pyflatness as pf
from ranks.test_values import assert_same, plain
from support import ranks
from support.rank_cases import LOSS, data
from support.rank_fsdp import SAMPLED

# --- what each of the ranks does --------------------------------------------------------------------------------------

WHOLE_HEAD = ColwiseParallel(output_layouts=Replicate())


class Positions(nn.Module):
    """A head at the end of a sequence, whose layers have several positions of a sample."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.stack([x, x.flip(1), x.square()], dim=1)
        return self.head(self.down(self.up(x).relu()).relu().mean(1))


def parallel(size, classes=3, head=WHOLE_HEAD, make=None):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, classes))
    model = (make() if make else model).double().eval()
    if size == 1:
        return model
    names = ("up", "down", "head") if make else ("0", "2", "4")
    plan = dict(zip(names, (ColwiseParallel(), RowwiseParallel(), head), strict=True))
    return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)


def sampled(rank, size):
    layers = ["0", "2"]
    measures = ["relative_flatness", "trace", "scaled_trace", "relative_flatness_std", "weight_norm"]
    return pf.measure(parallel(size), LOSS, data(), layers=layers, measures=measures, per_sample=True, **SAMPLED)


def exactly(rank, size):
    measures = ["trace", "neuron_flatness", "normalized_sharpness", "largest_scaled_trace"]
    return pf.measure(parallel(size), LOSS, data(), measures=measures)


def positions(rank, size):
    model = parallel(size, make=Positions)
    return pf.measure(model, LOSS, data(), layers=["up", "down"], measures=["relative_flatness", "trace"], **SAMPLED)


def head(rank, size):
    return pf.relative_flatness(parallel(size), LOSS, data(), per_sample=True)


def head_normalized(rank, size):
    return pf.relative_flatness(parallel(size), LOSS, data(), normalize="std")


def head_of_squared_error(rank, size):
    inputs, classes = data()
    targets = nn.functional.one_hot(classes, 3).double()
    return pf.relative_flatness(parallel(size), nn.MSELoss(), (inputs, targets))


def vocabulary(rank, size):
    inputs, _ = data()
    return pf.relative_flatness(parallel(size, 50_257), LOSS, (inputs, torch.arange(len(inputs)) * 2000))


def vocabulary_in_parts(rank, size):
    """Measure the head without a weight that is gathered."""
    with mock.patch("pyflatness.model.spread.Part.whole", side_effect=AssertionError("a weight is gathered")):
        return vocabulary(rank, size)


def refused(rank, size):
    """Return by call the errors of what cannot be had of such a model."""
    model, found = parallel(size), {}
    inputs, targets = data()
    calls = {
        "other data": lambda: pf.relative_flatness(model, LOSS, (inputs + rank, targets)),
        "parts of logits": lambda: pf.relative_flatness(parallel(size, 4, ColwiseParallel()), LOSS, data()),
        "lambda_max": lambda: pf.measure(model, LOSS, data(), measures=["lambda_max"]),
        "one rank": lambda: pf.relative_flatness(model, LOSS, data(), process_group=False),
    }
    for name, call in calls.items():
        try:
            call()
        except pf.errors.FlatnessError as error:
            found[name] = error
    return found, [(type(p).__name__, p.requires_grad, p.grad is None) for p in model.parameters()]


# --- what that comes to -----------------------------------------------------------------------------------------------

CASES = "sampled", "exactly", "positions", "head", "head_normalized", "head_of_squared_error", "vocabulary_in_parts"
REFUSED = {
    "other data": (pf.errors.RankError, "rank 1 has other samples than rank 0"),
    "parts of logits": (pf.errors.RankError, "rank 1 has other outputs than rank 0"),
    "lambda_max": (
        pf.errors.NotYetError,
        "lambda_max cannot be had yet of a model whose parameters are spread over ranks",
    ),
    "one rank": (pf.errors.InputError, r"spread over the processes \[0, 1\], .* each with the same data"),
}


@pytest.fixture(scope="module")
def found():
    return ranks.outcomes("ranks.test_tensor_parallel", [*CASES, "refused"], 2)


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_the_value_of_one_process(found, name):
    for result in found[name]:
        if isinstance(result, Exception):
            raise result
    one, other = map(plain, found[name])
    assert repr(one) == repr(other)  # bit for bit
    assert_same(one, plain(globals()[name](0, 1)), 1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(found, name):
    kind, message = REFUSED[name]
    for errors, _ in found["refused"]:
        assert isinstance(errors[name], kind)
        assert re.search(message, str(errors[name]))


def test_the_model_is_left_as_it_was_found(found):
    for _, parameters in found["refused"]:
        assert parameters == [("DTensor", True, True)] * 6
