"""Granulated Kendall, conditional mutual information and sign errors: by hand, pair by pair, and of known tables."""

import itertools
import math

import numpy as np
import pytest

import pyflatness as pf

# Depth and rate in full, two networks of (4, 0.3); text and numbers as settings.
DEPTH, RATE = ["shallow", "shallow", "deep", "deep", "deep"], [0.1, 0.3, 0.1, 0.3, 0.3]
SMALL = {"depth": DEPTH, "rate": RATE, "kappa": [1, 2, 4, 3, 5], "gap": [5, 6, 7, 8, 9]}


def sign(a, b):
    return (a > b) - (a < b)


def study(seed, ties=False, missing=0):
    """A grid of 3 × 2 × 3 settings with two seeds, without some of its networks."""
    generator = np.random.default_rng(seed)
    rows = list(itertools.product((0.1, 0.3, 1.0), ("sgd", "adam"), (1, 2, 3), (0, 1)))
    rows = [rows[k] for k in generator.permutation(len(rows))[missing:]]
    rate, optimiser, depth, _ = zip(*rows, strict=True)
    gap = np.array(rate) + generator.normal(size=len(rows))
    kappa = gap + np.array(depth) + generator.normal(size=len(rows))
    if ties:
        kappa, gap = np.round(kappa), np.round(gap)
    return {"rate": rate, "optimiser": optimiser, "depth": depth, "kappa": kappa.tolist(), "gap": gap.tolist()}


SETTINGS = ["rate", "optimiser", "depth"]
CASES = [(0, False, 0), (1, True, 0), (2, False, 9), (3, True, 9)]


def differing(table, setting):
    """Ordered pairs of networks that differ in one setting alone."""
    for i, j in itertools.permutations(range(len(table["gap"])), 2):
        if [name for name in SETTINGS if table[name][i] != table[name][j]] == [setting]:
            yield i, j


def agreement(table, i, j):
    return sign(table["kappa"][i], table["kappa"][j]) * sign(table["gap"][i], table["gap"][j])


def test_granulated_kendall_by_hand():
    """Of depth, at rate 0.1: networks 0, 2 agree, τ = 1. At 0.3: 1, 3 and 1, 4 agree, τ = 1. So ψ = (1 + 1) / 2 = 1.

    Of the rate, shallow: 0, 1 agree, τ = 1. Deep: 2, 3 do not, 2, 4 do, and 3, 4 have the same rate: τ = 0. So ψ = 1/2.
    """
    found = pf.statistics.granulated_kendall(SMALL, "kappa", "gap", ["depth", "rate"])
    assert found.by_setting == {"depth": 1.0, "rate": 0.5}
    assert found.pairs == {"depth": 3, "rate": 3}
    assert float(found) == found.value == 0.75
    assert str(found) == "kappa with gap: granulated Kendall Ψ 0.75; depth 1.00 (3 pairs), rate 0.50 (3 pairs)"


def test_sign_error_by_hand():
    """Of four environments only (deep, 0.1) against (deep, 0.3) errs, in 2, 3 and not in 2, 4: ½. Mean ½ / 4 = 1/8."""
    found = pf.statistics.sign_error(SMALL, "kappa", "gap", ["depth", "rate"])
    errors = {(e.first, e.second): (e.setting, e.error, e.pairs) for e in found.environments}
    assert errors == {
        ("shallow, 0.1", "deep, 0.1"): ("depth", 0.0, 1),
        ("shallow, 0.3", "deep, 0.3"): ("depth", 0.0, 2),
        ("shallow, 0.1", "shallow, 0.3"): ("rate", 0.0, 1),
        ("deep, 0.1", "deep, 0.3"): ("rate", 0.5, 2),
    }
    assert (found.mean, found.worst) == (0.125, 0.5)
    assert found.by_setting() == {"depth": (0.0, 0.0), "rate": (0.25, 0.5)}
    assert str(found).startswith(
        "kappa with gap: sign error 0.12, worst 0.50 of 4 environments; depth 0.00, worst 0.00;"
    )


def test_environments_of_few_pairs_are_taken_together():
    """Those of each setting have 1 and 2 pairs, together 3; of those of the rate one errs."""
    found = pf.statistics.sign_error(SMALL, "kappa", "gap", ["depth", "rate"], fewest=3)
    assert [(e.setting, e.first, e.second, e.pairs) for e in found.environments] == [
        ("depth", "shallow", "deep", 3),
        ("rate", "0.1", "0.3", 3),
    ]
    assert found.worst == pytest.approx(1 / 3)
    two = pf.statistics.sign_error(SMALL, "kappa", "gap", ["depth", "rate"], fewest=2)
    assert [e.pairs for e in two.environments] == [1, 2, 1, 2]


def channel(error):
    """I / H of a sign that is sent on wrongly with some probability: 1 less its binary entropy, in bits."""
    return 1 + sum(p * math.log2(p) for p in (error, 1 - error) if p)


def test_conditional_mutual_information_by_hand():
    """All pairs but 2, 3 of the ten agree; of the deep ones 2, 3 disagrees of three.

    Both signs of a pair come with probability ½, so that I / H is that of a binary symmetric channel. The shallow pair,
    one of four, says all of itself: with depth given, p(U) are 1/4 and 3/4, but by the symmetry H(V_g | U) is 1 bit, so
    Î = 1/4 · 1 + 3/4 · (1 - H₂(1/3)). With the rate given one pair has 0.1 and three have 0.3, and all agree: 1. With
    both the one pair 3, 4 is left, which agrees.
    """
    found = pf.statistics.conditional_mutual_information(SMALL, "kappa", "gap", ["depth", "rate"])
    assert found.by_condition == pytest.approx(
        {(): channel(0.1), ("depth",): 1 / 4 + 3 / 4 * channel(1 / 3), ("rate",): 1.0, ("depth", "rate"): 1.0}
    )
    assert float(found) == pytest.approx(1 / 4 + 3 / 4 * channel(1 / 3))
    assert str(found) == "kappa with gap: conditional mutual information 0.311 given depth, 0.531 given nothing"


@pytest.mark.parametrize("case", CASES)
def test_granulated_kendall_pair_by_pair(case):
    table = study(*case)
    found = pf.statistics.granulated_kendall(table, "kappa", "gap", SETTINGS)
    for setting in SETTINGS:
        by_others = {}
        pairs = [*differing(table, setting)]
        for i, j in pairs:
            others = tuple(table[name][i] for name in SETTINGS if name != setting)
            by_others.setdefault(others, []).append(agreement(table, i, j))
        assert found.by_setting[setting] == pytest.approx(np.mean([np.mean(of) for of in by_others.values()]))
        assert found.pairs[setting] == len(pairs) / 2
    assert found.value == pytest.approx(np.mean([*found.by_setting.values()]))


@pytest.mark.parametrize("case", CASES)
def test_sign_error_pair_by_pair(case):
    table = study(*case)
    environments = {}
    for setting in SETTINGS:
        for i, j in differing(table, setting):
            sides = frozenset(tuple(table[name][k] for name in SETTINGS) for k in (i, j))
            environments.setdefault(sides, []).append((1 - agreement(table, i, j)) / 2)
    found = pf.statistics.sign_error(table, "kappa", "gap", SETTINGS)
    means = [np.mean(errors) for errors in environments.values()]
    assert (found.mean, found.worst) == pytest.approx((np.mean(means), max(means)))
    assert sorted(e.error for e in found.environments) == pytest.approx(sorted(means))
    assert sorted(2 * e.pairs for e in found.environments) == sorted(map(len, environments.values()))


@pytest.mark.parametrize("case", CASES)
def test_conditional_mutual_information_pair_by_pair(case):
    table = study(*case)
    found = pf.statistics.conditional_mutual_information(table, "kappa", "gap", SETTINGS)
    sets = [given for size in range(3) for given in itertools.combinations(SETTINGS, size)]
    assert [*found.by_condition] == sets
    for given in sets:
        joint = {}
        for i, j in itertools.permutations(range(len(table["gap"])), 2):
            values = tuple(table[name][i] for name in given)
            if values == tuple(table[name][j] for name in given):
                key = values, sign(table["kappa"][i], table["kappa"][j]), sign(table["gap"][i], table["gap"][j])
                joint[key] = joint.get(key, 0) + 1
        total = sum(joint.values())

        def p(u=None, a=None, b=None, joint=joint, total=total):
            wanted = [count for (v, s, t), count in joint.items() if v == u and a in (None, s) and b in (None, t)]
            return sum(wanted) / total

        information = sum(
            count / total * math.log((count / total) * p(u) / (p(u, a) * p(u, b=b)))
            for (u, a, b), count in joint.items()
        )
        entropy = -sum(p(u, b=b) * math.log(p(u, b=b) / p(u)) for u, b in {(u, b) for u, _, b in joint})
        assert found.by_condition[given] == pytest.approx(information / entropy)
    assert found.value == pytest.approx(min(found.by_condition.values()))


def grid(seeds, generator):
    settings = itertools.product(range(3), range(3), range(3), range(seeds))
    a, b, c, _ = np.array([*settings]).T
    return {"a": a, "b": b, "c": c, "noise": generator.normal(size=len(a))}


def test_of_tables_with_a_known_answer():
    """A measure that is the target, minus it, or has nothing to do with it; and one that follows one setting alone."""
    generator = np.random.default_rng(0)
    table = grid(10, generator)
    gap = 3.0 * table["a"] + generator.normal(size=270)
    table |= {"gap": gap, "same": gap**3, "opposite": -gap, "setting": table["a"] + 1e-3 * table["noise"]}
    options = "gap", ["a", "b", "c"]
    value = {
        name: pf.statistics.granulated_kendall(table, name, *options)
        for name in ("same", "opposite", "noise", "setting")
    }
    assert [value["same"].value, value["opposite"].value] == [1, -1]
    assert abs(value["noise"].value) < 0.1
    assert value["setting"].by_setting["a"] > 0.9
    assert abs(value["setting"].by_setting["b"]) < 0.1
    error = {name: pf.statistics.sign_error(table, name, *options) for name in value}
    assert [(error[name].mean, error[name].worst) for name in ("same", "opposite")] == [(0, 0), (1, 1)]
    assert 0.45 < error["noise"].mean < 0.55 < error["noise"].worst
    assert error["setting"].by_setting()["a"][0] < 0.05
    assert error["setting"].worst > 0.6  # where another setting changes
    found = {name: pf.statistics.conditional_mutual_information(table, name, *options) for name in value}
    assert found["same"].value == pytest.approx(1)
    assert found["opposite"].value == pytest.approx(1)
    assert found["noise"].value < 0.01
    assert found["setting"].by_condition[()] > 0.3
    assert found["setting"].by_condition[("a",)] < 0.01  # nothing beyond the setting itself
    assert found["setting"].value <= found["setting"].by_condition[("a",)]


def test_equal_values_count_half():
    tied = {**SMALL, "kappa": [1, 1, 1, 1, 1]}
    assert pf.statistics.granulated_kendall(tied, "kappa", "gap", ["depth", "rate"]).value == 0
    assert pf.statistics.sign_error(tied, "kappa", "gap", ["depth", "rate"]).worst == 0.5
    assert pf.statistics.conditional_mutual_information(tied, "kappa", "gap", ["depth", "rate"]).value == 0
    same = {**SMALL, "gap": [1, 1, 1, 1, 1]}
    found = pf.statistics.conditional_mutual_information(same, "kappa", "gap", ["depth", "rate"])
    assert all(map(math.isnan, (found.value, *found.by_condition.values())))
    assert "conditional mutual information nan given any settings" in str(found)


def test_every_form_of_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(SMALL)
    frame.to_csv(tmp_path / "wide.csv", index=False)
    lines = ["checkpoint,layer,measure,value,loss,depth,rate"]
    lines += [f"{k},,kappa,{SMALL['kappa'][k]},1,{DEPTH[k]},{RATE[k]}" for k in range(5)]
    (scored := tmp_path / "scored.csv").write_text("\n".join(lines))
    test = {"checkpoint": range(5), "loss": [1 + gap for gap in SMALL["gap"]]}
    for function in (
        pf.statistics.granulated_kendall,
        pf.statistics.sign_error,
        pf.statistics.conditional_mutual_information,
    ):
        found = function(SMALL, "kappa", "gap", ["depth", "rate"])
        assert function(frame, "kappa", "gap", ["depth", "rate"]) == found
        assert function(tmp_path / "wide.csv", "kappa", "gap", ["depth", "rate"]) == found
        assert function(scored, "kappa", "gap", ["depth", "rate"], test=test) == found
        assert function(SMALL, "kappa", "gap", ["depth", "rate"], exclude=["4"]) != found
        shown = found.to_frame()
        assert set(shown["measure"]) == {"kappa"}
        assert len(shown) == {"granulated_kendall": 2, "sign_error": 4}.get(function.__name__, 4)


@pytest.mark.parametrize(
    "function",
    [pf.statistics.granulated_kendall, pf.statistics.sign_error, pf.statistics.conditional_mutual_information],
)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((SMALL, "kapa", "gap", ["depth"]), "no column of numbers 'kapa'; did you mean kappa"),
        ((SMALL, "kappa", "gap", ["width"]), "no column 'width'"),
        ((SMALL, "kappa", "gap", ["gap", "depth"]), "columns other than 'kappa' and 'gap'"),
        ((SMALL, "kappa", "gap", ["depth", "depth"]), "each once"),
        ((SMALL, "kappa", "gap", []), r"settings=\[\]"),
        (({**SMALL, "depth": [*DEPTH[:4], None]}, "kappa", "gap", ["depth"]), "'depth' is empty for 4;"),
        (({**SMALL, "rate": [*RATE[:4], math.nan]}, "kappa", "gap", ["rate"]), "'rate' is empty for 4;"),
        (({**SMALL, "gap": [1, 2, 3, 4, math.inf]}, "kappa", "gap", ["rate"]), "'gap' is empty, NaN or infinite for 4"),
    ],
)
def test_refusals(function, arguments, message):
    with pytest.raises(pf.errors.InputError, match=message):
        function(*arguments)


@pytest.mark.parametrize("function", [pf.statistics.granulated_kendall, pf.statistics.sign_error])
def test_a_setting_that_never_differs_alone(function):
    coupled = {"depth": [1, 2, 3], "rate": [1, 2, 3], "kappa": [1, 2, 3], "gap": [1, 2, 3]}
    with pytest.raises(pf.errors.InputError, match="no two networks differ in 'depth' alone"):
        function(coupled, "kappa", "gap", ["depth", "rate"])
