"""
Clean against noisy labels
==========================

Two networks learn the same digits to the same training loss, one of them with a tenth of
the labels random. Which is sharper, in which layers, and how sure is that? This example
takes a few seconds.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
x, loss = x / 16, nn.CrossEntropyLoss()
(x, x_test), (y, y_test) = x.split([1000, 797]), y.split([1000, 797])
noisy = y.clone()
noisy[::10] = torch.randint(10, (100,), generator=torch.Generator().manual_seed(0))


def trained(labels: torch.Tensor) -> nn.Module:
    """Return a network with a training loss of at most 0.05."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    while loss(model(x), labels) > 0.05:
        optimizer.zero_grad()
        loss(model(x), labels).backward()
        optimizer.step()
    return model.eval()


labels = {"clean": y, "noisy": noisy}
models = {name: trained(targets) for name, targets in labels.items()}

# %%
# All layers
# ----------
#
# A larger relative flatness κ is sharper. The values are exact: for a ReLU network that
# is checked on the model and the data. The network's value is the sum over the layers.

names = ["relative_flatness", "trace"]
for name, model in models.items():
    accuracy = (model(x_test).argmax(1) == y_test).double().mean()
    print(f"{name}: {accuracy:.0%} of the test images are right")
    print(pf.measure(model, loss, (x, labels[name]), measures=names))

# %%
# An interval
# -----------
#
# With ``probes=`` a value comes from random vectors, and has a standard error and an
# interval. It is an interval for the exact value on these data.

for name, model in models.items():
    sampled = pf.measure(model, loss, (x, labels[name]), probes=2)["relative_flatness"]
    low, high = sampled.interval()
    print(f"{name}: {sampled:.0f}, between {low:.0f} and {high:.0f}")

# %%
# An invariance
# -------------
#
# A ReLU network computes the same function if one layer is multiplied by 5 and the next
# is divided by it. κ stays the same. The trace of the Hessian does not.

model = models["clean"]
other = pf.reparameterize(model, {"0": 5.0}, (x, y))
for name, network in {"as trained": model, "rescaled": other}.items():
    report = pf.measure(network, loss, (x, y), measures=names)
    kappa, trace = (report[measure].value for measure in names)
    print(f"{name}: κ {kappa:.2f}, trace {trace:.2f}")

# %%
# What this does not show
# -----------------------
#
# These are two networks with one seed each. Whether κ says something about generalisation
# is a question for :doc:`studies of many networks </study>`.
