"""Several signals that share the inputs, contracted together: from places where one of them is not zero, held back."""

import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyflatness as pf
from pyflatness.contractions import LayerContraction
from pyflatness.contractions.backends import compiled, cuda, reference
from pyflatness.contractions.geometry import Geometry
from pyflatness.contractions.layer import Contraction
from pyflatness.errors import BackendError
from pyflatness.passes import memory
from support.cases import on_threads
from support.combinations import ENGINES, every
from support.layer_cases import CASES, DTYPES, LAYOUTS, ONE, any_case, double, layer, layout, limit


def several(case, dtype, count, kind="contiguous", roots=9, kept=0.3, seed=0):
    """Arguments of ``direct_gathered``: signals that are zero at the same places, and here and there alone."""
    inputs, signal, geometry, root, _ = layer(case, dtype, kind, roots, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(signal.shape, generator=generator) < kept

    def another():
        alone = torch.rand(signal.shape, generator=generator) < 0.9
        return layout(torch.randn(signal.shape, generator=generator).to(dtype) * mask * alone, kind)

    return inputs, [another() for _ in range(count)], geometry, root


def check_gathered(module, inputs, signals, geometry, root):
    values = module.direct_gathered(inputs, signals, geometry, root)
    found = [reference.direct(*double(inputs, signal, geometry, root, None)) for signal in signals]
    for name in ("squares", "gram_weighted"):
        value, truth = getattr(values, name), [getattr(one, name) for one in found]
        if truth[0] is None:
            assert value is None
            continue
        assert value.dtype == torch.float64
        torch.testing.assert_close(value, torch.cat(truth), rtol=limit(inputs.dtype), atol=0)
    assert values.weighted is values.by_column is values.by_row is None


@every(engine=ENGINES, case=CASES, dtype=DTYPES, kind=LAYOUTS)
def test_signals_together(engine, case, dtype, kind):
    check_gathered(engine.module, *several(case, dtype, 3, kind))


@every(engine=ENGINES, count=[1, 2, 4, 5, 6, 9, 10, 11, 23], kept=[0.0, 0.02, 0.5, 1.0], roots=[0, 1, 13])
def test_any_number_of_signals_and_zeros(engine, count, kept, roots):
    for name in ("second convolution", "depthwise", "downsampling"):
        check_gathered(engine.module, *several(CASES[name], torch.float32, count, roots=roots, kept=kept))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_of_few_channels(engine, dtype):
    check_gathered(engine.module, *several((2, 1, 50, 200, (1, 7, 8), (1, 3, 3), ONE, ONE), dtype, 9))
    check_gathered(engine.module, *several((1, 2, 7, 900, (2, 4, 5), (2, 3, 2), ONE, ONE), dtype, 4))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    any_case(), st.sampled_from(LAYOUTS), st.integers(0, 20), st.integers(1, 12), st.sampled_from(DTYPES),
    st.integers(0, 3),
)  # fmt: skip
def test_any_layer(engine, case, kind, roots, count, dtype, s):
    check_gathered(engine.module, *several(case, dtype, count, kind, roots, seed=s))


@pytest.mark.parametrize("dtype", DTYPES)
def test_signals_of_several_layouts(engine, dtype):
    for name in ("second convolution", "groups"):
        inputs, signals, geometry, root = several(CASES[name], dtype, 5)
        mixed = [layout(signal, kind) for signal, kind in zip(signals, LAYOUTS, strict=True)]
        check_gathered(engine.module, inputs, mixed, geometry, root)
        spread = [signal[:1, :, :, :1, :1].expand_as(signal) for signal in signals]
        check_gathered(engine.module, inputs, spread, geometry, root)


@every(
    engine=ENGINES,
    dtype=DTYPES,
    name=["second convolution", "depthwise", "late block", "sequence", "downsampling"],
    bad=[torch.nan, torch.inf],
    kept=[0.0, 0.3],
)
def test_what_is_not_finite_stays_in_its_sample(engine, dtype, name, bad, kept):
    """Also in an input that only places see where all signals are zero: 0 · ∞ is no number."""
    case, keep = (4, *CASES[name][1:]), torch.tensor([0, 2, 3])
    for spoiled in range(2):
        inputs, signals, *rest = several(case, dtype, 3, kept=kept)
        clean = engine.module.direct_gathered(inputs, signals, *rest)
        (inputs if spoiled == 0 else signals[1])[1, -1, -1, 0, 0] = bad
        values = engine.module.direct_gathered(inputs, signals, *rest)
        for value, before in zip(values[:2], clean[:2], strict=True):
            value, before = value.view(3, 4), before.view(3, 4)
            torch.testing.assert_close(value[:, keep], before[:, keep], rtol=0, atol=0)
            broken = [spoiled == 0, True, spoiled == 0]
            assert [not bool(one.isfinite()) for one in value[:, 1]] == broken


def test_pixels_that_no_place_sees(engine):
    inputs, signals, *rest = several((2, 1, 3, 4, (2, 9, 9), (1, 2, 2), (3, 3, 3), ONE), torch.float32, 2)
    inputs[:, :, 1], inputs[:, :, :, 2], inputs[..., 2] = torch.nan, torch.nan, torch.nan
    check_gathered(engine.module, inputs, signals, *rest)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("samples", [0, 1, 5])
def test_threads_and_few_samples(engine, threads, samples):
    if samples == 0 and engine.backend == "reference":
        pytest.skip("unfold cannot make the patches of no samples")
    with on_threads(threads):
        for name in ("second convolution", "depthwise", "one of everything"):
            arguments = several((samples, *CASES[name][1:]), torch.float32, 3)
            if samples:
                check_gathered(engine.module, *arguments)
            first, second = (engine.module.direct_gathered(*arguments) for _ in range(2))
            assert first.squares.shape == first.gram_weighted.shape == (3 * samples,)
            assert torch.equal(first.squares, second.squares)
            assert torch.equal(first.gram_weighted, second.gram_weighted)


def test_arguments_that_do_not_fit():
    inputs, signals, geometry, root = several(CASES["second convolution"], torch.float32, 3)
    with pytest.raises(BackendError, match=r"direct_gathered: .* got torch\.float32 on cpu, torch\.float64 on cpu"):
        compiled.direct_gathered(inputs, [signals[0], signals[1].double()], geometry, root)
    with pytest.raises(ValueError, match="`signal` has"):
        compiled.direct_gathered(inputs, [signals[0], signals[1][:2]], geometry, root)
    with pytest.raises(ValueError, match="`root` has"):
        compiled.direct_gathered(inputs, signals, geometry, root[:, :, :-1])


@every(
    engine=ENGINES,
    dtype=DTYPES,
    count=[1, 3, 100],
    quantities=[("gram_weighted",), ("gram_weighted", "squares")],
    case=[
        (5, 1, 40, 30, ONE, ONE, ONE, ONE),
        (5, 3, 7, 4, (1, 3, 3), (1, 3, 3), ONE, ONE),  # of one position, in groups
        (5, 1, 3, 6, (1, 20, 20), (1, 5, 5), ONE, ONE),
    ],
)
def test_signals_held_back(engine, dtype, count, quantities, case, monkeypatch):
    inputs, signals, geometry, _ = several(case, dtype, 7)
    weight = torch.randn(case[1], case[3], case[2] * geometry.kernel_elements).to(dtype)
    signs = [None, 1.0, -1.0, *torch.randn(4, 5).double()]
    gradients = LayerContraction(weight, geometry, engine.module, quantities, memory=2**20)
    contract = gradients.at([inputs], 7).of
    expected = sum(contract([delta], sign).values for delta, sign in zip(signals, signs, strict=True))
    monkeypatch.setattr(LayerContraction, "stack_size", lambda *_, **__: count)
    stacked = gradients.at([inputs], 7)
    contributions = [stacked.hold([delta], sign) for delta, sign in zip(signals, signs, strict=True)]
    assert [one is None for one in contributions] == [(n + 1) % count != 0 for n in range(7)]
    found = sum(one.values for one in (*contributions, stacked.rest()) if one is not None)
    torch.testing.assert_close(found, expected, rtol=limit(dtype), atol=0)
    assert stacked.rest() is None
    truth = LayerContraction(weight.double(), geometry, reference, quantities, memory=2**30, route="direct")
    truth = truth.at([inputs.double()], 7).of
    exact = sum(truth([delta.double()], sign).values for delta, sign in zip(signals, signs, strict=True))
    torch.testing.assert_close(found, exact, rtol=10 * limit(dtype), atol=0)


def test_a_buffer_is_the_same_at_every_call():
    gradients = LayerContraction(torch.randn(1, 3, 4), Geometry(), reference, ("gram_weighted",), memory=1)
    whole = gradients.buffer(5, torch.zeros(8, 3, 1, 1, 1))
    assert whole.shape == (5, 8, 3, 1, 1, 1)
    ragged = gradients.buffer(4, torch.zeros(7, 3, 1, 1, 1, dtype=torch.bfloat16))
    assert ragged.shape == (4, 7, 3, 1, 1, 1)
    assert ragged.dtype == torch.float32
    assert ragged.data_ptr() == whole.data_ptr()


def test_signals_that_are_parts_of_larger_tensors_do_not_keep_those(monkeypatch):
    gradients = LayerContraction(torch.randn(1, 3, 4), Geometry(), reference, ("gram_weighted",), memory=1)
    monkeypatch.setattr(LayerContraction, "stack_size", lambda *_, **__: 9)
    stacked = gradients.at([torch.randn(5, 4, 1, 1, 1)], 9)
    large = torch.randn(5, 300, 1, 1, 1)
    gone = weakref.ref(large)
    assert stacked.hold([large[:, :3]]) is None
    del large
    assert gone() is None


def test_how_many_signals_at_a_time():
    one, two, plane = (torch.zeros(2, 16, *size) for size in (ONE, (1, 1, 2), (1, 16, 16)))
    linear, groups, three, five = Geometry(), Geometry(2), Geometry(1, (1, 3, 3)), Geometry(1, (1, 5, 5))

    def together(inputs, geometry, backend=reference, *, signals=9, at_most=2**20, rows=16, **options):
        weight = torch.randn(geometry.groups, rows, 16 // geometry.groups * geometry.kernel_elements)
        options = {"quantities": ("gram_weighted",), "memory": 2**20} | options
        layer = LayerContraction(weight, geometry, backend, **options)
        return layer.stack_size(inputs, signals, at_most, by_gram=layer.by_gram(inputs, signals))

    assert together([one], linear) == 9
    assert together([one], linear, signals=3) == 1
    assert together([two], linear) == 9
    assert together([two], linear, compiled) == 1
    assert together([one, one], linear) == 1
    assert together([one], groups) == 9
    assert together([one], linear, route="direct") == 9
    assert together([one], linear, quantities=("gram_weighted", "weighted")) == 1
    assert together([one], linear, quantities=("diagonal",)) == 1
    assert together([plane], five, compiled) == 9
    assert together([plane], five, compiled, route="gram") == 1
    assert together([plane], three, compiled) == 1  # which has Winograd's transforms
    assert together([plane], five, compiled, rows=40, route="direct") == 9
    assert together([plane], five, compiled, rows=41, route="direct") == 1  # whose matrices would leave the cache
    assert together([torch.zeros(2, 16, 1, 16, 9000)], five, compiled, at_most=2**40, memory=2**40) == 1  # or image
    for backend in (cuda, reference):
        assert together([plane], five, backend) == 9
        assert together([plane], five, backend, memory=1, at_most=4 * 2 * 16 * 12 * 12 * 4) == 3
        assert together([plane], five, backend, at_most=2 * 16 * 12 * 12 * 4) == 1
        assert together([plane], five, backend, quantities=("squares", "gram_weighted"), at_most=2**17) == 3
        assert together([plane], five, backend, quantities=("by_row",)) == 1
    assert together([plane, plane], five, compiled) == 1
    assert together([plane], five, compiled, quantities=("by_row",)) == 1
    for most, count in ((9, 9), (8, 5), (5, 5), (4, 3), (3, 1), (0, 1)):
        for limited in ("at_most", "memory"):
            assert together([plane], five, compiled, **{limited: most * 2 * 16 * 12 * 12 * 4}) == count


def test_what_is_held_back_of_all_layers_is_limited(monkeypatch):
    """Values do not depend on it."""
    nn = torch.nn
    first = nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*first, nn.Linear(324, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    data = torch.randn(40, 3, 13, 13), torch.randint(20, (40,))
    counts = []

    made = Contraction.__init__

    def counted(self, *args):
        made(self, *args)
        if self.stack_size > 1:
            counts.append(self.stack_size)

    monkeypatch.setattr(Contraction, "__init__", counted)
    found = {}
    linear = 40 * 20 * 4  # bytes of a signal
    for held, expected in ((2**30, [19, 19, 19]), (10 * linear, [5, 5]), (0, [])):  # of all layers but the head
        monkeypatch.setattr(memory, "_HELD_BACK", held)
        report = pf.measure(model, nn.CrossEntropyLoss(), data, measures="relative_flatness", progress=False)
        assert counts == expected
        counts.clear()
        for name in report.layers:
            value = report[name, "relative_flatness"].value
            assert value == pytest.approx(found.setdefault(name, value), rel=1e-5)
