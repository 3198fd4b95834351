"""A user's module, as type checkers see it: by mypy in `make lint`, and with the wheel in `make wheel`."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyflatness as pf


def flatness(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    estimate: pf.results.Estimate = pf.relative_flatness(model, nn.CrossEntropyLoss(), (inputs, targets), layer="0")
    interval = estimate.interval()
    return estimate.value if interval is None else interval[1]


def by_measure(
    model: nn.Module, loader: "DataLoader[tuple[Tensor, ...]]"
) -> Mapping[str, Mapping[str, pf.results.Estimate]]:
    report: pf.results.Report = pf.measure(
        model, nn.CrossEntropyLoss(), loader, measures=["relative_flatness", "trace"]
    )
    whole: pf.results.Estimate = report["trace"]
    print(f"{float(whole):.3g}", report.to_json())
    return report.by_measure()


def of_a_head(features: Tensor, weight: Tensor, labels: Tensor) -> float:
    return pf.head_flatness(features, weight, targets=labels).value


if __name__ == "__main__":
    network = nn.Sequential(nn.Linear(4, 3))
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    print(flatness(network, x, y), by_measure(network, DataLoader(TensorDataset(x, y))), of_a_head(x, x[:3], y))
