"""Large models: all layers of a language model by one probe against a training step, ResNet-20 against its sweep.

Run from the project's root: ``python benchmarks/models.py [gpt2] [memory] [resnet20]``; all of them unless some are
named. Every figure is a ratio within one run, alternatives in turn; nothing is asserted. Needs rich, transformers for
the first two, and for the last ``../shared`` with published weights and images.

``gpt2`` is of GPT-2 small's shape with random weights (12 blocks, 768 wide, vocabulary 50,257) on sequences of 128
tokens, 4 to a batch. ``training step`` is the forward and backward pass with gradients of all weights, without an
optimiser; ``pyflatness`` the whole call of ``pf.measure`` for relative flatness of all 51 layers by one probe, the head
exactly (``curvature="ggn"``); ``floor`` a forward pass, a backward pass without gradients of weights, and the two
products of the head's formula; ``multiply-adds`` what those of the other layers' contractions take at the rate of a
1024 × 1024 product. What a call does once (samples told apart, factors of w wᵀ) counts less the more batches there are.
``memory`` is of fresh processes: the largest resident size above what the model takes.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator

import bare
import peak
import torch
from layers import Line, Work, product_rate, show, swept, titled
from networks import cifar10, resnet20
from rich.table import Table
from timing import in_turn
from torch import nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
SEQUENCES, TOKENS = 4, 128  # of a batch, and of a sequence


class Language:
    """GPT-2 small's shape and some batches, with what is timed on them.

    Args:
        batches: how many.
    """

    def __init__(self, batches: int) -> None:
        import transformers

        torch.manual_seed(0)
        config = transformers.GPT2Config()
        self.model = transformers.GPT2LMHeadModel(config).eval()
        tokens = torch.randint(config.vocab_size, (batches, SEQUENCES, TOKENS))
        self.data = [{"input_ids": part, "labels": part} for part in tokens]

    def step(self) -> None:
        """Take a forward and a backward pass of each batch, with all gradients."""
        for batch in self.data:
            outputs, targets = pf.causal_lm(self.model, batch)
            LOSS(outputs, targets).backward()
            self.model.zero_grad()

    def measure(self) -> pf.results.Report:
        """Return relative flatness of all layers."""
        return pf.measure(
            self.model, LOSS, self.data, measures="relative_flatness", probes=1, curvature="ggn", progress=False
        )

    def floor(self) -> None:
        """Take a forward pass, a backward pass to the first layer's input, and the products of the head's formula."""
        weight = self.model.lm_head.weight.detach()
        self.model.requires_grad_(False)
        for batch in self.data:
            embedded = self.model.transformer.wte(batch["input_ids"]).requires_grad_()
            features = self.model.transformer(inputs_embeds=embedded)[0]
            outputs = self.model.lm_head(features)
            torch.autograd.grad(outputs, embedded, outputs.detach())
            bare.products(features.detach().flatten(0, 1), weight, TOKENS)
        self.model.requires_grad_(True)

    def multiply_adds(self) -> float:
        """Return those of the contractions but the head's: Gram matrices of inputs and of gradients in these."""
        total = 0.0
        for module in self.model.modules():
            if _is_layer(module) and module is not self.model.lm_head:
                m, _ = module.weight.shape
                total += len(self.data) * SEQUENCES * 2 * m * TOKENS**2
        return total


def gpt2(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """Time one probe of all layers against training steps, over one batch and over four."""
    for batches in (1, 4):
        yield f"GPT-2 small's shape\n{batches} × {SEQUENCES} × {TOKENS} tokens", _of_language(batches, rounds)


def _of_language(batches: int, rounds: int) -> Iterator[Line]:
    work = Language(batches)
    work.step()
    timings = in_turn({"pyflatness": work.measure, "training step": work.step, "floor": work.floor}, rounds, repeats=1)
    ours, step, floor = timings.values()
    yield Line("pyflatness", ours.median, ours.ratio(step), limit=1.5)
    yield Line("training step", step.median, 1.0, ours.ratio(step))
    yield Line("floor", floor.median, floor.ratio(step), ours.ratio(floor))
    products = work.multiply_adds() / product_rate()
    yield Line("multiply-adds", products, products / step.median)


def memory(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """Compare largest resident sizes of fresh processes."""
    yield f"GPT-2 small's shape\n1 × {SEQUENCES} × {TOKENS} tokens\nMiB", _of_memory()


def _of_memory() -> Iterator[Line]:
    ours, step = (_peak(what) / 2**20 for what in ("measure", "step"))
    yield Line("pyflatness", ours / 1e3, ours / step, limit=1.3)
    yield Line("training step", step / 1e3, 1.0, ours / step)


def _peak(what: str) -> int:
    command = [sys.executable, __file__, "--peak", what]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(what: str) -> None:
    """Print how far the resident size grows beyond what the model and the imports took."""
    work = Language(1)
    before = peak.resident()
    getattr(work, what)()
    print(peak.resident() - before)


def published(rounds: int) -> Iterator[tuple[str, Iterator[Line]]]:
    """Time all layers of ResNet-20 with published weights on images of CIFAR-10."""
    x, _ = cifar10(1000)
    work = Work("ResNet-20, 20 layers, CIFAR-10", resnet20(), x)
    yield titled(work), swept(work, min(rounds, 5), 1.3)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__ in ("Linear", "Conv1D")


GROUPS = {"gpt2": gpt2, "memory": memory, "resnet20": published}


def main() -> None:
    """Print a table of times and ratios with the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=["measure", "step"], help="print this one's memory, and nothing else")
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.peak)
        return
    unknown = set(arguments.rows) - set(GROUPS)
    if unknown:
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    wanted = arguments.rows or list(GROUPS)
    table = Table(
        *("work", "what", "median ms", "it / step or sweep", "pyflatness / it", "to reach", "reached"),
        title="float32, times in turn; memory in MiB",
    )
    show(table, [group for name, group in GROUPS.items() if name in wanted], arguments.rounds)


if __name__ == "__main__":
    main()
