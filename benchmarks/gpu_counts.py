"""Count what the rows of ``benchmarks/gpu.py`` cannot do without, on any machine: multiply-adds, and bytes of operands.

    python benchmarks/gpu_counts.py

Operands count once, though a GPU may read them several times. Of a layer's two routes the one with fewer multiply-adds
counts (docs/cuda.md), with K cotangents that share φ. The times are those of an H100's data sheet: 3.35
TB/s; 33, 247 and 495 T multiply-adds a second in float32, TF32 and bfloat16. Prints Markdown.
"""

import torch
from networks import images, measurable, resnet18
from torch import Tensor, nn

BYTES = 3.35e9  # a millisecond
RATES = {"float32": 33e9, "TF32": 247e9, "bfloat16": 495e9}
COTANGENTS = 9


def main() -> None:
    """Print the table."""
    print("| work | multiply-adds | bytes | ms for either |\n|---|---|---|---|")
    few, more, wide = (50_000, 10, 84), (50_000, 1000, 2048), (8192, 128_256, 4096)
    row("head (50000, 10, 84), float32", product(*few), 4 * (few[0] + few[1]) * few[2], "float32")
    squares = product(more[0], more[1], more[1])
    row("head (50000, 1000, 2048), float32", product(*more) + squares, 4 * operands(*more), "float32")
    row("head (8192, 128256, 4096), bfloat16", 2 * product(*wide), 2 * operands(*wide), "bfloat16")
    work, read = network(256)
    row("ResNet-18, n = 256, contractions of 9 cotangents", work, read, "TF32")
    tokens = contraction(4096, 4096, 2048, 1)
    row("linear 4096 × 4096, 8 × 2048 tokens, bfloat16", 8 * tokens, 2 * 8 * 2 * 2048 * 4096, "bfloat16")


def row(name: str, multiply_adds: int, read: int, kind: str) -> None:
    """Print one."""
    print(
        f"| {name} | {multiply_adds / 1e9:.4g} G | {read / 1e6:.4g} MB "
        f"| {multiply_adds / RATES[kind]:.2g} ({kind}), {read / BYTES:.2g} |"
    )


def product(n: int, d: int, m: int) -> int:
    """Return the multiply-adds of φ wᵀ, φ (n, m) and w (d, m)."""
    return n * d * m


def operands(n: int, d: int, m: int) -> int:
    """Return the elements of φ and w."""
    return (n + d) * m


def contraction(d: int, m: int, places: int, cotangents: int) -> int:
    """Return the multiply-adds of |R M|² of one sample and all cotangents."""
    r = min(d, m)
    if places == 1:
        return cotangents * (r * d + r) + m
    by_patches = cotangents * r * m * places
    by_gram = cotangents * r * places**2 + m * places**2
    return cotangents * r * d * places + min(by_patches, by_gram)


def network(n: int) -> tuple[int, int]:
    """Return the multiply-adds of all layers of ResNet-18 on n images, and the bytes of inputs and cotangents."""
    model = resnet18().eval()
    found: list[tuple[int, int]] = []

    def count(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        d, m = layer.weight.flatten(1).shape
        places = output[0].numel() // d
        found.append((contraction(d, m, places, COTANGENTS), inputs[0].numel() + COTANGENTS * output.numel()))

    for name in measurable(model):
        model.get_submodule(name).register_forward_hook(count)
    with torch.no_grad():
        model(images(1))
    return n * sum(work for work, _ in found), 4 * n * sum(elements for _, elements in found)


if __name__ == "__main__":
    main()
