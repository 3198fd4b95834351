"""
Find out which layers can be quantised
======================================

Quantisation rounds the weights of a network to a few levels. Some layers can take that,
and others cannot. This example computes what rounding would do to the loss, layer by
layer, and gives each layer as few bits as it can do with. It needs the extra ``demo``
(``pip install 'pyflatness[demo]'``).
"""

# %%
# Train a network
# ---------------
#
# The network is a small convolutional one for scikit-learn's handwritten digits. Of a
# network of yours, take the weights that you would deploy, and data that it should stay
# good at.

from collections import OrderedDict

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)
data = x[:1000], y[:1000]

model = nn.Sequential(
    OrderedDict(
        conv1=nn.Conv2d(1, 8, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(8, 16, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64, 32),
        relu3=nn.ReLU(),
        fc2=nn.Linear(32, 10),
    )
)
loss, epochs = nn.CrossEntropyLoss(), 16
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20 * epochs)
for _ in range(epochs):
    for batch in torch.randperm(1000).split(50):
        optimizer.zero_grad()
        loss(model(data[0][batch]), data[1][batch]).backward()
        optimizer.step()
        schedule.step()
model = model.eval()
print(f"training loss {loss(model(data[0]), data[1]).item():.4f}")

# %%
# Predict what rounding costs
# ---------------------------
#
# ``pf.changes.rounded`` returns the change Δ that rounding would make to the weight of
# each layer: here to 4 bits, which are 15 levels, with a scale for each row. The network
# itself is not changed. :func:`pyflatness.cost_of_change` then expands the loss E to
# second order,
#
# .. math:: E(w + Δ) - E(w) ≈ ⟨∇E, Δ⟩ + \tfrac12 ⟨Δ, H Δ⟩ ,
#
# with H the Hessian of the loss in the weights. In the report ``gradient_of_change`` is
# the first term, ``cost_of_change`` the second one, and ``loss_change`` how much the loss
# really changes, which is measured for comparison (``measured=False`` leaves it out).
# Each layer has a row for the case that it alone is rounded. The row ``network`` is for
# all of them together.

changes = {bits: pf.changes.rounded(model, bits=bits) for bits in (3, 4, 6)}
reports = {bits: pf.cost_of_change(model, loss, data, changes[bits]) for bits in changes}
print(reports[4])

# %%
# Compare the layers
# ------------------
#
# The left figure shows the sum of the two terms as circles, and the measured change of
# the loss as crosses. The closer they are, the better was the prediction. With few bits
# the changes are large, and terms beyond the second order begin to count; the order of
# the layers can be right nevertheless.
#
# The right figure has the same for pruning, which sets the smallest weights of each layer
# to zero.


def predicted(report: pf.results.Report, layer: str) -> float:
    """Return the change of the loss to second order."""
    return report[layer, "gradient_of_change"] + report[layer, "cost_of_change"]


def draw(axes: Axes, report: pf.results.Report, label: str) -> None:
    """Draw what is predicted of each layer, and what was measured."""
    costs = [predicted(report, layer) for layer in report.layers]
    (line,) = axes.plot(report.layers, costs, "o-", label=label)
    costs = [report[layer, "loss_change"].value for layer in report.layers]
    axes.plot(report.layers, costs, "x", color=line.get_color(), markersize=9)


figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for bits, report in reports.items():
    draw(left, report, f"{bits} bits")
for share in (0.25, 0.5, 0.75):
    report = pf.cost_of_change(model, loss, data, pf.changes.pruned(model, share))
    draw(right, report, f"{share:.0%} of the weights")
for axes, title in ((left, "rounding"), (right, "pruning")):
    axes.set(title=title, xlabel="layer", ylabel="change of the loss")
    axes.set_yscale("symlog", linthresh=0.001)  # some changes lower the loss a little
    axes.grid(alpha=0.3)
    axes.legend()

# %%
# Choose the bits
# ---------------
#
# Suppose that no layer may raise the loss by more than 0.003. Each layer then gets the
# fewest bits for which the prediction is below that, or 6 if there are none. What all
# these changes do together comes from one more call. It need not be the sum over the
# layers, since the errors of one layer meet those of the next.

bits_of = {}
for layer in reports[4].layers:
    enough = [bits for bits in reports if predicted(reports[bits], layer) < 0.003]
    bits_of[layer] = min(enough, default=6)
print("bits:", bits_of)
together = pf.cost_of_change(
    model, loss, data, {layer: changes[bits][layer] for layer, bits in bits_of.items()}
)
total = together["gradient_of_change"] + together["cost_of_change"]
print(f"predicted {total:.4f}, measured {together['loss_change'].value:.4f}")
plt.show()

# %%
# :doc:`/curvature` has other changes (2:4 sparsity, low ranks, other checkpoints), says
# what the call costs, and compares the prediction with HAWQ-V2's and Fisher's on a
# ResNet-20 and a language model.
