"""The kernels of layers and their torch twins against the reference in float64: any shape, strides and engine."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyflatness.contractions.backends import compiled, reference
from pyflatness.contractions.geometry import Geometry
from pyflatness.errors import BackendError
from support.cases import on_threads
from support.combinations import ENGINES, every
from support.layer_cases import CASES, DTYPES, LAYOUTS, ONE, any_case, check_values, double, layer, limit, of_kernels


def check_direct(module, inputs, signal, geometry, root, weight, slack=1):
    values = module.direct(inputs, signal, geometry, root, weight)
    check_values(values, reference.direct(*double(inputs, signal, geometry, root, weight)), inputs.dtype, slack)


def check_grams(module, inputs, signal, geometry):
    patches = geometry.patches(inputs.double())
    lengths = patches.square().sum(dim=3).sqrt()
    truth = reference.patch_gram(inputs.double(), geometry)
    values = module.patch_gram(inputs, geometry)
    assert values.dtype == inputs.dtype
    assert values.shape == truth.shape
    error = (values.double() - truth).abs() / (lengths.unsqueeze(2) * lengths.unsqueeze(3))
    assert float(error.max()) < limit(inputs.dtype)
    rows = geometry.rows(signal)
    for a in (rows, rows.contiguous()):
        result = module.gram(a, truth.to(inputs.dtype))
        expected = reference.gram(a.double(), truth)
        assert result.dtype == torch.float64
        assert float(((result - expected).abs() / expected).max()) < limit(inputs.dtype)
    for r in (5, 16, 33):  # rows of R: fewer than a kernel takes, and not a multiple of those of a panel
        for triangular in (False, True):
            factor = torch.randn(geometry.groups, r, rows.shape[3], dtype=rows.dtype)
            factor = factor.triu() if triangular else factor
            result = module.gram_weighted(rows, factor, truth.to(inputs.dtype), triangular=triangular)
            expected = reference.gram(rows.double() @ factor.double().mT, truth)
            assert float(((result - expected).abs() / expected.clamp_min(1e-30)).max()) < limit(inputs.dtype)


@every(engine=ENGINES, case=CASES, dtype=DTYPES, kind=LAYOUTS)
def test_layers(engine, case, dtype, kind):
    inputs, signal, geometry, root, weight = layer(case, dtype, kind)
    check_direct(engine.module, inputs, signal, geometry, root, weight)
    check_grams(engine.module, inputs, signal, geometry)


@every(engine=ENGINES, dtype=DTYPES, roots=[0, 1, 2, 5, 16, 33, 70], weighted=[False, True])
def test_what_is_not_asked_for(engine, dtype, roots, weighted):
    for name in ("second convolution", "depthwise", "late block"):
        inputs, signal, geometry, root, weight = layer(CASES[name], dtype, roots=roots)
        check_direct(engine.module, inputs, signal, geometry, root, weight if weighted else None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    any_case(), st.sampled_from(LAYOUTS), st.integers(0, 20), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 3)
)
def test_any_layer(engine, case, kind, roots, weighted, dtype, s):
    inputs, signal, geometry, root, weight = layer(case, dtype, kind, roots, seed=s)
    check_direct(engine.module, inputs, signal, geometry, root, weight if weighted else None)
    check_grams(engine.module, inputs, signal, geometry)


FORMS = ["automatic", "patches", "tiles2", "tiles4"]


compiled_engines = pytest.mark.parametrize("engine", ENGINES[1:], indirect=True)  # the reference has one form


def check_forms(engine, *arguments):
    inputs, signal, geometry, *_ = arguments
    # The rounding of single numbers shows in few of them, and averages out in many (M this small is never made so
    # unless forced).
    few = inputs.shape[1] * signal.shape[1] < 16 * geometry.groups**2
    for form in FORMS:
        with compiled.forced_direct_form(form):
            check_direct(engine.module, *arguments, slack=4 if few and form == "tiles4" else 1)


@compiled_engines
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(1, 70),
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from(LAYOUTS), st.integers(0, 20), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 3),
)  # fmt: skip
def test_any_form_of_three_by_three(engine, n, groups, channels, rows, places, kind, roots, weighted, dtype, s):
    depth, height, width = places
    case = (n, groups, channels, rows, (depth, height + 2, width + 2), (1, 3, 3), ONE, ONE)
    inputs, signal, geometry, root, weight = layer(case, dtype, kind, roots, seed=s)
    check_forms(engine, inputs, signal, geometry, root, weight if weighted else None)


@compiled_engines
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 3, 200), (1, 130, 4), (2, 34, 34)])
def test_forms_of_many_tiles(engine, dtype, size):
    check_forms(engine, *layer((1, 1, 70, 33, size, (1, 3, 3), ONE, ONE), dtype))


@compiled_engines
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [(2, 1, 5, 7, (1, 5, 6)), (2, 2, 20, 33, (1, 19, 18)), (1, 1, 64, 64, (1, 34, 34))])
def test_forms_on_badly_scaled_data(engine, dtype, case):
    inputs, signal, *rest = layer((*case, (1, 3, 3), ONE, ONE), dtype)
    check_forms(engine, inputs + 100, signal, *rest)
    scales = [10 ** (8 * torch.rand_like(t) - 4) for t in (inputs, signal)]
    check_forms(engine, inputs * scales[0], signal * scales[1], *rest)


@compiled_engines
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_form_hides_what_is_not_finite(engine, form, bad):
    for row, column in ((0, 0), (7, 8), (8, 7), (15, 15)):  # of a place
        for spoiled in range(2):
            inputs, signal, geometry, root, weight = layer(CASES["residual block"], torch.float32)
            (inputs, signal)[spoiled][1, -1, 0, row, column] = bad
            with compiled.forced_direct_form(form):
                values = compiled.direct(inputs, signal, geometry, root, weight)
            for value in of_kernels(values):
                assert value[0].isfinite().all()
                assert not value[1].isfinite().all()


def test_only_three_by_three_has_other_forms():
    for name in ("groups", "3-D", "downsampling", "patches"):
        arguments = layer(CASES[name], torch.float32)
        with compiled.forced_direct_form("patches"):
            expected = compiled.direct(*arguments)
        for form in FORMS:
            with compiled.forced_direct_form(form):
                values = compiled.direct(*arguments)
            assert all(map(torch.equal, of_kernels(values), of_kernels(expected)))
    with pytest.raises(ValueError, match="no form 'fft'"), compiled.forced_direct_form("fft"):
        pass


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_tensors(engine, dtype):
    geometry = Geometry(1, (1, 3, 3))
    pixels = torch.randn(2, 1, 1, 9, 9).to(dtype).expand(2, 6, 1, 9, 9)
    weight = torch.randn(1, 20, 54).to(dtype)
    for signal in (torch.randn(2, 20, 1, 1, 1), torch.randn(1, 20, 1, 1, 7), torch.randn(1, 1, 1, 1, 1)):
        spread = signal.to(dtype).expand(2, 20, 1, 7, 7)
        check_direct(engine.module, pixels, spread, geometry, torch.randn(1, 7, 20).to(dtype), weight)
        check_grams(engine.module, pixels, spread, geometry)
    check_grams(engine.module, torch.randn(1, 6, 1, 1, 1).to(dtype).expand(2, 6, 1, 9, 9), spread, geometry)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_layers_as_they_come(engine, dtype):
    inputs, signal = torch.randn(3, 11, 50).to(dtype), torch.randn(3, 11, 34).to(dtype)
    fives = [t.transpose(1, 2)[..., None, None] for t in (inputs, signal)]
    values = engine.module.direct(*fives, Geometry(), None, None).squares
    truth = (signal.double().mT @ inputs.double()).square().sum(dim=(1, 2))
    torch.testing.assert_close(values, truth, rtol=limit(dtype), atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("samples", [0, 1, 2])
def test_threads_and_few_samples(engine, threads, samples):
    if samples == 0 and engine.backend == "reference":
        pytest.skip("unfold cannot make the patches of no samples")
    with on_threads(threads):
        for name in ("residual block", "depthwise", "one of everything"):
            case = (samples, *CASES[name][1:])
            inputs, signal, geometry, root, weight = layer(case, torch.float32)
            if samples:
                check_direct(engine.module, inputs, signal, geometry, root, weight)
                check_grams(engine.module, inputs, signal, geometry)
            first, second = (engine.module.direct(inputs, signal, geometry, root, weight) for _ in range(2))
            assert all(map(torch.equal, of_kernels(first), of_kernels(second)))
            assert first.squares.shape == first.gram_weighted.shape == first.weighted.shape == (samples,)
            assert first.by_column.shape == (samples, inputs.shape[1])
            assert first.by_row.shape == (samples, signal.shape[1])
            assert engine.module.gram(geometry.rows(signal), engine.module.patch_gram(inputs, geometry)).shape == (
                samples,
            )


@every(engine=ENGINES, dtype=DTYPES, positions=[60, 96, 97, 500], samples=[1, 2, 5])
def test_long_sequences_are_shared_among_threads_and_sums_do_not_depend_on_these(engine, dtype, positions, samples):
    case = (samples, 1, 40, 34, (1, 1, positions), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    inputs, signal, geometry, root, _ = layer(case, dtype, roots=24)
    check_grams(engine.module, inputs, signal, geometry)
    if engine.backend == "reference":
        return  # a matrix library's sums may depend on the threads
    found = []
    for threads in (1, 2, 4):
        with on_threads(threads):
            grams, rows = engine.module.patch_gram(inputs, geometry), geometry.rows(signal)
            weighted = engine.module.gram_weighted(rows, root, grams, triangular=False)
            found.append((grams, engine.module.gram(rows, grams), weighted))
    assert all(all(map(torch.equal, found[0], other)) for other in found[1:])


@every(engine=ENGINES, dtype=DTYPES, samples=[1, 7, 8, 9, 26], threads=[1, 2, 3])
def test_samples_that_look_at_the_weight_together(engine, dtype, samples, threads):
    """Where nothing but weighted sums is made of M; in several tiles, the last of which is not full."""
    with on_threads(threads):
        for groups, channels, rows in ((1, 61, 70), (2, 30, 33), (2, 3, 16)):
            case = (samples, groups, channels, rows, (1, 6, 6), (1, 3, 3), (1, 1, 1), (1, 1, 1))
            inputs, signal, geometry, _, weight = layer(case, dtype)
            check_direct(engine.module, inputs, signal, geometry, None, weight)


@every(
    engine=ENGINES,
    dtype=DTYPES,
    name=["second convolution", "depthwise", "late block", "sequence", "downsampling"],
    bad=[torch.nan, torch.inf],
    gram_weighted=[True, False],
)
def test_what_is_not_finite_stays_in_its_sample(engine, dtype, name, bad, gram_weighted):
    rest = CASES[name][1:]
    for spoiled in range(2):
        inputs, signal, geometry, root, weight = layer((4, *rest), dtype, roots=9 if gram_weighted else 0)
        clean = engine.module.direct(inputs, signal, geometry, root, weight)
        grams = engine.module.patch_gram(inputs, geometry)
        contracted = engine.module.gram(geometry.rows(signal), grams)
        (inputs, signal)[spoiled][1, -1, -1, 0, 0] = bad
        values = engine.module.direct(inputs, signal, geometry, root, weight)
        keep = torch.tensor([0, 2, 3])
        for value, before in zip(values, clean, strict=True):
            if before is None:
                continue
            torch.testing.assert_close(value[keep], before[keep], rtol=0, atol=0)
            assert not value[1].isfinite().all()
        broken = engine.module.patch_gram(inputs, geometry)
        torch.testing.assert_close(broken[keep], grams[keep], rtol=0, atol=0)
        again = engine.module.gram(geometry.rows(signal), broken)
        torch.testing.assert_close(again[keep], contracted[keep], rtol=0, atol=0)
        assert not again[1].isfinite()


def test_the_patch_gram_is_symmetric(engine):
    inputs, _, geometry, _, _ = layer(CASES["residual block"], torch.float32)
    values = engine.module.patch_gram(inputs, geometry)
    torch.testing.assert_close(values, values.mT, rtol=1e-6, atol=1e-5)


@every(engine=ENGINES, n=[0, 1, 7, 8, 50], size=[1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32])
def test_small_eigenvalues(engine, n, size):
    matrices = torch.randn(n, size, size, dtype=torch.float64)
    matrices = matrices + matrices.mT
    if n > 7:
        matrices[3] = matrices[3] @ matrices[3].mT * 1e200
        matrices[4] = matrices[4, :, :1] @ matrices[4, :, :1].mT * 1e-250
        matrices[5] = torch.eye(size)
        matrices[6] = 0
        matrices[7] = torch.diag(torch.arange(size, 0, -1.0))
    values = engine.module.small_eigenvalues(matrices)
    expected = torch.linalg.eigvalsh(matrices)
    assert values.shape == (n, size)
    assert bool((values.diff(dim=1) >= 0).all())
    scale = matrices.abs().amax(dim=(1, 2), keepdim=True)[:, 0] if n else torch.ones(0, 1)
    assert bool(((values - expected).abs() <= 1e-14 * size * scale).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_eigenvalues_of_what_is_not_finite(engine, bad):
    matrices = torch.eye(5, dtype=torch.float64).repeat(20, 1, 1)
    matrices[3, 1, 2] = matrices[3, 2, 1] = bad
    matrices[11, 4, 4] = bad
    values = engine.module.small_eigenvalues(matrices)
    broken = torch.zeros(20, dtype=torch.bool)
    broken[[3, 11]] = True
    assert bool(values[broken].isnan().all())
    assert torch.equal(values[~broken], torch.ones(18, 5, dtype=torch.float64))


def test_arguments_that_do_not_fit():
    inputs, signal, geometry, root, weight = layer(CASES["residual block"], torch.float32)
    with pytest.raises(ValueError, match="does not have 15 places in 18 pixels"):
        compiled.direct(inputs, signal[..., :15], geometry, root, weight)
    with pytest.raises(ValueError, match="`root` has"):
        compiled.direct(inputs, signal, geometry, root[:, :, :-1], weight)
    with pytest.raises(ValueError, match="`weight` has"):
        compiled.direct(inputs, signal, geometry, root, weight[:, :, :-1])
    with pytest.raises(ValueError, match="`patch_gram` has"):
        compiled.gram(geometry.rows(signal), torch.ones(2, 1, 4, 4))
    with pytest.raises(BackendError, match="inputs of 2 samples, cotangents of 1"):
        compiled.direct(inputs, signal[:1], geometry, root, weight)
    with pytest.raises(BackendError, match=r"direct: .* got torch\.float32 on cpu, torch\.float64 on cpu"):
        compiled.direct(inputs, signal.double(), geometry, root, weight)
    with pytest.raises(ValueError, match="takes matrices of 1 to 32 rows, got 33"):
        compiled.small_eigenvalues(torch.zeros(2, 33, 33, dtype=torch.float64))
    with pytest.raises(BackendError, match=r"wants float64, got torch\.float32"):
        compiled.small_eigenvalues(torch.zeros(2, 3, 3))
