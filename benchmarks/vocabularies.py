"""Language models whose logits are the work: one probe, and products with the GGN, against training steps.

Run from the project's root: ``python benchmarks/vocabularies.py [--words 50304] [--rounds 7]``. Needs transformers. The
model has GPT-2's graph with two layers of 64 features and random weights, on 2 × 128 tokens. A training step is the
forward and backward pass of the model's own loss with gradients of all weights. Times are of the processor, on one
thread, alternatives in turn.

``first probe`` is a call of ``pf.measure`` for relative flatness of all layers by one probe, ``further probe`` half of
what three probes take more. ``product`` is a call of ``pf.spectrum`` for the largest eigenvalue of the GGN, over the
products that it took.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from timing import in_turn

import pyflatness as pf

SEQUENCES, TOKENS = 2, 128


class Row(NamedTuple):
    """Hold what was measured of a work in training steps, and what it is to reach at most."""

    what: str
    measured: float
    limit: float


def rows(rounds: int, words: int = 50_304) -> Iterator[Row]:
    """Yield the rows of the table."""
    import transformers

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=words, n_embd=64, n_layer=2, n_head=2, n_positions=TOKENS, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(words, (SEQUENCES, TOKENS))
    data = [{"input_ids": tokens, "labels": tokens}]

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad(set_to_none=True)

    probes = partial(pf.measure, model, "auto", data, measures=["relative_flatness"], curvature="ggn", progress=False)
    spectrum = partial(pf.spectrum, model, "auto", data, k=1, copies=False, tolerance=0.1, curvature="ggn")
    products = spectrum(progress=False).products
    works = {
        "step": step,
        "one": lambda: probes(probes=1),
        "three": lambda: probes(probes=3),
        "spectrum": lambda: spectrum(progress=False),
    }
    timings = in_turn(works, rounds, repeats=1, clock=time.process_time)
    steps = timings["step"].seconds
    of_step = {
        name: [seconds / step for seconds, step in zip(timing.seconds, steps, strict=True)]
        for name, timing in timings.items()
    }
    torch.set_num_threads(threads)
    further = [(three - one) / 2 for one, three in zip(of_step["one"], of_step["three"], strict=True)]
    what = f"GPT-2's graph, 64 wide, two layers, {words:,} words"
    yield Row(f"{what}: first probe", statistics.median(of_step["one"]), 2.5)
    yield Row(f"{what}: further probe", statistics.median(further), 1.0)
    yield Row(f"{what}: product with the GGN", statistics.median(of_step["spectrum"]) / products, 1.9)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=50_304)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    table = Table("work", "training steps", "to reach", "reached")
    for row in rows(options.rounds, options.words):
        reached = "yes" if row.measured <= row.limit else "NO"
        table.add_row(row.what, f"{row.measured:.3g}", f"≤ {row.limit:g}", reached)
    Console(width=120).print(table)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, one thread")


if __name__ == "__main__":
    main()
