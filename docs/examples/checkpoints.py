"""
Measure a folder of checkpoints
===============================

You have trained some networks and kept their weights in files. This example measures how
flat the training loss is around each of them, and draws that against the generalisation
gap, which is the loss on test data minus that on training data. It trains a dozen small
networks first. If you have checkpoints of your own, begin at `Measure them`_. It needs
the extra ``demo`` (``pip install 'pyflatness[demo]'``).
"""

# %%
# Train some networks
# -------------------
#
# The networks learn to read scikit-learn's handwritten digits, which have 8 × 8 pixels.
# With only 300 images to train on, the loss on the other 1,497 images is visibly larger
# at the end.

import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

digits = load_digits()
order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
x = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
y = torch.tensor(digits.target)[order]
train, test = (x[:300], y[:300]), (x[300:], y[300:])
loss = nn.CrossEntropyLoss()


def network() -> nn.Module:
    """Return a network with random weights."""
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
    )


# %%
# Most measures of flatness fall while a training goes on, so that networks which stopped
# at different training losses are hard to compare. Each network is therefore trained
# until its training loss is below 0.05. The networks differ in their learning rates and
# in their seeds. Their weights go into a temporary folder, which is removed again below.


def trained(learning_rate: float, seed: int) -> nn.Module:
    """Return a network whose training loss is below 0.05."""
    torch.manual_seed(seed)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    while loss(model(train[0]), train[1]).item() > 0.05:
        for batch in torch.randperm(300).split(30):
            optimizer.zero_grad()
            loss(model(train[0][batch]), train[1][batch]).backward()
            optimizer.step()
    return model


folder = tempfile.TemporaryDirectory()
for learning_rate in (0.05, 0.2, 0.5):
    for seed in range(4):
        model = trained(learning_rate, seed)
        name = f"lr{learning_rate}_seed{seed}.safetensors"
        save_file(model.state_dict(), Path(folder.name) / name)

# %%
# Measure them
# ------------
#
# :func:`pyflatness.score` takes paths of checkpoints, or folders of these, and ``model=``
# is the function or class that makes the network that the weights belong to. It reads
# ``.safetensors`` files, and state dicts that ``torch.save`` has written. Here it
# computes relative flatness (κ) of all layers on the training data, and in the same pass
# the loss and the accuracy. A second call does so on the test data; only its loss is
# needed.

on_train = pf.score([folder.name], "cross_entropy", train, model=network)
on_test = pf.score([folder.name], "cross_entropy", test, model=network)
folder.cleanup()

# %%
# There is a row for each checkpoint and layer, and one for the network, which is the sum
# over its layers. That row has an empty name as its ``layer``. ``print(on_train)`` shows
# all rows, and ``on_train.to_frame()`` is a data frame of pandas. For many checkpoints it
# is worth passing ``store="runs.sqlite"``: a call that was interrupted then continues
# where it stopped (:doc:`/scoring`).

print("network         relative flatness  exact    loss  accuracy")
for row in on_train:
    if row.layer == "":
        name, exact = Path(row.checkpoint).stem, "yes" if row.exact else "no"
        values = f"{row.value:17.2f}  {exact:>5}  {row.loss:.4f}  {row.accuracy:8.3f}"
        print(f"{name:14}  {values}")

# %%
# All values are exact, since these are networks with ReLU (:doc:`/values`). In this table
# the learning rate decides most: the larger it is, the smaller is κ, so the flatter is
# the loss.
#
# Draw κ against the gap
# ----------------------
#
# Each point is a network. The title gives three correlation coefficients of κ with the
# gap, and their 95 % bootstrap intervals in brackets.

figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
on_train.plot("relative_flatness network", "gap", test=on_test, axes=axes)
plt.show()

# %%
# The flattest networks are among those with the smallest gaps. But the intervals contain
# zero, so that a dozen networks of one architecture cannot tell whether κ and the gap go
# along with each other. :doc:`/study` asks the same question of 648 networks, where the
# intervals are narrow, and :doc:`/statistics` says which statistics to use for such a
# study.
