"""Entries of the grid of the public calls beside the values of layers, and of samples that are not finite."""

import copy
import csv
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyflatness as pf
from support.cases import LOSSES, head, to
from support.grid import CASES, Case

Entry = tuple[str, Callable[[], Any]]
OnCase = Callable[..., Any]
ON_TUPLES = "generalization", "shuffled", "changed"  # the calls that make other data of theirs
ALPHAS = (0.05, 0.4)
HALVES = ("mlp ReLU", "mlp Tanh", "cnn", "residual", "attention", "siamese", "loss: squared error", "tokens",
    "loss: class weights sum", "loss: binary sum", "batch norm of vectors", "linear layers on pixels")  # fmt: skip


def _gap(model: nn.Module, loss: Any, data: Any, **options: Any) -> Any:
    return pf.generalization_gap(model, loss, data, tuple(part[:2] for part in data), **options)


def _bound(model: nn.Module, loss: Any, data: Any, **options: Any) -> Any:
    return pf.theory.generalization_bound(
        model, loss, data, test=tuple(part[:2] for part in data), folds=2, probes=3, **options
    )


def _rescaled(model: nn.Module, loss: Any, data: Any, factor: Any = 2.0) -> nn.Module:
    first = next(name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d))
    return pf.reparameterize(model, {first: factor}, data)


def _from_the_start(model: nn.Module, loss: Any, data: Any) -> Any:
    initial = {name: 0.5 * value for name, value in model.state_dict().items()}
    return pf.measures.pac_bayes(model, loss, data, probes=2, steps=4, initial=initial)


def _printed(model: nn.Module, loss: Any, data: Any) -> list[str]:
    """Return what results print."""
    calls = "bounds", "pac_bayes", "feature_robustness", "generalization_gap", "generalization_bound", "verify"
    found = [CALLS[name](model, loss, data) for name in calls]
    found += [
        pf.relative_flatness(model, loss, data, **options) for options in ({}, {"probes": 3}, {"normalize": "std"})
    ]
    return [str(result) for result in found]


def _round_trip(model: nn.Module, loss: Any, data: Any) -> dict[str, Any]:
    """Return what a report is written as, and read back from."""
    report = pf.measure(model, loss, data, measures=["trace", "relative_flatness", "weight_norm"], per_sample=True)
    text = report.to_json()
    estimate = report[report.layers[0], "trace"]
    return {
        "json": text,
        "read back": pf.results.Report.from_json(text),
        "frame": report.to_frame().to_csv(),
        "interval": estimate.interval(0.5),
        "estimate": pf.results.Estimate.from_dict(estimate.to_dict()),
        "network": report["trace"],
    }


class Shuffled:
    """Batches of two in another order at each read."""

    def __init__(self, data: tuple[torch.Tensor, torch.Tensor], *, changed: bool = False) -> None:
        self._data, self._changed = data, changed
        self._draw = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        inputs, targets = self._data
        order = torch.randperm(len(inputs), generator=self._draw)
        if self._changed:
            self._data = inputs + 1, targets
        return zip(inputs[order].split(2), targets[order].split(2), strict=True)


def _shuffled(
    model: nn.Module, loss: Any, data: Any, *, call: Callable[..., Any], changed: bool = False, **options: Any
) -> Any:
    return call(model, loss, Shuffled(data, changed=changed), **options)


def _critical(model: nn.Module, loss: Any, data: Any, **options: Any) -> pf.results.Estimate:
    step = {name: -parameter.detach() for name, parameter in model.named_parameters()}
    return pf.measures.critical_sharpness(model, loss, data, step, **options)


def _change(model: nn.Module, loss: Any, data: Any, **options: Any) -> pf.results.Report:
    return pf.cost_of_change(model, loss, data, pf.changes.rounded(model, 4), **options)


def _interpolated(model: nn.Module, loss: Any, data: Any) -> dict[str, Any]:
    other = {name: 1.5 * value for name, value in model.state_dict().items()}
    return _numbers(pf.linear_interpolation(model, loss, data, other, test=data, points=3))


def _landscape(model: nn.Module, loss: Any, data: Any, **options: Any) -> dict[str, Any]:
    return _numbers(pf.landscape(model, loss, data, points=3, **options))


def _numbers(found: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if name != "key"}


def _history(model: nn.Module, loss: Any, data: Any, **options: Any) -> list[Any]:
    history = pf.track(model, loss, data, weights=["live", "ema"], averaged=copy.deepcopy(model), **options)
    records = [history.record(step=step, train_loss=0.5).to_dict() for step in range(2)]
    return [{name: part for name, part in record.items() if name != "seconds"} for record in records]


CALLS: dict[str, Callable[..., Any]] = {
    "interpolation_error": lambda model, loss, data: pf.theory.interpolation_error(model, data),
    "worst_case_sharpness": partial(pf.worst_case_sharpness, steps=4, starts=2, bound=True, adaptive=True, m=3),
    "keskar_sharpness": partial(pf.measures.keskar_sharpness, steps=3),
    "critical_sharpness": _critical,
    "spectrum": partial(pf.spectrum, k=2, which="both", density=True, probes=2, steps=5),
    "landscape": _landscape,
    "landscape, a line": partial(_landscape, dimensions=1, quadratic=False),
    "linear_interpolation": _interpolated,
    "cost_of_change": _change,
    "cost_of_change, ggn, by trace": partial(_change, curvature="ggn", by_trace=True, measured=False),
    "importance": lambda *given: dict(pf.importance(*given)),
    "importance, hessian, sampled": lambda *given: dict(pf.importance(*given, kind="hessian", probes=2)),
    "representation": pf.representation,
    "representation, top, by sample": partial(pf.representation, top=2, per_sample=True),
    "representation, tight": partial(pf.representation, memory=1, backend="reference"),
    "bounds": pf.theory.bounds,
    "bounds, sharpness of all, normalized": partial(pf.theory.bounds, sharpness="all", normalized=True),
    "mls_adversarial": partial(pf.measures.mls_adversarial, steps=4, per_sample=True),
    "mls_adversarial, radius": partial(pf.measures.mls_adversarial, steps=2, rho=0.1, seed=4),
    "pac_bayes": partial(pf.measures.pac_bayes, probes=3, steps=5),
    "pac_bayes, squared": partial(pf.measures.pac_bayes, probes=2, steps=4, squared=True, drop=0.3, seed=2),
    "adaptive_sharpness_mc": partial(pf.measures.adaptive_sharpness_mc, probes=3),
    "adaptive_sharpness_mc, not scaled": partial(
        pf.measures.adaptive_sharpness_mc, probes=2, scaled=False, rho=0.3, seed=5
    ),
    "feature_robustness": partial(pf.theory.feature_robustness, probes=3, rho=ALPHAS),
    "feature_robustness, propagate": partial(
        pf.theory.feature_robustness, probes=2, rho=ALPHAS, nan_policy="propagate", seed=1
    ),
    "generalization_gap": _gap,
    "generalization_gap, omit": partial(_gap, nan_policy="omit"),
    "generalization_bound": _bound,
    "generalization_bound, given": partial(_bound, rho=0.2, kappa=1.5, seed=3),
    "track": _history,
    "reparameterize": _rescaled,
    "verify": partial(pf.verify, seconds=None),
    "pac_bayes, initial": _from_the_start,
    "report": _round_trip,
    "printed": _printed,
    "shuffled": partial(_shuffled, call=pf.measure),
    "shuffled, std": partial(_shuffled, call=pf.measure, normalize="std"),
    "shuffled, by sample": partial(_shuffled, call=pf.measure, normalize="std", per_sample=True),
    "changed data, std": partial(_shuffled, call=pf.measure, normalize="std", changed=True),
    "changed data, all": partial(_shuffled, call=pf.measure, measures="all", changed=True),
}


def of_networks(on_case: OnCase) -> Iterator[Entry]:
    """Yield what the public calls beside those of layers give for each network."""
    for name, case in itertools.product(CALLS, HALVES):
        batches = {} if name.startswith(ON_TUPLES) else {"data": 2}
        yield f"{name} | {case}", partial(on_case, CASES[case], CALLS[name])
        again = partial(on_case, CASES[case], CALLS[name], dtype=torch.float32, **batches)
        yield f"{name} | {case} | float32, batches of 2", again


def _of_head(call: Callable[..., Any], loss: str, **options: Any) -> Any:
    features, weight, bias = head(torch.float64)
    function, targets = (to(torch.float64, value) for value in LOSSES[loss])
    return call(features, weight, bias, targets, loss=function, **options)


def _refitted(loss: str) -> Any:
    features, weight, bias = head(torch.float64)
    function, targets = (to(torch.float64, value) for value in LOSSES[loss])

    def fit(held: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight + held.mean(), bias

    test = features[:3] + 1, targets[:3]
    return pf.theory.representativeness(
        features, weight, bias, targets, loss=function, folds=2, probes=2, fit=fit, test=test
    )


def _noise(**options: Any) -> torch.Tensor:
    features, *_ = head(torch.float32)
    return pf.theory.truncated_normal_noise(features, 0.3, **options)


def of_features() -> Iterator[Entry]:
    """Yield representativeness of heads as tensors, noise and bounds from numbers."""
    for loss in LOSSES:
        yield f"representativeness | {loss}", partial(_of_head, pf.theory.representativeness, loss, folds=2, probes=3)
        yield f"representativeness, refitted | {loss}", partial(_refitted, loss)
        yield (
            f"authors_representativeness | {loss}",
            partial(_of_head, pf.theory.authors_representativeness, loss, folds=2),
        )
        yield f"flatness_penalty | {loss}", partial(_of_head, pf.flatness_penalty, loss)
    for probes, seed in itertools.product((1, 3), (0, 5)):
        yield f"truncated_normal_noise | {probes} | {seed}", partial(_noise, probes=probes, seed=seed)
    yield "uniform_robustness_bound", partial(pf.theory.uniform_robustness_bound, 0.3, 7, 1.25)
    yield "spectral_robustness_bound", partial(pf.theory.spectral_robustness_bound, 0.3, 7.5, 1.25)
    draw = torch.Generator().manual_seed(3)
    columns = {name: torch.rand(12, generator=draw).tolist() for name in ("gap", "trace", "relative_flatness")}
    yield "correlations", partial(pf.statistics.correlations, columns, seed=1)
    yield "correlations, one", partial(pf.statistics.correlations, columns, "trace")
    columns |= {"depth": [1, 2, 3] * 4, "optimiser": ["sgd"] * 6 + ["adam"] * 6}
    clusters = {"settings": ["depth", "optimiser"], "permutations": 99}
    yield "correlations, clusters", partial(pf.statistics.correlations, columns, "trace", **clusters)
    yield (
        "correlations, given",
        partial(pf.statistics.correlations, columns, "trace", given="relative_flatness", interval="fisher"),
    )
    for function in (
        pf.statistics.granulated_kendall,
        pf.statistics.conditional_mutual_information,
        pf.statistics.sign_error,
    ):
        yield function.__name__, partial(function, columns, "trace", "gap", ["depth", "optimiser"])


def _broken(case: Case, call: Callable[..., Any], *args: Any, kind: str, **options: Any) -> Any:
    """Call with one number of a sample that is not finite, or a weight that is not."""
    model, inputs, targets = case.build(), case.inputs.clone(), case.targets.clone()
    if kind == "inputs":
        inputs[1].flatten()[0] = torch.nan
    elif kind == "infinite inputs":
        inputs[-1].flatten()[0] = torch.inf
    elif kind == "all inputs":
        inputs[:] = torch.nan
    elif kind == "weight":
        next(model.parameters()).data.flatten()[0] = torch.nan
    else:
        targets[0] = torch.nan
    batches = list(zip(inputs.split(2), targets.split(2), strict=True))
    return call(model, case.loss, batches, *args, **options)


def of_broken_samples() -> Iterator[Entry]:
    """Yield what each policy makes of numbers that are not finite."""
    policies, kinds = ("raise", "propagate", "omit"), ("inputs", "infinite inputs", "all inputs", "weight", "targets")
    for name, policy, kind in itertools.product(
        ("mlp ReLU", "mlp Tanh", "cnn", "loss: squared error", "loss: class weights", "loss: custom"), policies, kinds
    ):
        case = CASES[name]
        if kind == "targets" and not case.targets.is_floating_point():
            continue
        given = {"kind": kind, "nan_policy": policy}
        where = f"{name} | {kind} not finite | {policy}"
        yield (
            f"relative_flatness | {where}",
            partial(_broken, case, pf.relative_flatness, case.layers[0], per_sample=True, **given),
        )
        yield (
            f"relative_flatness | {where} | head, std",
            partial(_broken, case, pf.relative_flatness, normalize="std", per_sample=policy != "raise", **given),
        )
        yield (
            f"relative_flatness | {where} | probes",
            partial(_broken, case, pf.relative_flatness, case.layers[0], probes=2, **given),
        )
        yield f"measure all | {where}", partial(_broken, case, pf.measure, measures="all", **given)
        yield f"block_traces | {where}", partial(_broken, case, pf.block_traces, case.layers[0], **given)
        yield f"representation | {where}", partial(_broken, case, pf.representation, per_sample=True, **given)
        yield f"generalization_gap | {where}", partial(_broken, case, _of_itself, **given)


def _of_itself(model: nn.Module, loss: Any, data: Any, **options: Any) -> Any:
    return pf.generalization_gap(model, loss, data, data, **options)


def score(*options: str) -> list[dict[str, str]]:
    """Return the rows that the command line's ``score`` writes for two checkpoints, but their times."""
    from support.value_grid import command_line

    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "scored_network.py"
        shutil.copy(Path(__file__).with_name("tiny_network.py"), network)
        paths = []
        for seed in range(2):
            torch.manual_seed(seed)
            layers = {"body": nn.Linear(4, 5), "head": nn.Linear(5, 3)}
            state = {
                f"{name}.{key}": value for name, layer in layers.items() for key, value in layer.state_dict().items()
            }
            paths.append(Path(folder) / f"{seed}.pt")
            torch.save(state, paths[-1])
        out = Path(folder) / "scores.csv"
        command_line("score", "--model", f"{network}:Tiny", "--data", f"{network}:data", "--loss", "cross_entropy",
            *options, "--out", str(out), *map(str, paths))  # fmt: skip
        with out.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    return [{key: cell.replace(folder, "") for key, cell in row.items() if key != "seconds"} for row in rows]


def _layers() -> str:
    from support.value_grid import command_line

    return command_line("layers", "--model", f"{Path(__file__).with_name('larger_networks.py')}:stages")


def of_the_command_line() -> Iterator[Entry]:
    """Yield the rows of ``score`` and what ``layers`` prints."""
    for options in ((), ("--layers", "*", "--measures", "all"), ("--layers", "body", "--probes", "2"),
        ("--layers", "*", "--curvature", "ggn", "--measures", "trace")):  # fmt: skip
        yield f"score | {' '.join(options).replace('*', 'every layer')}", partial(score, *options)
    yield "layers", _layers


def entries(on_case: OnCase) -> Iterator[Entry]:
    """Yield all of these."""
    return itertools.chain(of_networks(on_case), of_features(), of_broken_samples(), of_the_command_line())
