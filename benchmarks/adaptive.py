"""What sampled values of all layers cost, and how far off they are: beside what was to be reached.

Run from the project's root: ``python benchmarks/adaptive.py [hundred] [lenet5] [resnet20] [epoch] [thousand] [story]
[coverage] [unbiased]``; all rows unless some are named. Times are of the processor, by one thread, those of one line in
turn. Networks, images and stories are those of ``../shared``.

``hundred``: a perceptron of two hidden layers and 100 classes, trained here to three stages; 256 samples. Passes are
rows that go backward in units of the data, as a mean over the seeds; ``true`` is the root mean square of the true
relative errors over the seeds, in the layer where it is largest. ``plain`` is how many plain probes give 1 %, ``one
probe`` the time of a call with a single one, below which no sampled call can be. ``lenet5``: five networks of the zoo,
2,000 of their images; ``resnet20``: published weights, 512 images. ``epoch``: ResNet-20 on ``--images`` of CIFAR-10's
50,000 by ``fraction="auto"``, over an epoch of training on the same images, timed on an eighth of its batches.
``thousand``: five convolutions and a head of 1,000 classes, 64 images. ``story``: Hessian values of all 37 layers of
the story-telling Llama, by 8 probes of four stories, and of 16.

``coverage``: how often a 95 % interval holds the truth, over 600 seeds of small networks, in the layer and the network
where that is worst; ``refused`` is how often there is none, as the replicates are too few or agree. ``unbiased``: how
far the mean of 2,000 draws is from the truth, in its standard errors. Both have ``rtol=`` sample, where exact values
are cheaper.
"""

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from time import process_time
from typing import Any
from unittest import mock

import torch
from networks import SHARED, cifar10, resnet20
from rich.console import Console
from rich.table import Table
from timing import in_turn
from torch import Tensor, nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness.passes.recorder import Recorder
from pyflatness.passes.tail import Tail
from pyflatness.sweep import adaptive_sweep

LOSS = nn.CrossEntropyLoss()
NETWORKS = (
    "adam_bs1024_lr0.002_seed0",
    "adam_bs64_lr0.001_seed1",
    "rmsprop_bs64_lr0.0005_seed9",
    "sgd_bs64_lr0.05_seed1",
    "sgd_bs256_lr0.05_seed0",
)
STAGES = (("start", 1.0, 9.0, 0.15), ("half-way", 0.5, 2.5, 0.06), ("trained", 0.01, 1.5, 0.04))
"""Name, median of 1 - p_max that is trained to, and to reach: passes, and time over exact."""
BATCH = 128  # of a training step
Options = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """Hold a line of the table: what was measured, what was to be reached, what was, and what stands beside it."""

    what: str
    asked: str
    found: str
    reached: bool
    beside: str = ""


@dataclass
class Work:
    """A network and its data, to be measured in all layers."""

    model: nn.Module
    data: tuple[Tensor, Tensor]
    loss: nn.Module = field(default_factory=nn.CrossEntropyLoss)

    def report(self, options: Options) -> pf.results.Report:
        """Return relative flatness of all layers."""
        how = {"layers": "*", "measures": "relative_flatness", "progress": False, **options}
        return pf.measure(self.model, self.loss, self.data, **how)

    def values(self, options: Options) -> Tensor:
        """Return values and standard errors, (2, layers)."""
        report = self.report(options)
        found = [report[name, "relative_flatness"] for name in report.layers]
        return torch.tensor([[e.value for e in found], [e.stderr or 0.0 for e in found]], dtype=torch.float64)

    def passes(self, options: Options) -> tuple[float, Tensor]:
        """Return rows that go back in units of the data, and the values."""
        back, gradients, send = list[int](), Recorder.gradients, Tail.send

        def counted(self: Recorder, outputs: Tensor, cotangent: Tensor, *args: Any, **more: Any) -> Any:
            back.append(len(cotangent))
            return gradients(self, outputs, cotangent, *args, **more)

        def several(self: Tail, cotangents: Tensor) -> Any:
            back.append(cotangents.shape[0] * cotangents.shape[1])
            return send(self, cotangents)

        with mock.patch.object(Recorder, "gradients", counted), mock.patch.object(Tail, "send", several):
            values = self.values(options)[0]
        return sum(back) / len(self.data[0]), values

    def seconds(self, ways: dict[str, Options], rounds: int) -> dict[str, Any]:
        """Return the time of some ways, in turn."""
        calls = {what: partial(self.report, options) for what, options in ways.items()}
        return in_turn(calls, rounds, repeats=1, clock=process_time)


def held(what: str, work: Work, most: float, seeds: int) -> Line:
    """Return whether ``rtol=0.01`` holds 1 % in every layer, by how many passes."""
    exact = work.values({})[0]
    found = [work.passes({"rtol": 0.01, "seed": seed}) for seed in range(seeds)]
    passes = sum(each for each, _ in found) / seeds
    errors = torch.stack([values / exact - 1 for _, values in found]).square().mean(dim=0).sqrt()
    error, plain = 100 * float(errors.max()), work.values({"probes": 8})
    needed = math.ceil(8 * float((plain[1] / exact / 0.01).square().max()))
    return Line(
        what,
        f"≤ {most:g} passes, true error ≤ 1 %",
        f"{passes:.2f} passes, {error:.2f} %",
        passes <= most and error <= 1,
        f"plain probes for 1 %: {needed}",
    )


def hundred(options: argparse.Namespace) -> Iterator[Line]:
    """Yield passes and time at 100 classes."""
    for name, work, passes, share in trained(100, 256):
        yield held(f"100 classes, {name}", work, passes, options.seeds)
        ways: dict[str, Options] = {"exact": {}, "rtol": {"rtol": 0.01}, "one": {"probes": 1}}
        seconds = work.seconds(ways, options.rounds)
        found, floor = (seconds[what].ratio(seconds["exact"]) for what in ("rtol", "one"))
        beside = f"one probe: {floor:.2f}"
        yield Line(f"100 classes, {name}, time / exact", f"≤ {share:g}", f"{found:.2f}", found <= share, beside)


def trained(count: int, samples: int) -> Iterator[tuple[str, Work, float, float]]:
    """Yield a network of many classes at each of the stages."""
    torch.manual_seed(0)
    centres, y = torch.randn(count, 64), torch.randint(count, (20_000,))
    x = centres[y] + 0.8 * torch.randn(20_000, 64)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, count)).eval()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for name, doubt, *reach in STAGES:
        while _doubt(model, x[:2000]) > doubt:
            for index in torch.randperm(len(x)).split(256)[:10]:
                optimizer.zero_grad()
                F.cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        yield name, Work(model, (x[:samples], y[:samples])), *reach


@torch.no_grad()
def _doubt(model: nn.Module, x: Tensor) -> float:
    return float((1 - model(x).softmax(dim=1).amax(dim=1)).median())


def lenet5(options: argparse.Namespace) -> Iterator[Line]:
    """Yield passes and errors on networks of the zoo."""
    from safetensors.torch import load_file

    spec = importlib.util.spec_from_file_location("zoo_networks", SHARED / "zoo" / "lenet5.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in NETWORKS:
        model = module.LeNet5().eval()
        model.load_state_dict(load_file(SHARED / "zoo" / f"lenet5_cifar10k_{name}.safetensors"))
        yield held(f"LeNet5 {name}", Work(model, module.images("train", 2000)), 1.7, options.seeds)


def of_resnet20(options: argparse.Namespace) -> Iterator[Line]:
    """Yield passes and errors on ResNet-20."""
    yield held("ResNet-20, 512 images", Work(resnet20(), cifar10(512, "train")), 1.15, options.seeds)


def epoch(options: argparse.Namespace) -> Iterator[Line]:
    """Yield the time of a part of many images, over an epoch's."""
    model, data = resnet20(), cifar10(options.images, "train")
    work = Work(model, data)
    start = process_time()
    report = work.report({"fraction": "auto", "rtol": 0.01})
    middle = process_time()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for x, y in zip(data[0].split(BATCH)[::8], data[1].split(BATCH)[::8], strict=True):
        optimizer.zero_grad()
        LOSS(model(x), y).backward()
        optimizer.step()
    trained_in = (process_time() - middle) * options.images / len(torch.cat(data[1].split(BATCH)[::8]))
    with torch.no_grad():
        start_of_forward = process_time()
        for x in data[0].split(BATCH)[::8]:
            model.eval()(x)
        forward = (process_time() - start_of_forward) * 8 / trained_in
    found = [report[name, "relative_flatness"] for name in report.layers]
    error = 100 * max((each.stderr or 0.0) / each.value for each in found)
    notes = {note for each in found for note in each.notes if "sent backward" in note}
    share = (middle - start) / trained_in
    yield Line(
        f"ResNet-20, {options.images:,} images, 1 %, over an epoch of training",
        "≤ 0.45",
        f"{share:.2f}, stderr {error:.2f} %",
        share <= 0.45 and error <= 1.05,
        f"{'; '.join(notes)}; a forward pass of all: {forward:.2f}; {middle - start:.0f} s",
    )


def thousand(options: argparse.Namespace) -> Iterator[Line]:
    """Yield the time of 1 % at 1,000 classes."""
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    parts += [Residual(16), Residual(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1000)]
    work = Work(nn.Sequential(*parts).eval(), (torch.randn(64, 3, 32, 32), torch.randint(1000, (64,))))
    seconds = work.seconds({"rtol": {"rtol": 0.01}}, 3)["rtol"].median
    start = process_time()
    exact = work.values({})[0]
    whole = process_time() - start
    found = torch.stack([work.values({"rtol": 0.01, "seed": seed})[0] for seed in range(options.seeds)])
    error = 100 * float((found / exact - 1).square().mean(dim=0).sqrt().max())
    yield Line(
        "1,000 classes, ResNet of 6 layers, 64 images, 1 %",
        "≤ 1.5 s",
        f"{seconds:.1f} s, {error:.2f} %",
        seconds <= 1.5 and error <= 1,
        f"exact {whole:.0f} s",
    )


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Map (n, width, h, w) to the same."""
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


def story(options: argparse.Namespace) -> Iterator[Line]:
    """Yield the time of Hessian values of a language model."""
    from depth import model, stories

    del options
    network = model()
    for count, most in ((4, 8.0), (16, 30.0)):
        data = [{"input_ids": part} for part in stories(count).split(4)]
        start = process_time()
        report = pf.measure(network, data=data, probes=8, progress=False)
        seconds, value = process_time() - start, report["relative_flatness"]
        error = 100 * (value.stderr or 0.0) / value.value
        asked = f"≤ {most:g} s" + (", the network's value to 5 %" if count == 16 else "")
        yield Line(
            f"stories260K, {count} stories, Hessian values, 8 probes",
            asked,
            f"{seconds:.1f} s, network ± {error:.1f} %",
            seconds <= most and (count == 4 or error <= 5),
        )


def small(scale: float, samples: int, activation: type[nn.Module] = nn.ReLU, loss: nn.Module = LOSS) -> Work:
    """Return a network of three layers and ten classes, whose softmax is the more peaked the larger the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), activation(), nn.Linear(16, 12), activation(), nn.Linear(12, 10))
    with torch.no_grad():
        model[4].weight.mul_(scale)
    return Work(model.double().eval(), (torch.randn(samples, 8).double(), torch.arange(samples) % 10), loss)


WEIGHTED = nn.CrossEntropyLoss(torch.linspace(0.2, 3, 10).double(), label_smoothing=0.1)
KINDS: dict[str, Callable[[int], Work]] = {
    "flat": partial(small, 0.5),
    "peaked": partial(small, 20.0),
    "class weights": partial(small, 3.0, loss=WEIGHTED),
    "tanh": partial(small, 3.0, activation=nn.Tanh),
}


@cache
def made(kind: str, samples: int) -> tuple[Work, pf.results.Report]:
    """Return a small network and its exact values."""
    work = KINDS[kind](samples)
    return work, work.report({})


def settings() -> Iterator[tuple[str, str, int, Options]]:
    """Yield a title, a kind of network, its samples, and options."""
    for kind in KINDS:
        for samples in (20, 60):
            yield "rtol=0.05", kind, samples, {"rtol": 0.05}
        for probes in (1, 2, 8):
            yield f"probes={probes}", kind, 20, {"probes": probes}
    for kind in ("peaked", "class weights"):
        yield "fraction=0.3", kind, 400, {"fraction": 0.3}
        yield "fraction=0.3, probes=1", kind, 400, {"fraction": 0.3, "probes": 1}
        yield 'fraction="auto", rtol=0.1', kind, 2000, {"fraction": "auto", "rtol": 0.1}


def estimates(kind: str, samples: int, options: Options, seeds: int) -> Iterator[dict[str, list[Any]]]:
    """Yield by layer, ``""`` the network, the exact value and the sampled ones of some seeds."""
    work, exact = made(kind, samples)
    found: dict[str, list[Any]] = {}
    more: Options = {"layers": ["0", "2"]}
    with mock.patch.object(adaptive_sweep, "PLAN", -math.inf):
        for seed in range(seeds):
            report = work.report({**options, **more, "seed": seed})
            for name in report.layers:
                found.setdefault(name, []).append(report[name, "relative_flatness"])
            if len(report.layers) > 1:
                found.setdefault("", []).append(report["relative_flatness"])
    for name, values in found.items():
        truth = (
            exact[name, "relative_flatness"].value if name else sum(exact[n, "relative_flatness"] for n in ("0", "2"))
        )
        yield {"name": [name], "truth": [float(truth)], "values": values}


def coverage(options: argparse.Namespace) -> Iterator[Line]:
    """Yield how often intervals hold the truth."""
    for title, kind, samples, how in settings():
        shares, refused = [], 0.0
        for found in estimates(kind, samples, how, options.coverage_seeds):
            intervals = [each.interval() for each in found["values"]]
            given = [each for each in intervals if each is not None]
            refused = max(refused, 1 - len(given) / len(intervals))
            if len(given) >= len(intervals) / 4:
                shares.append(sum(low <= found["truth"][0] <= high for low, high in given) / len(given))
        low, high = (100 * min(shares), 100 * max(shares)) if shares else (math.nan, math.nan)
        yield Line(
            f"{title}, {kind}, {samples} samples",
            "93–97 %, never below 92",
            f"{low:.1f}–{high:.1f} %" if shares else "no intervals",
            not shares or low >= 92,
            f"refused: {100 * refused:.0f} %" if refused else "",
        )


def unbiased(options: argparse.Namespace) -> Iterator[Line]:
    """Yield how far means of draws are from the truth."""
    cases: list[tuple[str, str, int, Options]] = [
        ("probes=1", "peaked", 20, {"probes": 1}),
        ("probes=2", "class weights", 20, {"probes": 2}),
        ("rtol=0.1", "peaked", 60, {"rtol": 0.1}),
        ("rtol=0.1", "tanh", 60, {"rtol": 0.1}),
        ("probes=2", "tanh", 20, {"probes": 2}),
        ("fraction=0.3", "peaked", 400, {"fraction": 0.3}),
        ("fraction=0.3, probes=1", "peaked", 400, {"fraction": 0.3, "probes": 1}),
    ]
    for title, kind, samples, how in cases:
        worst = 0.0
        for found in estimates(kind, samples, how, options.draws):
            values = torch.tensor([each.value for each in found["values"]], dtype=torch.float64)
            off = (values.mean() - found["truth"][0]) / (values.std() / len(values) ** 0.5)
            worst = max(worst, abs(float(off)))
        yield Line(f"{title}, {kind}, {samples} samples", "≤ 3 standard errors", f"{worst:.1f}", worst <= 3)


ROWS = {
    "hundred": hundred,
    "lenet5": lenet5,
    "resnet20": of_resnet20,
    "epoch": epoch,
    "thousand": thousand,
    "story": story,
    "coverage": coverage,
    "unbiased": unbiased,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--seeds", type=int, default=20, help="of errors and passes")
    parser.add_argument("--rounds", type=int, default=9, help="of timings")
    parser.add_argument("--images", type=int, default=20_000, help="of the row epoch")
    parser.add_argument("--coverage-seeds", type=int, default=600)
    parser.add_argument("--draws", type=int, default=2000, help="of the row unbiased")
    options = parser.parse_args(arguments)
    if set(options.rows) - set(ROWS):
        parser.error(f"there are {', '.join(ROWS)}")
    torch.set_num_threads(1)
    console = Console(width=150)
    table = Table("what", "to reach", "found", "reached", "beside it")
    for name in options.rows or ROWS:
        start = process_time()
        for line in ROWS[name](options):
            table.add_row(line.what, line.asked, line.found, "yes" if line.reached else "NO", line.beside)
            print(
                "|",
                " | ".join([line.what, line.asked, line.found, "yes" if line.reached else "NO", line.beside]),
                flush=True,
            )
        print(f"{name}: {process_time() - start:.0f} s of the processor", file=sys.stderr, flush=True)
    console.print(table)
    print(f"torch {torch.__version__}, one thread")


if __name__ == "__main__":
    main()
