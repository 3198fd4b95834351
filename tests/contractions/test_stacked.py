"""Products of several cotangents by torch's matrix library, and how precise they are told to be."""

import contextlib

import pytest
import torch

from pyflatness.contractions import LayerContraction
from pyflatness.contractions.backends import cuda, reference
from pyflatness.contractions.precision import float32_products
from support.combinations import every
from support.layer_cases import CASES, LAYOUTS, layer, layout

NAMES = ["sequence", "1-D", "second convolution", "downsampling", "depth multiplier", "groups", "3-D", "late block"]
SIGNS = [None, 1.0, -1.0, 0.5, torch.tensor([2.0, -3.0, 1.0], dtype=torch.float64)]


def contributions(contraction, signals, signs):
    if contraction.stack_size == 1:
        return sum(contraction.of([one], sign).values for one, sign in zip(signals, signs, strict=True))
    found = [contraction.hold([one], sign) for one, sign in zip(signals, signs, strict=True)]
    return sum(one.values for one in (*found, contraction.rest()) if one is not None)


@every(
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    route=["direct", "gram"],
    quantities=[("gram_weighted",), ("squares",), ("squares", "gram_weighted")],
    name=NAMES,
)
def test_cotangents_held_back(dtype, route, quantities, name):
    inputs, signal, geometry, _, weight = layer((3, *CASES[name][1:]), torch.float32)
    weight, inputs = weight.to(dtype), inputs.to(dtype)
    signals = [layout(torch.randn_like(signal), kind).to(dtype) for kind in LAYOUTS]
    truth = LayerContraction(weight.double(), geometry, reference, quantities, memory=2**30, route="direct")
    expected = contributions(truth.at([inputs.double()], 5), [one.double() for one in signals], SIGNS)
    size = contributions(truth.at([inputs.double()], 5), [one.double() for one in signals], [1.0] * 5)
    for memory in (1, 2**20):
        ours = LayerContraction(weight, geometry, reference, quantities, memory=memory, route=route)
        each = ours.cotangent_bytes([inputs])
        for held, together in ((0, 1), (3 * each, 3), (9 * each, 5)):
            contraction = ours.at([inputs], 5, held)
            assert contraction.stack_size == together
            found = contributions(contraction, signals, SIGNS)
            assert float(((found - expected) / size).abs().max()) < (1e-12 if dtype == torch.float64 else 1e-5)
    found = ours.at([inputs], 5, 9 * each).of_several(torch.cat(signals), SIGNS).values
    assert float(((found - expected) / size).abs().max()) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_one_after_another():
    """A stack that was contracted takes others."""
    inputs, signal, geometry, _, weight = layer(CASES["groups"], torch.float64)
    ours = LayerContraction(weight, geometry, reference, ("gram_weighted",), memory=2**20)
    contraction = ours.at([inputs], 4, 2 * ours.cotangent_bytes([inputs]))
    found = [contraction.hold([signal * scale]) for scale in (1, 2, 3, 4)]
    once = ours.at([inputs], 4).of([signal]).values
    for number, factor in ((1, 1 + 4), (3, 9 + 16)):
        torch.testing.assert_close(found[number].values, once * factor, rtol=1e-12, atol=0)
    assert found[0] is found[2] is contraction.rest() is None


MATMUL, CONVOLUTION = torch.backends.cuda.matmul, torch.backends.cudnn.conv


@pytest.fixture
def settings():
    """What a test sets is taken back."""
    whole = torch.backends
    before = [(one, one.fp32_precision) for one in (whole, whole.cudnn, MATMUL, CONVOLUTION)]
    yield
    for one, value in before:
        one.fp32_precision = value


@every(
    dtype=[torch.float32, torch.bfloat16],
    name=["groups", "sequence"],
    convolution=["ieee", "tf32"],
    matmul=["none", "ieee", "tf32"],
)
def test_products_are_as_precise_as_the_layer_s_own(
    emulated_cuda, settings, monkeypatch, matmul, convolution, name, dtype
):
    MATMUL.fp32_precision, CONVOLUTION.fp32_precision = matmul, convolution
    inputs, signal, geometry, _, weight = layer(CASES[name], torch.float32)
    inputs, signal, weight = inputs.to(dtype), signal.to(dtype), weight.to(dtype)
    seen, bmm, fails = set(), torch.bmm, False

    def watched(*args, **options):
        seen.add(MATMUL.fp32_precision)
        if fails:
            raise RuntimeError("out of memory")
        return bmm(*args, **options)

    monkeypatch.setattr(torch, "bmm", watched)
    expected = "tf32" if dtype == torch.bfloat16 else convolution if name == "groups" else matmul
    with cuda.emulated(emulated_cuda):
        for route in ("direct", "gram"):
            ours = LayerContraction(
                weight, geometry, cuda, ("gram_weighted",), memory=2**20, route=route, convolution=name == "groups"
            )
            each = ours.cotangent_bytes([inputs])
            for held in (0, 2 * each):
                contraction = ours.at([inputs], 3, held)
                contributions(contraction, [signal] * 3, [None] * 3)
            contraction.of_several(torch.cat([signal, signal]), [None, None])
            assert {"ieee" if one == "none" else one for one in seen} == {"ieee" if expected == "none" else expected}
            assert (matmul, convolution) == (MATMUL.fp32_precision, CONVOLUTION.fp32_precision)
        fails = True
        for held in (0, 2 * each):
            with pytest.raises(RuntimeError, match="out of memory"):
                contributions(ours.at([inputs], 3, held), [signal] * 3, [None] * 3)
            assert (matmul, convolution) == (MATMUL.fp32_precision, CONVOLUTION.fp32_precision)


@pytest.mark.parametrize("tf32", [True, False])
def test_a_setting_that_is_inherited_stays_so(settings, tf32):
    torch.backends.fp32_precision, MATMUL.fp32_precision = "ieee" if tf32 else "tf32", "none"
    with contextlib.suppress(ZeroDivisionError), float32_products(tf32=tf32):
        assert (MATMUL.fp32_precision == "tf32") == tf32
        raise ZeroDivisionError
    for value in ("tf32", "ieee"):
        torch.backends.fp32_precision = value
        assert MATMUL.fp32_precision == value


def test_the_older_settings_stay_consistent(settings):
    """Torch raises when the older ones are asked and contradict the new."""
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            for tf32 in (True, False):
                with float32_products(tf32=tf32):
                    pass
                assert MATMUL.allow_tf32 == (precision == "high")
    finally:
        torch.set_float32_matmul_precision(before)
