"""Cotangents that come as some elements with their positions in a layer's output, as max-pooling hands them on."""

import pytest
import torch

from pyflatness.contractions import LayerContraction
from pyflatness.contractions.backends import reference
from support.cases import on_threads
from support.combinations import ENGINES, every
from support.layer_cases import CASES, DTYPES, LAYOUTS, double, layer, layout, limit


def pooled(case, dtype, count, elements, kind="contiguous", seed=0):
    """Arguments of ``direct_gathered`` with positions: some come twice, a quarter is nowhere, and may be NaN there."""
    inputs, whole, geometry, root, _ = layer(case, dtype, "contiguous", 9, seed)
    generator = torch.Generator().manual_seed(seed)
    n, rows, *places = whole.shape
    shape = n, rows, elements
    positions = torch.randint(places[0] * places[1] * places[2], shape, generator=generator, dtype=torch.int32)
    positions[torch.rand(shape, generator=generator) < 0.25] = -1
    cotangents = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
    cotangents[-1][positions < 0] = torch.nan
    return layout(inputs, kind), cotangents, geometry, root, positions


def check(module, inputs, cotangents, geometry, root, positions):
    found = module.direct_gathered(inputs, cotangents, geometry, root, positions)
    places = geometry.places(inputs.shape[2:])
    for number, cotangent in enumerate(cotangents):
        whole = torch.zeros(*positions.shape[:2], places[0] * places[1] * places[2], dtype=torch.float64)
        whole.scatter_add_(2, positions.clamp(min=0), cotangent.double().masked_fill(positions < 0, 0.0))
        whole = whole.unflatten(2, places)
        truth = reference.direct(*double(inputs, whole, geometry, root, None))
        part = slice(number * len(inputs), (number + 1) * len(inputs))
        for name in ("squares", "gram_weighted"):
            expected = getattr(truth, name)
            torch.testing.assert_close(getattr(found, name)[part], expected, rtol=limit(inputs.dtype), atol=0)


@every(
    engine=ENGINES,
    name=["first convolution", "second convolution", "downsampling", "groups", "3-D", "1-D"],
    dtype=DTYPES,
    kind=LAYOUTS,
)
def test_any_layer(engine, name, dtype, kind):
    check(engine.module, *pooled(CASES[name], dtype, 3, 20, kind))


@every(engine=ENGINES, count=[1, 9, 10, 11], elements=[1, 7, 255, 256, 257, 600])
def test_any_number_of_elements(engine, count, elements):
    check(engine.module, *pooled(CASES["second convolution"], torch.float32, count, elements))


def test_strides_and_a_form_with_space(engine):
    inputs, cotangents, geometry, root, positions = pooled(CASES["second convolution"], torch.float32, 3, 12)
    expected = engine.module.direct_gathered(inputs, cotangents, geometry, root, positions)
    spread = [cotangent.unflatten(2, (1, 3, 4)) for cotangent in cotangents]
    for kind in LAYOUTS:
        given = [layout(cotangent, kind) for cotangent in spread]
        found = engine.module.direct_gathered(inputs, given, geometry, root, positions.mT.contiguous().mT)
        assert torch.equal(found.squares, expected.squares)
        assert torch.equal(found.gram_weighted, expected.gram_weighted)


def test_a_position_beyond_the_last_is_never_read(engine):
    if engine.backend == "reference":
        pytest.skip("torch refuses it")
    inputs, cotangents, geometry, root, positions = pooled(CASES["second convolution"], torch.float32, 2, 12)
    outside = torch.where(positions < 0, 10**9, positions)
    found = engine.module.direct_gathered(inputs, cotangents, geometry, root, outside)
    expected = engine.module.direct_gathered(inputs, cotangents, geometry, root, positions)
    assert torch.equal(found.squares, expected.squares)


def test_an_infinite_input_is_no_number_in_its_own_sample(engine):
    inputs, cotangents, geometry, root, positions = pooled((3, *CASES["second convolution"][1:]), torch.float32, 2, 12)
    inputs[1, -1, -1, -1, -1] = torch.inf
    found = engine.module.direct_gathered(inputs, cotangents[:1], geometry, root, positions)
    assert found.squares.isfinite().tolist() == [True, False, True]


def test_no_samples_and_threads(engine):
    arguments = pooled(CASES["second convolution"], torch.float32, 3, 12)
    for threads in (1, 2, 3):
        with on_threads(threads):
            check(engine.module, *arguments)
    if engine.backend != "reference":  # unfold cannot make the patches of no samples
        inputs, cotangents, geometry, root, positions = arguments
        found = engine.module.direct_gathered(inputs[:0], [c[:0] for c in cotangents], geometry, root, positions[:0])
        assert found.squares.shape == (0,)


def test_held_back_by_a_contraction(engine):
    """Signs, and cotangents that are left when the last has come."""
    inputs, cotangents, geometry, _, positions = pooled(CASES["second convolution"], torch.float64, 7, 12)
    cotangents[-1] = cotangents[-1].nan_to_num(0.0)
    weight = torch.randn(1, 16, 6 * geometry.kernel_elements, dtype=torch.float64)
    quantities = "gram_weighted", "squares"
    made = LayerContraction(weight, geometry, engine.module, quantities, memory=2**30, route="direct")
    each = made.cotangent_bytes([inputs], 12)
    for held in (7, 4):
        if not made.gathers([inputs], 7, held * each, 12):
            assert engine.backend == "reference"
            return
        assert each == inputs.shape[0] * 16 * 12 * 8
        found = made.at([inputs], 7, held * each, positions)
        assert found.stack_size == held
        assert found.held == held * each
        signs = [None, 1.0, -1.0, *torch.randn(4, len(inputs), dtype=torch.float64)]
        values = [found.hold([c], sign) for c, sign in zip(cotangents, signs, strict=True)]
        total = sum(one.values for one in (*values, found.rest()) if one is not None)
        truth = 0
        for cotangent, sign in zip(cotangents, signs, strict=True):
            alone = reference.direct_gathered(inputs, [cotangent], geometry, made._prepared.factor, positions)
            truth = truth + torch.stack([alone.gram_weighted, alone.squares]) * (1.0 if sign is None else sign)
        torch.testing.assert_close(total, truth)
