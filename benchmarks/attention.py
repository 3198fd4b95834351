"""Measure ten random equivalent copies of one small trained transformer, and draw the figure of docs/attention.md.

Run ``python benchmarks/attention.py`` from the project's root; ``--draw`` draws the figure anew from the stored points.
The transformer, of two blocks of attention and a gated MLP, learns to add two numbers modulo 7. A copy has random
matrices A and B in every head and random factors D of the gated MLPs, whose singular values are log-uniform between
1/30 and 30. All measures are exact, in float64.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf

DOCS = Path(__file__).resolve().parent.parent / "docs"
POINTS, FIGURE = DOCS / "attention.json", DOCS / "attention.png"
MODULUS, WIDTH, HEADS, INNER, BLOCKS = 7, 16, 2, 32, 2
COPIES, SPREAD = 10, 30.0
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj", "up"), ("o_proj", "down")
MEASURES = ("relative_flatness", "relative_flatness_columns", "trace", "adaptive_sharpness", "lambda_max")
KEPT = "κ: rows of q, k, v, up; columns of o, down"
LINES = {KEPT: "o", "trace": "s", "adaptive_sharpness": "^", "lambda_max": "v"}


class Attention(nn.Module):
    """Attention without a mask, its projections named as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all heads, projected."""
        q, k, v = (
            part(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated MLP, each beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and the MLP add to it."""
        x = x + self.attention(self.norms[0](x))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    """Classify two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(MODULUS, WIDTH), nn.Parameter(torch.randn(2, WIDTH))
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(BLOCKS))), nn.Linear(WIDTH, MODULUS)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of the sum."""
        return self.head(self.blocks(self.tokens(x) + self.places).mean(dim=1))


def sums() -> tuple[Tensor, Tensor]:
    """Return all pairs of numbers, and their sums."""
    pairs = torch.cartesian_prod(torch.arange(MODULUS), torch.arange(MODULUS))
    return pairs, pairs.sum(dim=1) % MODULUS


def trained() -> tuple[nn.Module, float]:
    """Return the transformer and its loss."""
    torch.manual_seed(0)
    model, (x, y) = Transformer().double(), sums()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for _ in range(400):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return model.eval(), float(loss.detach())


def random_factors(draws: torch.Generator) -> dict[str, Any]:
    """Return random A, B and D of every block."""

    def sizes(*shape: int) -> Tensor:
        return SPREAD ** (2 * torch.rand(*shape, dtype=torch.float64, generator=draws) - 1)

    def matrices() -> Tensor:
        h = WIDTH // HEADS
        left, right = (
            torch.linalg.qr(torch.randn(HEADS, h, h, dtype=torch.float64, generator=draws)).Q for _ in range(2)
        )
        return left @ (sizes(HEADS, h, 1) * right)

    return {
        key: value
        for number in range(BLOCKS)
        for key, value in {
            f"blocks.{number}.attention": {"qk": matrices(), "vo": matrices()},
            f"blocks.{number}.up": sizes(INNER),
        }.items()
    }


def measured(model: nn.Module, reference: Tensor) -> dict[str, Any]:
    """Return each layer's values, the network's λ_max and by how much the outputs differ from those of the original."""
    data, layers = sums(), [f"blocks.{b}.{place}" for b in range(BLOCKS) for place in places()]
    report = pf.measure(model, nn.CrossEntropyLoss(), data, layers=layers, measures=MEASURES)
    with torch.no_grad():
        difference = float((model(data[0]) - reference).abs().max())
    by_layer = {name: {layer: report[layer, name].value for layer in layers} for name in MEASURES[:-1]}
    return {"layers": by_layer, "lambda_max": report["lambda_max"].value, "difference": difference}


def places() -> list[str]:
    """Return the layers of a block that are measured."""
    return [f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")] + ["up", "down"]


def lines(copies: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the figure's lines: sums over layers of each copy, the first one the original."""
    found: dict[str, list[float]] = {name: [] for name in LINES}
    for copy in copies:
        by = copy["layers"]
        found[KEPT].append(
            sum(
                by["relative_flatness" if layer.endswith(ROWS) else "relative_flatness_columns"][layer]
                for layer in by["trace"]
            )
        )
        for name in ("trace", "adaptive_sharpness"):
            found[name].append(sum(by[name].values()))
        found["lambda_max"].append(copy["lambda_max"])
    return found


def main() -> None:
    """Write docs/attention.json and docs/attention.png."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the figure from the stored points")
    if not parser.parse_args().draw:
        torch.set_num_threads(1)
        model, loss = trained()
        reference, draws = model(sums()[0]).detach(), torch.Generator().manual_seed(1)
        copies = [measured(model, reference)]
        for _ in range(COPIES):
            copies.append(measured(pf.reparameterize(model, random_factors(draws), sums()), reference))
        POINTS.write_text(json.dumps({"loss": loss, "copies": copies}, indent=1) + "\n", encoding="utf-8")
    found = lines(json.loads(POINTS.read_text(encoding="utf-8"))["copies"])
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, values in found.items():
        axes.plot([value / values[0] for value in values], marker=LINES[name], label=name, linewidth=1)
    axes.set(yscale="log", xlabel="copy of the transformer (0: as trained)", ylabel="value / value as trained")
    axes.set_xticks(range(COPIES + 1))
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.1))
    figure.savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    main()
