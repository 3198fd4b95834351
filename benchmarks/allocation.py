"""Bits for each layer under a budget: ``pf.allocate`` against single costs, measured or predicted, and other estimates.

Run from the project's root: ``python benchmarks/allocation.py [resnet20 | resnet56 | stories | FOLDER] [--seeds K]``.
FOLDER is a language model in Hugging Face's layout, such as ``benchmarks/smollm2.py fetch`` writes; its text is that of
a file (``--text``), or Python's language reference. Formats are symmetric integers with a scale for each row (of a
FOLDER for each 64 entries of a row), the budget is 3 to 6 bits a weight. Choices are made on some data, and judged by
the loss, and the accuracy of ResNet-20, on other data that all of them share:

- same: the same bits for all layers;
- single: an integer linear program (scipy.optimize.milp) over what ``pf.cost_of_change`` predicts of each layer alone;
- ours: ``pf.allocate``, with ``rounds=0``, and by second order alone, with ``measured=False``;
- measured: that program over the measured change of the loss when one layer alone is rounded;
- KL: over the measured KL divergence from the model then, as Model-Optimizer and mlx-lm choose;
- AutoScheme: over Σ_i Σ_j |∂ℓ_i/∂w_j Δ_j| of samples i, with all layers rounded to the format, as auto-round scores;
- HAWQ-V2, Fisher: over Tr(H_l) |Δ|² / (2 d m), and ½ Σ_j F_j Δ_j² with squared gradients of single samples.

A weight that layers share is one layer for all of them. ``--methods`` leaves out what is not named of the last six.
Means over seeds, which draw other data to plan with, and the standard deviation over them. ``seconds`` are those of
processors: of pf.allocate alone, and of measuring each layer with each format by plain torch.
"""

import argparse
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from changes import Costs, allocated, fisher, weight
from depth import model as storyteller
from depth import stories
from networks import cifar10, published
from rich.console import Console
from rich.table import Table
from smollm2 import text as reference
from torch import Tensor, nn

import pyflatness as pf

BUDGETS = (3.0, 3.5, 4.0, 4.5, 5.0, 6.0)
BITS = (2, 3, 4, 5, 6, 8)
METHODS = ("single", "measured", "KL", "AutoScheme", "HAWQ-V2", "Fisher")
Judge = Callable[[nn.Module], tuple[float, float]]


@dataclass
class Case:
    """A network, data of a seed to plan with in two forms, and its judge: loss and accuracy on other data."""

    model: nn.Module
    loss: Any
    plan_with: Callable[[int], Any]
    risk: Callable[[nn.Module, Any], float]
    log_p: Callable[[nn.Module, Any], Tensor]  # of each term's classes
    judge: Judge
    formats: tuple[str, ...]
    samples: Callable[[nn.Module, Any], Iterator[Callable[[], Tensor]]]  # the loss of each


def resnet(depth: int, bits: Sequence[int], planned: int, judged: int) -> Case:
    """Return a published ResNet on images of CIFAR-10."""
    model, loss, (x, y) = published(depth), nn.CrossEntropyLoss(), cifar10(judged + 8 * planned)

    def plan_with(seed: int) -> Any:
        start = judged + seed * planned
        return x[start : start + planned], y[start : start + planned]

    def risk(network: nn.Module, data: Any) -> float:
        with torch.no_grad():
            return float(loss(network(data[0]), data[1]))

    def log_p(network: nn.Module, data: Any) -> Tensor:
        with torch.no_grad():
            return network(data[0]).log_softmax(dim=1)

    def judge(network: nn.Module) -> tuple[float, float]:
        with torch.no_grad():
            outputs = torch.cat([network(part) for part in x[:judged].split(250)])
        return float(loss(outputs, y[:judged])), float((outputs.argmax(1) == y[:judged]).double().mean())

    def samples(network: nn.Module, data: Any) -> Iterator[Callable[[], Tensor]]:
        for image, label in zip(*data, strict=True):
            yield lambda image=image, label=label: loss(network(image[None]), label[None])

    return Case(model, loss, plan_with, risk, log_p, judge, tuple(f"int{each}" for each in bits), samples)


def of_language(model: nn.Module, tokens: Tensor, planned: int, judged: int, formats: tuple[str, ...]) -> Case:
    """Return a language model on sequences of tokens (n, length)."""

    def risk(network: nn.Module, data: Any) -> float:
        with torch.no_grad():
            parts = [part for batch in data for part in batch["input_ids"].split(1)]
            return float(sum(network(input_ids=part, labels=part).loss for part in parts)) / len(parts)

    def log_p(network: nn.Module, data: Any) -> Tensor:
        with torch.no_grad():
            logits = [network(input_ids=part).logits for batch in data for part in batch["input_ids"].split(1)]
        return torch.cat(logits)[:, :-1].flatten(0, 1).log_softmax(dim=1)

    def plan_with(seed: int) -> Any:
        start = judged + seed * planned
        return [{"input_ids": part} for part in tokens[start : start + planned].split(4)]

    def judge(network: nn.Module) -> tuple[float, float]:
        return risk(network, [{"input_ids": tokens[:judged]}]), float("nan")

    def samples(network: nn.Module, data: Any) -> Iterator[Callable[[], Tensor]]:
        for part in (part for batch in data for part in batch["input_ids"].split(1)):
            yield lambda part=part: network(input_ids=part, labels=part).loss

    return Case(model, "auto", plan_with, risk, log_p, judge, formats, samples)


def of_folder(
    folder: Path, text: Path | None, bits: Sequence[int], planned: int, judged: int, length: int = 128
) -> Case:
    """Return a language model of a folder, on a text that is cut into sequences."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    read = reference() if text is None else text.read_text("utf-8")
    numbers = transformers.AutoTokenizer.from_pretrained(folder)(read)["input_ids"]
    tokens = torch.tensor(numbers[: len(numbers) // length * length]).view(-1, length)
    return of_language(model, tokens, planned, judged, tuple(f"int{each}-g64" for each in bits))


class Single:
    """Costs of single layers by several estimates, and the choices that have the least sum of them."""

    def __init__(self, case: Case, data: Any, probes: int | None, methods: Sequence[str]) -> None:
        self.found: dict[str, Costs] = defaultdict(dict)
        model, how = case.model, {"curvature": "ggn", "probes": probes}
        made = {name: pf.changes.of_format(model, name) for name in case.formats}
        self.sizes = {name: change.numel() for name, change in made[case.formats[0]].items()}
        self.bits = {name: pf.changes.named(name) for name in case.formats}
        for name, changes in made.items() if "single" in methods else ():
            report = pf.cost_of_change(model, case.loss, data, changes, measured=False, **how)
            for layer in changes:
                self.found["single"][layer, name] = float(report[layer, "predicted"])
        start, before = time.process_time(), case.risk(model, data)
        own = case.log_p(model, data) if "KL" in methods else None
        for name, changes in made.items() if own is not None or "measured" in methods else ():
            for layer, change in changes.items():
                values = weight(model, layer).data
                kept = values.clone()
                values += change
                if "measured" in methods:
                    self.found["measured"][layer, name] = case.risk(model, data) - before
                if own is not None:
                    log_p = case.log_p(model, data)
                    self.found["KL"][layer, name] = float((own.exp() * (own - log_p)).sum(dim=1).mean())
                values.copy_(kept)
        self.seconds = time.process_time() - start
        weights = {layer: weight(model, layer) for layer in self.sizes}
        if "Fisher" in methods:
            losses = [*case.samples(model, data)]
            information = fisher(
                model,
                lambda number: dict(
                    zip(weights, torch.autograd.grad(losses[number](), [*weights.values()]), strict=True)
                ),
                len(losses),
            )
            for name, changes in made.items():
                for layer, change in changes.items():
                    cost = 0.5 * float((information[layer] * change.double().square()).sum())
                    self.found["Fisher"][layer, name] = cost
        for name, changes in made.items() if "AutoScheme" in methods else ():
            rounded = applied(model, dict.fromkeys(changes, name))
            held = [weight(rounded, layer).requires_grad_() for layer in changes]
            scores = np.zeros(len(held))
            for of_sample in case.samples(rounded, data):
                gradients = torch.autograd.grad(of_sample(), held)
                scores += [float((g * d).abs().sum()) for g, d in zip(gradients, changes.values(), strict=True)]
            self.found["AutoScheme"] |= {
                (layer, name): float(score) for layer, score in zip(changes, scores, strict=True)
            }
        if "HAWQ-V2" in methods:
            traces = pf.measure(model, case.loss, data, layers=[*self.sizes], measures="trace", **how)
            for name, changes in made.items():
                for layer, change in changes.items():
                    square = float(change.double().square().mean())
                    self.found["HAWQ-V2"][layer, name] = 0.5 * float(traces[layer, "trace"]) * square

    def choice(self, by: str, budget: float) -> dict[str, str]:
        """Return the format of each layer with the least sum of costs."""
        by_number = {
            (layer, number): cost for (layer, name), cost in self.found[by].items() for number in [self._bits(name)]
        }
        names = {self._bits(name): name for name in self.bits}
        return {layer: names[number] for layer, number in allocated(by_number, self.sizes, budget).items()}

    def _bits(self, name: str) -> float:
        return self.bits[name].bits_of(torch.empty(1, 1024))


def applied(model: nn.Module, choice: Mapping[str, str]) -> nn.Module:
    """Return a changed copy."""
    by_format: dict[str, list[str]] = defaultdict(list)
    for layer, name in choice.items():
        by_format[name].append(layer)
    made = copy.deepcopy(model)
    for name, layers in by_format.items():
        pf.changes.add(made, pf.changes.of_format(made, name, layers=layers))
    return made


def seed_of(
    case: Case, seed: int, budgets: Sequence[float], probes: int, methods: Sequence[str], *, more: bool
) -> Iterator[tuple[str, float, float, float, str]]:
    """Yield method, budget, loss, accuracy, and a remark."""
    data = case.plan_with(seed)
    single = Single(case, data, probes, methods)
    least = single._bits(case.formats[0]) - int(case.formats[0][3])
    for budget in budgets:
        start = time.process_time()
        how = {"bits": budget + least, "probes": probes, "seed": seed}
        found = pf.allocate(case.model, case.loss, data, case.formats, **how)
        yield "seconds", 0.0, time.process_time() - start, single.seconds, ""
        remark = f"predicted {pf.report.intervals.shown(found.predicted.value, found.predicted.interval())}"
        remark += f", on its own data {found.loss_change:.4f}"
        remark += f", gap {found.gap:.2g}, {found.bits:.3f} bits"
        yield "ours", budget, *case.judge(found.apply(case.model)), remark
        if more:
            without = pf.allocate(case.model, case.loss, data, case.formats, rounds=0, **how)
            yield "rounds=0", budget, *case.judge(without.apply(case.model)), ""
        (by_order,) = found.frontier([budget + least]).plans
        yield "by second order", budget, *case.judge(by_order.apply(case.model)), ""
        for by in single.found:
            yield by, budget, *case.judge(applied(case.model, single.choice(by, budget + least))), ""
        same = next((name for name in case.formats if name.partition("-")[0] == f"int{budget:g}"), None)
        if same:
            yield "same", budget, *case.judge(applied(case.model, dict.fromkeys(single.sizes, same))), ""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", default="resnet20", nargs="?")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--without-rounds", action="store_true", help="also by pf.allocate(…, rounds=0)")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="bits a weight")
    parser.add_argument("--formats", type=int, nargs="+", default=BITS, help="bits of those to choose among")
    parser.add_argument("--planned", type=int, help="samples to plan with")
    parser.add_argument("--judged", type=int, help="samples to judge with")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS, help="beside same and ours")
    options = parser.parse_args()
    if options.network in ("resnet20", "resnet56"):
        case = resnet(int(options.network[6:]), options.formats, options.planned or 1024, options.judged or 2000)
    elif options.network == "stories":
        named = tuple(f"int{bits}" for bits in options.formats)
        case = of_language(storyteller(), stories(256), options.planned or 32, options.judged or 64, named)
    else:
        case = of_folder(
            Path(options.network), options.text, options.formats, options.planned or 16, options.judged or 32
        )
    found: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    before = case.judge(case.model)
    for seed in range(options.seeds):
        for method, budget, loss, accuracy, remark in seed_of(
            case, seed, options.budgets, options.probes, options.methods, more=options.without_rounds
        ):
            if method == "seconds":
                found[method, budget].append((loss, accuracy))
                continue
            found[method, budget].append((loss - before[0], accuracy))
            print(f"seed {seed}, {budget} bits, {method}: {loss - before[0]:.4f} {remark}", flush=True)
    methods = [*dict.fromkeys(["same", *(method for method, _ in found if method != "seconds")])]
    table = Table(title=f"{options.network}: loss {before[0]:.4f}, accuracy {before[1]:.4f} before")
    for column in ("bits", *methods):
        table.add_column(column, justify="right")
    for budget in options.budgets:
        table.add_row(f"{budget}", *(_cell(found[method, budget]) for method in methods))
    Console(width=160).print(table)
    seconds = np.mean(found["seconds", 0.0], axis=0)
    print(f"seconds: pf.allocate {seconds[0]:.1f}, measuring each layer and format {seconds[1]:.1f}")


def _cell(values: list[tuple[float, float]]) -> str:
    if not values:
        return "–"
    loss, accuracy = np.array(values).T
    spread = f" ± {loss.std(ddof=1):.3f}" if len(loss) > 1 and loss.std() > 0 else ""
    return f"{loss.mean():.3f}{spread}" + ("" if np.isnan(accuracy).any() else f"\n{accuracy.mean():.3f}")


if __name__ == "__main__":
    main()
