"""Print the values of docs/comparison.md: the same numbers by pyflatness, PyHessian, curvlinops and BackPACK.

Run from the project's root: ``python benchmarks/comparison.py``; ``pip install '.[peers]' pyhessian``. Two networks on
300 of scikit-learn's digits, in float64: one with ReLU, one with tanh. Truth is the Hessian by nested autograd. What a
library has no call for stays empty.
"""

import copy
import warnings

import curvlinops
import torch
from backpack import backpack, extend
from backpack.extensions import DiagGGNExact, DiagHessian
from pyhessian import hessian as PyHessian
from rich.console import Console
from rich.table import Table
from scipy.sparse.linalg import eigsh
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyflatness as pf

TRUTH, OURS, PYHESSIAN, CURVLINOPS, BACKPACK = "nested autograd", "pyflatness", "PyHessian", "curvlinops", "BackPACK"
Values = dict[str, float | str]


def network(activation: nn.Module) -> nn.Sequential:
    """Return 64-8-10 neurons with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 8), activation, nn.Linear(8, 10)).double().eval()


def main() -> None:
    """Print a table for each network."""
    warnings.simplefilter("ignore")
    digits = load_digits()
    x, y = torch.from_numpy(digits.data[:300] / 16), torch.from_numpy(digits.target[:300])
    for name, activation in (("ReLU", nn.ReLU()), ("tanh", nn.Tanh())):
        by = [TRUTH, OURS, PYHESSIAN, CURVLINOPS, BACKPACK]
        table = Table("quantity", *by, title=f"64-8-10 with {name}, {len(x)} digits")
        for quantity, values in rows(network(activation), x, y).items():
            shown = (values.get(library, "–") for library in by)
            table.add_row(quantity, *(f"{value:.6g}" if isinstance(value, float) else value for value in shown))
        Console().print(table)


def rows(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, Values]:
    """Return each quantity by library."""
    loss, data = nn.CrossEntropyLoss(), (x, y)
    parameters = dict(model.named_parameters())
    whole = dense(model, loss, data, list(parameters))
    block = dense(model, loss, data, ["0.weight"])
    weight = model[0].weight.detach()
    rows_of = block.reshape(*weight.shape, *weight.shape)
    kappa = float(((weight @ weight.T) * torch.einsum("sktk->st", rows_of)).sum())
    report = pf.measure(model, loss, data, layers=["0"], measures=["relative_flatness", "trace"], progress=False)
    spectrum = pf.spectrum(model, loss, data, k=1, which="both", progress=False)
    products = PyHessian(model, loss, data=data, cuda=False)
    operator = curvlinops.HessianLinearOperator(model, loss, [*parameters.values()], [data], check_deterministic=False)
    in_block = curvlinops.HessianLinearOperator(model, loss, [model[0].weight], [data], check_deterministic=False)
    diagonal, of_ggn = by_backpack(model, x, y)
    ends = torch.linalg.eigvalsh(whole)
    estimated = torch.tensor(products.trace(maxIter=100, tol=0.0))
    matrix = in_block @ torch.eye(weight.numel(), dtype=weight.dtype)
    matrix = matrix[0].flatten(0, 1) if isinstance(matrix, list) else matrix
    return {
        "κ of layer 0": {TRUTH: kappa, OURS: report["0", "relative_flatness"].value},
        "Tr(H) of layer 0": {
            TRUTH: float(block.trace()),
            OURS: report["0", "trace"].value,
            CURVLINOPS: float(matrix.trace()),
            BACKPACK: diagonal,
        },
        "Tr(GGN) of layer 0": {
            OURS: pf.measure(model, loss, data, layers=["0"], measures="trace", curvature="ggn", progress=False)[
                "0", "trace"
            ].value,
            BACKPACK: of_ggn,
        },
        "Tr(H), all parameters": {
            TRUTH: float(whole.trace()),
            OURS: pf.measure(model, loss, data, measures="sharpness", progress=False)["sharpness"].value,
            PYHESSIAN: f"{float(estimated.mean()):.4g} ± {float(estimated.std() / len(estimated) ** 0.5):.2g}",
        },
        "largest eigenvalue": {
            TRUTH: float(ends[-1]),
            OURS: float(spectrum.eigenvalues[0]),
            PYHESSIAN: products.eigenvalues(maxIter=100, tol=1e-3, top_n=1)[0][0],
            CURVLINOPS: float(eigsh(operator.to_scipy(), k=1, which="LA", return_eigenvectors=False)[0]),
        },
        "smallest eigenvalue": {
            TRUTH: float(ends[0]),
            OURS: float(spectrum.eigenvalues[-1]),
            CURVLINOPS: float(eigsh(operator.to_scipy(), k=1, which="SA", return_eigenvectors=False)[0]),
        },
    }


def dense(model: nn.Module, loss: nn.Module, data: tuple[Tensor, Tensor], names: list[str]) -> Tensor:
    """Return the Hessian in some parameters by nested autograd."""
    chosen = [dict(model.named_parameters())[name] for name in names]
    gradient = torch.cat(
        [part.flatten() for part in torch.autograd.grad(loss(model(data[0]), data[1]), chosen, create_graph=True)]
    )
    each = (torch.autograd.grad(entry, chosen, retain_graph=True) for entry in gradient)
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in each])


def by_backpack(model: nn.Sequential, x: Tensor, y: Tensor) -> tuple[float, float]:
    """Return the traces of the Hessian and of the GGN of the first layer's weight."""
    extended, loss = extend(copy.deepcopy(model)), extend(nn.CrossEntropyLoss())  # whose hooks stay
    with backpack(DiagHessian(), DiagGGNExact()):
        loss(extended(x), y).backward()
    weight = extended[0].weight
    return float(weight.diag_h.sum()), float(weight.diag_ggn_exact.sum())


if __name__ == "__main__":
    main()
