r"""By which factor other libraries' traces differ from the mean loss's own: the second table of docs/comparison.md.

    pip install --no-deps curvlinops-for-pytorch==3.0.1 backpack-for-pytorch==1.7.1 laplace-torch==0.3 \
        nngeometry==0.4 asdfghjkl==0.1a5 hessian-eigenthings==1.0.0a5 pyhessian==0.1 opacus==1.6.0 \
        einops einconv linear-operator tensordict torchmetrics opt-einsum unfoldNd
    python benchmarks/factors.py

The network is Linear(6, 5)–tanh–Linear(5, 10) in float64, the loss cross-entropy over 20 samples, in one batch or in
batches of 12 and 8. H, G and E are the Hessian, the Gauss–Newton and the empirical Fisher matrix of the mean loss over
all of them, by nested autograd, which pyflatness's traces are held against too. Each cell is a library's trace over it.
"""

import copy
import functools
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import pyflatness as pf

Batches = list[tuple[Tensor, Tensor]]
X, Y = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 10
IGNORED = torch.where(torch.arange(20) < 5, -100, Y)  # all of the first batch's
WEIGHTS = torch.linspace(0.5, 2.0, 10).double()
ONE, TWO = [(X, Y)], [(X[:12], Y[:12]), (X[12:], Y[12:])]
CASES: dict[str, tuple[nn.CrossEntropyLoss, Batches]] = {
    "one batch": (nn.CrossEntropyLoss(), ONE),
    "12 and 8": (nn.CrossEntropyLoss(), TWO),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), ONE),
    "ignored": (nn.CrossEntropyLoss(), [(X, IGNORED)]),
    "ignored, 12 and 8": (nn.CrossEntropyLoss(), [(X[:12], IGNORED[:12]), (X[12:], IGNORED[12:])]),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), ONE),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), ONE),
}


PLAIN = ("one batch", "12 and 8", "sum")


def network() -> nn.Sequential:
    """Return the network, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 10)).double().eval()


def truth(loss: nn.CrossEntropyLoss, batches: Batches) -> dict[str, Tensor]:
    """Return H, G and E of the loss over all samples as one batch; of a sum as of a mean."""
    model = network()
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    mean = nn.CrossEntropyLoss(loss.weight, ignore_index=loss.ignore_index, label_smoothing=loss.label_smoothing)
    names, shapes = zip(*((name, held.shape) for name, held in model.named_parameters()), strict=True)
    theta = torch.cat([held.detach().flatten() for held in model.parameters()])

    def outputs(theta: Tensor, x: Tensor) -> Tensor:
        parts = theta.split([shape.numel() for shape in shapes])
        held = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return torch.func.functional_call(model, held, (x,))

    hessian = torch.func.hessian(lambda theta: mean(outputs(theta, x), y))(theta)
    jacobian = torch.func.jacrev(lambda theta: outputs(theta, x).flatten())(theta)
    inner = torch.func.hessian(lambda f: mean(f.view(len(x), -1), y))(outputs(theta, x).flatten())
    gradients = torch.stack(
        [torch.func.grad(lambda theta, i=i: mean(outputs(theta, x[i : i + 1]), y[i : i + 1]))(theta) for i in range(20)]
    )
    return {"H": hessian, "G": jacobian.T @ inner @ jacobian, "E": gradients.T @ gradients / len(gradients)}


def pyflatness(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by pf.measure, over all layers' weights and biases: of the Hessian, and of the GGN."""
    loss.reduction = "mean"
    found = pf.measure(model, loss, batches, measures="sharpness", progress=False)["sharpness"].value
    exact = pf.importance(model, loss, batches, kind="ggn", progress=False)
    return {"H": found, "G": float(sum(part.sum() for part in exact.values()))}


def curvlinops(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by curvlinops."""
    import curvlinops as library

    own = [*model.parameters()]
    found = {}
    kinds = {"H": library.HessianLinearOperator, "G": library.GGNLinearOperator, "E": library.EFLinearOperator}
    kinds["G (KFAC)"] = functools.partial(library.KFACLinearOperator, fisher_type="type-2")
    kinds["G (EKFAC)"] = functools.partial(library.EKFACLinearOperator, fisher_type="type-2")
    for name, kind in kinds.items():
        found[name] = of_operator(functools.partial(kind, model, loss, own, batches, check_deterministic=False))
    return found


def of_operator(make: Callable[[], Any]) -> float:
    """Return the trace of an operator of curvlinops; NaN where it refuses."""
    try:
        operator = make()
        return float(torch.trace(operator @ torch.eye(operator.shape[1], dtype=torch.float64)))
    except Exception as error:
        print(f"  curvlinops: {type(error).__name__}: {str(error)[:100]}")
        return float("nan")


def backpack(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by BackPACK, of which a call has one batch: the mean over the batches, by their samples."""
    from backpack import backpack as context
    from backpack import extend, extensions

    model, loss = extend(model), extend(loss)
    total = dict.fromkeys(("H", "G", "E (SumGradSquared)"), 0.0)
    for x, y in batches:
        with context(extensions.DiagHessian(), extensions.DiagGGNExact(), extensions.SumGradSquared()):
            loss(model(x), y).backward()
        for held in model.parameters():
            for name, part in zip(total, (held.diag_h, held.diag_ggn_exact, held.sum_grad_squared), strict=True):
                total[name] += float(part.sum()) * len(x) / 20
    return total


def laplace(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by laplace-torch, which has a loss of its own, over all parameters."""
    from laplace import Laplace
    from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

    data = ConcatDataset([TensorDataset(x, y) for x, y in batches])
    found = {}
    for name, structure in {"G (Full)": "full", "G (Diag)": "diag", "G (Kron)": "kron"}.items():
        la = Laplace(copy.deepcopy(model), "classification", subset_of_weights="all", hessian_structure=structure)
        la.fit(DataLoader(data, batch_size=len(batches[0][0])))
        held = la.H.diag() if structure == "kron" else la.H
        found[name] = float(held.trace() if held.ndim == 2 else held.sum())
    return found


def nngeometry(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by NNGeometry, which reads inputs alone."""
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDense, PMatDiag, PMatKFAC
    from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

    data = ConcatDataset([TensorDataset(x, y) for x, y in batches])
    loader, kinds = DataLoader(data, batch_size=len(batches[0][0])), {"Dense": PMatDense, "Diag": PMatDiag}
    return {
        f"G ({name})": float(FIM(model, loader, kind).trace()) for name, kind in {**kinds, "KFAC": PMatKFAC}.items()
    }


def asdl(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by asdl (asdfghjkl), of the exact Fisher matrix, with the count of samples that it is told."""
    import asdl as library

    found = {}
    for size in (20, 1):
        own = copy.deepcopy(model)
        config = library.FisherConfig("fisher_exact", ["diag"], loss_type="cross_entropy", data_size=size)
        maker = library.get_fisher_maker(own, config)
        for number, (x, y) in enumerate(batches):
            dummy = maker.setup_model_call(own, x)
            maker.setup_loss_call(nn.functional.cross_entropy, dummy, y)
            maker.forward_and_backward(accumulate=number > 0)
        parts = [getattr(module, "fisher", None) for module in own.modules()]
        found[f"G (data_size={size})"] = sum(
            float(held.sum()) for part in parts if part is not None for held in (part.diag.weight, part.diag.bias)
        )
    return found


def hessian_eigenthings(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return traces by hessian-eigenthings, by a product for each parameter."""
    import hessian_eigenthings as library

    of_output, forward = library.supervised_loss_of_output(loss), library.supervised_forward
    operators = {
        "H": library.HessianOperator(model, batches, library.supervised_loss(loss)),
        "G": library.GGNOperator(model, batches, forward, of_output),
        "E": library.EmpiricalFisherOperator(model, batches, library.supervised_per_sample_loss(loss)),
    }
    eye = torch.eye(sum(held.numel() for held in model.parameters()), dtype=torch.float64)
    return {name: sum(float(row @ held.matvec(row)) for row in eye) for name, held in operators.items()}


def pyhessian(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return the trace of products by PyHessian."""
    from pyhessian import hessian
    from pyhessian.utils import group_product, hessian_vector_product

    shapes = [held.shape for held in model.parameters()]
    whole = {"data": batches[0]} if len(batches) == 1 else {"dataloader": batches}
    found, total = hessian(model, loss, cuda=False, **whole), 0.0
    for row in torch.eye(sum(shape.numel() for shape in shapes), dtype=torch.float64):
        parts = [part.view(shape) for part, shape in zip(row.split([s.numel() for s in shapes]), shapes, strict=True)]
        if len(batches) == 1:
            product = hessian_vector_product(found.gradsH, found.params, parts)
        else:
            _, product = found.dataloader_hv_product(parts)
        total += float(group_product(product, parts))
    return {"H": total}


def opacus(model: nn.Module, loss: nn.Module, batches: Batches) -> dict[str, float]:
    """Return the trace of E by Opacus' per-sample gradients."""
    from opacus import GradSampleModule

    wrapped, total, count = GradSampleModule(model.train(), loss_reduction="mean"), 0.0, 0
    for x, y in batches:
        wrapped.zero_grad()
        loss(wrapped(x), y).backward()
        total += sum(float(held.grad_sample.square().sum()) for held in wrapped.parameters())
        count += len(x)
    return {"E": total / count}


LIBRARIES: dict[str, tuple[str, Callable[[nn.Module, nn.Module, Batches], dict[str, float]]]] = {
    "pyflatness": ("pyflatness", pyflatness),
    "curvlinops": ("curvlinops-for-pytorch", curvlinops),
    "BackPACK": ("backpack-for-pytorch", backpack),
    "laplace-torch": ("laplace-torch", laplace),
    "NNGeometry": ("nngeometry", nngeometry),
    "asdl": ("asdfghjkl", asdl),
    "hessian-eigenthings": ("hessian-eigenthings", hessian_eigenthings),
    "PyHessian": ("pyhessian", pyhessian),
    "Opacus": ("opacus", opacus),
}


def main() -> None:
    """Print a table: a row for each library and matrix, a column for each case; what a library refuses is empty."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    truths = {case: truth(*held) for case, held in CASES.items()}
    table = Table("library", "trace of", *CASES)
    for name, (package, function) in LIBRARIES.items():
        rows: dict[str, dict[str, str]] = {}
        for case, (loss, batches) in CASES.items():
            try:
                found = function(network(), copy.deepcopy(loss), batches)
            except Exception as error:  # of whatever kind it refuses the case by
                print(f"{name}, {case}: {type(error).__name__}: {str(error)[:100]}")
                continue
            for matrix, trace in found.items():
                if matrix[0] == "E" and case not in PLAIN:  # whose samples' own losses are a matter of definition
                    continue
                rows.setdefault(matrix, {})[case] = f"{trace / float(truths[case][matrix[0]].trace()):.4g}"
        version = importlib.metadata.version(package)
        for matrix, cells in rows.items():
            table.add_row(f"{name} {version}", matrix, *(cells.get(case, "") for case in CASES))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
