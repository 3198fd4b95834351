"""What must not move: cuts, orders, shifts, merged rows, and reparameterisations that leave the function alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pyflatness as pf

SIZES = {"n": st.integers(1, 12), "d": st.integers(1, 8), "m": st.integers(1, 9), "seed": st.integers(0, 10_000)}


def problem(n, d, m, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal(n, m), normal(d, m), normal(d), torch.randint(d, (n,), generator=generator)


def kappa(*arguments, **options):
    return pf.head_flatness(*arguments, **options).value


@given(**SIZES)
def test_never_negative_and_zero_for_one_class(n, d, m, seed):
    features, weight, bias, targets = problem(n, d, m, seed)
    for loss, y in (("cross_entropy", targets), ("mse_loss", None), ("binary_cross_entropy_with_logits", None)):
        assert kappa(features, weight, bias, y, loss=loss) >= 0
    assert kappa(features, weight[:1], bias[:1]) == 0


@given(**SIZES, split=st.integers(0, 7), share=st.floats(0.01, 0.99))
def test_merging_equal_rows_changes_nothing(n, d, m, seed, split, share):
    """Two classes with one weight row are, to κ, one class with the sum of their probabilities."""
    features, weight, bias, _ = problem(n, d, m, seed)
    split %= d
    double = torch.cat([weight, weight[split : split + 1]])
    shares = torch.tensor([share, 1 - share], dtype=torch.float64).log()
    biases = torch.cat([bias, bias[split : split + 1] + shares[1]])
    biases[split] += shares[0]
    assert kappa(features, double, biases) == pytest.approx(kappa(features, weight, bias), rel=1e-11, abs=1e-300)


@given(**SIZES)
def test_shifts_of_rows_and_logits_change_nothing(n, d, m, seed):
    features, weight, bias, _ = problem(n, d, m, seed)
    expected = kappa(features, weight, bias)
    assert kappa(features, weight + 3 * weight[:1].flip(1), bias) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert kappa(features, weight, bias + 77.0) == pytest.approx(expected, rel=1e-11, abs=1e-300)


@given(**SIZES)
def test_order_of_samples_classes_and_features_changes_nothing(n, d, m, seed):
    features, weight, bias, targets = problem(n, d, m, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, classes, columns = (torch.randperm(size, generator=generator) for size in (n, d, m))
    loss = nn.CrossEntropyLoss(weight=torch.rand(d, generator=generator).double() + 0.1)
    moved = nn.CrossEntropyLoss(weight=loss.weight[classes])
    value = pf.head_flatness(features, weight, bias, targets, loss=loss, per_sample=True)
    other = pf.head_flatness(
        features[rows][:, columns], weight[classes][:, columns], bias[classes], classes.argsort()[targets[rows]],
        loss=moved, per_sample=True,
    )  # fmt: skip
    assert other.value == pytest.approx(value.value, rel=1e-11, abs=1e-300)
    torch.testing.assert_close(other.per_sample, value.per_sample[rows], rtol=1e-11, atol=1e-300)


@given(**SIZES, cuts=st.lists(st.integers(1, 11), max_size=4), normalize=st.sampled_from([None, "std"]))
def test_any_cut_into_batches_gives_the_same(n, d, m, seed, cuts, normalize):
    features, weight, bias, targets = problem(n, d, m, seed)
    model = nn.Sequential(nn.Linear(m, d)).double()
    model[0].weight.data, model[0].bias.data = weight, bias
    loss = nn.CrossEntropyLoss(weight=torch.arange(1.0, d + 1).double(), label_smoothing=0.1)
    whole = pf.head_flatness(features, weight, bias, targets, loss=loss, per_sample=True, normalize=normalize)
    bounds = [0, *sorted({cut % n for cut in cuts} - {0}), n]
    batches = [(features[a:b], targets[a:b]) for a, b in itertools.pairwise(bounds)]
    parts = pf.relative_flatness(model, loss, batches, per_sample=True, normalize=normalize)
    assert parts.value == pytest.approx(whole.value, rel=1e-10, abs=1e-300)
    torch.testing.assert_close(parts.per_sample, whole.per_sample, rtol=1e-10, atol=1e-300)


def network(seed, *widths, bias=True):
    torch.manual_seed(seed)
    parts = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    return nn.Sequential(*parts[:-1]).double()


DATA = torch.randn(30, 5, generator=torch.Generator().manual_seed(5)).double(), torch.arange(30) % 4


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("factor", [0.01, 5.0, 25.0])
def test_layer_wise_reparameterisation_changes_nothing(factor, normalize):
    model = network(0, 5, 9, 4)
    before = pf.relative_flatness(model, nn.CrossEntropyLoss(), DATA, normalize=normalize).value
    with torch.no_grad():
        model[0].weight *= factor
        model[0].bias *= factor
        model[2].weight /= factor
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), DATA, normalize=normalize).value == pytest.approx(
        before, rel=1e-10
    )


def test_neuron_wise_reparameterisation_moves_only_the_plain_measure():
    """Theorem 4, with a dead and a constant unit among the neurons."""
    model = network(0, 5, 9, 4)
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0, -1.0  # dead
        model[0].weight[5], model[0].bias[5] = 0, 2.0  # constant
    loss = nn.CrossEntropyLoss()
    plain, normalised = (pf.relative_flatness(model, loss, DATA, normalize=how).value for how in (None, "std"))
    factors = torch.rand(9, generator=torch.Generator().manual_seed(6)).double() * 20 + 0.05
    with torch.no_grad():
        outputs = model(DATA[0])
        model[0].weight *= factors[:, None]
        model[0].bias *= factors
        model[2].weight /= factors
        torch.testing.assert_close(model(DATA[0]), outputs)
    moved, same = (pf.relative_flatness(model, loss, DATA, normalize=how).value for how in (None, "std"))
    assert same == pytest.approx(normalised, rel=1e-10)
    assert moved != pytest.approx(plain, rel=0.05)


def test_duplicated_data_changes_nothing():
    model = network(1, 5, 9, 4)
    twice = tuple(torch.cat([part, part]) for part in DATA)
    once = pf.relative_flatness(model, nn.CrossEntropyLoss(), DATA).value
    assert pf.relative_flatness(model, nn.CrossEntropyLoss(), twice).value == pytest.approx(once, rel=1e-12)
