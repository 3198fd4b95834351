"""Tensors that torch negates lazily, as the imaginary part of a conjugate: their memory holds other numbers."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness.contractions import Geometry
from pyflatness.contractions.backends import compiled, reference
from pyflatness.contractions.kernels import array, dense, dense_rows, plain, span
from pyflatness.errors import BackendError
from support.cases import C, M
from support.combinations import every
from support.grid import Net, normal


def negated(tensor):
    """The same numbers, in memory with the other sign."""
    lazily = torch._neg_view(-tensor)
    assert lazily.is_neg()
    return lazily


INPUTS, SIGNAL, WEIGHT = normal(0, 2, 3, 1, 6, 6), normal(1, 2, 4, 1, 4, 4), normal(2, 1, 4, 27)
GEOMETRY = Geometry(1, (1, 3, 3))
POINT, POINT_SIGNAL = normal(0, 5, 7, 1, 1, 1), normal(1, 5, 4, 1, 1, 1)
SQUARE, PAIRS = normal(5, 3, 4, 4), normal(4, 2, 1, 5, 5)
KERNELS = {
    "direct": (INPUTS, SIGNAL, GEOMETRY, WEIGHT @ WEIGHT.mT, WEIGHT),
    "direct_gathered": (INPUTS, [SIGNAL, 2 * SIGNAL], GEOMETRY, WEIGHT @ WEIGHT.mT),
    "patch_gram": (INPUTS, GEOMETRY),
    "gram": (normal(3, 2, 1, 5, 3), PAIRS @ PAIRS.mT),
    "row_dots": (normal(3, 5, 4), normal(4, 5, 4)),
    "pair_distances": (normal(3, 5, 4),),
    "softmax_variance": (normal(3, 6, M), normal(4, C, M), normal(5, C), reference.pair_distances(normal(4, C, M))),
    "sigmoid_curvature": (normal(3, 6, C), normal(4, 6, C), normal(5, C)),
    "small_eigenvalues": (SQUARE + SQUARE.mT,),
}


def flat(found):
    if isinstance(found, torch.Tensor):
        return found.flatten()
    return torch.cat([flat(part) for part in found if part is not None])


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_reads_the_numbers(name):
    arguments = KERNELS[name]
    expected = flat(getattr(reference, name)(*arguments))
    for place, argument in enumerate(arguments):
        changed = argument
        if isinstance(argument, torch.Tensor):
            changed = negated(argument)
        elif isinstance(argument, list):
            changed = [negated(part) for part in argument]
        given = [*arguments[:place], changed, *arguments[place + 1 :]]
        found = flat(getattr(compiled, name)(*given))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("take", [array, span])
def test_no_address_is_given_of_one(take):
    with pytest.raises(BackendError, match="negated lazily"):
        take(negated(normal(0, 3, 4)))
    for made in (plain, dense, dense_rows):
        take(made(negated(normal(0, 3, 4))))


@every(together=1, loss=["cross_entropy", "mse_loss", "binary_cross_entropy_with_logits"], classes=[C, 70, 1500])
def test_heads(loss, classes):
    features, weight, bias = normal(0, 9, M), normal(1, classes, M), normal(2, classes)
    expected = pf.head_flatness(features, weight, bias, loss=loss)
    for given in (
        (negated(features), weight, bias),
        (features, negated(weight), bias),
        (features, weight, negated(bias)),
    ):
        assert pf.head_flatness(*given, loss=loss).value == pytest.approx(expected.value, rel=1e-12)


@pytest.mark.parametrize("layer", ["a", "b"])
def test_a_model_with_complex_numbers_inside(layer):
    """The layers' inputs are lazily negated, and so are gradients in their outputs."""

    def spectrum(x):
        return torch.fft.rfft(x.contiguous()).conj().imag

    def forward(net, x):
        h = torch.relu(net.a(spectrum(x)))
        return net.b(torch.complex(h, h).conj().imag)

    model = Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, C)).double()
    data = normal(0, 7, 8), torch.arange(7) % C
    compiled_value, reference_value = (
        pf.relative_flatness(model, nn.CrossEntropyLoss(), data, layer, backend=name).value
        for name in ("compiled", "reference")
    )
    assert compiled_value == pytest.approx(reference_value, rel=1e-10)
    assert pf.verify(model, nn.CrossEntropyLoss(), data, layer).ok
