"""The CUDA kernels of layers, on a GPU and emulated on the CPU, against the reference in float64."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyflatness import BackendError
from pyflatness.contractions import cuda, reference
from pyflatness.contractions.geometry import Geometry
from support import layer_cases as layers
from support.cuda_layers import CASES, KINDS, in_one_order, layer
from support.layer_cases import ONE

kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def precision(kind):
    """Inside the test, torch's own precision of float32 products is what the kind asks for."""
    with tf32() if kind == "tf32" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def limits(kind):
    """Of |M|², |R M|² and |w ∘ M|² and of Gram matrices; of sums over w ∘ M, relative to |w ∘ M|."""
    if kind in ("float32", "float64"):
        return (layers.limit(KINDS[kind]),) * 5
    if kind == "tf32":
        return 1e-3, 2e-3, 1e-3, 1e-3, 2e-3
    return 1e-5, 1e-3, 1e-5, 1e-5, 1e-5  # R M is made in TF32


def check_direct(kind, inputs, signal, geometry, root, weight):
    values = cuda.direct(inputs, signal, geometry, root, weight)
    expected = reference.direct(*layers.double(inputs, signal, geometry, root, weight))
    for name, value, truth, limit in zip(
        values._fields, values, expected, (*limits(kind)[:3], *[limits(kind)[4]] * 2), strict=True
    ):
        if truth is None:
            assert value is None
            continue
        assert value.dtype == torch.float64
        assert value.shape == truth.shape
        size = truth if name in ("squares", "gram_weighted", "weighted") else expected.weighted.sqrt().unsqueeze(1)
        assert float(((value - truth).abs() / size).max()) < limit, name


def check_grams(kind, inputs, signal, geometry):
    limit = limits(kind)[3]
    truth = reference.patch_gram(inputs.double(), geometry)
    values = cuda.patch_gram(inputs, geometry)
    lengths = geometry.patches(inputs.double()).square().sum(dim=3).sqrt()
    assert values.dtype == (torch.float64 if kind == "float64" else torch.float32)
    assert values.shape == truth.shape
    assert float(((values - truth).abs() / (lengths.unsqueeze(2) * lengths.unsqueeze(3))).max()) < limit
    rows = geometry.rows(signal)
    for a in (rows, rows.contiguous()):
        result = cuda.gram(a, truth.to(values.dtype))
        expected = reference.gram(a.double(), truth)
        assert result.dtype == torch.float64
        assert float(((result - expected).abs() / expected).max()) < limit


@in_one_order
@kinds
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layers(cuda_device, precision, kind, case):
    arguments = layer(case, kind, cuda_device)
    check_direct(kind, *arguments)
    check_grams(kind, *arguments[:3])


@in_one_order
@kinds
@pytest.mark.parametrize("layout", layers.LAYOUTS[1:])
@pytest.mark.parametrize("name", ["groups", "3-D", "sequence", "wide sequence"])
def test_layouts(cuda_device, precision, kind, layout, name):
    arguments = layer(CASES[name], kind, cuda_device, layout)
    check_direct(kind, *arguments)
    check_grams(kind, *arguments[:3])


@in_one_order
@kinds
@pytest.mark.parametrize("roots", [0, 1, 64, 70])
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_asked_for(cuda_device, precision, kind, roots, weighted):
    *arguments, weight = layer(CASES["late block"], kind, cuda_device, roots=roots)
    check_direct(kind, *arguments, weight if weighted else None)


@in_one_order
@kinds
@pytest.mark.parametrize(
    "name", ["late block", "groups", "downsampling", "many rows", "tile for tile", "wide sequence"]
)
def test_whole_numbers_have_no_rounding(cuda_device, precision, kind, name):
    """Every product and sum of these is exact in every kind of numbers: a misplaced element shows whatever its size."""
    values = layer(CASES[name], "float64", torch.device("cpu"), roots=70)
    whole = [t if isinstance(t, Geometry) else t.round().clamp(-1, 1) for t in values]
    half = KINDS[kind] in cuda.HALF
    dtypes = [KINDS[kind]] * 3 + [torch.float32 if half else KINDS[kind]] * 2
    arguments = [t if isinstance(t, Geometry) else t.to(d).to(cuda_device) for t, d in zip(whole, dtypes, strict=True)]
    for value, truth in zip(cuda.direct(*arguments), reference.direct(*whole), strict=True):
        assert torch.equal(value.cpu(), truth)
    inputs, signal, geometry = arguments[:3]
    gram = cuda.patch_gram(inputs, geometry)
    assert torch.equal(gram.double().cpu(), reference.patch_gram(whole[0], geometry))
    assert torch.equal(
        cuda.gram(geometry.rows(signal), gram).cpu(), reference.gram(geometry.rows(whole[1]), gram.cpu().double())
    )


@pytest.mark.parametrize(
    "name", ["late block", "depthwise", "groups", "sequence", "downsampling", "more rows than a tile"]
)
@kinds
def test_the_order_of_threads_changes_nothing(emulated_cuda, precision, kind, name):
    inputs, signal, *rest = layer(CASES[name], kind, torch.device("cpu"))
    found = []
    for order in range(3):
        emulated_cuda.set_order(order)
        with cuda.emulated(emulated_cuda):
            gram = cuda.patch_gram(inputs, rest[0])
            found.append([*cuda.direct(inputs, signal, *rest), gram, cuda.gram(rest[0].rows(signal), gram)])
    emulated_cuda.set_order(0)
    for values in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, found[0], strict=True))


@in_one_order
@kinds
@pytest.mark.parametrize("blocks", [1, 6])
def test_blocks_of_several_tiles(cuda_device, precision, monkeypatch, kind, blocks):
    monkeypatch.setattr("pyflatness.contractions.cuda_layers._multiprocessors", lambda device: 1)
    monkeypatch.setattr("pyflatness.contractions.cuda_layers._BLOCKS", blocks)
    check_direct(kind, *layer((2, 1, 64, 20, (1, 4, 4), (1, 3, 3), ONE, ONE), kind, cuda_device))
    check_direct(kind, *layer((2, 1, 64, 200, (1, 4, 4), (1, 3, 3), ONE, ONE), kind, cuda_device))


@in_one_order
@kinds
def test_large_tiles_of_places(cuda_device, precision, kind):
    """From 256 places on, tensor cores take tiles of 128: here two and a part, in 16-byte accesses and without."""
    for r, layout in ((16, "contiguous"), (13, "transposed")):
        rows = layers.layout(torch.randn(1, 1, 1, 260, r), layout)[:, :, 0].to(KINDS[kind]).to(cuda_device)
        gram = reference.patch_gram(torch.randn(1, 5, 260, 1, 1, device=cuda_device), Geometry())
        expected = reference.gram(rows.double(), gram.double())
        result = cuda.gram(rows, gram.to(torch.float64 if kind == "float64" else torch.float32))
        assert float(((result - expected).abs() / expected).max()) < limits(kind)[3]


@in_one_order
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_more_rows_than_fit_shared_memory(cuda_device, precision, kind):
    arguments = layer((1, 1, 3, 3500, (1, 3, 4), (1, 2, 2), ONE, ONE), kind, cuda_device)
    check_direct(kind, *arguments)


@in_one_order
@kinds
def test_no_samples(cuda_device, precision, kind):
    inputs, signal, geometry, root, weight = layer((0, *CASES["groups"][1:]), kind, cuda_device)
    values = cuda.direct(inputs, signal, geometry, root, weight)
    assert [len(value) for value in values] == [0] * 5
    gram = cuda.patch_gram(inputs, geometry)
    assert cuda.gram(geometry.rows(signal), gram).shape == (0,)


@in_one_order
@kinds
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sample(cuda_device, precision, kind, bad):
    for name in ("3-D", "groups"):  # by tiles, and small
        for spoiled in range(2):
            inputs, signal, geometry, root, weight = layer((3, *CASES[name][1:]), kind, cuda_device)
            clean = cuda.direct(inputs, signal, geometry, root, weight)
            grams = cuda.patch_gram(inputs, geometry)
            (inputs, signal)[spoiled][1, -1, -1, 0, 0] = bad
            for value, before in zip(cuda.direct(inputs, signal, geometry, root, weight), clean, strict=True):
                assert torch.equal(value[::2], before[::2])
                assert not value[1].isfinite().all()
            broken = cuda.patch_gram(inputs, geometry)
            torch.testing.assert_close(broken[::2], grams[::2], rtol=0, atol=0)
            assert cuda.gram(geometry.rows(signal), broken).isfinite().tolist() == [True, False, True]


sizes = st.tuples(*[st.integers(1, 5)] * 3)


@in_one_order
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 20), st.integers(1, 40), sizes,
    st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 3)] * 3), st.tuples(*[st.integers(1, 2)] * 3),
    st.sampled_from(layers.LAYOUTS), st.integers(0, 20), st.booleans(), st.sampled_from(list(KINDS)), st.integers(0, 3),
)  # fmt: skip
def test_any_layer(
    cuda_device, n, groups, channels, rows, extra, kernel, stride, dilation, layout, roots, weighted, kind, s
):
    size = tuple(e + d * (k - 1) for e, d, k in zip(extra, dilation, kernel, strict=True))
    case = (n, groups, channels, rows, size, kernel, stride, dilation)
    *arguments, weight = layer(case, kind, cuda_device, layout, roots, seed=s)
    with tf32() if kind == "tf32" else contextlib.nullcontext():
        values = cuda.direct(*arguments, weight if weighted else None)
        gram = cuda.patch_gram(arguments[0], arguments[2])
    slack = 3 if kind == "tf32" else 1  # few numbers, whose rounding does not average out
    expected = reference.direct(*layers.double(*arguments, weight))
    size = expected.squares, expected.gram_weighted, expected.weighted
    scales = [*size, *[expected.weighted.sqrt().unsqueeze(1)] * 2]
    bounds = [*limits(kind)[:3], *[limits(kind)[4]] * 2]
    for value, truth, scale, bound in zip(values, expected, scales, bounds, strict=True):
        if value is not None:
            assert float(((value - truth).abs() / scale).max()) < slack * bound
    truth = reference.patch_gram(arguments[0].double(), arguments[2])
    lengths = truth.diagonal(dim1=2, dim2=3).sqrt()
    error = (gram - truth).abs() / (lengths.unsqueeze(2) * lengths.unsqueeze(3))
    assert float(error.max()) < slack * limits(kind)[3]


@in_one_order
def test_tensors_of_the_wrong_kind_are_refused(cuda_device):
    inputs, signal, geometry, root, weight = layer(CASES["groups"], "float32", cuda_device)
    with pytest.raises(BackendError, match=r"direct: wants .* got torch\.float32 on .*, torch\.float64 on"):
        cuda.direct(inputs, signal.double(), geometry, root, weight)
    with pytest.raises(
        BackendError, match=r"direct: beside torch\.float32 .* wants torch\.float32, got torch\.float64"
    ):
        cuda.direct(inputs, signal, geometry, root.double(), weight)
    with pytest.raises(
        BackendError, match=r"gram: beside torch\.bfloat16 .* wants torch\.float32, got torch\.bfloat16"
    ):
        cuda.gram(geometry.rows(signal).bfloat16(), cuda.patch_gram(inputs, geometry).bfloat16())
    with pytest.raises(BackendError, match=r"patch_gram: wants .* got torch\.int64"):
        cuda.patch_gram(inputs.long(), geometry)
    with pytest.raises(BackendError, match="inputs of 2 samples, cotangents of 1"):
        cuda.direct(inputs, signal[:1], geometry, root, weight)


def test_without_a_device(monkeypatch):
    monkeypatch.setattr("pyflatness.contractions.cuda_device._MISSING", "there is no module")
    with pytest.raises(BackendError, match="there is no module"):
        cuda.patch_gram(torch.ones(1, 1, 1, 2, 2), Geometry())
