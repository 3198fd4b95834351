"""What a sample takes is counted without the pass that finds out what else a loss that is a callable depends on."""

import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf


def notes(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    data = torch.randn(2, 4), torch.arange(2)
    return pf.measure(model, loss, data, measures="trace", layers="0", curvature="ggn", memory=1)["0", "trace"].notes


def test_the_note_is_the_same():
    def custom(outputs, targets):
        return F.cross_entropy(outputs, targets)

    of_custom, of_own = (
        [note for note in notes(loss) if note.startswith("one sample takes")]
        for loss in (custom, nn.CrossEntropyLoss())
    )
    assert len(of_own) == 1
    assert of_custom == of_own
