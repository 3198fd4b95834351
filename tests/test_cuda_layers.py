"""The CUDA kernels of layers, on a GPU and emulated on the CPU, against the reference in float64."""

import contextlib

import pytest
import test_layer_kernels as layers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bindings import changed
from test_layer_kernels import ONE

import pyflatness as pf
from pyflatness import BackendError
from pyflatness.contractions import WeightGradients, backends, cuda, reference
from pyflatness.contractions.geometry import Geometry

KINDS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Emulated, a thread costs a microsecond at every barrier.
SMALLER = {
    "first convolution": (1, 1, 3, 6, (1, 16, 16), (1, 5, 5), ONE, ONE),
    "second convolution": (1, 1, 6, 16, (1, 14, 14), (1, 5, 5), ONE, ONE),
    "residual block": (1, 1, 64, 64, (1, 12, 12), (1, 3, 3), ONE, ONE),
    "depthwise": (2, 5, 1, 1, (1, 9, 9), (1, 3, 3), ONE, ONE),
    "depth multiplier": (2, 4, 1, 3, (1, 9, 9), (1, 3, 3), (1, 2, 2), ONE),
}
CASES = {
    **layers.CASES,
    **SMALLER,
    "more rows than a tile": (2, 1, 20, 200, (1, 7, 6), (1, 3, 3), ONE, ONE),
    "tile for tile": (1, 1, 64, 128, (1, 8, 8), ONE, ONE, ONE),
    "wide sequence": (1, 2, 48, 64, (40, 1, 1), ONE, ONE, ONE),
}

in_one_order = pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)
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


@pytest.fixture
def module(_emulated_cuda):
    if isinstance(_emulated_cuda, str):
        pytest.skip(_emulated_cuda)
    return _emulated_cuda


def moved(tensor, device):
    """The tensor on a device, with the strides that it has."""
    if device.type == "cpu":
        return tensor
    whole = tensor.new_empty(0).set_(tensor.untyped_storage())
    return whole.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def layer(case, kind, device, layout="contiguous", roots=9, seed=0):
    """Arguments of ``direct``; the root and the weight of half precision as float32."""
    inputs, signal, geometry, *others = layers.layer(case, KINDS[kind], layout, roots, seed)
    if kind in ("bfloat16", "float16"):
        others = [None if t is None else t.float() for t in others]
    inputs, signal, *others = (None if t is None else moved(t, device) for t in (inputs, signal, *others))
    return inputs, signal, geometry, *others


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
        size = truth if name in ("squares", "rooted", "weighted") else expected.weighted.sqrt().unsqueeze(1)
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
def test_the_order_of_threads_changes_nothing(module, precision, kind, name):
    inputs, signal, *rest = layer(CASES[name], kind, torch.device("cpu"))
    found = []
    for order in range(3):
        module.set_order(order)
        with cuda.emulated(module):
            gram = cuda.patch_gram(inputs, rest[0])
            found.append([*cuda.direct(inputs, signal, *rest), gram, cuda.gram(rest[0].rows(signal), gram)])
    module.set_order(0)
    for values in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(values, found[0], strict=True))


@in_one_order
@kinds
@pytest.mark.parametrize("blocks", [1, 6])
def test_blocks_of_several_tiles(cuda_device, precision, monkeypatch, kind, blocks):
    monkeypatch.setattr(cuda, "_multiprocessors", lambda device: 1)
    monkeypatch.setattr(cuda, "_BLOCKS", blocks)
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
    size = expected.squares, expected.rooted, expected.weighted
    scales = [*size, *[expected.weighted.sqrt().unsqueeze(1)] * 2]
    bounds = [*limits(kind)[:3], *[limits(kind)[4]] * 2]
    for value, truth, scale, bound in zip(values, expected, scales, bounds, strict=True):
        if value is not None:
            assert float(((value - truth).abs() / scale).max()) < slack * bound
    truth = reference.patch_gram(arguments[0].double(), arguments[2])
    lengths = truth.diagonal(dim1=2, dim2=3).sqrt()
    error = (gram - truth).abs() / (lengths.unsqueeze(2) * lengths.unsqueeze(3))
    assert float(error.max()) < slack * limits(kind)[3]


FORMS = {
    "convolution": ((2, 1, 20, 70, (1, 6, 6), (1, 3, 3), ONE, ONE), "direct"),
    "convolution by its Gram matrix": ((2, 1, 20, 70, (1, 6, 6), (1, 3, 3), ONE, ONE), "gram"),
    "groups": ((2, 2, 4, 6, (1, 6, 6), (1, 3, 3), ONE, ONE), "direct"),
    "groups by their Gram matrices": ((2, 2, 4, 6, (1, 6, 6), (1, 3, 3), ONE, ONE), "gram"),
    "sequence": ((2, 1, 80, 72, (9, 1, 1), ONE, ONE, ONE), "gram"),
    "sequence by M": ((2, 1, 80, 72, (9, 1, 1), ONE, ONE, ONE), "direct"),
    "one position": ((4, 1, 30, 20, ONE, ONE, ONE, ONE), "gram"),
    "one position by M": ((4, 1, 30, 20, ONE, ONE, ONE, ONE), "direct"),
}
QUANTITIES = {
    "rooted": ("rooted",),
    "both": ("squares", "rooted"),
    "all": ("squares", "rooted", "weighted", "by_column", "by_row", "diagonal"),
}


@in_one_order
@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("quantities", QUANTITIES.values(), ids=QUANTITIES)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_routes(cuda_device, kind, quantities, form):
    case, route = form
    inputs, signal, geometry, _, weight = layer(case, kind, cuda_device)
    if geometry.taps == 1:  # a linear layer's rows, as they lie in memory
        inputs, signal = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (inputs, signal))
    weight = weight.to(KINDS[kind])
    sign = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64, device=cuda_device)[: len(inputs)]
    ours = WeightGradients(weight, geometry, cuda, quantities, memory=1 << 20, route=route)
    truth = WeightGradients(weight.double(), geometry, reference, quantities, memory=1 << 20, route="direct")
    found = ours.of([inputs], 9)([signal], sign)
    expected = truth.of([inputs.double()], 9)([signal.double()], sign)
    limit = {"float32": 1e-5, "float64": 1e-12}.get(kind, 2e-3)
    assert float(((found.values - expected.values) / expected.values).abs().max()) < limit
    assert found.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert float((found.parts[name] - part).abs().max() / part.abs().max()) < limit
    pairs = [
        g.traces([x], [d], sign) for g, x, d in ((ours, inputs, signal), (truth, inputs.double(), signal.double()))
    ]
    assert float((pairs[0] - pairs[1]).abs().max() / pairs[1].abs().max()) < limit


@in_one_order
@pytest.mark.parametrize("columns", [200, 300])
@pytest.mark.parametrize("places", [1, 3])
def test_wide_layers_in_bfloat16(cuda_device, columns, places):
    """R δ is a product of bfloat16: one row of the signal alone, where R's own rounding would show most."""
    _, _, geometry, _, weight = layer((1, 1, columns, 260, ONE, ONE, ONE, ONE), "bfloat16", cuda_device)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(8, places, columns, generator=generator).bfloat16().to(cuda_device)
    signal = torch.randn(8, places, 260, generator=generator).bfloat16().to(cuda_device)
    for alone in (False, True):
        if alone:
            signal[:, :, 1:] = 0
        phi, delta = (t.transpose(1, 2)[..., None, None] for t in (inputs, signal))
        found, expected = (
            WeightGradients(w, geometry, backend, ("rooted",), memory=1 << 24, route=route).of([x], 1)([d]).values
            for w, x, d, backend, route in (
                (weight.bfloat16(), phi, delta, cuda, "gram"),
                (weight.bfloat16().double(), phi.double(), delta.double(), reference, "direct"),
            )
        )
        assert float(((found - expected) / expected).abs().max()) < 1e-3


@in_one_order
def test_inputs_and_signals_of_two_dtypes(cuda_device):
    """As autocast leaves them."""
    inputs, signal, geometry, _, weight = layer(CASES["groups"], "float32", cuda_device)
    truth = WeightGradients(weight.double(), geometry, reference, ("rooted",), memory=1 << 20, route="direct")
    for route in ("direct", "gram"):
        ours = WeightGradients(weight, geometry, cuda, ("rooted",), memory=1 << 20, route=route)
        for x, delta in ((inputs.bfloat16(), signal), (inputs, signal.bfloat16()), (inputs.half(), signal.bfloat16())):
            expected = truth.of([x.double()], 9)([delta.double()]).values
            found = ours.of([x], 9)([delta]).values
            assert float(((found - expected) / expected).abs().max()) < 2e-3


@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_a_network(cuda_device, monkeypatch):
    monkeypatch.setattr(backends, "compiled", cuda)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 5, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(5, 6, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(54, 7), torch.nn.ReLU(), torch.nn.Linear(7, 4),
    ).eval()  # fmt: skip
    data = torch.randn(5, 3, 8, 8), torch.arange(5) % 4
    options = {"layers": ["0", "2", "5"], "progress": False}
    names = ["relative_flatness", "trace", "adaptive_sharpness", "neuron_flatness"]
    ours, truth = (
        pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=names, backend=backend, **options)
        for backend in ("compiled", "reference")
    )
    for name in ("0", "2", "5"):
        for measure in names:
            assert ours[name, measure].value == pytest.approx(truth[name, measure].value, rel=1e-4)
    traces = [
        pf.block_traces(model, torch.nn.CrossEntropyLoss(), data, "2", backend=backend, progress=False)
        for backend in ("compiled", "reference")
    ]
    torch.testing.assert_close(*traces, rtol=1e-4, atol=1e-7)


def calls(module, suffix):
    """A correct call of each kernel, and the places of the tensors in it."""
    dtype, sums = {
        "_f32": (torch.float32, torch.float32),
        "_f64": (torch.float64, torch.float64),
        "_bf16": (torch.bfloat16, torch.float32),
    }[suffix]
    sizes = ((4, 2, 3, 2), (1, 5, 4), (1, 3, 3), (1, 3, 2), (1, 1, 1), (1, 1, 1))
    inputs, signal = torch.ones(4, 6, 1, 5, 4, dtype=dtype), torch.ones(4, 4, 1, 3, 3, dtype=dtype)
    root, weight, gram = (torch.ones(*s, dtype=sums) for s in ((2, 7, 2), (2, 2, 18), (4, 2, 9, 9)))
    totals, columns, rows, pairs = (
        torch.ones(*s, dtype=torch.float64) for s in ((4, 2, 1, 3), (4, 2, 18), (4, 2, 2), (8,))
    )
    found = {
        "direct": [
            sizes, inputs, inputs.stride(), signal, signal.stride(), root, 7, weight, 1, totals, columns, rows, 0,
        ],
        "patch_gram": [sizes, inputs, inputs.stride(), gram, 0],
        "gram": [signal, (36, 18, 1, 9), 4, 2, 9, 2, gram, pairs, 0],
    }  # fmt: skip
    if suffix != "_bf16":
        found["sum_shifts"] = [sizes, torch.ones(4, 2, 20, 20, dtype=sums), gram, 0]
    return found


def call(module, name, values):
    plain = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
    return getattr(module, name)(*plain)


@pytest.mark.parametrize("suffix", ["_f32", "_f64", "_bf16"])
def test_wrong_element_counts_are_refused(module, suffix):
    for name, values in calls(module, suffix).items():
        call(module, name + suffix, values)
        for place, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            for wrong in ((value.data_ptr(), value.numel() - 1), (value.data_ptr(), value.numel() + 1)):
                with pytest.raises(ValueError, match="elements"):
                    call(module, name + suffix, [*values[:place], wrong, *values[place + 1 :]])
            with pytest.raises(ValueError, match="null pointer"):
                call(module, name + suffix, [*values[:place], (0, value.numel()), *values[place + 1 :]])


def test_bad_sizes_are_refused(module):
    bad = {
        "direct": {
            (0, 0, 1, 0): "0 groups",
            (0, 1, 1, 6): "does not have 3 places in 6 pixels",
            (0, 0, 2, 2**50): "multiply-adds|not those of an array",
            (2, 0, 1000): "`inputs` has 480 elements",
            (2, 1, 2**62): "not those of an array",
            (2, 1, 2**31): "`inputs` has 480 elements",
            (4, 2, -9): "not those of an array",
            (6, 6): "`root` has 28 elements",
            (8, 0): "0 splits of 1 tiles",
            (8, 2): "2 splits of 1 tiles",
        },
        "patch_gram": {(0, 3, 1, 4): "kernel of 4 pixels", (0, 5, 1, -1): "dilation -1"},
        "gram": {(1, 2, 2): "`rows` has", (4, 0): "0 places", (5, 0): "0 elements", (4, -1): "not those"},
        "sum_shifts": {(0, 4, 0, 2): "stride 2 is not 1", (0, 0, 0, 5): "elements"},
    }
    for name, values in calls(module, "_f32").items():
        for path, message in bad[name].items():
            with pytest.raises(ValueError, match=message):
                call(module, name + "_f32", changed(values, *path))


def test_what_32_bits_cannot_hold_is_refused(module):
    """No element is read: the sizes are refused first."""
    far = (4, 2**31, 1, 1, 1), (4, 2**40, 1, 1, 1)
    for strides in far:
        values = calls(module, "_f32")["direct"]
        last = 3 * strides[0] + 5 * strides[1] + 4 + 3
        values = [*values[:1], (values[1].data_ptr(), last + 1), strides, *values[3:]]
        with pytest.raises(ValueError, match=r"a sample of `inputs` spans .* more than 2\^31"):
            call(module, "direct_f32", values)
    huge = ((1, 1, 1, 9000), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    x, d, r = torch.ones(1), torch.ones(9000), torch.ones(9000)
    totals = torch.ones(3, dtype=torch.float64)
    nothing = (0, 0)
    with pytest.raises(ValueError, match="9000 rows do not fit"):
        call(
            module,
            "direct_f32",
            [huge, x, (1,) * 5, d, (9000, 1, 1, 1, 1), r, 1, nothing, 1, totals, nothing, nothing, 0],
        )


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
    with pytest.raises(BackendError, match="inputs of 2 samples, signal of 1"):
        cuda.direct(inputs, signal[:1], geometry, root, weight)


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(cuda, "_MISSING", "there is no module")
    with pytest.raises(BackendError, match="there is no module"):
        cuda.patch_gram(torch.ones(1, 1, 1, 2, 2), Geometry())


@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_jacobians(cuda_device, monkeypatch):
    """Their Gram matrices' eigenvalues."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).eval()
    data = torch.randn(5, 6), torch.arange(5) % 4
    measures = ["mls", "log_volume", "local_dimension"]
    truth, ours = (
        pf.measure(model, torch.nn.CrossEntropyLoss(), data, measures=measures, backend=backend, progress=False)
        for backend in ("reference", "compiled")
    )
    monkeypatch.setattr(backends, "compiled", cuda)
    kernels = pf.measure(
        model, torch.nn.CrossEntropyLoss(), data, measures=measures, backend="compiled", progress=False
    )
    for name in measures:
        assert kernels[name].value == pytest.approx(truth[name].value, rel=1e-4)
        assert ours[name].value == pytest.approx(truth[name].value, rel=1e-4)
