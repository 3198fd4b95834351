"""``budget=``: measurements within a part of the training's time, and what many small ones say together."""

import math
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyflatness as pf
from pyflatness.training import budget as budgets
from pyflatness.training.budget import TimeBudget
from support import trainings
from support.cases import classifier

X, Y = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
LOSS = nn.CrossEntropyLoss()


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(budgets.time, "perf_counter", lambda: self.now)
        self._patch = monkeypatch.setattr

    def of(self, history):
        """Go on by a second with each measurement of a history."""
        measure = history._measure

        def measured(batch):
            self.now += 1.0
            return measure(batch)

        self._patch(history, "_measure", measured)


@pytest.mark.parametrize("part", [0.01, 0.1])
@pytest.mark.parametrize(("fixed", "each"), [(0.5, 0.001), (0.05, 0.05)])
def test_the_part_of_the_time_is_kept(monkeypatch, part, fixed, each):
    """The first measurement is at once; at the end nearly all of the part is used, and samples are more where cheap."""
    clock, budget, taken = Clock(monkeypatch), TimeBudget(part, (torch.zeros(4096, 1), torch.zeros(4096))), []
    for step in range(20_000):
        clock.now += 0.1
        batch = budget.due()
        if batch is not None:
            taken.append((step, len(batch[0])))
            clock.now += fixed + each * len(batch[0])
            budget.took()
    assert taken[0] == (0, 32)
    assert 0.8 * part < budget.spent / (budget.spent + budget.trained) <= part
    assert max(samples for _, samples in taken) > 100 if fixed > each else max(samples for _, samples in taken) <= 64
    assert len(taken) >= 10


@pytest.mark.parametrize("size", [8, 16, 20])
def test_the_part_of_the_time_is_kept_with_batches_of_fewer_samples(monkeypatch, size):
    """As of a callback, which measures batches that were trained on."""
    clock, budget, taken = Clock(monkeypatch), TimeBudget(0.1, None), []
    for _ in range(1000):
        clock.now += 0.1
        batch = budget.due((torch.zeros(size, 1), torch.zeros(size)))
        if batch is not None:
            clock.now += 0.5
            budget.took()
            taken.append((len(batch[0]), budget.spent / (budget.spent + budget.trained)))
    assert {samples for samples, _ in taken} == {size}
    assert max(share for _, share in taken[1:]) <= 0.1  # the first one is at once
    assert len(taken) >= 20


def test_a_history_is_gone_on_with_at_the_step_and_time_where_it_ended(monkeypatch):
    clock, model = Clock(monkeypatch), classifier(5, 6, 3)
    history = pf.track(model, LOSS, (X, Y), budget=0.1)

    def steps(history, count):
        for _ in range(count):
            clock.now += 1.0
            history.step()

    steps(history, 101)  # of which the first one is measured, and each takes no time here
    assert history.ran == (101, 100.0, 0.0)
    read = pf.results.History.from_json(history.to_json())
    assert read.ran == history.ran
    assert "ran" not in pf.results.History(history.records).to_dict()
    wrong = ({"steps": -1, "trained": 0.0, "spent": 0.0}, {"steps": 3, "trained": float("nan"), "spent": 0.0})
    for ran in ({"steps": 3}, [3], *wrong):
        with pytest.raises(pf.errors.InputError, match=r"ran is a dict of steps, trained|a number of steps|seconds"):
            pf.results.History.from_dict({"records": [], "ran": ran})
    further = pf.track(model, LOSS, (X, Y), budget=0.1, history=read)
    steps(further, 1)
    assert further[-1].step == 102
    assert further.ran == (102, 100.0, 0.0)
    further.step(step=500)
    assert further[-1].step == 500
    with pytest.raises(pf.errors.InputError, match="a number of steps is wanted"):
        further.step(step=-1)


HALVES = [(X[:40], Y[:40]), (X[40:], Y[40:])]


@pytest.mark.parametrize(("data", "sizes"), [((X, Y), (32, 32)), (HALVES, (32, 8))], ids=["tensors", "batches"])
def test_a_step_measures_some_samples_of_the_data_in_turn(data, sizes, monkeypatch):
    Clock(monkeypatch)  # measuring takes no time, and so is always within the part
    model = classifier(5, 6, 3).train()
    history = pf.track(model, LOSS, data, budget=0.999, seed=1)
    torch.manual_seed(0)
    before = trainings.random_states()
    records = [history.step(train_loss=1.0) for _ in range(9)]
    assert trainings.random_states() == before
    assert model.training
    assert all(records)
    seen = TimeBudget(0.5, data)
    for record, size in zip(records[:2], sizes, strict=True):
        batch = seen._next()
        found = record.reports["live"]["0", "relative_flatness"]
        how = {"curvature": "ggn", "probes": 1, "seed": 1, "per_sample": True, "eval": True}
        expected = pf.measure(model, LOSS, batch, measures="relative_flatness", **how)["0", "relative_flatness"]
        assert (found.value, found.samples, found.exact, found.per_sample) == (expected.value, size, False, None)
        assert found.stderr == pytest.approx(statistics.stdev(expected.per_sample.tolist()) / size**0.5)
    assert [record.step for record in records] == [*range(1, 10)]
    places = TimeBudget(0.5, (torch.arange(80), torch.arange(80)))
    assert sorted(n for _ in range(3) for n in places._next()[0].tolist()) == [*range(80)]


def test_a_history_goes_on_with_its_time(tmp_path):
    model = classifier(5, 6, 3)
    history = pf.track(model, LOSS, (X, Y), budget=0.5)
    history.step()
    last = history[-1]
    history.to_json(tmp_path / "history.json")
    again = pf.track(model, LOSS, (X, Y), budget=1e-9, history=pf.results.History.from_json(tmp_path / "history.json"))
    assert again._budget.spent == sum(record.seconds for record in history) > 0
    assert (again._budget.trained, again._budget.steps) == (last.numbers["train_seconds"], last.step)
    assert again.step() is None


def test_the_weights_of_a_training_are_those_without():
    found = []
    for budget in (None, 0.9):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        history = pf.track(model, LOSS, (X, Y), budget=budget)
        for _ in range(5):
            chosen = torch.randint(64, (16,))
            optimizer.zero_grad()
            LOSS(model(X[chosen]), Y[chosen]).backward()
            optimizer.step()
            if budget:
                history.step()
        found.append((trainings.bits(model), trainings.random_states()))
    assert found[0] == found[1]


def report(value, stderr, samples=16):
    held = pf.results.Estimate(value, stderr, samples, "ggn-sampled", exact=False, backend="reference", dof=15.0)
    return pf.results.Report(("a",), ("relative_flatness",), {(name, "relative_flatness"): held for name in ("a", "")})


def test_pooled_values_hold_the_last_value_as_often_as_they_say():
    """A level that stays, moves or falls: 95 % intervals over 200 draws, narrower than the 0.15 of one record."""
    draw = torch.Generator().manual_seed(0)
    for moved, fallen in ((0.0, 1.0), (0.05, 1.0), (0.0, 0.9)):
        inside, widths = 0, []
        for _ in range(200):
            history, level = pf.results.History(), 10.0
            for step in range(1, 41):
                level *= fallen * (1 + moved * float(torch.randn((), generator=draw)))
                seen = level * (1 + 0.3 * torch.randn(16, generator=draw, dtype=torch.float64))
                history.add(report(float(seen.mean()), float(seen.std() / 4)), step=10 * step)
            found = history.pooled()["a"]
            low, high = found.interval()
            inside += low <= level <= high
            widths.append((high - low) / 2 / found.value)
        assert inside / 200 > 0.92
        assert statistics.median(widths) < (0.15 if moved or fallen < 1 else 0.1)


def test_an_alarm_is_where_samples_become_alike():
    history = pf.results.History()
    for step in range(30):
        history.add(report(1.0, (0.3 if step < 20 else 0.1) * (4 if step == 5 else 1), samples=64), step=step)
    assert [record.step for record in history.alarms()] == [*range(20, 26)]  # until the median is the new one
    with pytest.raises(pf.errors.InputError, match="'trace' of 'live' weights is in no record"):
        history.alarms("trace")


@pytest.mark.parametrize(
    ("count", "samples", "stderr", "said"),
    [
        (30, 31, 0.3, "so far there are 30 with standard errors, and from the 11th on they have at most 31 samples$"),
        (30, 64, None, "so far there are 0 with standard errors$"),
    ],
    ids=["few samples", "exact values"],
)
def test_where_no_record_could_be_an_alarm_a_warning_says_so_once(count, samples, stderr, said):
    history = pf.results.History()
    for step in range(count):
        history.add(report(1.0, stderr if step < 20 else stderr and 0.1, samples), step=step)
    needed = "it takes 10 records with standard errors, as of budget=, and then one of at least 32 samples; "
    with pytest.warns(RuntimeWarning, match=needed + said) as found:
        assert history.alarms() == history.alarms() == ()
    assert len(found) == 1
    assert found[0].filename == __file__


def test_before_an_eleventh_record_there_is_no_alarm_and_no_warning():
    history = pf.results.History()
    for step in range(10):
        assert history.alarms() == ()
        history.add(report(1.0, None), step=step)
    assert history.alarms() == ()


def test_a_training_that_goes_on_from_an_older_checkpoint_drops_the_records_after_it(monkeypatch):
    Clock(monkeypatch)  # which stands still, so that every step is measured
    history = pf.track(classifier(5, 6, 3), LOSS, (X, Y), budget=0.5)
    for step in (1, 340):
        assert history.step(step=step)
    with pytest.warns(RuntimeWarning, match="step 100 follows step 340, .* the 1 records of later steps") as found:
        history.step(step=100)
    assert found[0].filename == __file__
    history.step(step=101)
    assert [record.step for record in history] == [1, 100, 101]
    assert history.pooled()["0"] > 0


def test_a_layer_with_a_value_that_is_not_positive_has_its_last_record():
    history = pf.results.History()
    for step, value, samples in ((1, 1.0, 32), (2, -0.2, 2), (3, 0.5, 2)):
        history.add(report(value, 0.1, samples), step=step)
    assert history.pooled()["a"] == history[-1].reports["live"]["a", "relative_flatness"]


@pytest.mark.parametrize("size", [1e-200, 1e120])
def test_pooled_values_of_any_size(size):
    history = pf.results.History()
    for step, value in enumerate((1.0, 1.1, 0.9), 1):
        history.add(report(value * size, 0.1 * size), step=step)
    assert history.pooled()["a"].value == pytest.approx(size, rel=0.15)


def test_pooled_values_of_steps_that_go_back_are_refused():
    history = pf.results.History()
    for step in (1, 340, 100):
        history.add(report(1.0, 0.1), step=step)
    with pytest.raises(pf.errors.InputError, match="history: after step 340 comes step 100"):
        history.pooled()


def test_a_history_says_what_its_measurements_took(monkeypatch):
    clock = Clock(monkeypatch)
    history = pf.track(classifier(5, 6, 3), LOSS, (X, Y), budget=0.5)
    assert repr(history) == "History(0 records: nothing measured)"
    clock.of(history)
    history.step()
    clock.now += 0.5
    history.step()
    said = "; measured in 1.0 s, 66.7% of the training's 1.5 s)"
    assert repr(history) == f"History(1 records from step 1 to 1: relative_flatness{said}"
    assert str(history).splitlines()[0] == repr(history)


NAN = X.clone()
NAN[::4] = math.nan


def test_a_training_that_diverges_goes_on(monkeypatch):
    """A step with NaN is not recorded, and said once; its time counts as one of measuring."""
    clock, model = Clock(monkeypatch), classifier(5, 6, 3)
    history = pf.track(model, LOSS, (X, Y), budget=0.999)
    assert history.step(train_loss=0.5)
    kept = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    clock.of(history)

    def step():
        clock.now += 1.0
        return history.step(train_loss=math.nan)

    with pytest.warns(RuntimeWarning, match="history: step 2 is not measured, .* layer '0': its weight has 1 ") as said:
        assert [step(), step()] == [None, None]
    assert len(said) == 1
    assert history.ran == (3, 2.0, 2.0)
    with torch.no_grad():
        model[0].weight.copy_(kept)
    assert step().step == 4
    assert len(history) == 2


@pytest.mark.parametrize("policy", ["propagate", "omit"])
def test_nan_by_its_policy(policy):
    model = classifier(5, 6, 3)
    history = pf.track(model, LOSS, (NAN, Y), budget=0.999, nan_policy=policy)
    found = history.step().reports["live"]["relative_flatness"]
    if policy == "propagate":
        assert math.isnan(found.value)
        return
    assert found.omitted > 0
    assert found.samples == 32 - found.omitted
    low, high = found.interval()
    assert low < found.value < high
    how = {"measures": "relative_flatness", "nan_policy": policy, "curvature": "ggn", "probes": 1, "per_sample": True}
    values = pf.measure(model, LOSS, TimeBudget(0.5, (NAN, Y))._next(), **how)["relative_flatness"].per_sample
    assert found.stderr == pytest.approx(statistics.stdev(values[~values.isnan()].tolist()) / found.samples**0.5)


def test_what_is_refused():
    model = classifier(5, 6, 3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    arrays = X.numpy(), Y.numpy()
    for data, budget, message in (
        *(((X, Y), budget, r"budget=.* a part of the time between 0 and 1") for budget in (0, 1, -0.1, "much")),
        (loader, 0.1, r"data: budget= .*list\(itertools.islice\(loader, 20\)\), got"),
        *((data, 0.1, r"ndarray; pass torch.from_numpy\(array\)") for data in (arrays, [arrays])),
        ((X[:0], Y[:0]), 0.1, "and each needs samples; there are none"),
    ):
        with pytest.raises(pf.errors.InputError, match=message):
            pf.track(model, LOSS, data, budget=budget)
    with pytest.raises(pf.errors.InputError, match="read from a file or made without a model"):
        pf.results.History().step()
    with pytest.raises(pf.errors.InputError, match=r"call step\(\) after each step"):
        pf.track(model, LOSS, (X, Y), budget=0.1).record()
    history = pf.track(model, LOSS, (X, Y))
    with pytest.raises(pf.errors.InputError, match=r"step\(\) is for pf.track\(…, budget=0.01\)"):
        history.step()
    history.record()
    with pytest.raises(pf.errors.InputError, match="'relative_flatness' of 'live' weights is in no record with a step"):
        history.pooled()


class Attention(nn.Module):
    """A block with fused attention."""

    def __init__(self):
        super().__init__()
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(len(x), -1, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(dim=1))


@pytest.mark.parametrize("kind", ["flash attention", "compiled", "FSDP2"])
def test_first_derivatives_are_enough(kind, tmp_path):
    """Of models whose second derivatives cannot be had."""
    torch.manual_seed(0)
    model, x, y = Attention(), torch.randn(16, 6, 8), torch.arange(16) % 3
    history = pf.track(model, LOSS, (x, y), budget=0.9)
    if kind == "flash attention":
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            record = history.step()
    elif kind == "compiled":
        model.qkv.compile(backend="aot_eager")
        model(x)
        record = history.step()
    else:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            mesh = torch.distributed.init_device_mesh("cpu", (1,))
            torch.distributed.fsdp.fully_shard(model, mesh=mesh)
            record = history.step()
        finally:
            torch.distributed.destroy_process_group()
    found = record.reports["live"]
    assert set(found.layers) == {"qkv", "head"}
    assert all(estimate.value > 0 for _, _, estimate in found)
