"""Contractions on a GPU: rows for ``benchmarks/gpu.py``.

- ResNet-18, all layers, float32, with convolutions and matrix products each in full precision or in TF32: the floor is
  the bare sweep (:mod:`bare`), ``took`` the sweep with pyflatness's contractions, ``composed`` with contractions
  composed in torch, ``reference`` with those of pyflatness in plain torch.
- The same by a user's call, whose overhead on the host counts.
- A linear layer of a transformer block in bfloat16: the floor is the multiply-adds of the cheaper route at the rate of
  a 4096 × 4096 product in the same run.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import bare
import torch
from gpu_rows import Row, Works, milliseconds, peak_mib
from networks import images, measurable, resnet18, settled
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.contractions import Backend, Geometry, LayerContraction
from pyflatness.contractions.backends import cuda, reference
from pyflatness.contractions.layer import Contraction
from pyflatness.model import layers

MEMORY = 2 << 30  # for buffers, and three times as much for cotangents
BEYOND = 20.0  # milliseconds that the contractions of ResNet-18 are to take at most beyond the sweep
PRECISIONS = (
    ("tf32", "ieee"),
    ("tf32", "tf32"),
    ("ieee", "ieee"),
)  # of convolutions and of products; torch's own first


def works(device: torch.device) -> Works:
    """Return what makes each row."""
    found: dict[str, Callable[[], Row]] = {}
    model = functools.cache(lambda: settled(resnet18()).to(device))
    for convolutions, products in PRECISIONS:
        said = f"ResNet-18, n = 256, convolutions {convolutions}, products {products}"
        for take, name in ((network, said), (public_call, f"{said}, pf.measure")):
            found[name] = functools.partial(in_precision, convolutions, products, take, model, 256, device)
    said = "ResNet-18, n = 256, pf.spectrum, 8 Hessian products"
    found[said] = lambda: hessian_products(model(), 256, 8, device)
    found["linear 4096 × 4096, 8 × 2048 tokens, bfloat16"] = functools.partial(sequence, 8, 2048, 4096, device)
    return found


def in_precision(
    convolutions: str,
    products: str,
    take: Callable[..., Row],
    make: Callable[[], nn.Module],
    n: int,
    device: torch.device,
) -> Row:
    """Return the row of a network while float32 work is done in these precisions."""
    with precision(convolutions, products):
        return take(make(), n, device)


@contextlib.contextmanager
def precision(convolutions: str, products: str) -> Iterator[None]:
    """Do float32 convolutions and matrix products on a GPU in these precisions, inside a ``with`` block."""
    kinds = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [kind.fp32_precision for kind in kinds]
    for kind, wanted in zip(kinds, (convolutions, products), strict=True):
        kind.fp32_precision = wanted
    try:
        yield
    finally:
        for kind, found in zip(kinds, before, strict=True):
            kind.fp32_precision = found


def network(model: nn.Module, n: int, device: torch.device, backend: Backend = cuda, rounds: int = 5) -> Row:
    """Return relative flatness of all layers of a network on n images, 9 cotangents of 10 classes."""
    sweep, plain, x = Contracted(model, backend), Contracted(model, reference), images(n).to(device)
    check(sweep.values(x) / n, torch.stack([*bare.composed(sweep.bare, [x]).values()]))
    times = milliseconds(
        {
            "sweep": lambda: sweep.bare.run([x]),
            "ours": lambda: sweep.values(x),
            "composed": lambda: bare.composed(sweep.bare, [x]),
            "reference": lambda: plain.values(x),
        },
        device,
        rounds,
    )
    least = peak_mib(lambda: sweep.bare.run([x]), device)
    extra, floor = peak_mib(lambda: sweep.values(x), device) - least, times.pop("sweep")
    return Row(floor, times.pop("ours"), times, extra, floor + BEYOND, f"extra to be ≤ {0.2 * least:.0f} MiB")


def public_call(model: nn.Module, n: int, device: torch.device, backend: str = "compiled", rounds: int = 5) -> Row:
    """Return the same by a user's call."""
    sweep = bare.Sweep(model, measurable(model))
    data = images(n).to(device), (torch.arange(n) % 10).to(device)

    def measured(backend: str, memory: int | None = None) -> Tensor:
        report = pf.measure(
            model, "cross_entropy", data, measures="relative_flatness", backend=backend, memory=memory, progress=False
        )
        return torch.tensor([report[name, "relative_flatness"].value for name in sweep.layers])

    check(measured(backend), measured("reference"))
    times = milliseconds(
        {
            "sweep": lambda: sweep.run([data[0]]),
            "ours": lambda: measured(backend),
            "memory=512 MiB": lambda: measured(backend, 512 << 20),
            "reference": lambda: measured("reference"),
        },
        device,
        rounds,
    )
    least = peak_mib(lambda: sweep.run([data[0]]), device)
    extra = peak_mib(lambda: measured(backend), device) - least
    return Row(times.pop("sweep"), times.pop("ours"), times, extra)


def hessian_products(model: nn.Module, n: int, count: int, device: torch.device, rounds: int = 5) -> Row:
    """Return the trace of the Hessian in all parameters by products with so many random vectors.

    The floor takes no more than these products: a gradient with its graph, and one derivative of it for each vector.
    """
    x, y = images(n).to(device), (torch.arange(n) % 10).to(device)
    parameters = [*model.parameters()]
    signs = [[torch.randn_like(parameter).sign() for parameter in parameters] for _ in range(count)]

    def bare_products() -> Tensor:
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), parameters, create_graph=True)
        total = x.new_zeros(())
        for vector in signs:
            products = torch.autograd.grad(gradients, parameters, vector, retain_graph=True)
            total += sum((one * other).sum() for one, other in zip(products, vector, strict=True))
        return total

    def ours() -> pf.results.Spectrum:
        return pf.spectrum(model, "cross_entropy", (x, y), k=0, density=True, probes=count, steps=1, progress=False)

    products = ours().products
    times = milliseconds({"bare": bare_products, "ours": ours}, device, rounds)
    extra = peak_mib(ours, device) - peak_mib(bare_products, device)
    return Row(times.pop("bare"), times.pop("ours"), times, extra, None, f"{products} products")


def sequence(n: int, tokens: int, width: int, device: torch.device, backend: Backend = cuda, rounds: int = 9) -> Row:
    """Return relative flatness of a linear layer, width × width, for one cotangent of n sequences."""
    layer = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
    phi, delta = (torch.randn(n, tokens, width, device=device).bfloat16() for _ in range(2))
    weight = layer.weight.detach()
    inputs, signal = (layers.kind_of(layer).in_common_form(t) for t in (phi, delta))

    def contracted(backend: Backend) -> Callable[[], Tensor]:
        form = LayerContraction(weight[None], Geometry(), backend, ("gram_weighted",), memory=MEMORY)
        return lambda: form.at(inputs, 1).of(signal).values[0]

    def composed() -> Tensor:
        squares = weight.float() @ weight.float().t()
        pairs = (delta @ squares.bfloat16()) @ delta.mT
        return ((phi @ phi.mT).float() * pairs).sum(dim=(1, 2), dtype=torch.float64)

    ours = contracted(backend)
    check(ours(), composed(), 2e-2)  # what half precision leaves of the composed form's products
    side = min(width, 4096)
    square = torch.randn(side, side, device=device).bfloat16()
    alternatives = {
        "product": lambda: square @ square,
        "ours": ours,
        "composed": composed,
        "reference": contracted(reference),
    }
    times = milliseconds(alternatives, device, rounds)
    places = tokens * width * width + 2 * tokens**2 * width  # R δ, and two Gram matrices
    floor = times.pop("product") * n * min(places, tokens * width**2 + width**3) / side**3
    return Row(floor, times.pop("ours"), times, peak_mib(ours, device), 1.3 * floor)


class Contracted:
    """The bare sweep with pyflatness's contractions for relative flatness.

    Args:
        model: on its device.
        backend: of the contractions.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        self.bare = bare.Sweep(model, measurable(model))
        self._forms = {
            name: LayerContraction(
                layers.matrix(module)[0][None],
                layers.kind_of(module).geometry,
                backend,
                ("gram_weighted",),
                memory=MEMORY,
                convolution=layers.is_convolution(module),
            )
            for name, module in self.bare.layers.items()
        }

    def values(self, x: Tensor) -> Tensor:
        """Return sums over the samples, (layers,)."""
        totals = {name: torch.zeros((), dtype=torch.float64, device=x.device) for name in self._forms}
        for inputs, signals in self.bare.passes([x]):
            contractions = {name: self._contraction(name, phi) for name, phi in inputs.items()}
            for gradients in signals:
                for name, delta in gradients.items():
                    contraction = contractions[name]
                    contract = contraction.of if contraction.stack_size == 1 else contraction.hold
                    found = contract(self._common(name, delta))
                    if found is not None:
                        totals[name] += found.values[0].sum()
            for name, contraction in contractions.items():
                found = contraction.rest()
                if found is not None:
                    totals[name] += found.values[0].sum()
        return torch.stack([*totals.values()])

    def _contraction(self, name: str, phi: Tensor) -> Contraction:
        inputs = self._common(name, layers.kind_of(self.bare.layers[name]).pad(phi, phi))
        return self._forms[name].at(inputs, 9, 3 * MEMORY)

    def _common(self, name: str, tensor: Tensor) -> list[Tensor]:
        module = self.bare.layers[name]
        images = layers.is_convolution(module)  # one of each sample
        return layers.kind_of(module).in_common_form(tensor.unsqueeze(1) if images else tensor)


def check(ours: Tensor, composed: Tensor, tolerance: float = 1e-2) -> None:
    """Raise unless both ways give the same values."""
    torch.testing.assert_close(ours.double(), composed.double(), rtol=tolerance, atol=0)
