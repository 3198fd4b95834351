"""What it costs to record weights that no module calls: two blocks of GPT-2 small's width, written with parameters.

Run from the project's root: ``python benchmarks/uses.py``. The forward pass, with its graph, of 4 × 128 tokens through
attention of torch's (``nn.MultiheadAttention``) and a feed-forward part in ``F.linear`` is timed as it is, with its
eight weights watched, and with hooks on their stand-ins besides, in turn. The last line is of blocks 16 wide on 2 × 4
tokens, in which hardly anything but the overhead takes time.
"""

import argparse
from functools import partial

import torch
from timing import in_turn
from torch import Tensor, nn
from torch.nn import functional as F

from pyflatness.model import state, uses
from pyflatness.passes.recorder import Recorder, frozen


class Block(nn.Module):
    """A block of a transformer, normalised in front."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, max(1, width // 64), batch_first=True)
        self.up = nn.Parameter(torch.randn(4 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 4 * width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of its input."""
        h = self.first(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + F.linear(F.gelu(F.linear(self.second(x), self.up)), self.down)


def compare(width: int, samples: int, tokens: int, rounds: int, repeats: int) -> None:
    """Print medians of a forward pass, and ratios round by round."""
    model, x = nn.Sequential(Block(width), Block(width)).eval(), torch.randn(samples, tokens, width)
    with state.observing(model) as (held, _), frozen(held), torch.enable_grad():
        layers = uses.of(held)
        recorder, x = Recorder(layers), x.requires_grad_()

        def watched() -> None:
            with uses.attached(layers):
                held(x)

        def recorded() -> None:
            with recorder.attached(), uses.attached(layers), recorder.recording():
                held(x)

        forward = {"forward": partial(held, x), "watched": watched, "recorded": recorded}
        found = in_turn(forward, rounds, repeats)
    print(f"{width} wide, {samples} × {tokens} tokens, {len(layers) - 6} weights")
    for name, timing in found.items():
        print(f"  {name:<9} {1e3 * timing.median:9.3f} ms   {timing.ratio(found['forward']):.4f} of the forward pass")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    compare(768, 4, 128, rounds, 1)
    compare(16, 2, 4, 20 * rounds, 5)
