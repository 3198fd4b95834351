"""The CUDA kernels of layers, on a GPU and emulated on the CPU, against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyflatness.contractions.backends import cuda, reference
from pyflatness.contractions.geometry import Geometry
from pyflatness.errors import BackendError
from support import layer_cases as layers
from support.combinations import every
from support.cuda_layers import CASES, in_one_order, layer, moved
from support.layer_cases import of_kernels

WIDE = {"float32": torch.float32, "float64": torch.float64}


def check_products(gradients, geometry, root, weight):
    values = cuda.products(gradients, geometry, root, weight)
    expected = reference.products(*layers.double(gradients, geometry, root, weight))
    layers.check_values(values, expected, gradients.dtype)


def matrices(case, dtype, device, n=3):
    """M and the rest of ``products`` for a layer."""
    _, _, geometry, root, weight = layer(case, "float64", device)
    gradients = torch.randn(n, *weight.shape, dtype=torch.float64).to(device)
    return [t if isinstance(t, Geometry) else t.to(dtype) for t in (gradients, geometry, root, weight)]


@every(
    kind=["float32", "float64", "bfloat16", "float16"],
    layout=layers.LAYOUTS,
    case=CASES,
    cuda_device=["cuda", "emulated"],
)
def test_patches(cuda_device, kind, layout, case):
    inputs, _, geometry, *_ = layer(case, kind, cuda_device, layout)
    assert torch.equal(cuda.patches(inputs, geometry), geometry.patches(inputs))


sizes = st.tuples(*[st.integers(1, 5)] * 3)


@in_one_order
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), sizes, st.tuples(*[st.integers(1, 3)] * 3),
    st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 2)] * 3), st.sampled_from(layers.LAYOUTS),
    st.sampled_from(["float32", "float64", "bfloat16"]),
)  # fmt: skip
def test_patches_of_any_layer(cuda_device, n, groups, channels, extra, kernel, stride, dilation, layout, kind):
    size = tuple(e + d * (k - 1) for e, d, k in zip(extra, dilation, kernel, strict=True))
    inputs, _, geometry, *_ = layer((n, groups, channels, 1, size, kernel, stride, dilation), kind, cuda_device, layout)
    assert torch.equal(cuda.patches(inputs, geometry), geometry.patches(inputs))


@in_one_order
def test_patches_of_expanded_inputs(cuda_device):
    geometry = Geometry(1, (1, 3, 3))
    for shape in ((2, 1, 1, 9, 9), (1, 6, 1, 1, 1), (2, 6, 1, 9, 1)):
        inputs = torch.randn(shape).to(cuda_device).expand(2, 6, 1, 9, 9)
        assert torch.equal(cuda.patches(inputs, geometry), geometry.patches(inputs))


@in_one_order
def test_patches_that_begin_anywhere(cuda_device):
    """Neither inputs nor their rows begin at a multiple of an access's size."""
    whole = moved(torch.randn(2, 3, 1, 11, 13), cuda_device)
    for kernel, stride in (((1, 2, 2), (1, 1, 1)), ((1, 3, 2), (1, 2, 3))):
        for start in range(4):
            inputs, geometry = whole[:, 1:, :, start:, start:], Geometry(1, kernel, stride)
            assert torch.equal(cuda.patches(inputs, geometry), geometry.patches(inputs))


@pytest.mark.parametrize("dtype", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@in_one_order
def test_products(cuda_device, dtype, case):
    check_products(*matrices(case, dtype, cuda_device))


@pytest.mark.parametrize("dtype", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("size", [(1, 255), (1, 256), (9, 257), (8, 512), (70, 1030), (17, 1)])
@in_one_order
def test_products_of_any_size(cuda_device, dtype, size):
    """Around the columns of a block, and the rows of its warps."""
    d, m = size
    for groups in (1, 3):
        arguments = matrices((1, groups, m, d, *[(1, 1, 1)] * 4), dtype, cuda_device)
        check_products(*arguments)
        check_products(*arguments[:2], None, arguments[3])
        check_products(*arguments[:3], None)


@in_one_order
def test_products_of_whole_numbers_have_no_rounding(cuda_device):
    gradients, geometry, root, weight = matrices(CASES["groups"], torch.float64, torch.device("cpu"))
    whole = [t.round().clamp(-1, 1) for t in (gradients, root, weight)]
    expected = reference.products(whole[0], geometry, *whole[1:])
    for dtype in WIDE.values():
        made, *others = (t.to(cuda_device, dtype) for t in whole)
        for value, truth in zip(of_kernels(cuda.products(made, geometry, *others)), of_kernels(expected), strict=True):
            assert torch.equal(value.cpu(), truth)


@pytest.mark.parametrize("name", ["late block", "depthwise", "groups", "sequence"])
def test_the_order_of_threads_changes_nothing(emulated_cuda, name):
    arguments, found = matrices(CASES[name], torch.float32, torch.device("cpu")), []
    inputs, _, geometry, *_ = layer(CASES[name], "float32", torch.device("cpu"))
    for order in range(3):
        emulated_cuda.set_order(order)
        with cuda.emulated(emulated_cuda):
            found.append([*of_kernels(cuda.products(*arguments)), cuda.patches(inputs, geometry)])
    emulated_cuda.set_order(0)
    for values in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, found[0], strict=True))


@in_one_order
def test_no_samples(cuda_device):
    inputs, _, geometry, *_ = layer((0, *CASES["groups"][1:]), "float32", cuda_device)
    assert cuda.patches(inputs, geometry).shape[0] == 0
    arguments = matrices(CASES["groups"], torch.float32, cuda_device, n=0)
    assert [len(value) for value in of_kernels(cuda.products(*arguments))] == [0] * 5


@in_one_order
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(cuda_device, bad):
    gradients, *rest = matrices(CASES["groups"], torch.float32, cuda_device)
    clean = cuda.products(gradients, *rest)
    gradients[1, -1, -1, 0] = bad
    for value, before in zip(of_kernels(cuda.products(gradients, *rest)), of_kernels(clean), strict=True):
        assert torch.equal(value[::2], before[::2])
        assert not value[1].isfinite().all()


@in_one_order
def test_tensors_of_the_wrong_kind_are_refused(cuda_device):
    gradients, geometry, root, weight = matrices(CASES["groups"], torch.float32, cuda_device)
    with pytest.raises(BackendError, match=r"products: wants .* got torch\.float32 on .*, torch\.float64 on"):
        cuda.products(gradients, geometry, root, weight.double())
    inputs, _, geometry, *_ = layer(CASES["groups"], "float32", cuda_device)
    with pytest.raises(BackendError, match=r"patches: wants .* got torch\.int64"):
        cuda.patches(inputs.long(), geometry)


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(cuda, "missing", "there is no module")
    with pytest.raises(BackendError, match="there is no module"):
        cuda.patches(torch.ones(1, 1, 1, 2, 2), Geometry(1, (1, 1, 2)))
