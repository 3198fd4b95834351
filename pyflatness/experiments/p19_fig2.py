"""P19, Figure 2: the measures of Figure 1, and those of the Hessian alone, at other weights of the same functions."""

from . import correlating, p19_minima, p21_minima, zoo
from .experiment import Bench, Experiment, Found
from .reparameterized import BY_LAYERS


def run(bench: Bench) -> Found:
    """Measure before and after the reparameterisation, and correlate."""
    networks, (head, _) = p19_minima.minima(bench), p21_minima.layers(bench)
    asked = p19_minima.asked(bench, networks)
    before = zoo.networks(bench, networks, asked)
    after = zoo.networks(bench, networks, asked, change=BY_LAYERS)
    return judged(before, after, [f"{measure} {head}" for measure in asked[0].measures])


def judged(before: zoo.Networks, after: zoo.Networks, shown: list[str]) -> Found:
    """Return what tables of networks at both weights say of the claim."""
    one, two = correlating.with_gap(before, shown), correlating.with_gap(after, shown)
    pairs = [f"{name} {correlating.said(one, name)} before and {correlating.said(two, name)} after" for name in shown]
    paper = {name: "as before" if name.startswith("scaled") else "very weak" for name in shown}
    return Found(
        after.columns | {f"{name}, before": before.columns[name] for name in shown},
        tuple(correlating.findings(two, shown, paper)),
        f"Over {two.points} networks the correlations with the gap (Pearson, {correlating.intervals(after)}) "
        f"are: {'; '.join(pairs)}.",
        lambda figure: correlating.scatter(figure, after, shown, columns=2),
        after.failures,
        size=(8.0, 7.0),
    )


EXPERIMENT = Experiment(
    name="p19-fig2",
    figure="P19, Figure 2",
    title="the measures of Figure 1 and those of the Hessian alone after random reparameterisations",
    claim="After layer-wise reparameterisations by factors in [5, 25] the proposed measures are not affected, and "
    "those of the Hessian alone have a very weak correlation with the generalisation error.",
    run=run,
    small=p19_minima.SMALL,
    paper=p19_minima.PAPER,
    data=p19_minima.DATA,
)
