"""The CUDA kernels among streams, devices and graphs; these need a GPU, some of them two."""

import pytest
import torch

import pyflatness as pf
from pyflatness.contractions import SoftmaxVariance
from pyflatness.contractions.backends import cuda

HEADS = {
    "fused": (300, 10, 84, torch.float32, "fused"),
    "pairs": (300, 100, 64, torch.float32, "pairs"),
    "rows": (300, 2000, 64, torch.float32, "rows"),
    "rows, bfloat16": (300, 2000, 64, torch.bfloat16, "rows"),
}


@pytest.fixture(autouse=True)
def _needs_a_gpu():
    reason = cuda.unavailable(torch.device("cuda"), torch.float32) if torch.cuda.is_available() else "no CUDA GPU"
    if reason:
        pytest.skip(reason)


def head(name, device="cuda"):
    n, d, m, dtype, route = HEADS[name]
    features, weight, bias = torch.randn(n, m), torch.randn(d, m) / m**0.5, torch.randn(d)
    features, weight, bias = (t.to(device, dtype) for t in (features, weight, bias))
    return features, SoftmaxVariance(weight, bias, cuda, rows=n, route=route, memory=2**22)


@pytest.mark.parametrize("name", HEADS)
def test_side_stream(name):
    """Work is on the current stream: features that this stream writes late are read late."""
    features, variance = head(name)
    expected, waiting = variance(features), torch.zeros_like(features)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        waiting.copy_(features)
        found = variance(waiting)
    torch.cuda.current_stream().wait_stream(stream)
    assert found.equal(expected)


@pytest.mark.parametrize("name", HEADS)
def test_graph(name):
    """Captured without a wait for the host, replayed on other features."""
    features, variance = head(name)
    others = torch.randn_like(features)
    expected = variance(features), variance(others)
    given = features.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        variance(given)  # libraries make their workspaces before
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = variance(given)
    for values, right in zip((features, others), expected, strict=True):
        given.copy_(values)
        graph.replay()
        assert found.equal(right)


@pytest.mark.parametrize("name", HEADS)
def test_the_same_bits_again(name):
    features, variance = head(name)
    first = variance(features)
    assert all(variance(features).equal(first) for _ in range(5))


@pytest.mark.parametrize("name", HEADS)
def test_a_device_that_is_not_the_current_one(name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    features, variance = head(name, "cuda:1")
    with torch.cuda.device(0):
        found = variance(features)
    assert found.device == torch.device("cuda:1")
    with torch.cuda.device(1):
        assert found.equal(variance(features))


@pytest.mark.parametrize("rtol", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_public_call(dtype, rtol):
    features, weight = torch.randn(500, 64), torch.randn(3000, 64) / 8
    found = pf.head_flatness(features.to("cuda", dtype), weight.to("cuda", dtype), backend="compiled", rtol=rtol)
    expected = pf.head_flatness(features.to(dtype), weight.to(dtype))
    assert found.value == pytest.approx(expected.value, rel=2e-3 if dtype == torch.bfloat16 else 1e-5)
    assert (found.backend, found.exact, found.max_error) == ("compiled", True, None)  # rtol asks for nothing here


def test_extra_memory_of_a_language_models_head():
    """At most 512 MiB on top of features and weight; the logits would be 2 GiB."""
    n, d, m = 8192, 128_256, 1024
    features, weight = (torch.randn(rows, m, device="cuda", dtype=torch.bfloat16) / 32 for rows in (n, d))
    for rtol in (0.0, 1e-3):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pf.head_flatness(features, weight, backend="compiled", rtol=rtol)
        assert torch.cuda.max_memory_allocated() - before <= 512 * 2**20
