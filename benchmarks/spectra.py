"""Spectra beside the libraries that people take for them: hessian-eigenthings, PyHessian and curvlinops.

Run from the project's root: ``python benchmarks/spectra.py [lenet5 | resnet20] [k1 k5 density trace]``. Networks
and images are those of ``../shared``. All take the Hessian in all parameters, on the same two batches, in float32.

- ``k1``, ``k5``: the largest eigenvalues, to residuals |H y - θ y| of 1e-3 of the largest one. Each library is told
  what brings it there with the fewest products: Lanczos of hessian-eigenthings, which does not stop by itself, the
  number of steps, ARPACK behind curvlinops the tolerance. PyHessian's power iteration stops by its own rule, told 1e-3.
  ``pf.spectrum`` is told the tolerance, and its count for k = 5 includes what finds copies of eigenvalues, which no
  other has. Behind are residuals as measured here. One
  gradient over all of the data is timed beside them.
- ``density``: Lanczos quadrature, 2 probes of 32 steps (PyHessian: ``torch.eig``, which is no more).
- ``trace``: 32 random vectors.

Calls run in turn; printed are medians, Hessian-vector products over all of the data, and times as ratios to the first.

What lost, and is left out: ``is_grads_batched=True`` for the vectors of a product. It takes 0.2 to 0.5 times as long
for an MLP of 1,827 weights and 8 to 32 vectors, and 0.9 to 1.1 times with 269,322 weights or for a layer of a
transformer, and as long as now for LeNet5 with torch's second derivatives of convolutions (1.1 times for two vectors).
So does ``torch.func.jvp`` of the gradient under ``vmap``: 0.96 of the written-out derivatives with 8 vectors, 1.5 times
with one.
"""

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import curvlinops
import torch
from curvlinops.papyan2020traces.spectrum import fast_lanczos
from eigenvalues import ZOO, batches
from hessian_eigenthings import algorithms as eigenthings
from hessian_eigenthings.operators import HessianOperator
from networks import cifar10, lenet5, published
from pyhessian import hessian as PyHessian
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from scipy.sparse.linalg import eigsh
from timing import Timing, in_turn
from torch import Tensor, nn

import pyflatness as pf

TOLERANCE, STEPS, PROBES, VECTORS = 1e-3, 32, 2, 32
LOSS = nn.CrossEntropyLoss()
Data = list[tuple[Tensor, Tensor]]
OURS, ONCE = "pyflatness", "pyflatness, copies=False"
EIGENTHINGS, PYHESSIAN, CURVLINOPS = "hessian-eigenthings", "PyHessian", "curvlinops"
GRADIENT = "one gradient"


@dataclass
class Found:
    """Hold what a call found: numbers to print, and vectors whose residuals are measured."""

    numbers: str
    vectors: Tensor | None = None


@dataclass
class Setting:
    """Hold a network, its data, and how many products each library took in its last call."""

    model: nn.Module
    data: Data
    products: dict[str, float] = field(default_factory=dict)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters in the model's order, which is that of all vectors."""
        return [*self.model.parameters()]

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return sum(w.numel() for w in self.parameters)

    def counted(
        self, name: str, function: Callable[..., Any], vectors: Callable[..., float] = lambda *args: 1
    ) -> Callable[..., Any]:
        """Return a product that is counted, from zero, by how many vectors it has."""
        self.products[name] = 0

        def product(*args: Any) -> Any:
            self.products[name] += vectors(*args)
            return function(*args)

        return product

    def eigenthings(self) -> HessianOperator:
        """Return the operator of hessian-eigenthings."""
        operator = HessianOperator(self.model, self.data, lambda model, batch: LOSS(model(batch[0]), batch[1]))
        operator.matvec = self.counted(EIGENTHINGS, operator.matvec)
        return operator

    def pyhessian(self) -> PyHessian:
        """Return PyHessian's object."""
        found = PyHessian(self.model, LOSS, dataloader=self.data, cuda=False)
        found.dataloader_hv_product = self.counted(PYHESSIAN, found.dataloader_hv_product)
        return found

    def curvlinops(self) -> curvlinops.HessianLinearOperator:
        """Return the operator of curvlinops, without its checks."""
        operator = curvlinops.HessianLinearOperator(
            self.model, LOSS, self.parameters, self.data, check_deterministic=False, num_data=self.samples
        )
        operator._matmat_batch = self.counted(
            CURVLINOPS, operator._matmat_batch, lambda x, y, matrix: matrix[0].shape[-1] / len(self.data)
        )
        return operator

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return sum(len(x) for x, _ in self.data)

    def residuals(self, vectors: Tensor) -> Tensor:
        """Return |H y - θ y| of unit vectors (k, N), θ = ⟨y, H y⟩, and θ: (2, k)."""
        images = torch.stack([self._times(vector) for vector in vectors])
        values = (images * vectors).sum(1)
        return torch.stack([(images - values.unsqueeze(1) * vectors).norm(dim=1), values])

    def _times(self, vector: Tensor) -> Tensor:
        parts = [
            p.view_as(w)
            for p, w in zip(vector.split([w.numel() for w in self.parameters]), self.parameters, strict=True)
        ]
        total = torch.zeros_like(vector)
        for x, y in self.data:
            gradients = torch.autograd.grad(LOSS(self.model(x), y), self.parameters, create_graph=True)
            products = torch.autograd.grad(gradients, self.parameters, parts)
            total += torch.cat([p.flatten() for p in products]) * len(x) / self.samples
        return total


def spectrum(setting: Setting, name: str = OURS, **options: Any) -> pf.results.Spectrum:
    """Return what ``pf.spectrum`` does, with its products counted."""
    found = pf.spectrum(setting.model, LOSS, setting.data, progress=False, **options)
    setting.products[name] = found.products
    return found


def of_pairs(setting: Setting, k: int) -> dict[str, Callable[[], Found]]:
    """Return calls for the k largest eigenvalues."""
    steps, values = _steps(setting, k)
    relative = TOLERANCE * float(values[-1] / values[0])

    def ours(name: str) -> Found:
        found = spectrum(setting, name, k=k, tolerance=TOLERANCE, copies=name == OURS)
        flat = torch.cat([each.flatten(1) for each in found.eigenvectors.values()], dim=1)
        return Found(_listed(found.eigenvalues), flat.float())

    def theirs() -> Found:
        options = {"k": k, "max_iter": steps, "which": "LA", "seed": 0, "reorthogonalize": True}
        found = eigenthings.lanczos(setting.eigenthings(), **options)
        return Found(_listed(found.eigenvalues), found.eigenvectors)

    def power() -> Found:
        values, vectors = setting.pyhessian().eigenvalues(maxIter=100, tol=TOLERANCE, top_n=k)
        return Found(_listed(values), torch.stack([torch.cat([p.flatten() for p in v]) for v in vectors]))

    def arpack() -> Found:
        start = torch.randn(setting.size, generator=torch.Generator().manual_seed(0)).numpy()
        values, vectors = eigsh(setting.curvlinops().to_scipy(), k=k, which="LA", tol=relative, v0=start)
        return Found(_listed(values[::-1]), torch.from_numpy(vectors.T[::-1].copy()).float())

    def gradient() -> Found:
        setting.products[GRADIENT] = 1
        for x, y in setting.data:
            torch.autograd.grad(LOSS(setting.model(x), y), setting.parameters)
        return Found("–")

    return {
        **{name: partial(ours, name) for name in (OURS, ONCE)},
        **{EIGENTHINGS: theirs, PYHESSIAN: power, CURVLINOPS: arpack, GRADIENT: gradient},
    }


def _steps(setting: Setting, k: int) -> tuple[int, Tensor]:
    """Return after how many steps Lanczos of hessian-eigenthings has k small residuals, and the values."""
    start = torch.randn(setting.size, generator=torch.Generator().manual_seed(0))
    found = eigenthings.lanczos_tridiagonal(setting.eigenthings(), start, 30 * k)
    for steps in range(k + 1, 30 * k):
        off = found.betas[: steps - 1]
        projected = torch.diag(found.alphas[:steps]) + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(projected)
        if bool((vectors[-1, -k:].abs() * found.betas[steps - 1] <= TOLERANCE * values[-1]).all()):
            return steps, values[-k:]
    raise RuntimeError(f"{30 * k} steps of Lanczos do not bring {k} residuals to {TOLERANCE} of the largest eigenvalue")


def of_density(setting: Setting) -> dict[str, Callable[[], Found]]:
    """Return calls for the density; what is shown is the trace that it gives."""

    def ours() -> Found:
        density = spectrum(setting, k=0, density=True, probes=PROBES, steps=STEPS).density
        assert density is not None
        return Found("{:.4g} ± {:.2g}".format(*density.moment(1)))

    def theirs() -> Found:
        found = eigenthings.spectral_density(
            setting.eigenthings(), num_runs=PROBES, lanczos_steps=STEPS, num_grid_points=1000, seed=0
        )
        each = setting.size * (found.raw_eigenvalues * found.raw_weights).sum(1)
        return Found(f"{each.mean():.4g} ± {each.std() / PROBES**0.5:.2g}")

    def papyan() -> Found:
        operator = setting.curvlinops()
        found = [fast_lanczos(operator, STEPS) for _ in range(PROBES)]
        each = torch.stack([setting.size * (values * vectors[0].square()).sum() for values, vectors in found])
        return Found(f"{each.mean():.4g} ± {each.std() / PROBES**0.5:.2g}")

    return {OURS: ours, EIGENTHINGS: theirs, CURVLINOPS: papyan}


def of_trace(setting: Setting) -> dict[str, Callable[[], Found]]:
    """Return calls for the trace by so many random vectors."""

    def ours() -> Found:
        density = spectrum(setting, k=0, density=True, probes=VECTORS, steps=1).density
        assert density is not None
        return Found("{:.4g} ± {:.2g}".format(*density.moment(1)))

    def theirs() -> Found:
        found = eigenthings.hutchinson(setting.eigenthings(), num_samples=VECTORS, seed=0)
        return Found(f"{found.estimate:.4g} ± {found.stderr:.2g}")

    def yao() -> Found:
        each = torch.tensor(setting.pyhessian().trace(maxIter=VECTORS, tol=0.0))
        return Found(f"{each.mean():.4g} ± {each.std() / VECTORS**0.5:.2g}")

    def hutchinson() -> Found:
        return Found(f"{float(curvlinops.hutchinson_trace(setting.curvlinops(), VECTORS)):.4g}")

    return {OURS: ours, EIGENTHINGS: theirs, PYHESSIAN: yao, CURVLINOPS: hutchinson}


def shown(title: str, setting: Setting, calls: dict[str, Callable[[], Found]], rounds: int) -> None:
    """Time the calls and print the table."""
    found: dict[str, Found] = {}
    counted: dict[str, float] = {}

    def run(name: str) -> None:
        found[name] = calls[name]()
        counted[name] = setting.products[name]

    timed = in_turn({name: partial(run, name) for name in calls}, rounds, repeats=1)
    table = Table(title=title)
    for column in ("", "products", "s", "times pyflatness", "ms a product", "found", "largest residual / λ_1"):
        table.add_column(column, justify="left" if column in ("", "found") else "right")
    for name, timing in timed.items():
        table.add_row(name, *_cells(setting, found[name], round(counted[name]), timing, timed[OURS]))
    Console(width=150).print(table)


def _cells(setting: Setting, found: Found, products: int, timing: Timing, ours: Timing) -> Sequence[str]:
    residual = "–"
    if found.vectors is not None:
        each, values = setting.residuals(torch.nn.functional.normalize(found.vectors, dim=1))
        residual = f"{float(each.max() / values.max()):.1e}"
    return (
        f"{products}",
        f"{timing.median:.2f}",
        f"{timing.ratio(ours):.3f}",
        f"{1000 * timing.median / products:.1f}",
        found.numbers,
        residual,
    )


def _listed(values: Any) -> str:
    return ", ".join(f"{float(value):.4g}" for value in values)


def of_lenet5(count: int) -> Setting:
    """Return LeNet5 of the zoo on some images."""
    model = lenet5().eval()
    model.load_state_dict(load_file(sorted(ZOO.glob("*.safetensors"))[0]))
    (x, y), *_ = batches(count)
    return Setting(model, _halves(x, y))


def of_resnet20(count: int) -> Setting:
    """Return the published ResNet-20 on some images."""
    return Setting(published(20), _halves(*cifar10(count)))


def _halves(x: Tensor, y: Tensor) -> Data:
    return list(zip(x.split(len(x) // 2), y.split(len(y) // 2), strict=True))


def main() -> None:
    """Print the tables that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=["lenet5", "resnet20"])
    parser.add_argument("parts", nargs="*", choices=["k1", "k5", "density", "trace", []])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")
    if arguments.network == "lenet5":
        setting = of_lenet5(arguments.images or 128)
    else:
        setting = of_resnet20(arguments.images or 16)
    about = f"{arguments.network}, {setting.size:,} weights, {setting.samples} images"
    for part in arguments.parts or ["k1", "k5", "density", "trace"]:
        if part in ("k1", "k5"):
            calls = of_pairs(setting, int(part[1:]))
        else:
            calls = of_density(setting) if part == "density" else of_trace(setting)
        shown(f"{part}: {about}", setting, calls, arguments.rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
