"""Contractions on a GPU: rows for ``benchmarks/gpu.py``. Not yet run on one.

- ResNet-18, all layers, float32 with TF32 allowed: the floor is the bare sweep, ``ours`` the sweep with pyflatness's
  contractions, ``composed`` with contractions composed in torch (:mod:`bare`).
- A linear layer of a transformer block in bfloat16: the floor is the multiply-adds of the cheaper route at the rate of
  a 4096 × 4096 product in the same run.
"""

from types import ModuleType

import bare
import torch
from gpu_rows import Row, milliseconds, peak_mib
from networks import images, measurable, resnet18, settled
from torch import Tensor, nn

from pyflatness.contractions import Geometry, LayerContraction, cuda
from pyflatness.contractions.layer import Contraction
from pyflatness.model import layers

MEMORY = 2 << 30  # for buffers, and three times as much for cotangents


def rows(device: torch.device | None = None) -> list[Row]:
    """Return all rows, on the GPU."""
    device = device or torch.device("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        return [network("ResNet-18", settled(resnet18()), 256, device, cuda), sequence(8, 2048, 4096, device, cuda)]
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def network(title: str, model: nn.Module, n: int, device: torch.device, backend: ModuleType, rounds: int = 9) -> Row:
    """Return relative flatness of all layers of a network on n images, 9 signals of 10 classes."""
    sweep = Contracted(model.to(device), backend)
    x = images(n).to(device)
    check(sweep.values(x) / n, torch.stack([*bare.composed(sweep.bare, [x]).values()]))
    times = milliseconds(
        {
            "sweep": lambda: sweep.bare.run([x]),
            "ours": lambda: sweep.values(x),
            "composed": lambda: bare.composed(sweep.bare, [x]),
        },
        device,
        rounds,
    )
    least = peak_mib(lambda: sweep.bare.run([x]), device)
    extra = peak_mib(lambda: sweep.values(x), device) - least
    target = f"contraction ≤ 20 ms (aim 10) beyond the sweep; extra ≤ {0.2 * least:.0f} MiB"
    return Row(f"{title}, n = {n}", times["sweep"], times["ours"], times["composed"], extra, target)


def sequence(n: int, tokens: int, width: int, device: torch.device, backend: ModuleType, rounds: int = 9) -> Row:
    """Return relative flatness of a linear layer, width × width, for one signal of n sequences."""
    layer = nn.Linear(width, width, bias=False, device=device, dtype=torch.bfloat16)
    phi, delta = (torch.randn(n, tokens, width, device=device).bfloat16() for _ in range(2))
    weight = layer.weight.detach()
    form = LayerContraction(weight[None], Geometry(), backend, ("gram_weighted",), memory=MEMORY)
    inputs, signal = (layers.kind_of(layer).in_common_form(t) for t in (phi, delta))

    def ours() -> Tensor:
        return form.at(inputs, 1).of(signal).values[0]

    def composed() -> Tensor:
        squares = weight.float() @ weight.float().t()
        pairs = (delta @ squares.bfloat16()) @ delta.mT
        return ((phi @ phi.mT).float() * pairs).sum(dim=(1, 2), dtype=torch.float64)

    check(ours(), composed(), 2e-2)  # what half precision leaves of the composed form's products
    side = min(width, 4096)
    square = torch.randn(side, side, device=device).bfloat16()
    times = milliseconds({"product": lambda: square @ square, "ours": ours, "composed": composed}, device, rounds)
    places = tokens * width * width + 2 * tokens**2 * width  # R δ, and two Gram matrices
    floor = times["product"] * n * min(places, tokens * width**2 + width**3) / side**3
    extra = peak_mib(ours, device)
    name = f"linear {width} × {width}, {n} × {tokens} tokens, bfloat16"
    return Row(name, floor, times["ours"], times["composed"], extra, "≤ 1.3 × the floor")


class Contracted:
    """The bare sweep with pyflatness's contractions for relative flatness.

    Args:
        model: on its device.
        backend: of the contractions.
    """

    def __init__(self, model: nn.Module, backend: ModuleType) -> None:
        self.bare = bare.Sweep(model, measurable(model))
        self._forms = {
            name: LayerContraction(
                layers.matrix(module)[0][None],
                layers.geometry(module),
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


def check(ours: Tensor, composed: Tensor, tolerance: float = 5e-3) -> None:
    """Raise unless both ways give the same values."""
    torch.testing.assert_close(ours.double(), composed.double(), rtol=tolerance, atol=0)
