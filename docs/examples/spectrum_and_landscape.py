"""
Look at the curvature of a loss
===============================

Measures such as relative flatness or the trace say in one number how sharp a minimum is.
This example looks at more than a number: at the eigenvalues of the loss Hessian, and at
the loss itself along some directions. It needs the extra ``demo`` (``pip install
'pyflatness[demo]'``).
"""

# %%
# Train a network
# ---------------
#
# The network is small, and learns scikit-learn's handwritten digits.

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

torch.manual_seed(0)
digits = load_digits()
data = (
    torch.tensor(digits.data[:500] / 16, dtype=torch.float32),
    torch.tensor(digits.target[:500]),
)


def trained() -> nn.Module:
    """Return a network that was trained for 20 epochs."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        for batch in torch.randperm(500).split(50):
            optimizer.zero_grad()
            loss(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
    return model.eval()


loss = nn.CrossEntropyLoss()
model = trained()

# %%
# The spectrum
# ------------
#
# :func:`pyflatness.spectrum` returns the largest and the smallest eigenvalues of the
# Hessian in all 2,410 parameters. The Hessian is never written down: what is needed are
# its products with vectors, each of which takes one read of the data. Every eigenvalue
# comes with a bound on its error.

spectrum = pf.spectrum(
    model, loss, data, k=5, which="both", density=True, probes=4, steps=40
)
print(spectrum)

# %%
# In the figure the ticks are these ten eigenvalues. The curve is the density of all
# eigenvalues, on a logarithmic axis: nearly all of them lie close to zero, and only a few
# directions are curved. The smallest ones are negative, so the weights are not quite at a
# minimum.

figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
spectrum.plot(axes=axes)

# %%
# A landscape
# -----------
#
# :func:`pyflatness.landscape` computes the loss on a plane through the weights. One plane
# is spanned by the two eigenvectors of the largest eigenvalues, where the loss rises
# fastest. The other has two random directions, scaled so that each filter or neuron is
# changed in proportion to its weights. The white cross is the network.
#
# Dashed lines are the quadratic model of the loss, which is what gradient and Hessian at
# the cross predict. Where the dashed lines follow the borders of the colours, the
# prediction is right.

steep = pf.landscape(model, loss, data, directions=spectrum, points=15, span=1.5)
random = pf.landscape(model, loss, data, directions="random", points=15)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
steep.plot(axes=left)
random.plot(axes=right)

# %%
# Between two networks
# --------------------
#
# :func:`pyflatness.linear_interpolation` computes the loss on the line between the
# weights of two networks. Here the second network has other initial weights and other
# batches. Both ends have a small loss, and the barrier is how much the loss rises between
# them.

between = pf.linear_interpolation(model, loss, data, trained())
print(between)
figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
between.plot(axes=axes)
plt.show()

# %%
# :doc:`/curvature` has the options of these calls and what they cost, and also the search
# for the worst rise of the loss in a ball around the weights.
