"""
Follow flatness through a training
==================================

This example records the relative flatness of each layer while a network is trained, for
the weights of each moment and for their running average. It needs the extra ``demo``
(``pip install 'pyflatness[demo]'``).
"""

# %%
# The training loop is one that you might have written without pyflatness, but for two
# lines. :func:`pyflatness.track` makes a history of a network, a loss and data.
# ``history.record`` measures the network as it is at that moment, and keeps the values
# together with the numbers that you pass to it. The training is bit for bit what it would
# be without it.
#
# The network learns scikit-learn's handwritten digits. ``average`` is torch's exponential
# moving average of its weights, and ``weights=["live", "ema"]`` asks for both to be
# measured.

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import pyflatness as pf

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
order = torch.randperm(len(x))
train, test = order[:1200], order[1200:]

model = nn.Sequential(
    nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
loss, optimizer = (
    nn.CrossEntropyLoss(),
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
)
history = pf.track(
    model, loss, (x[train], y[train]), weights=["live", "ema"], averaged=average
)

steps = 0
for epoch in range(21):
    with torch.no_grad():
        test_loss = loss(model(x[test]), y[test])
    history.record(step=steps, epoch=epoch, test_loss=test_loss)
    for batch in train[torch.randperm(len(train))].split(32):
        optimizer.zero_grad()
        loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        average.update_parameters(model)
        steps += 1

# %%
# Draw the history
# ----------------
#
# There is an axis for relative flatness and one for the test loss. Each layer has its
# colour, the sum over all layers is black, and the averaged weights are dashed.

figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
history.plot(x="epoch", axes=axes)

# %%
# At random weights relative flatness is small. In the first epoch it rises by two orders
# of magnitude, and then it falls as the network becomes sure of its training data. The
# averaged weights come later, and lack the peaks of the live ones.
#
# Read the values
# ---------------
#
# Each record holds the report that :func:`pyflatness.measure` returns.
# ``history.to_frame()`` is a table of all values, and ``history.to_json(path)`` writes
# them to a file.

print(history[-1].reports["live"])
print(f"the last measurement took {history[-1].seconds:.3f} s")
plt.show()

# %%
# :doc:`/training` says what recording costs and what it leaves as it was, and has
# callbacks for Lightning and for the ``Trainer`` of transformers, which record without a
# loop of your own.
