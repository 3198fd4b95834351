"""The user's default device and dtype are for the user's tensors: values and draws do not depend on them."""

import ast
import contextlib
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.numerics import choice_problem
from support import doors
from support.combinations import in_soak
from support.doors import LOSS, ON_MODELS, ON_TENSORS, X, Y
from support.grid import Net


@contextlib.contextmanager
def default(device, dtype):
    before = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


DEFAULTS = [[("meta", torch.bfloat16), ("cpu", torch.float64)], [("meta", torch.float32), ("cpu", torch.float16)]]


@pytest.fixture(params=[DEFAULTS[0], *in_soak(DEFAULTS[1])], ids=["double", "half"])
def same(request):
    """A function that holds the result of a call under some defaults against that without."""

    def check(call):
        expected = numbers(call())
        for device, dtype in request.param:
            with default(device, dtype):
                found = numbers(call())
            assert found == expected, (device, dtype)

    return check


def numbers(result):
    """All that a result holds, in the order of its fields, as text of full precision."""
    if isinstance(result, torch.Tensor):
        return [str(result.dtype), str(result.device), result.tolist()]
    if isinstance(result, nn.Module):
        return [numbers(p) for p in result.parameters()]
    if isinstance(result, pf.results.Report):
        return {key: numbers(estimate) for key, estimate in result._estimates.items()}
    if hasattr(result, "__dataclass_fields__"):
        return [numbers(getattr(result, name)) for name in result.__dataclass_fields__]
    if isinstance(result, dict):
        return {key: numbers(part) for key, part in result.items()}
    if isinstance(result, (tuple, list)):
        return [numbers(part) for part in result]
    if isinstance(result, types.FunctionType):
        return result.__qualname__
    if isinstance(result, choice_problem.ChoiceProblem):
        return numbers(vars(result))
    return result.tolist() if isinstance(result, np.ndarray) else repr(result)


@pytest.mark.parametrize("name", ON_MODELS)
def test_calls_on_models(name, same):
    model = doors.net()
    same(lambda: ON_MODELS[name](model, LOSS, (X, Y)))


@pytest.mark.parametrize("name", ON_TENSORS)
def test_calls_on_tensors(name, same):
    tensors = doors.head()
    same(lambda: ON_TENSORS[name](*tensors))


def test_truncated_normal_noise(same):
    same(lambda: pf.theory.truncated_normal_noise(X, 0.1, probes=3))


def smooth():
    """A convolution, attention-free but curved layers, and a head on every position."""

    def forward(net, x):
        return net.head(torch.tanh(net.hidden(torch.tanh(net.conv(x)).transpose(1, 2)))).transpose(1, 2)

    return Net(forward, conv=nn.Conv1d(2, 4, 2, groups=2), hidden=nn.Linear(4, 5), head=nn.Linear(5, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"measures": "all"},
        {"probes": 3},
        {"probes": "adaptive", "curvature": "ggn"},
        {"normalize": "std", "per_sample": True},
        {"conv": "affine", "memory": 1},
        {"curvature": "ggn", "backend": "reference"},
        {"nan_policy": "omit"},
    ],
    ids=str,
)
def test_all_measures_of_a_curved_network(options, same):
    model, x, y = smooth().eval(), torch.randn(6, 2, 4), torch.randint(3, (6, 3))
    same(lambda: pf.measure(model, LOSS, (x, y), **{"measures": "sweep", **options}))


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.BCEWithLogitsLoss(), nn.HuberLoss(), lambda f, y: (f - y).cos().mean()]
)
def test_losses(loss, same):
    model, targets = doors.net(), torch.rand(len(X), doors.C)
    for layer in "02":
        same(lambda layer=layer: pf.relative_flatness(model, loss, (X, targets), layer))


_MAKE = {
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "as_tensor",
    "arange",
    "linspace",
    "eye",
    "randn",
    "rand",
    "randint",
}
_MAKE |= {"randperm", "scalar_tensor", "tril_indices", "triu_indices", "logspace", "normal"}
_WHOLE = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}  # of whole numbers unless they say otherwise


def test_every_tensor_that_is_made_says_where_and_of_what():
    """Each call of a torch function that makes a tensor names its device, and its dtype where a default would count."""
    root = Path(pf.__file__).parent
    missing = []
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] == "cli":  # programs, which have no user's defaults
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            made = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if made not in _MAKE or not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
                continue
            said = {keyword.arg for keyword in node.keywords}
            lacks = {"device", "dtype"} - said - ({"dtype"} if made in _WHOLE else set())
            if lacks:
                missing.append(f"{path.relative_to(root)}:{node.lineno} torch.{made} lacks {', '.join(sorted(lacks))}")
    assert not missing, "\n".join(missing)


def test_the_largest_of_values_that_agree_to_nine_digits():
    """Both layers have the same trace, and weights of one shape, so that the second's |w|² Tr(H) is 2e-9 larger."""
    model = Net(lambda net, x: net.one(x) + net.other(x), one=nn.Linear(4, 3), other=nn.Linear(4, 3)).double()
    with torch.no_grad():
        model.other.weight.copy_(model.one.weight * (1 + 1e-9))
    report = pf.measure(model, LOSS, (X.double(), Y), measures=["scaled_trace", "largest_scaled_trace"])
    assert report["other", "scaled_trace"].value > report["one", "scaled_trace"].value
    assert report["largest_scaled_trace"].value == report["other", "scaled_trace"].value
