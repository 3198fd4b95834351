"""Eigenvalues by Lanczos: how many products they take, how near they come to dense ones, and how long that takes.

    python benchmarks/eigenvalues.py [--samples N] [CHECKPOINT...]      # LeNet5 of the zoo, in ../shared

The Hessians of the rows of LeNet5's fc2 (84 matrices of 120 x 120) over 10,000 images: the largest eigenvalue of each,
a product being one for all rows, against ``eigvalsh`` of all of them, written out in closed form; the largest error of
a row, relative to its eigenvalue. Then the whole call for κ^φ and for λ_max of every layer and the network, and forward
passes alone. Without the zoo: random weights, noise for images.
"""

import argparse
import time
from pathlib import Path

import torch
from networks import images, lenet5
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.numerics import lanczos
from pyflatness.scoring import specs

ZOO = Path(__file__).resolve().parents[2] / "shared" / "zoo"
Data = list[tuple[Tensor, Tensor]]


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoints", nargs="*", type=Path)
    parser.add_argument("--samples", type=int, default=10_000)
    arguments = parser.parse_args()
    data = batches(arguments.samples)
    for path in arguments.checkpoints or sorted(ZOO.glob("*.safetensors"))[:1] or [None]:
        model = lenet5().eval()
        if path is not None:
            model.load_state_dict(load_file(path))
        print("random weights" if path is None else path.stem)
        of_rows(model, data)
        of_calls(model, data)


def batches(samples: int) -> Data:
    """Return the zoo's training images, or noise."""
    if ZOO.is_dir():
        x, y = specs.resolve(f"{ZOO}/lenet5.py:images")("train", samples)
    else:
        x, y = images(samples), torch.arange(samples) % 10
    return list(zip(x.split(1000), y.split(1000), strict=True))


@torch.no_grad()
def of_rows(model: nn.Sequential, data: Data) -> None:
    """Errors by the number of products, of all rows of fc2."""
    phi, weights = curvatures(model, data)
    start = time.perf_counter()
    dense = torch.stack([torch.linalg.eigvalsh(phi.t() * h @ phi)[-1] for h in weights.t()])
    print(f"  fc2, all {len(dense)} rows: dense {time.perf_counter() - start:.2f} s")
    live = dense > 0
    vectors = torch.randn(weights.shape[1], phi.shape[1], generator=torch.Generator().manual_seed(0)).double()
    for limit in (5, 10, 15, 20, 30, 40):
        start = time.perf_counter()
        search = lanczos.largest(vectors, tolerance=0.0, max_products=limit - 1, size=limit)
        found = lanczos.solved(search, lambda v: (weights * (phi @ v.t())).t() @ phi)
        seconds = time.perf_counter() - start
        error = ((found.values - dense).abs()[live] / dense[live]).max()
        bound = (found.residuals[live] / dense[live]).max()
        print(f"    {found.products:3d} products: error {error:.1e}, residual {bound:.1e}, {seconds:.2f} s")


def curvatures(model: nn.Sequential, data: Data) -> tuple[Tensor, Tensor]:
    """φ (n, 120) of fc2 and ∂²ℓ_i/∂z_is² / n (n, 84) in closed form: the variance of fc3's column s under p_i."""
    parts = dict(model.named_children())
    place = [*parts].index("fc2")
    phi = torch.cat([model[:place](x) for x, _ in data]).double()
    fc2, fc3 = parts["fc2"].double(), parts["fc3"].double()
    z = fc2(phi)
    p = torch.softmax(fc3(F.relu(z)), dim=1)
    variance = p @ fc3.weight.square() - (p @ fc3.weight).square()
    fc2.float(), fc3.float()
    return phi, variance.clamp_min(0) * (z > 0) / len(phi)


def of_calls(model: nn.Module, data: Data) -> None:
    """Whole calls, what they say of themselves, and how many forward passes they take the time of."""
    start = time.perf_counter()
    with torch.no_grad():
        for x, _ in data:
            model(x)
    forward = time.perf_counter() - start
    for measure, layers in (("relative_flatness_max", "fc2"), ("lambda_max", None)):
        start = time.perf_counter()
        report = pf.measure(model, nn.CrossEntropyLoss(), data, layers=layers, measures=measure, progress=False)
        seconds = time.perf_counter() - start
        print(f"  {measure}: {seconds:.1f} s, {seconds / forward:.0f} forward passes ({forward:.2f} s each)")
        for layer in report.layers:
            print(f"    {layer}: {report[layer, measure]}")
        if measure == "lambda_max":
            print(f"    network: {report[measure]}")


if __name__ == "__main__":
    main()
