"""Cross-entropy of so many logits that it is made of some rows at a time."""

import pytest
import torch
from torch.nn import functional as F

from pyflatness.losses import CrossEntropy
from pyflatness.losses.cross_entropy import _AT_ONCE

CLASSES = _AT_ONCE // 3  # so that a block has three rows
LOSS = CrossEntropy(None, -100, 0.1, "sum")


def tokens():
    """Return logits (2, CLASSES, 4) of tokens whose classes are last in memory, those of a fifth token left out."""
    return torch.randn(2, 5, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))[:, 1:].mT


def labels():
    found = torch.randint(CLASSES, (2, 4), generator=torch.Generator().manual_seed(1))
    found[1, 2] = LOSS.ignore_index
    return found


@pytest.mark.parametrize("given", ["classes", "probabilities"])
def test_a_loss_and_its_gradient_are_those_of_torch(given):
    outputs = tokens().requires_grad_()
    targets = labels() if given == "classes" else torch.softmax(tokens().flip(2), 1)
    wanted = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1).flatten()
    torch.testing.assert_close(LOSS.each(outputs, targets), wanted)
    found, wanted = LOSS.value(outputs, targets), wanted.sum()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(value, outputs)[0] for value in (found, wanted)))


def test_factors_are_those_of_the_hessian():
    rows, targets = tokens().movedim(1, -1).reshape(-1, CLASSES), labels().flatten()
    terms = LOSS.terms(rows, targets, 1)
    factors, p = LOSS.factors(rows, terms), torch.softmax(rows, 1)
    change = torch.randn(rows.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moments = (p * change).sum(1), (p * change.square()).sum(1)
    torch.testing.assert_close(factors.form(change), terms.scale * (moments[1] - moments[0].square()))
    hessian_times = terms.scale.unsqueeze(1) * p * (change - moments[0].unsqueeze(1))
    torch.testing.assert_close(factors.times(change), hessian_times)
    torch.testing.assert_close(factors.sizes(), terms.scale * (1 - p.square().sum(1)))

    signs = 1 - 2 * torch.randint(2, rows.shape, generator=torch.Generator().manual_seed(3)).to(torch.int8)
    mixtures, some = factors.mixtures(), torch.tensor([7, 0, 3, 3])
    ((mixed, sign),) = mixtures.mixed(signs)
    torch.testing.assert_close((sign, mixed.sum(1)), (1.0, torch.zeros(len(rows), dtype=torch.float64)))
    alone = [LOSS.factors(rows[i : i + 1], terms.take(torch.tensor([i]))).mixtures() for i in range(len(rows))]
    wanted = torch.cat([one.mixed(signs[i : i + 1])[0][0] for i, one in enumerate(alone)])
    torch.testing.assert_close(mixed, wanted)
    torch.testing.assert_close(mixtures.weights(), torch.cat([one.weights() for one in alone]))
    torch.testing.assert_close(mixtures.take(some).mixed(signs[some])[0][0], wanted[some])
