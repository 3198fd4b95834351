"""Options that calls share are said once: signatures and help have them from there."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import pyflatness as pf
from pyflatness.options import EVERY, How, MeasureHow, Options
from support import doors
from support.public import CALLS

# Densities of eigenvalues have probes of their own, so `spectrum` cannot have the options of measures.
RETYPED = {("spectrum", "curvature")}


def test_help_defines_every_argument():
    missing = {
        (name, argument)
        for name, call in CALLS.items()
        for argument in inspect.signature(call).parameters
        if not re.search(rf"^    {argument}: \S", inspect.getdoc(call), re.MULTILINE)
    }
    assert missing == {("causal_lm", "model"), ("causal_lm", "batch")}
    shown = {name: str(inspect.signature(call)) for name, call in CALLS.items()}
    assert not [name for name, signature in shown.items() if "Ellipsis" in signature or "= ..." in signature]
    annotations = {(name, one) for name, call in CALLS.items() for one in inspect.signature(call).parameters.values()}
    assert not [(name, one.name) for name, one in annotations if one.annotation is one.empty]


def test_no_public_function_says_an_option_of_all_again():
    said = set()
    for path in Path(pf.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and any("public(" in ast.unparse(one) for one in node.decorator_list):
                said |= {(node.name, argument.arg) for argument in node.args.kwonlyargs if argument.arg in EVERY}
    assert {(call, option) for call, option in said if option != "probes"} == RETYPED  # noise and directions have own


def test_one_word_has_one_meaning_in_all_signatures():
    """A radius is `rho`, random vectors are `probes`, starts of an ascent `starts`, points of a grid `points`."""
    other_words = {"epsilon", "delta", "deltas", "alphas", "draws", "restarts", "radius", "clusters"}
    named = {(name, argument) for name, call in CALLS.items() for argument in inspect.signature(call).parameters}
    assert not {(name, argument) for name, argument in named if argument in other_words}
    assert {name for name, argument in named if argument == "points"} == {"landscape", "linear_interpolation"}


def test_options_are_in_signatures_with_their_types_and_defaults():
    parameters = inspect.signature(pf.measure).parameters
    defaults = {**dataclasses.asdict(Options()), "eval": False}
    for name in EVERY:
        assert parameters[name].annotation == MeasureHow.__annotations__[name]
        assert parameters[name].default == defaults.get(name)
    assert [name for name in parameters if name not in EVERY] == ["model", "loss", "data", "layers", "measures"]
    assert "probes" not in inspect.signature(pf.verify).parameters


def test_what_is_checked_is_what_is_described():
    checked = {field.name for field in dataclasses.fields(Options)}
    assert checked == {*EVERY} - {"reduction", "forward", "eval", "progress", "process_group"}
    assert {*How.__annotations__} < {*MeasureHow.__annotations__}


@pytest.mark.parametrize(
    ("call", "option", "near"),
    [
        (pf.verify, "nan_policy", ""),
        (pf.measure, "memoy", "memory"),
        (pf.track, "layer", "layers"),
        (pf.track, "eval", ""),  # it measures in eval mode by itself
        (pf.landscape, "steps", "points"),
        (pf.measures.pac_bayes, "draws", "probes"),
    ],
)
def test_an_option_that_a_call_does_not_take_is_refused(call, option, near):
    with pytest.raises(TypeError, match=rf"no argument '{option}'; did you mean .*{near}"):
        call(doors.net(), doors.LOSS, (doors.X, doors.Y), **{option: 1})
