"""Intervals and partial correlations of networks, also in clusters, against scipy and resampling one by one."""

import math

import numpy as np
import pytest
from scipy import stats

import pyflatness as pf
from pyflatness.statistics import intervals
from pyflatness.statistics.coefficients import STATISTICS, coefficients, whole

SCIPY = {
    "Pearson": lambda x, y: stats.pearsonr(x, y).statistic,
    "Spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    "Kendall": lambda x, y: stats.kendalltau(x, y).statistic,
}
SIZES = [5, 1, 4, 3, 6, 2, 5]  # of the clusters


def study(seed=0, ties=False):
    """Networks in clusters, with a loss that measure and gap both depend on."""
    generator = np.random.default_rng(seed)
    recipe = np.repeat(np.arange(len(SIZES)), SIZES)
    shared = generator.normal(size=len(SIZES))[recipe]
    loss, *noise = generator.normal(size=(3, len(recipe)))
    kappa, gap = (shared + loss + part for part in noise)
    if ties:
        loss, kappa, gap = (np.round(values) for values in (loss, kappa, gap))
    order = generator.permutation(len(recipe))  # clusters need not be blocks of rows
    names = [f"recipe {k}" for k in recipe]
    columns = {"kappa": kappa, "gap": gap, "loss": loss, "recipe": np.array(names)}
    return {name: column[order].tolist() for name, column in columns.items()}


def one(table, statistic, **options):
    return pf.statistics.correlations(table, "kappa", **options)["kappa", statistic]


@pytest.mark.parametrize("statistic", SCIPY)
@pytest.mark.parametrize("decimals", [1, 16])  # one decimal: with ties
def test_values_and_intervals_against_scipy(statistic, decimals):
    rng = np.random.default_rng(0)
    x = rng.normal(size=30).round(decimals)
    y = (x + rng.normal(size=30)).round(decimals)
    found = pf.statistics.correlations({"x": x.tolist(), "y": y.tolist()}, "x", "y")["x", statistic]
    assert found.value == pytest.approx(SCIPY[statistic](x, y), abs=1e-12)
    truth = stats.bootstrap(
        (x, y), SCIPY[statistic], paired=True, vectorized=False, method="percentile", n_resamples=1000, rng=rng
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((truth.low, truth.high), abs=0.05)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("statistic", SCIPY)
def test_a_line_and_degenerate_values(statistic):
    def ends(x, y):
        row = pf.statistics.correlations({"x": x, "y": y}, "x", "y")["x", statistic]
        return row.value, row.low, row.high

    line = np.arange(5.0)
    assert ends(line, -1e-9 * line) == pytest.approx((-1, -1, -1))
    for x, y in ((line, np.full(5, 0.1)), (np.full(5, 0.1), line), (line[:1], line[:1])):
        assert all(map(math.isnan, ends(x, y)))
    for bad in (math.nan, math.inf):
        for x, y in ((line, [0, 1, 2, 3, bad]), ([0, 1, 2, 3, bad], line)):
            with pytest.raises(pf.errors.InputError, match="is empty, NaN or infinite for 4"):
                ends(x, y)


def test_fisher_of_pearson_is_that_of_scipy():
    table = study()
    row = one(table, "Pearson", interval="fisher")
    expected = stats.pearsonr(table["kappa"], table["gap"]).confidence_interval(0.95)
    assert (row.low, row.high) == pytest.approx([expected.low, expected.high], rel=1e-12)


@pytest.mark.parametrize(("statistic", "variance"), [("Spearman", lambda r: (1 + r**2 / 2) / 23), ("Kendall", None)])
def test_fisher_of_ranks(statistic, variance):
    row = one(study(), statistic, interval="fisher")  # of 26 networks
    half = stats.norm.ppf(0.975) * math.sqrt(variance(row.value) if variance else 0.437 / 22)
    expected = [math.tanh(math.atanh(row.value) + side * half) for side in (-1, 1)]
    assert (row.low, row.high) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("ties", [False, True])
def test_the_bootstrap_draws_whole_clusters(statistic, ties):
    table = study(ties=ties)
    kappa, gap = np.array(table["kappa"]), np.array(table["gap"])
    members = {name: np.flatnonzero(np.array(table["recipe"]) == name) for name in dict.fromkeys(table["recipe"])}
    drawn = np.random.default_rng(3).integers(len(members), size=(intervals.RESAMPLES, len(members)))
    values = []
    for clusters in drawn[:200]:
        networks = np.concatenate([[*members.values()][cluster] for cluster in clusters])
        values.append(SCIPY[statistic](kappa[networks], gap[networks]))
    places = np.array([[*members].index(name) for name in table["recipe"]])
    found = intervals.bootstrap_resamples(len(kappa), places, seed=3)
    assert coefficients(statistic, [kappa, gap], found)[:200] == pytest.approx(values, rel=1e-10)
    row = one(table, statistic, settings="recipe", seed=3)
    whole_run = coefficients(statistic, [kappa, gap], found)
    assert (row.low, row.high) == pytest.approx(np.percentile(whole_run, [2.5, 97.5]).tolist())
    assert row.value == pytest.approx(SCIPY[statistic](kappa, gap))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_fisher_over_clusters_leaves_each_out_once(statistic):
    table = study()
    kappa, gap, recipe = (np.array(table[name]) for name in ("kappa", "gap", "recipe"))
    z = [math.atanh(SCIPY[statistic](kappa[recipe != name], gap[recipe != name])) for name in {*table["recipe"]}]
    half = stats.t.ppf(0.975, 6) * math.sqrt(6 / 7 * sum((value - np.mean(z)) ** 2 for value in z))
    row = one(table, statistic, interval="fisher", settings="recipe")
    expected = [math.tanh(math.atanh(row.value) + side * half) for side in (-1, 1)]
    assert (row.low, row.high) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("interval", ["bootstrap", "fisher"])
def test_networks_that_are_clusters_of_their_own_are_independent(interval):
    table = {"kappa": study()["kappa"], "gap": study()["gap"], "name_of_all": list(range(26))}
    found = [one(table, "Kendall", interval=interval, settings=by) for by in (None, "name_of_all")]
    if interval == "bootstrap":
        assert found[0] == found[1]
    else:  # another estimate of the same variance
        assert found[1].high - found[1].low == pytest.approx(found[0].high - found[0].low, rel=0.4)


def test_clusters_may_be_named_by_several_columns():
    table = study()
    table["optimiser"] = [name[-1] in "0123" for name in table["recipe"]]
    table["rate"] = [int(name[-1]) % 4 for name in table["recipe"]]
    together = pf.statistics.correlations(table, "kappa", settings=["optimiser", "rate"])
    assert together.rows == pf.statistics.correlations(table, "kappa", settings="recipe").rows
    assert together.clusters == 7
    assert str(together).startswith("with gap, 26 networks in 7 clusters; 95 % bootstrap intervals over clusters\n")
    assert {row.measure for row in pf.statistics.correlations(table, settings="rate", given="loss").rows} == {
        "kappa",
        "optimiser",
    }


def test_no_interval_from_few_networks_or_clusters():
    few = {"kappa": [1, 2, 4, 3], "gap": [1, 3, 2, 4]}
    table = study()
    fewer = {name: column[:] for name, column in table.items()} | {"half": [k % 4 for k in range(26)]}
    for interval in ("bootstrap", "fisher"):
        for row in (
            *pf.statistics.correlations(few, interval=interval).rows,
            *pf.statistics.correlations(fewer, "kappa", interval=interval, settings="half").rows,
            *pf.statistics.correlations({**few, "kappa": [1, 2, 4, 3]}, interval=interval).rows,
        ):
            assert math.isfinite(row.value)
            assert math.isnan(row.low)
            assert math.isnan(row.high)
    five = {"kappa": [1, 2, 4, 3, 5], "gap": [1, 3, 2, 4, 5], "loss": [2, 1, 1, 3, 2]}
    assert math.isfinite(one(five, "Kendall", interval="fisher").low)
    assert math.isnan(one(five, "Kendall", interval="fisher", given="loss").low)  # 4 less one to fit


def test_fisher_has_no_interval_for_a_perfect_correlation():
    line = {"kappa": [1, 2, 3, 4, 5, 6], "gap": [2, 4, 6, 8, 10, 12], "recipe": list("abcdef")}
    for settings in (None, "recipe"):
        assert [
            str(row)[-3:] for row in pf.statistics.correlations(line, interval="fisher", settings=settings).rows
        ] == ["[–]"] * 3


def left(values, given):
    """What a regression on columns leaves."""
    columns = np.column_stack([np.ones(len(values)), *given])
    return values - columns @ np.linalg.lstsq(columns, values, rcond=None)[0]


@pytest.mark.parametrize("names", [("loss",), ("loss", "epochs")])
def test_partial_correlations_are_those_of_residuals(names):
    table = study(1) | {"epochs": np.random.default_rng(2).normal(size=26).tolist()}
    kappa, gap, *given = (np.array(table[name]) for name in ("kappa", "gap", *names))
    found = pf.statistics.correlations(table, "kappa", given=names)
    assert found.given == names
    assert found["kappa", "Pearson"].value == pytest.approx(SCIPY["Pearson"](left(kappa, given), left(gap, given)))
    ranks = [stats.rankdata(values) for values in (kappa, gap, *given)]
    expected = SCIPY["Pearson"](left(ranks[0], ranks[2:]), left(ranks[1], ranks[2:]))
    assert found["kappa", "Spearman"].value == pytest.approx(expected)
    signs = [np.sign(values[:, None] - values).ravel() for values in (kappa, gap, *given)]
    expected = SCIPY["Pearson"](left(signs[0], signs[2:]), left(signs[1], signs[2:]))
    assert found["kappa", "Kendall"].value == pytest.approx(expected)


def test_partial_kendall_by_its_formula():
    table = study(2, ties=True)
    x, y, z = (table[name] for name in ("kappa", "gap", "loss"))
    xy, xz, yz = (SCIPY["Kendall"](*pair) for pair in ((x, y), (x, z), (y, z)))
    row = one(table, "Kendall", given="loss")
    assert row.value == pytest.approx((xy - xz * yz) / math.sqrt((1 - xz**2) * (1 - yz**2)))
    assert row.low < row.value < row.high


def test_partial_correlation_takes_out_what_the_loss_explains():
    generator = np.random.default_rng(0)
    loss = generator.normal(size=400)
    kappa, gap = (loss + 0.5 * generator.normal(size=400) for _ in range(2))
    table = {"kappa": kappa, "gap": gap, "loss": loss}
    for row in pf.statistics.correlations(table, "kappa", interval="fisher").rows:
        assert row.low > 0.5
    for row in pf.statistics.correlations(table, "kappa", interval="fisher", given="loss").rows:
        assert row.low < 0.2  # Kendall's keeps a little: its partial is 0 only for pairs, not for normal variables
        assert abs(row.value) < 0.25
    for row in pf.statistics.correlations({**table, "kappa": loss}, "kappa", given="loss").rows:
        assert math.isnan(row.value)


def test_text_columns_are_clusters_in_files_of_score(tmp_path):
    table = study()
    lines = ["checkpoint,layer,measure,value,loss,recipe"]
    lines += [f"net{k},,kappa,{table['kappa'][k]!r},{table['gap'][k]!r},{table['recipe'][k]}" for k in range(26)]
    (path := tmp_path / "scored.csv").write_text("\n".join(lines))
    found = pf.statistics.correlations(path, "kappa", "loss", settings="recipe")
    assert [row.low for row in found.rows] == [
        row.low for row in pf.statistics.correlations(table, "kappa", settings="recipe").rows
    ]
    path.write_text("\n".join([*lines[:-1], lines[-1][: lines[-1].rindex(",") + 1]]))
    with pytest.raises(pf.errors.InputError, match="'recipe' is empty for net25"):
        pf.statistics.correlations(path, "kappa", "loss", settings="recipe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": "t"}, "interval='t' does not exist; choose one of 'bootstrap', 'fisher'"),
        ({"settings": "recip"}, "no column 'recip'; did you mean recipe"),
        ({"given": "reciqe"}, "no column of numbers 'reciqe'"),
        ({"given": "same"}, "'same' is constant"),
        ({"permutations": -1}, "permutations=-1"),
        ({"permutations": True}, "permutations=True"),
        ({"within": True, "settings": "recipe"}, "pass settings= and permutations= too"),
        ({"within": True, "permutations": 9}, "pass settings= and permutations= too"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(pf.errors.InputError, match=message):
        pf.statistics.correlations({**study(), "same": [1] * 26}, "kappa", **options)


def test_every_statistic_of_the_whole_sample_is_that_of_scipy():
    generator = np.random.default_rng(5)
    for n in (2, 3, 7, 40):
        for _ in range(20):
            x, y = generator.integers(4, size=(2, n)).astype(float)
            for statistic, truth in SCIPY.items():
                if np.ptp(x) and np.ptp(y):
                    assert coefficients(statistic, [x, y], whole(n))[0] == pytest.approx(truth(x, y), abs=1e-12)
                else:
                    assert math.isnan(coefficients(statistic, [x, y], whole(n))[0])


def crossed(seed=0):
    """Networks of six recipes and four seeds, which both shift measure and gap; two are missing."""
    generator = np.random.default_rng(seed)
    recipe, start = (part.ravel() for part in np.meshgrid(range(6), range(4), indexing="ij"))
    parts = [generator.normal(size=count)[of] for count, of in ((6, recipe), (4, start))]
    kappa, gap = (sum(parts) + generator.normal(size=24) for _ in range(2))
    table = {
        "kappa": kappa,
        "gap": gap,
        "recipe": recipe,
        "start": start,
        "shape": np.array(["a", "b", "c"])[recipe % 3],
    }
    return {name: column[2:].tolist() for name, column in table.items()}


@pytest.mark.parametrize("statistic", STATISTICS)
def test_seeds_are_left_out_as_well_as_recipes(statistic):
    table = crossed(seed=3)
    kappa, gap, recipe, start = (np.array(table[name]) for name in ("kappa", "gap", "recipe", "start"))

    def variance(of):
        z = [math.atanh(SCIPY[statistic](kappa[of != left_out], gap[of != left_out])) for left_out in {*of.tolist()}]
        return (len(z) - 1) / len(z) * sum((value - np.mean(z)) ** 2 for value in z)

    first, more = variance(recipe), variance(start) - variance(4 * recipe + start)
    assert more > 0
    dof = (first + more) ** 2 / (first**2 / 5 + more**2 / 3)
    row = one(table, statistic, interval="fisher", settings="recipe", seeds="start")
    half = stats.t.ppf(0.975, dof) * math.sqrt(first + more)
    expected = [math.tanh(math.atanh(row.value) + side * half) for side in (-1, 1)]
    assert (row.low, row.high) == pytest.approx(expected, rel=1e-9)
    alone = one(table | {"start": [0] * 22}, statistic, interval="fisher", settings="recipe", seeds="start")
    assert alone == one(table, statistic, interval="fisher", settings="recipe")
    with pytest.raises(pf.errors.InputError, match="settings= and interval='fisher'"):
        one(table, statistic, seeds="start")


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("interval", ["bootstrap", "fisher"])
def test_strata_are_compared_inside(statistic, interval):
    """Across the shapes the order is turned round, as in Simpson's paradox."""
    table = crossed()
    level = {"a": 0.0, "b": 50.0, "c": 100.0}
    table["kappa"] = [value + level[shape] for value, shape in zip(table["kappa"], table["shape"], strict=True)]
    table["gap"] = [value - level[shape] for value, shape in zip(table["gap"], table["shape"], strict=True)]
    kappa, gap, shape = (np.array(table[name]) for name in ("kappa", "gap", "shape"))
    inside = {name: SCIPY[statistic](kappa[shape == name], gap[shape == name]) for name in level}
    expected = sum((shape == name).sum() * value for name, value in inside.items()) / len(shape)
    assert one(table, statistic).value < -0.4
    row = one(table, statistic, strata="shape", interval=interval, settings="recipe")
    assert row.value == pytest.approx(expected)
    assert row.low < row.value < row.high
    assert row.value > 0
    with pytest.raises(pf.errors.InputError, match="strata"):
        one(table, statistic, strata="shape", permutations=9)


def test_text_is_held_fixed_by_its_values():
    table = crossed()
    shape = np.array(table["shape"])
    given = [(shape == name).astype(float) for name in ("b", "c")]
    kappa, gap = (left(np.array(table[name]), given) for name in ("kappa", "gap"))
    assert one(table, "Pearson", given="shape").value == pytest.approx(SCIPY["Pearson"](kappa, gap))


def test_training_losses_that_differ_are_said():
    table = crossed() | {"loss": [0.1] * 20 + [0.3, 0.075]}
    found = pf.statistics.correlations(table, "kappa")
    assert "from 0.075 to 0.3, a factor of 4" in found.note
    assert str(found).splitlines()[-1] == found.note
    for options in ({"given": "loss"}, {"exclude": ["20"]}):
        assert not pf.statistics.correlations(table, "kappa", **options).note


# --- intervals that are missing ---------------------------------------------------------------------------------------


RATES = [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
TABLE = {"kappa": [1.0, 2, 3, 4, 5, 6], "gap": [2.0, 1, 4, 3, 6, 5], "loss": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]}


def test_too_few_for_an_interval():
    few = {name: column[:4] for name, column in TABLE.items()}
    assert "[–]: 4 networks are too few for an interval" in str(pf.statistics.correlations(few, "kappa"))
    table = {**TABLE, "rate": RATES}
    said = str(pf.statistics.correlations(table, "kappa", settings=["rate"], interval="fisher"))
    assert "[–]: 3 clusters are too few for an interval" in said
    assert "too few" not in str(pf.statistics.correlations(TABLE, "kappa"))


def test_not_defined():
    held = pf.statistics.correlations(TABLE, "kappa", given="loss")
    assert np.isnan(held["kappa", "Spearman"].value)
    assert "nan: not defined where a column is constant, or in the order of what is held fixed" in str(held)
    constant = pf.statistics.correlations({**TABLE, "kappa": [1.0] * 6}, "kappa")
    assert "nan: not defined where a column is constant\n" in f"{constant}\n"
    assert "nan" not in str(pf.statistics.correlations(TABLE, "kappa"))


@pytest.mark.parametrize("crossed", [True, False])
def test_a_measure_of_recipes_against_a_gap_of_seeds(crossed):
    """There the variance is the plain sum of that over recipes and that over seeds."""
    generator = np.random.default_rng(5)
    recipe, seed = (part.ravel() for part in np.meshgrid(range(7), range(6), indexing="ij"))
    of_recipe, of_seed = generator.normal(size=7)[recipe], generator.normal(size=6)[seed]
    noise = 0.3 * generator.normal(size=(2, 42))
    table = {"x": of_recipe + noise[0], "y": (of_seed if crossed else of_recipe) + noise[1]}
    table |= {"recipe": recipe.astype(str), "seed": seed.astype(str)}
    options = {"interval": "fisher", "settings": "recipe", "seeds": "seed"}
    found = pf.statistics.correlations(table, "x", "y", **options)["x", "Pearson"]

    def z(kept):
        return math.atanh(np.corrcoef(table["x"][kept], table["y"][kept])[0, 1])

    def variance(codes):
        values = [z(codes != code) for code in np.unique(codes)]
        return (len(values) - 1) * np.var(values)

    recipes, seeds = variance(recipe), variance(seed)
    more = seeds if crossed else max(0.0, seeds - variance(6 * recipe + seed))
    dof = (recipes + more) ** 2 / (recipes**2 / 6 + more**2 / 5)
    half = stats.t.ppf(0.975, dof) * math.sqrt(recipes + more)
    middle = z(np.full(42, True))
    assert (found.low, found.high) == pytest.approx((math.tanh(middle - half), math.tanh(middle + half)), rel=1e-6)
