"""Draw the profile of a language model over its depth: relative flatness of every layer, with standard errors.

Run from the project's root: ``python benchmarks/depth.py FIGURE.png [--probes K] [--stories N]``. In place of the
figure ``--exact`` holds sampled values of all layers against exact ones on one token of each story, and ``--hessian``
says what Hessian values of all layers cost and give. The model is the story-telling Llama of 260,000 weights in
``../shared/models``, the data stories that were sampled from it. The GGN value is sampled by K probes of each story,
all layers by one backward pass a probe, and the head is exact; the rest of the Hessian by products that layers share.
Needs transformers and matplotlib.

Notes, experiments on Hessian values (one story, 8 probes): the deviation of a probe over that of its GGN's part, in the
median of 36 layers, where layers shared products in 1 and 3 groups: relative flatness 4.2 and 2.3, trace 2.9 and 2.1.
Relative flatness read off the trace's products, w wᵀ beside them, halves the products; the network's value of four
stories then was 3600 ± 570, with products of its own 2900 ± 70.
"""

import argparse
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib
import numpy as np
import torch
from networks import PUBLISHED
from torch import Tensor, nn

import pyflatness as pf

FOLDER = PUBLISHED / "stories260K"
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def stories(count: int) -> Tensor:
    """Return stories (count, 256) as tokens."""
    return torch.from_numpy(np.load(FOLDER / "stories_tokens.npz")["input_ids"][:count].astype(np.int64))


def with_single_targets(count: int, longest: int) -> list[dict[str, Tensor]]:
    """Return batches of stories, by length, that are cut behind their one counted token, at a random place.

    Args:
        count: of the stories.
        longest: tokens that a story has at most.
    """
    places = torch.randint(1, longest, (count,), generator=torch.Generator().manual_seed(0))
    batches = []
    for part in places.argsort().split(32):
        tokens = stories(count)[part, : int(places[part].max()) + 1]
        last = places[part, None] == torch.arange(tokens.shape[1])
        batches.append({"input_ids": tokens, "labels": tokens.where(last, -100)})
    return batches


def model() -> nn.Module:
    """Return the model in eval mode."""
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(FOLDER).eval()


def measured(count: int, probes: int) -> pf.results.Report:
    """Return relative flatness of all layers on some stories."""
    data = [{"input_ids": part} for part in stories(count).split(32)]
    return pf.measure(model(), data=data, measures="relative_flatness", probes=probes, curvature="ggn")


def compared(count: int, probes: int) -> Iterator[str]:
    """Yield lines on exact values of all layers, and sampled ones, on one token of each story."""
    data, options = with_single_targets(count, 64), {"measures": "relative_flatness", "curvature": "ggn"}
    start = time.process_time()
    exact = pf.measure(model(), data=data, **options)
    yield f"{len(exact.layers)} layers, {sum(batch['input_ids'].numel() for batch in data):,} tokens"
    yield f"exact: {time.process_time() - start:.0f} s of CPU"
    scores = []
    for seed in range(16):
        start = time.process_time()
        sampled = pf.measure(model(), data=data, probes=probes, seed=seed, **options)
        seconds = time.process_time() - start
        pairs = [(exact[name, "relative_flatness"], sampled[name, "relative_flatness"]) for name in exact.layers[:-1]]
        scores.append(torch.tensor([(found.value - known.value) / found.stderr for known, found in pairs]))
        z = scores[-1]
        yield f"seed {seed}: max |z| {z.abs().max():.2f}, mean z² {z.square().mean():.2f}, {seconds:.1f} s of CPU"
    z = torch.stack(scores)
    yield f"all: max |z| {z.abs().max():.2f}, mean z² {z.square().mean():.2f}, median |z| {z.abs().median():.2f}"


def by_hessian(count: int, probes: int) -> Iterator[str]:
    """Yield lines on Hessian values of all layers on some stories: what they cost and give."""
    network, data = model(), [{"input_ids": stories(count)}]
    start = time.process_time()
    report = pf.measure(network, data=data, probes=probes)
    seconds = time.process_time() - start
    yield f"{count} stories, {len(report.layers)} layers, {probes} probes: {seconds:.1f} s of CPU"
    for measure, found in report.by_measure().items():
        errors = {name: 100 * each.stderr / abs(each.value) for name, each in found.items() if not each.exact}
        of_network = errors.pop("")
        middle = statistics.median(errors.values())
        yield f"{measure}: network {found[''].value:.0f} ± {of_network:.1f} %, layers ± {middle:.0f} % in the median"


def drawn(report: pf.results.Report, path: Path) -> None:
    """Write a figure of layers by kind over depth."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.2, 3.4), dpi=110, layout="constrained")
    for kind in KINDS:
        names = [name for name in report.layers if name.endswith(kind)]
        depth = [int(re.findall(r"\d+", name)[0]) for name in names]
        found = [report[name, "relative_flatness"] for name in names]
        errors = [estimate.stderr or 0.0 for estimate in found]
        axes.errorbar(depth, [estimate.value for estimate in found], errors, marker="o", markersize=3, label=kind)
    head = report["lm_head", "relative_flatness"].value
    axes.axhline(head, color="black", linestyle=":", linewidth=1, label="lm_head (exact)")
    axes.set(xlabel="block", ylabel="relative flatness (GGN)", yscale="log", xticks=depth[:: 1 + len(depth) // 12])
    figure.legend(fontsize=7, ncols=4, loc="outside lower center")
    figure.savefig(path)


def main() -> None:
    """Measure, draw, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=Path, nargs="?")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--hessian", action="store_true")
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--stories", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.exact or arguments.hessian:
        for line in (by_hessian if arguments.hessian else compared)(arguments.stories, arguments.probes):
            print(line, flush=True)
    if arguments.figure is None:
        return
    start = time.perf_counter()
    report = measured(arguments.stories, arguments.probes)
    print(report)
    print(f"{time.perf_counter() - start:.0f} s, torch {torch.__version__}, {torch.get_num_threads()} threads")
    drawn(report, arguments.figure)


if __name__ == "__main__":
    main()
