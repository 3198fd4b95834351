"""
Train with a flatness penalty
=============================

This example trains a network twice, once as usual and once with the relative flatness κ
of a layer as a part of the loss, and compares the two. It needs the extra ``demo``
(``pip install 'pyflatness[demo]'``).
"""

# %%
# The data are 300 of scikit-learn's handwritten digits to train on, and the others to
# test with.

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train, test = (images[:300], labels[:300]), (images[300:], labels[300:])
loss = nn.CrossEntropyLoss()

# %%
# The training loop
# -----------------
#
# :class:`pyflatness.FlatnessPenalty` is made once, for a layer of the network: here the
# second convolution, which is called ``"3"``. Called with the outputs of the forward
# pass, it returns an estimate of the layer's κ on that batch, through which gradients
# flow. Its strength λ is a number to choose, as that of weight decay is.
#
# The batches are drawn by a generator of their own, so that both trainings see the same
# ones. After each epoch :func:`pyflatness.track` records κ of the layer on all training
# data, exactly.


def trained(strength: float) -> tuple[nn.Module, pf.results.History]:
    """Return a network that was trained with so much of the penalty, and its history."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = torch.Generator().manual_seed(0)
    history = pf.track(model, loss, train, layers="3")
    with pf.FlatnessPenalty(model, "3", loss) as penalty:
        for epoch in range(30):
            for batch in torch.randperm(300, generator=batches).split(50):
                outputs = model(train[0][batch])
                total = loss(outputs, train[1][batch])
                if strength:
                    total = total + strength * penalty(outputs, train[1][batch])
                optimizer.zero_grad()
                total.backward()
                optimizer.step()
            history.record(epoch=epoch + 1)
    return model.eval(), history


plain, plain_history = trained(0.0)
flat, flat_history = trained(0.003)

# %%
# What the penalty did
# --------------------
#
# The figure shows κ of the layer after each epoch of the two trainings.

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
for history, label in ((plain_history, "plain"), (flat_history, "with the penalty")):
    kappas = [
        record.reports["live"]["3", "relative_flatness"].value for record in history
    ]
    axes.semilogy([record.epoch for record in history], kappas, label=label)
axes.set(xlabel="epoch", ylabel="relative flatness of the second convolution")
axes.legend()

# %%
# :func:`pyflatness.generalization_gap` evaluates loss and accuracy on both halves of the
# data.

for label, model in (("plain", plain), ("with the penalty", flat)):
    gap = pf.generalization_gap(model, loss, train, test)
    losses = f"training loss {gap.train.loss:.4f}, test loss {gap.test.loss:.3f}"
    print(f"{label}: {losses}, test accuracy {gap.test.accuracy:.3f}")
plt.show()

# %%
# A single pair of trainings says little about generalisation. :doc:`/training` compares
# five seeds, several strengths, and sharpness-aware minimisation (SAM); it also has the
# penalty for a head, and what the penalties cost.
