"""
Which checkpoint should I take?
===============================

The smallest relative flatness κ of a training is no answer: early on the loss is high and
the weights are small, so that nothing is sharp. This example shows it, and what works
better: the smallest κ among the checkpoints whose training loss is low enough. It needs
the extra ``demo`` (``pip install '.[demo]'`` in a clone).
"""

# %%
# Six trainings, three of them with a tenth of the labels wrong, and a checkpoint after
# each epoch. κ is summed over all layers and measured on the training data, with their
# wrong labels. The test data have none wrong, and serve to judge the choices alone.

import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
loss = nn.CrossEntropyLoss()


def training(seed: int, wrong: float, epochs: int = 40) -> torch.Tensor:
    """Return κ, the training loss and the test loss after each epoch."""
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    train, test, labels = order[:600], order[600:], y.clone()
    swapped = train[torch.rand(len(train)) < wrong]
    labels[swapped] = (labels[swapped] + torch.randint(1, 10, (len(swapped),))) % 10
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = []
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(32):
            optimizer.zero_grad()
            loss(model(x[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            losses = [loss(model(x[of]), labels[of]).item() for of in (train, test)]
        report = pf.measure(model, loss, (x[train], labels[train]))
        rows.append([report["relative_flatness"].value, *losses])
    return torch.tensor(rows).T


runs = {(wrong, seed): training(seed, wrong) for wrong in (0.0, 0.1) for seed in range(3)}

# %%
# For each training: the epoch of the smallest κ of all, with its test loss. Then only the
# checkpoints count whose training loss is at most a floor, here a tenth of that after the
# first epoch. Among these: Spearman's correlation of κ with the test loss, and the test
# loss of the smallest κ, beside that of the smallest training loss and the best there is.

print("wrong  seed | smallest κ of all | at most the floor: of test loss")
print("            | epoch   test loss | n   Spearman   κ's   loss's   best")
for (wrong, seed), (kappa, train_loss, test_loss) in runs.items():
    first = int(kappa.argmin())
    low = train_loss <= train_loss[0] / 10
    k, t, s = kappa[low], train_loss[low], test_loss[low]
    rank = spearmanr(k, s).statistic if len(k) > 2 else float("nan")
    print(
        f"{wrong:5.1f} {seed:5d} | {first + 1:5d} {test_loss[first]:11.2f} | {len(k):2d}"
        f"  {rank:8.2f}"
        f"  {s[k.argmin()]:5.3f}  {s[t.argmin()]:6.3f}  {s.min():5.3f}"
    )

# %%
# In all six trainings the smallest κ is that of the first epoch, whose test loss is the
# worst choice there is. At most the floor, κ rises with the test loss in each of them.
# Without wrong labels its choice is that of the smallest training loss, or next to it;
# with wrong labels it is better in all three.
#
# The limits: one small network and one data set, three seeds of each, test losses that
# differ by some hundredths, and a floor that is a choice of its own. With wrong labels a
# network that fits its training data less has the smaller test loss, so that stopping
# earlier does as well. If you have validation data, choose by these, and take κ to learn
# about networks that they cannot tell apart.
