"""Every public call of a model or a head's tensors on a GPU: the CPU's values, and nothing of the user's is changed."""

import copy

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import doors, traces, unchanged
from support.on_cuda import assert_close, moved, on_a_gpu, random_states

pytestmark = on_a_gpu
X, Y = doors.X.double(), doors.Y
VALUES = torch.linspace(-1, 1, doors.N * doors.C, dtype=torch.float64).view(doors.N, doors.C)
OTHERS = {  # of what the grid has not: losses, models or records of their own
    "interpolation_error": lambda model, loss, data: pf.theory.interpolation_error(
        model, (data[0], VALUES.to(data[0].device)), adaptive=True, second_derivatives=True
    ),
    "invariances": lambda model, loss, data: pf.invariances(model, loss, data, measures=["trace", "relative_flatness"]),
    "track": lambda *given: pf.track(*given, measures=["relative_flatness", "trace"]).record().reports,
    "measure, all": lambda *given: pf.measure(*given, measures="all"),
}
CALLS = {**doors.ON_MODELS, **OTHERS}
SAMPLED = {  # from a generator of the model's device
    *("pac_bayes", "mls_adversarial", "adaptive_sharpness_mc", "generalization_bound", "measure, all"),
    *("representativeness", "label_constancy"),
    "largest_robustness",  # its starts are relative to factors of the weight, whose signs are the library's
}


NETWORK, HEAD = doors.net().double(), doors.head()  # made where no test has set another default device
APPROXIMATE = {
    "spectrum": 1e-5,
    "largest_robustness": 1e-5,
}  # what is iterated, to within a tolerance or for some steps


def network():
    return copy.deepcopy(NETWORK)


@pytest.fixture(params=["as it is", "another stream", "default device"])
def around(request, cuda_device):
    """Return a function that puts data on the GPU, within what a user's program may have set.

    On another stream the data are there late, so that work on the default stream would read zeros.
    """
    if request.param == "default device":
        before = torch.get_default_device()
        torch.set_default_device(cuda_device)
        yield lambda data: moved(data, cuda_device)
        torch.set_default_device(before)
    elif request.param == "another stream" and cuda_device.type == "cuda":

        def late(data):
            held = [torch.zeros_like(part, device=cuda_device) for part in data]
            there = moved(data, cuda_device)
            stream = torch.cuda.current_stream()
            stream.synchronize()
            torch.cuda._sleep(20_000_000)
            return tuple(part.copy_(right) for part, right in zip(held, there, strict=True))

        with torch.cuda.stream(torch.cuda.Stream()):
            yield late
    else:
        yield lambda data: moved(data, cuda_device)


def agrees(name, found, expected, again):
    """Numbers that are drawn on the GPU come again, and all else is the CPU's."""
    if name in SAMPLED:
        assert_close(again(), found, rel=1e-12)
    else:
        rel = APPROXIMATE.get(name, 1e-8)
        assert_close(found, expected(), rel, most=rel / 100)


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_models(cuda_device, around, name):
    model, data = network().to(cuda_device), around((X, Y))
    before = unchanged.snapshot(model), traces.of_process(), traces.of_thread()
    states = random_states()
    found = CALLS[name](model, doors.LOSS, data)
    unchanged.assert_unchanged(model, before[0])
    assert (traces.of_process(), traces.of_thread()) == before[1:]
    assert all(map(torch.equal, random_states(), states))
    if name == "verify":  # its numbers are errors
        assert found
        return
    with torch.device("cpu"):
        agrees(
            name, found,
            lambda: CALLS[name](network(), doors.LOSS, (X, Y)),
            lambda: CALLS[name](model, doors.LOSS, data),
        )  # fmt: skip


@pytest.mark.parametrize("name", doors.ON_TENSORS)
def test_calls_of_tensors(cuda_device, around, name):
    given = [tensor.double() if tensor.is_floating_point() else tensor for tensor in HEAD]
    there, states = around(tuple(given)), random_states()
    found = doors.ON_TENSORS[name](*there)
    assert all(map(torch.equal, random_states(), states))
    with torch.device("cpu"):
        agrees(name, found, lambda: doors.ON_TENSORS[name](*given), lambda: doors.ON_TENSORS[name](*there))


def test_calls_of_features(cuda_device):
    states = random_states()
    assert_close(pf.theory.density_constants(X.to(cuda_device), 1.0), pf.theory.density_constants(X, 1.0), rel=1e-10)
    noise = pf.theory.truncated_normal_noise(X.to(cuda_device), 0.1, probes=3)
    assert noise.device.type == cuda_device.type
    assert torch.equal(noise, pf.theory.truncated_normal_noise(X.to(cuda_device), 0.1, probes=3))
    assert all(map(torch.equal, random_states(), states))


@pytest.mark.parametrize("name", ["relative_flatness", "measure", "spectrum", "worst_case_sharpness", "landscape"])
def test_an_error_in_the_data_leaves_no_trace(cuda_device, name):
    def batches():
        yield moved((X[:5], Y[:5]), cuda_device)
        raise KeyError("the data end here")

    class Once:
        def __iter__(self):
            return batches()

        def __len__(self):
            return 2

    model = network().to(cuda_device)
    before, states = unchanged.snapshot(model), random_states()
    with pytest.raises(KeyError, match="the data end here"):
        CALLS[name](model, doors.LOSS, Once())
    unchanged.assert_unchanged(model, before)
    assert all(map(torch.equal, random_states(), states))


def test_a_model_that_is_wrapped_or_compiled(cuda_device):
    model, data = network().to(cuda_device), moved((X, Y), cuda_device)
    expected = float(pf.relative_flatness(model, doors.LOSS, data))
    assert float(pf.relative_flatness(nn.DataParallel(model), doors.LOSS, data)) == expected
    assert float(pf.relative_flatness(torch.compile(model, backend="eager"), doors.LOSS, data)) == expected
