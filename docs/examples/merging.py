"""
Merge two fine-tuned networks
=============================

Two networks that were fine-tuned from one start can be merged into one, by averaging
their weights. This example weighs each weight by how important it is to each network, and
says where that helps and where it does not. It needs the extra ``demo``
(``pip install 'pyflatness[demo]'``).
"""

# %%
# Fine-tune twice
# ---------------
#
# A small network for scikit-learn's handwritten digits is trained on 300 images. Two
# copies of it are then fine-tuned on 400 others each, in one of two ways:
#
# - *classes*: one copy sees the digits 0 to 4 alone, the other 5 to 9;
# - *halves*: one copy sees the lower halves of images, the other the upper halves. The
#   rest of each image is black.

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
loss = nn.CrossEntropyLoss()
Data = tuple[torch.Tensor, torch.Tensor]


def train(model: nn.Module, data: Data, epochs: int, lr: float) -> nn.Module:
    """Train a model on data, and return it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0])).split(32):
            optimizer.zero_grad()
            loss(model(data[0][batch]), data[1][batch]).backward()
            optimizer.step()
    return model.eval()


def half(images: torch.Tensor, lower: bool) -> torch.Tensor:
    """Return images of which the other half is black."""
    kept = torch.zeros(8, 8)
    kept[slice(4, 8) if lower else slice(0, 4)] = 1
    return images * kept.flatten()


def tasks(how: str, tune: torch.Tensor, test: torch.Tensor) -> tuple[list[Data], Data]:
    """Return the data of both fine-tunings, and test data of both together."""
    if how == "classes":
        parts = [tune[y[tune] < 5], tune[y[tune] >= 5]]
        return [(x[part], y[part]) for part in parts], (x[test], y[test])
    parts = [*tune.chunk(2)]
    halves = [half(x[test], lower) for lower in (True, False)]
    data = [
        (half(x[part], lower), y[part])
        for part, lower in zip(parts, (True, False), strict=True)
    ]
    return data, (torch.cat(halves), y[test].repeat(2))


# %%
# Merge
# -----
#
# Around its own minimum θ_k, the loss of network k rises by about
# ½ Σ_j D_kj (θ_j - θ_kj)², with D_k the diagonal of its Hessian. The sum of both is
# smallest at
#
# .. math:: θ_j = \frac{\sum_k D_{kj} θ_{kj}}{\sum_k D_{kj}} ,
#
# a mean in which a weight counts most for the network to which it matters (Matena and
# Raffel 2022). Plain averaging has all D equal. :func:`pyflatness.importance` returns D
# by the names of parameters. ``kind="fisher"`` is that of the empirical Fisher matrix,
# from gradients at the labels. ``kind="ggn"`` is that of the GGN. For cross-entropy this
# is the Fisher matrix of the network's own predictions, and in a ReLU network its
# diagonal is the Hessian's. A small number keeps weights that matter to neither network
# at their mean.

KINDS = "fisher", "ggn"


def merged(models: list[nn.Module], data: list[Data], kind: str = "") -> nn.Module:
    """Return the mean of models, weighted by importances of a kind, or plain."""
    found = copy.deepcopy(models[0])
    if kind:
        weights = [
            pf.importance(model, loss, own, kind=kind)
            for model, own in zip(models, data, strict=True)
        ]
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            values = torch.stack([model.get_parameter(name) for model in models])
            sizes = torch.ones_like(values)
            if kind:
                sizes = torch.stack([one[name] for one in weights]).to(values) + 1e-10
            parameter.copy_((sizes * values).sum(dim=0) / sizes.sum(dim=0))
    return found


# %%
# Compare
# -------
#
# Accuracy on 697 test images, in the mean over ten seeds of everything: of the networks
# themselves on the test data of both, and of the merged ones. The last column is what
# weighing changes, with its standard error over the seeds.


def accuracies(how: str, seed: int) -> dict[str, float]:
    """Return the test accuracy of each network."""
    torch.manual_seed(seed)
    first, tune, test = torch.randperm(len(x)).split([300, 800, 697])
    data, both = tasks(how, tune, test)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    start = train(network, (x[first], y[first]), epochs=20, lr=0.1)
    models = [train(copy.deepcopy(start), own, epochs=5, lr=0.05) for own in data]
    networks = {"start": start, "one alone": models[0], "the other": models[1]}
    networks["plain mean"] = merged(models, data)
    networks |= {kind: merged(models, data, kind) for kind in KINDS}
    with torch.no_grad():
        return {
            name: (model(both[0]).argmax(dim=1) == both[1]).double().mean().item()
            for name, model in networks.items()
        }


for how in ("halves", "classes"):
    rows = [accuracies(how, seed) for seed in range(10)]
    print(how)
    for name in rows[0]:
        values = torch.tensor([row[name] for row in rows])
        changes = values - torch.tensor([row["plain mean"] for row in rows])
        by = f"{changes.mean():+.3f} ± {changes.std() / 10**0.5:.3f}"
        print(f"  {name:10s} {values.mean():.3f}  {by if name in KINDS else ''}")

# %%
# With *halves* weighing is worth much. The weights of black pixels do not matter to a
# network that never saw these pixels. Their importance is zero, and the merged network
# has them from the other one. A plain mean takes back a half of what either has learnt
# there.
#
# With *classes* it is worth nothing, and the empirical Fisher matrix makes it worse.
# Both networks use all weights, and the loss of one on its own classes says nothing of
# what the other needs. Both means are about as good as the start was.
#
# The limits: one small network, ten seeds, and two ways of fine-tuning, of which the
# first was chosen as one where importances differ. :doc:`/curvature` says what else the
# call returns, and what it costs.
