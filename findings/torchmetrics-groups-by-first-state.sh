#!/bin/sh
# torchmetrics 1.4.0 to 1.6.0: a MetricCollection takes two metrics of one class for one after the first update if their
# FIRST states agree; the others are not compared. From then on both have the value of one of them, without a message.
# A metric of a layer that counts samples first, and sums values second, so gives the value of another network's layer
# wherever both have seen the same samples. 1.6.3 compares all states. To be safe with both, a metric's first state has
# to tell it from others, or the collection is made with compute_groups=False.
# Prints what was seen, and exits with an error if the behaviour is another one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
cat > "$folder/seen.py" <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from torchmetrics import Metric, MetricCollection


class MeanSquare(Metric):
    """The mean square of a layer's weight times its inputs."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight
        self.add_state("count", torch.zeros(()), "sum")
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, features):
        self.count = self.count + len(features)
        self.total = self.total + (self.weight * features).square().sum()

    def compute(self):
        return self.total / self.count


batches = torch.arange(12.0).view(6, 2)
found = {}
for groups in (True, False):
    metrics = {"live": MeanSquare(1.0), "average": MeanSquare(0.5)}
    collection = MetricCollection(metrics, compute_groups=groups)
    for batch in batches:
        collection.update(batch)
    found[groups] = {name: float(value) for name, value in collection.compute().items()}
    print("torchmetrics", version("torchmetrics"), f"compute_groups={groups}:", found[groups])
assert found[False]["average"] == found[False]["live"] / 4
merged = found[True]["average"] == found[True]["live"]
assert merged == (sys.argv[1] == "merged"), "metrics are grouped otherwise now"
PYTHON
for pair in 1.4.0=merged 1.6.0=merged 1.6.3=apart; do
    "$folder/env/bin/pip" install --quiet torch==2.13.0 numpy setuptools "torchmetrics==${pair%=*}"
    "$folder/env/bin/python" -W ignore "$folder/seen.py" "${pair#*=}"
done
