"""Bad input of the calls on tables of networks, on many models, and of what a figure is drawn into or written to."""

import numpy as np
import pytest
import torch
from torch import nn

import pyflatness as pf
from support import doors
from support.doors import LOSS, X, Y

TABLE = {"name": [*"abcdef"], "m": [1, 2, 3, 4, 5, 6], "y": [2, 1, 4, 3, 6, 5], "s": [*"uuuvvv"], "q": [1, 2, 3] * 2}


def _grid(call):
    return lambda **given: call(**{"table": TABLE, "measure": "m", "target": "y", "settings": ["s", "q"], **given})


CALLS = {
    "correlations": lambda **given: pf.statistics.correlations(**{"table": TABLE, "x": "m", "y": "y", **given}),
    "granulated_kendall": _grid(pf.statistics.granulated_kendall),
    "sign_error": _grid(pf.statistics.sign_error),
    "conditional_mutual_information": _grid(pf.statistics.conditional_mutual_information),
    "plot_correlation": lambda **given: pf.statistics.plot_correlation(**{"table": TABLE, "x": "m", "y": "y", **given}),
    "plot_correlation_matrix": lambda **given: pf.statistics.plot_correlation_matrix(**{"table": TABLE, **given}),
    "invariances": lambda **given: pf.invariances(
        **{"model": doors.net(), "loss": LOSS, "data": (X, Y), "measures": "trace", **given}
    ),
    "score": lambda **given: pf.score(**{"models": {"a": doors.net()}, "data": (X, Y), "loss": LOSS, **given}),
}
OF_TABLES = ("correlations", "granulated_kendall", "sign_error", "conditional_mutual_information", "plot_correlation")
REPORT = pf.measure(doors.net(), LOSS, (X, Y), measures="trace")
HISTORY = pf.results.History()
HISTORY.add(REPORT, step=1)
RESULTS = [
    (lambda: REPORT[None], r"report\[measure\] or report\[layer, measure\] is wanted, got None"),
    (lambda: REPORT["0", "trace", 3], r"report\[layer, measure\] is wanted, got \('0', 'trace', 3\)"),
    (lambda: REPORT.to_json(3), "path=3: the path of a file is wanted"),
    (lambda: REPORT.to_csv(None), "path=None: the path of a file is wanted"),
    (lambda: REPORT.plot(axes=3), "axes: axes of matplotlib are wanted, .* got int"),
    (lambda: REPORT.plot(axes=[1, 2]), "axes: one for each of trace is wanted, got 2"),
    (lambda: REPORT.plot(3), "path=3: the path of a file is wanted"),
    (lambda: pf.results.Report.from_json(3), "report: JSON text, or the path of a file of it, is wanted"),
    (lambda: HISTORY.plot(measures=[]), "measures: an empty list; pass None for all that were recorded"),
    (lambda: HISTORY.plot(axes=3), "axes: axes of matplotlib are wanted, .* got int"),
    (lambda: pf.results.Landscape.from_npz(3), "path=3: the path of a file is wanted"),
]
CASES = [
    *((name, {"table": {"m": 3}}, "table: m=3: cells are wanted") for name in OF_TABLES),
    *((name, {"exclude": 3}, "exclude=3: a name or several of networks are wanted") for name in OF_TABLES),
    *((name, {"exclude": [None]}, "exclude=.*, and None is among them") for name in OF_TABLES),
    ("correlations", {"x": 3}, "x=3: a name or several of columns are wanted"),
    ("correlations", {"y": ["y"]}, r"y=\['y'\]: the name of a column is wanted"),
    ("correlations", {"settings": 3}, "settings=3: a name or several of columns"),
    ("correlations", {"given": None}, "given=None: a name or several of columns"),
    ("correlations", {"seed": "x"}, "seed='x': an integer of 64 bits"),
    ("correlations", {"interval": ["fisher"]}, r"interval=\['fisher'\] does not exist; choose one of 'bootstrap'"),
    ("correlations", {"permutations": -1}, "permutations=-1: a number of permutations, such as 9999 or 0, is wanted"),
    ("correlations", {"within": "yes"}, "within='yes': True or False is wanted"),
    ("sign_error", {"measure": None}, "measure=None: the name of a column is wanted"),
    ("sign_error", {"target": np.ones(2)}, "target=array.*: the name of a column is wanted"),
    ("sign_error", {"settings": 3}, "settings=3: a name or several of columns are wanted"),
    ("plot_correlation", {"axes": "x"}, r"axes: axes of matplotlib are wanted, as of plt.subplots\(\), got str"),
    ("plot_correlation", {"path": 3}, "path=3: the path of a file is wanted"),
    ("plot_correlation_matrix", {"axes": 3}, "axes: axes of matplotlib are wanted, .* got int"),
    ("plot_correlation_matrix", {"statistic": np.ones(2)}, "statistic=array.* does not exist; choose one of 'Pearson'"),
    ("invariances", {"model": None}, "model: a torch.nn.Module is wanted, got NoneType"),
    ("invariances", {"factors": 3}, r"factors=3: two positive numbers \(low, high\) are wanted"),
    ("invariances", {"factors": (2, 1)}, r"factors=\(2, 1\): two positive numbers"),
    ("invariances", {"factors": torch.ones(2, 2)}, "factors=tensor.*: two positive numbers"),
    ("score", {"models": 3}, "models: networks or paths by name, or several paths, are wanted, got int 3"),
    ("score", {"models": torch.tensor(1.0)}, "models: networks or paths by name, .* got Tensor"),
    ("score", {"models": [np.ones(2)]}, "models: array.*: a path is wanted, or a network by its name"),
    ("score", {"model": nn.Linear(2, 2)}, r"model: what makes the network is wanted, .* models=\{name: network\}"),
    ("score", {"data": None}, "data: a tuple of tensors or an iterable of batches is wanted, got NoneType"),
    ("score", {"data": LOSS, "loss": (X, Y)}, r"got tuple; the order of arguments is \(model, loss, data\)"),
    ("score", {"data": 3}, "data: a tuple of tensors or an iterable of batches is wanted, got int"),
    (
        "score",
        {"data": iter([(X, Y)])},
        "data: list_iterator can be read once, and every model reads them; pass a list",
    ),
    ("score", {"layers": []}, "layers: an empty list; pass None for all layers"),
    ("score", {"store": ""}, "store='': the path of a file is wanted"),
    ("score", {"store": 3}, "store=3: the path of a file is wanted"),
    ("score", {"executor": ""}, "executor='' does not exist; choose one of 'serial'"),
    ("score", {"retry": "yes"}, "retry='yes': True or False is wanted"),
]


@pytest.mark.parametrize(("name", "given", "match"), CASES, ids=lambda each: each if isinstance(each, str) else None)
def test_bad_input(name, given, match):
    with pytest.raises(pf.errors.InputError, match=match):
        CALLS[name](**given)


@pytest.mark.parametrize(("call", "match"), RESULTS)
def test_results(call, match):
    with pytest.raises(pf.errors.InputError, match=match):
        call()


def test_what_the_cases_are_made_from_is_fine():
    for call in CALLS.values():
        call()


def test_seeds_of_either_sign():
    """As everywhere else; NumPy's generators take none below zero."""
    one, other = (pf.statistics.correlations(TABLE, "m", "y", seed=seed) for seed in (-1, 0))
    assert one["m", "Pearson"].value == other["m", "Pearson"].value
    assert pf.invariances(doors.net(), LOSS, (X, Y), measures="trace", seed=-1).rows


def test_no_clusters_are_no_clusters():
    assert (
        pf.statistics.correlations(TABLE, "m", "y", settings=[]).rows
        == pf.statistics.correlations(TABLE, "m", "y").rows
    )
    _, axes = pf.statistics.plot_correlation(TABLE, "m", "y", settings=[])
    assert axes.get_legend_handles_labels()[1] == ["6 networks"]
