"""What is asked of the library about a random network, and what it is held against."""

import torch
from torch import nn

import pyflatness as pf
from support import truth as brute_force
from support.fuzzed.drawing import CONVOLUTIONS
from support.fuzzed.losses import draw
from support.fuzzed.truth import OF_LAYERS, Truth
from support.fuzzed.verdicts import RTOL, Verdict
from support.truth import is_called, place_of

_PRODUCTS = 70  # parameters for which a dense Hessian of them all is quick


def check(verdict: Verdict) -> None:
    """The layers' values by the Hessian, and some of the other checks, chosen by the seed."""
    case = verdict.case
    truth = case.truth()
    layers(verdict, truth)
    for other in case.rng.sample(OTHERS, 3):
        other(verdict, truth)


def _measure(verdict: Verdict, what: str, data=None, **options):
    case = verdict.case
    data = case.data() if data is None else data
    return verdict.call(
        what,
        lambda: pf.measure(case.model, case.problem.loss, data, **{"measures": "sweep", **case.options, **options}),
    )


def _flatness(verdict: Verdict, what: str, layer: str | None, data=None, **options):
    case = verdict.case
    data = case.data() if data is None else data
    run = pf.relative_flatness
    return verdict.call(what, lambda: run(case.model, case.problem.loss, data, layer, **{**case.options, **options}))


def _compare_report(verdict: Verdict, truth: Truth, report, curvature: str, *, per_sample: str = "") -> None:
    weights = tuple(name.replace(".parametrizations.weight.", ".weight.") for name in report.uncovered)
    expected = tuple(
        name for name in verdict.case.names if not any(f"{left}.".startswith(f"{name}.weight.") for left in weights)
    )
    besides = {name for name in report.layers if _is_besides(verdict.case.model, name)}
    found = tuple(name for name in report.layers if name not in besides)
    verdict.hold("layers", found == expected, f"measured {report.layers}, left out {report.uncovered}")
    for measure in OF_LAYERS:
        for name in report.layers:
            hessian = truth.of_layer(measure, "hessian", name)
            ggn = truth.of_layer(measure, "ggn", name) if curvature == "ggn" else None
            estimate = report[name, measure]
            what = f"{measure}, {curvature}"
            verdict.compare(what, estimate, hessian, ggn)
            kind = "ggn" if curvature == "ggn" else "hessian"
            if measure.startswith("neuron"):
                verdict.compare_each(f"{what}, per neuron", estimate.per_neuron, truth.per_neuron(measure, kind, name))
            elif name == per_sample:
                verdict.compare_each(f"{what}, per sample", estimate.per_sample, truth.shares(measure, kind, name))
        if measure != "adaptive_sharpness":
            sums = [[sum(c) for c in zip(*(truth.of_layer(measure, k, n) for n in report.layers), strict=True)]
                for k in ("hessian", "ggn")]  # fmt: skip
            network = report[measure] if measure in report.measures else None
            assert network is not None
            verdict.compare(f"{measure} of the network, {curvature}", network, tuple(sums[0]),
                tuple(sums[1]) if curvature == "ggn" else None)  # fmt: skip


def _is_besides(model: nn.Module, name: str) -> bool:
    """Return whether a layer is one that the other checks leave alone: an embedding, or a weight of attention."""
    layer, _ = place_of(model, name)
    return isinstance(layer, nn.Embedding) or not is_called(model, name)


def layers(verdict: Verdict, truth: Truth) -> None:
    """All that one sweep gives, of every layer."""
    rng = verdict.case.rng
    curvature = rng.choice(("auto", "auto", "hessian"))
    sample = rng.choice(verdict.case.names) if rng.random() < 0.12 else ""
    report = _measure(verdict, f"layers, {curvature}", curvature=curvature, per_sample=bool(sample))
    if report is not None:
        _compare_report(verdict, truth, report, curvature, per_sample=sample)


def gauss_newton(verdict: Verdict, truth: Truth) -> None:
    report = _measure(verdict, "layers, ggn", curvature="ggn")
    if report is not None:
        _compare_report(verdict, truth, report, "ggn")


def one_layer(verdict: Verdict, truth: Truth) -> None:
    """Relative flatness of the default layer, and of each alone, which need fewer products."""
    case = verdict.case
    for name in (None, *case.names):
        estimate = _flatness(verdict, "one layer", name)
        if estimate is not None:
            verdict.hold("one layer", name in (None, estimate.layer), f"{estimate.layer} for {name}")
            verdict.compare("one layer", estimate, truth.of_layer("relative_flatness", "hessian", estimate.layer))


def block_traces(verdict: Verdict, truth: Truth) -> None:
    case = verdict.case
    name, curvature = case.rng.choice(case.names), case.rng.choice(("auto", "ggn"))
    options = {key: value for key, value in case.options.items() if key != "memory"} | {"curvature": curvature}
    found = verdict.call("block traces",
        lambda: pf.block_traces(case.model, case.problem.loss, case.data(), name, **options))  # fmt: skip
    if found is None:
        return
    kind = "ggn" if curvature == "ggn" else "hessian"
    expected = brute_force.block_traces(truth.block(kind, name), truth.groups(name))
    size = float(truth._cancelled(name).abs().sum())
    values = [(value, size) for value in expected.flatten().tolist()]
    verdict.compare_each(f"block traces, {curvature}", found.flatten(), values)


def normalised(verdict: Verdict, truth: Truth) -> None:
    case = verdict.case
    if case.problem.ignored is not None:
        return  # the deviations are over what the loss does not ignore
    for name in case.names:
        estimate = _flatness(verdict, "normalised", name, normalize="std")
        if estimate is not None:
            verdict.compare("normalised", estimate, truth.normalised("hessian", name))


def affine(verdict: Verdict, truth: Truth) -> None:
    case = verdict.case
    for name in case.names:
        if isinstance(case.model.get_submodule(name), CONVOLUTIONS):
            expected = truth.affine(name)
            estimate = _flatness(verdict, "affine", name, conv="affine") if expected else None
            if estimate is not None and expected is not None:
                verdict.compare("affine", estimate, expected)


def eigenvalues(verdict: Verdict, truth: Truth) -> None:
    """λ_max of layers and network, and κ^φ, from them row by row."""
    curvature = verdict.case.rng.choice(("auto", "ggn"))
    measures = ("lambda_max", "relative_flatness_max")
    report = _measure(verdict, "lambda_max", measures=measures, curvature=curvature)
    if report is None:
        return
    for name in report.layers:
        verdict.compare(f"relative_flatness_max, {curvature}", report[name, "relative_flatness_max"],
            truth.of_rows("hessian", name), truth.of_rows("ggn", name) if curvature == "ggn" else None)  # fmt: skip
    for name in (*report.layers, ""):
        estimate = report[name, "lambda_max"] if name else report["lambda_max"]
        names = (name,) if name else report.layers
        verdict.compare(f"lambda_max, {curvature}", estimate, truth.lambda_max("hessian", names),
            truth.lambda_max("ggn", names) if curvature == "ggn" else None)  # fmt: skip


def parameters(verdict: Verdict, truth: Truth) -> None:
    """Measures over all parameters."""
    measures = ["interpolation_sharpness"]
    if truth.parameters(trainable=True) <= _PRODUCTS:
        measures.append(verdict.case.rng.choice(("sharpness", "adaptive_sharpness")))
    if not truth.parameters(trainable=True):
        return
    for measure in measures:
        report = _measure(verdict, measure, measures=measure)
        if report is not None:
            if measure in report.skipped:
                verdict.reasons[f"{measure}: {report.skipped[measure][:100]}"] += 1
            else:
                verdict.compare(f"{measure} of all parameters", report[measure], getattr(truth, measure))


def fisher_rao(verdict: Verdict, truth: Truth) -> None:
    report = _measure(verdict, "fisher_rao", measures="fisher_rao")
    if report is not None:
        verdict.compare("fisher_rao", report["fisher_rao"], truth.fisher_rao)


def representation(verdict: Verdict, truth: Truth) -> None:
    case = verdict.case
    report = verdict.call(
        "representation",
        lambda: pf.representation(case.model, case.problem.loss, case.data(), layers=[*case.names], per_sample=True),
    )
    if report is None:
        return
    found = truth.jacobians()
    for (place, measure), values in found.items():
        if measure == "log_volume" or (measure == "volume" and not place):
            continue
        outputs = case.outputs[0].numel()
        sizes = found[place, "mls"] ** outputs if measure == "volume" else 1e-3 + values.abs()
        estimate = report[place, measure] if place else report[measure]
        expected = list(zip(values.double().tolist(), (10 * sizes).tolist(), strict=True))
        verdict.compare_each(f"{measure} of Jacobians", estimate.per_sample, expected)


def omitted(verdict: Verdict, truth: Truth) -> None:
    """A sample with NaN among its inputs or targets is left out, and counts nowhere."""
    case = verdict.case
    if len(case.inputs) < 2 or not case.inputs.is_floating_point():
        return
    bad = case.rng.randrange(len(case.inputs))
    if case.problem.ignored is not None and (case.problem.ignored[bad].all() or not case.problem.positions):
        return  # a sample without a loss does not count, whatever is in it; as a callable's, its loss is NaN
    moved = case.outputs.clone()
    moved[bad] += 1 + case.outputs[bad].square()
    if torch.equal(
        case.problem.loss(moved, case.problem.targets), case.problem.loss(case.outputs, case.problem.targets)
    ):
        return  # nor has it one where its class weighs nothing
    inputs, targets = case.inputs.clone(), case.problem.targets.clone()
    if targets.is_floating_point() and case.rng.random() < 0.4:
        targets[bad].view(-1)[0:1].fill_(torch.nan) if targets.ndim > 1 else targets[bad : bad + 1].fill_(torch.nan)
    else:
        inputs[bad] = torch.nan
    with torch.no_grad():
        if not torch.isnan(case.run(inputs)[bad]).any() and not targets.isnan().any():
            return  # the network does not look at it
    kept = torch.arange(len(inputs)) != bad
    name, normalize = case.rng.choice(case.names), case.rng.choice((None, None, "std"))
    if normalize and case.problem.ignored is not None:
        normalize = None
    estimate = _flatness(verdict, "omitted", name, case.data(inputs, targets), nan_policy="omit", normalize=normalize)
    if estimate is None:
        return
    verdict.hold("omitted", (estimate.samples, estimate.omitted) == (len(inputs) - 1, 1), repr(estimate))
    rest = case.truth(kept)
    expected = rest.normalised("hessian", name) if normalize else rest.of_layer("relative_flatness", "hessian", name)
    verdict.compare(f"omitted, {normalize}", estimate, expected)


def as_function(verdict: Verdict, truth: Truth) -> None:
    """Where autograd's gradient is not that of the loss as a function of a layer's weight, no value is exact."""
    for name in verdict.case.names:
        by_autograd, (before, behind) = truth.slopes(name)
        missed = not truth.is_at_kink(name) and abs(by_autograd - before) > 1e-4 * (1 + abs(before))
        estimate = _flatness(verdict, "as a function", name) if missed else None
        if estimate is not None:
            verdict.hold("as a function", not estimate.exact, f"{name}: slopes {by_autograd}, {before}, {behind}")


def sampled(verdict: Verdict, truth: Truth) -> None:
    case = verdict.case
    name, curvature = case.rng.choice(case.names), case.rng.choice(("auto", "ggn"))
    estimate = _flatness(verdict, "sampled", name, probes=64, curvature=curvature, seed=case.seed)
    if estimate is not None:
        kind = "ggn" if curvature == "ggn" else "hessian"
        verdict.compare_sampled(f"sampled, {curvature}", estimate, truth.of_layer("relative_flatness", kind, name))


def head(verdict: Verdict, truth: Truth) -> None:
    """``head_flatness`` of tensors, with a loss of its own."""
    rng, generator = verdict.case.rng, torch.Generator().manual_seed(verdict.case.seed + 1)
    n, d, m, positions = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 4), rng.choice(((), (), (1,), (3,)))
    problem = draw(rng, generator, n, (d, *positions), "")
    if positions and "weight" in problem.text and "binary" in problem.text:
        return  # the weights' shape is that of classes in dimension 1
    features = torch.randn(n, *positions, m, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(d, *rest, generator=generator, dtype=torch.float64) for rest in ((m,), ()))

    def risk(w):
        return problem.loss((features @ w.t() + bias).movedim(-1, 1), problem.targets)

    targets = problem.targets if problem.targets.ndim == 1 + len(positions) else problem.targets.movedim(1, -1)
    estimate = verdict.call(
        "head_flatness",
        lambda: pf.head_flatness(features, weight, bias, targets, loss=problem.loss, **problem.options),
    )
    if estimate is not None:
        matrix = brute_force.hessian(risk, weight)
        size = brute_force.relative_flatness_of(matrix.abs(), weight.abs())
        what = f"head_flatness, {n} x {positions} x {d}, {problem.text}"
        value = brute_force.relative_flatness_of(matrix, weight)
        verdict.compare("head_flatness" if abs(estimate.value - value) <= RTOL * size + 1e-13 else what, estimate,
            (value, size))  # fmt: skip


OTHERS = (
    gauss_newton, one_layer, block_traces, normalised, affine, eigenvalues, parameters, fisher_rao, representation,
    omitted, sampled, head, as_function,
)  # fmt: skip
