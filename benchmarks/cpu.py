"""What pyflatness is to reach on the CPU, in one table: measured, to reach, and where the time goes.

Run from the project's root: ``python benchmarks/cpu.py [plain] [waits] [classes] [imagenet] [vocabularies] [smollm2]
[head] [lenet] [resnet8] [resnet32] [resnet128] [resnet20] [molecules] [backpack] [hessian] [peers]``; all of them
unless some are named, which takes some half an hour. ``--kept FILE`` adds the figures to those in a file and prints
them all: a table in parts, each of them short. BackPACK, curvlinops and PyHessian are optional
(``pip install '.[peers]' pyhessian``); their figures are left out where they are missing. ``vocabularies`` and
``smollm2`` need transformers, and ``smollm2`` the folder that ``python benchmarks/smollm2.py fetch`` writes.

The works are those of :mod:`plain_torch`, :mod:`vocabularies`, :mod:`head`, :mod:`layers` and :mod:`hessian`, timed in
turn with their floors. ``where it goes`` has the shares of the figure that parts of further calls take: every
millisecond it is looked which one runs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import adaptive
import bare
import layers
import peers
import plain_torch
import smollm2
import torch
import vocabularies
from networks import MessagePassing, Molecules, efficientnet_lite0, images, lenet5, resnet18, resnet20, settled
from rich.console import Console
from rich.table import Table
from timing import Waits, in_turn, shares
from torch import Tensor, nn

import head
import hessian
import pyflatness as pf

# What these cannot be below, by the arithmetic in docs/performance.md: of BackPACK's time, and of the products'.
IN_PARTS, LAST_LAYERS = {"fc2": 0.8, "fc3": 0.9}, {4: 1.4, 6: 1.8}
SMOLLM2 = (("float32", 8, 256, 1.05), ("bfloat16", 8, 256, 1.4), ("float32", 2, 128, 1.6))
HEADS = ("head (1, ", "head (50000, ", "LeNet5")  # beginnings of the rows of the head's table

# By a name for it, a part's functions: the end of their file's path, and how their names begin. What these call is of
# the part too, unless it is of one that stands above it here.
LAYERS = {
    "some samples first": [("dry_run.py", "run")],
    "forward": [("guards.py", "_watched")],
    "backward": [("autograd/graph.py", "_engine_run_backward")],
    "w wᵀ and its factor": [("factor.py", "gram_factor")],
    "contraction": [("routes.py", "forms"), ("routes.py", "__init__")],
}
PRODUCTS = {
    "the head?": [("head.py", "established")],
    "some samples first": [("dry_run.py", "run")],
    "forward": [("guards.py", "_watched")],
    "certificate": [("linearity.py", "nonlinear_layers")],
    "products": [("linear_map.py", "__call__"), ("block_traces.py", "gradients")],
    "basis": [("block_traces.py", "_basis")],
}


@dataclass(frozen=True)
class Figure:
    """A figure that is held against what it is to reach: at most, or at least where ``least``."""

    what: str
    unit: str
    measured: float
    limit: float
    parts: str = ""
    least: bool = False

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        reached = self.measured >= self.limit if self.least else self.measured <= self.limit
        sign = "≥" if self.least else "≤"
        cells = [f"{self.measured:.3g}", f"{sign} {self.limit:.3g}", "yes" if reached else "NO"]
        return [self.what, self.unit, *cells, self.parts]


def parts_of(call: Callable[[], object], figure: float, named: Mapping[str, list[tuple[str, str]]]) -> str:
    """Return where the time of calls goes: their parts' shares of a figure."""
    return ", ".join(f"{part} {figure * share:.2f}" for part, share in shares(call, named).items())


def plain(rounds: int) -> Iterator[Figure]:
    """All layers of small networks, beside plain torch."""
    for row in plain_torch.rows(3 * rounds):
        yield Figure(row.what, row.unit, row.measured, row.limit)


def waits(rounds: int) -> Iterator[Figure]:
    """How often the host would wait for a GPU: from one batch to the next, and in a call besides."""
    model, counts = settled(resnet18(channels=4)), []
    for batches in (4, 8):
        data = [(images(8)[:, :, ::4, ::4].contiguous(), torch.arange(8) % 10)] * batches
        with Waits() as counted:
            pf.measure(model, nn.CrossEntropyLoss(), data, measures=plain_torch.MEASURES, progress=False)
        counts.append(counted.count)
    each = (counts[1] - counts[0]) / 4
    what = "ResNet-18's graph, width / 16, waits for the device"
    yield Figure(what, "a batch", each, 2)
    yield Figure(what, "a call besides", counts[0] - 4 * each, 5)


def classes(rounds: int) -> Iterator[Figure]:
    """Sampled values to 1 % where classes are many, over exact ones; one probe a sample is the least that it takes."""
    for (name, work, _, _), limit in zip(adaptive.trained(100, 256), (0.45, 0.3, 0.2), strict=True):
        ways: dict[str, adaptive.Options] = {"exact": {}, "rtol": {"rtol": 0.01}, "one": {"probes": 1}}
        seconds = work.seconds(ways, 3 * rounds)
        found, one = (seconds[what].ratio(seconds["exact"]) for what in ("rtol", "one"))
        yield Figure(f"100 classes, {name}, 1 %", "× exact values", found, limit, f"one probe {one:.2f}")


def imagenet(rounds: int) -> Iterator[Figure]:
    """Sampled values to 5 % of a network for ImageNet."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 224, 224, generator=generator)
    model, y = settled(efficientnet_lite0(), x), torch.arange(16) * 61

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()

    def measured() -> object:
        return pf.measure(model, nn.CrossEntropyLoss(), (x, y), measures="relative_flatness", rtol=0.05, progress=False)

    ours, floor = in_turn({"": measured, "step": step}, rounds, repeats=1, clock=time.process_time).values()
    yield Figure("EfficientNet-Lite0, 50 layers, 16 images, 5 %", "× forward and backward", ours.ratio(floor), 6)


def smollm2_cost(rounds: int) -> Iterator[Figure]:
    """One probe of SmolLM2-135M, over a training step; nothing without the folder that ``smollm2.py fetch`` writes."""
    folder = smollm2.FOLDER
    for dtype, sequences, length, limit in SMOLLM2 if (folder / "config.json").exists() else ():
        work = smollm2.Work(folder, dtype, sequences, length)
        ways = {"": work.measure, "step": work.step}
        ours, step = in_turn(ways, rounds, repeats=1, clock=time.process_time).values()
        what = f"SmolLM2-135M, {sequences} × {length} tokens, {dtype}, one probe"
        yield Figure(what, "× training step", ours.ratio(step), limit)


def large_vocabularies(rounds: int) -> Iterator[Figure]:
    """Probes of a language model whose logits are the work, and products with its GGN."""
    for row in vocabularies.rows(2 * rounds + 1):
        yield Figure(row.what, "× training step", row.measured, row.limit)


def heads(rounds: int) -> Iterator[Figure]:
    """Heads from features and from images."""
    for work, timed, (floor, limit), _ in head.TARGETS:
        if work.startswith(HEADS):
            timings = timed(4 * rounds)
            ours = timings["pyflatness"]
            if floor:
                yield Figure(work, f"× {floor}", ours.ratio(timings[floor]), limit)
            else:
                yield Figure(work, "ms", 1e3 * ours.median, limit)


def swept(work: layers.Work, limit: float, rounds: int) -> Iterator[Figure]:
    """All layers of a network."""
    sweep = bare.Sweep(work.model, work.names)
    timings = in_turn({"": work.measure, "sweep": lambda: sweep.run(work.inputs())}, rounds, repeats=1)
    ours, floor = timings.values()
    figure = ours.ratio(floor)
    parts = parts_of(work.measure, figure, LAYERS)
    yield Figure(f"{work.title}, n = {len(work.x):,}", "× bare sweep", figure, limit, parts)


def lenet(rounds: int) -> Iterator[Figure]:
    """LeNet5."""
    yield from swept(layers.Work("LeNet5, 5 layers", lenet5().eval(), images(5000)), 1.2, 3 * rounds)


def _resnet18(n: int, limit: float) -> Callable[[int], Iterator[Figure]]:
    def figures(rounds: int) -> Iterator[Figure]:
        work = layers.Work("ResNet-18, 21 layers", settled(resnet18()), images(n))
        yield from swept(work, limit, max(2, rounds * min(3, 64 // n)))

    return figures


def published(rounds: int) -> Iterator[Figure]:
    """ResNet-20 with published weights."""
    yield from swept(layers.Work("ResNet-20, 20 layers", resnet20(), images(1000)), 1.4, rounds)


def molecules(rounds: int) -> Iterator[Figure]:
    """A network of messages on batches of 32 molecules, which go through it whole: 1 and 12 backward passes."""
    for classes in (2, 13):
        yield _messages(classes, rounds)


def _messages(classes: int, rounds: int) -> Figure:
    generator = torch.Generator().manual_seed(0)
    model, batches = MessagePassing(classes).eval(), [Molecules.random(32, generator) for _ in range(16)]

    def forward(model: nn.Module, batch: Molecules) -> tuple[Tensor, Tensor]:
        return model(batch), batch.targets

    def measured() -> object:
        return pf.measure(
            model, nn.CrossEntropyLoss(), batches, measures="relative_flatness", forward=forward, progress=False
        )

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    sweep = bare.Sweep(model, names)
    timings = in_turn({"": measured, "sweep": lambda: sweep.run(batches)}, 3 * rounds, repeats=1)
    ours, floor = timings.values()
    figure = ours.ratio(floor)
    parts = parts_of(measured, figure, LAYERS)
    what = f"messages in 16 batches of 32 molecules, 8 layers, {classes} classes"
    return Figure(what, "× bare sweep", figure, 1.3, parts)


def backpack(rounds: int) -> Iterator[Figure]:
    """One linear layer of LeNet5, beside BackPACK: all samples at once, and in parts."""
    for name in ("fc1", "fc2", "fc3"):
        work = layers.Work(f"LeNet5 {name}, n = 5,000", lenet5().eval(), images(5000), layers=[name], curvature="ggn")
        try:
            theirs = peers.backpack_identity(peers.Around(work.model, name))
        except ImportError:
            return
        timings = in_turn(
            {
                "": work.measure,
                "BackPACK at once": lambda work=work, theirs=theirs: theirs([(work.x, work.y)]),
                "BackPACK in parts of 256": lambda work=work, theirs=theirs: theirs(work.batches()),
            },
            2 * rounds,
            repeats=1,
        )
        ours = timings.pop("")
        for title, timing in timings.items():
            figure = ours.ratio(timing)
            limit = IN_PARTS.get(name, 2 / 3) if "parts" in title else 2 / 3
            yield Figure(work.title, f"× {title}", figure, limit, parts_of(work.measure, figure, LAYERS))


def products(rounds: int) -> Iterator[Figure]:
    """Exact Hessian values of a tanh network."""
    for place, rank, ways in hessian.tanh_layers():
        timings = in_turn(ways, 5 * rounds, repeats=1)
        figure = hessian.of_both(timings)
        parts = parts_of(ways["pyflatness"], figure, PRODUCTS)
        what = f"tanh network, layer {place}, rank {rank}, n = 256"
        yield Figure(what, "× (products + a forward pass)", figure, LAST_LAYERS.get(place, 1.2), parts)


def traces(rounds: int) -> Iterator[Figure]:
    """Traces of a transformer's layers to 1 %, beside other libraries' estimators."""
    layer = ""
    for estimator in hessian.estimators(rounds):
        layer = estimator.layer or layer
        if estimator.draws is not None and estimator.over is not None:
            yield Figure(f"trace of {layer} to 1 %", f"{estimator.what} / ours", estimator.over, 2.0, least=True)


GROUPS: dict[str, Callable[[int], Iterator[Figure]]] = {
    "plain": plain,
    "waits": waits,
    "classes": classes,
    "imagenet": imagenet,
    "vocabularies": large_vocabularies,
    "smollm2": smollm2_cost,
    "head": heads,
    "lenet": lenet,
    "resnet8": _resnet18(8, 1.45),
    "resnet32": _resnet18(32, 1.3),
    "resnet128": _resnet18(128, 1.35),
    "resnet20": published,
    "molecules": molecules,
    "backpack": backpack,
    "hessian": products,
    "peers": traces,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kept", type=Path, help="a file of figures, to add to")
    options = parser.parse_args()
    if unknown := set(options.groups) - set(GROUPS):
        parser.error(f"no groups {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    torch.manual_seed(0)
    kept: dict[str, list[Figure]] = {}
    if options.kept and options.kept.exists():
        kept = {name: [Figure(**one) for one in found] for name, found in json.loads(options.kept.read_text()).items()}
    for name in options.groups or GROUPS:
        kept[name] = list(GROUPS[name](options.rounds))
        if options.kept:
            options.kept.write_text(json.dumps({name: [asdict(one) for one in found] for name, found in kept.items()}))
    table = Table("figure", "unit", "measured", "to reach", "reached", "where it goes", title="float32, times in turn")
    for name in filter(kept.__contains__, GROUPS):
        table.add_section()
        for figure in kept[name]:
            table.add_row(*figure.cells())
    Console(width=150).print(table)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
