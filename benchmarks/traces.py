"""Errors of traces by Hutchinson, Hutch++ and XTrace at equal numbers of products, beside probes of each sample's own.

Run from the project's root: ``python benchmarks/traces.py [--images N] [--trials T] [--products M …] [--only NAME]``.
Networks and images are those of ``../shared``: a LeNet5 and the published ResNet-20 on CIFAR-10, whose layers are
piecewise linear behind, so that a layer's block is H = Bᵀ B with B the gradients of the columns of the losses'
square-root factors, and the exact trace is |B|².

- Hutchinson (1990): the mean of ⟨r, H r⟩ over signs r, each product over all images;
- Hutch++ (Meyer et al. 2021, arXiv:2010.09649);
- XTrace (Epperly, Tropp and Webber 2024, arXiv:2301.07825), with the scale of random vectors on the sphere;
- a probe for each sample: ⟨r_i, H_i r_i⟩ with signs of each sample's own, over all images in one product;
- a cotangent for each sample: random signs of the factor's columns, which is what ``probes=`` sends here: a backward
  pass, and no product.

Printed is the root of the mean squared error relative to the trace: of Hutch++ and XTrace over some trials, of random
signs by their variance.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from networks import cifar10, published
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn

ZOO = Path(__file__).parents[2] / "shared" / "zoo"
Estimator = Callable[[Tensor, int], float]


def signs(*shape: int) -> Tensor:
    """Return random signs."""
    return torch.randint(2, shape).mul_(2).sub_(1).float()


def times(factor: Tensor, vectors: Tensor) -> Tensor:
    """Return H Ω for H = Bᵀ B, Ω (N, k)."""
    return factor.flatten(0, 1).t() @ (factor.flatten(0, 1) @ vectors)


def hutch_plus_plus(factor: Tensor, products: int) -> float:
    """Return the estimate of Tr(H): a third of the products finds a space, of which a third is the exact trace."""
    third = products // 3
    space, _ = torch.linalg.qr(times(factor, signs(factor.shape[2], third)))
    inside = (space * times(factor, space)).sum(dtype=torch.float64)
    rest = signs(factor.shape[2], third)
    rest = rest - space @ (space.t() @ rest)
    return float(inside + (rest * times(factor, rest)).sum(dtype=torch.float64) / third)


def xtrace(factor: Tensor, products: int) -> float:
    """Return the estimate of Tr(H): of half as many vectors each tests the space of all the others."""
    size, count = factor.shape[2], products // 2
    vectors = torch.randn(size, count)
    vectors *= size**0.5 / vectors.norm(dim=0)
    images = times(factor, vectors)
    space, triangle = torch.linalg.qr(images)
    again = times(factor, space)
    inverse = torch.linalg.inv(triangle.double()).t()
    s = inverse / inverse.norm(dim=0)  # the direction of the space that each vector alone has found
    inside, along, cross = ((a.t() @ b).double() for a, b in ((space, again), (space, vectors), (again, vectors)))
    u = along - s * (s * along).sum(dim=0)
    quadratic = (vectors * images).sum(dim=0).double() - 2 * (cross * u).sum(dim=0) + (u * (inside @ u)).sum(dim=0)
    scale = (size - count + 1) / (size - (u * u).sum(dim=0))
    traces = inside.trace() - (s * (inside @ s)).sum(dim=0)
    return float((traces + scale * quadratic).mean())


def by_trials(estimator: Estimator, trials: int) -> Estimator:
    """Return what gives the error of an estimator, by so many trials."""

    def error(factor: Tensor, products: int) -> float:
        trace = float(factor.double().square().sum())
        found = torch.tensor([estimator(factor, products) for _ in range(trials)], dtype=torch.float64)
        return float((found / trace - 1).square().mean().sqrt())

    return error


def of_signs(squares: Tensor, diagonal: Tensor, trace: Tensor, products: int) -> float:
    """Return the error of probes by random signs: the variance of one is 2 (|H|² - Σ_j H_jj²)."""
    return float((2 * (squares - diagonal) / products).clamp_min(0).sqrt() / trace)


def hutchinson(factor: Tensor, products: int) -> float:
    """Return the error of signs that all samples share."""
    rows = factor.flatten(0, 1)
    squares, columns = (rows @ rows.t()).double().square().sum(), rows.double().square().sum(dim=0)
    return of_signs(squares, columns.square().sum(), columns.sum(), products)


def by_sample(factor: Tensor, products: int) -> float:
    """Return the error of signs of each sample's own."""
    squares, columns = (factor @ factor.mT).double().square().sum(), factor.square().sum(dim=1).double()
    return of_signs(squares, columns.square().sum(), columns.sum(), products)


def by_cotangent(factor: Tensor, products: int) -> float:
    """Return the error of random combinations of each sample's columns."""
    gram = (factor @ factor.mT).double()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    return of_signs(gram.square().sum(), diagonal.square().sum(), diagonal.sum(), products)


def factor_of(model: nn.Module, name: str, inputs: Tensor) -> Tensor:
    """Return B (n, C, N): of each sample the gradients in a layer's weight of its cross-entropy's columns, over √n."""
    weight = model.get_submodule(name).weight.detach()

    def columns(own: Tensor, image: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, {f"{name}.weight": own}, (image.unsqueeze(0),)).squeeze(0)
        p = outputs.detach().softmax(0)
        return p.sqrt() * (outputs - p @ outputs)  # ⟨√p_c (e_c - p), f⟩

    jacobian = torch.func.vmap(torch.func.jacrev(columns), in_dims=(None, 0), chunk_size=16)
    return jacobian(weight, inputs).flatten(2).detach() / len(inputs) ** 0.5


def cases(images: int, only: str) -> Iterator[tuple[str, Tensor]]:
    """Yield layers whose names begin so, and their factors."""
    spec = importlib.util.spec_from_file_location("zoo", ZOO / "lenet5.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lenet = module.LeNet5().eval()
    lenet.load_state_dict(load_file(ZOO / "lenet5_cifar10k_adam_bs128_lr0.0005_seed0.safetensors"))
    inputs, _ = module.images("train", images)
    wanted = [("LeNet5", lenet, inputs, name) for name in ("conv1", "conv2", "fc2", "fc3")]
    resnet, (inputs, _) = published(20), cifar10(images)
    layers = [name for name, layer in resnet.named_modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    wanted += [("ResNet-20", resnet, inputs, layers[place]) for place in (5, 12, -1)]
    for title, model, inputs, name in wanted:
        if f"{title} {name}".startswith(only):
            yield f"{title} {name}", factor_of(model, name, inputs)


def main() -> None:
    """Print a table for each number of products."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--only", default="", help="beginning of the names of layers")
    parser.add_argument("--products", type=int, nargs="+", default=[12, 48])
    options = parser.parse_args()
    torch.manual_seed(0)
    estimators: dict[str, Estimator] = {
        "Hutchinson": hutchinson,
        "Hutch++": by_trials(hutch_plus_plus, options.trials),
        "XTrace": by_trials(xtrace, options.trials),
        "a probe for each sample": by_sample,
        "a cotangent for each sample": by_cotangent,
    }
    tables = {count: Table(title=f"{count} products, {options.images} images") for count in options.products}
    for table in tables.values():
        for column in ("layer", "weights", *estimators):
            table.add_column(column, justify="left" if column == "layer" else "right")
    for name, factor in cases(options.images, options.only):
        for count, table in tables.items():
            errors = [f"{100 * error(factor, count):.2g} %" for error in estimators.values()]
            table.add_row(name, str(factor.shape[2]), *errors)
    for table in tables.values():
        Console(width=140).print(table)


if __name__ == "__main__":
    main()
