"""Formats for layers under a budget: the products of all pairs against a dense GGN, the search against all choices."""

import copy
import dataclasses
import itertools
import json
import pickle
import re

import numpy as np
import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness import progress
from pyflatness.curvature import allocate
from pyflatness.numerics.choice_problem import ChoiceProblem

CE = nn.CrossEntropyLoss()


class Tokens(nn.Module):
    """An embedding, a smooth layer that mixes tokens, and a head over tokens."""

    def __init__(self, tied=False):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.head((self.inner(h) + h.mean(dim=1, keepdim=True)).tanh()).movedim(-1, 1)


class Sum(nn.Module):
    """Three layers beside each other, two with the same weight: the loss is quadratic in all weights together."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 3, bias=False) for _ in "abc")
        self.b.weight.data.copy_(self.a.weight)
        self.c.weight.data.copy_(1.1 * self.a.weight)

    def forward(self, x):
        return self.a(x[:, :6]) + self.b(x[:, :6]) + self.c(x[:, 6:])


def _images():
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 5), nn.Tanh(), nn.Linear(5, 4)]
    return nn.Sequential(*layers).double().eval(), (torch.randn(6, 2, 5, 5).double(), torch.randint(4, (6,)))


def _texts(tied=False):
    torch.manual_seed(1)
    return Tokens(tied).double().eval(), (torch.randint(7, (8, 5)), torch.randint(7, (8, 5)))


def _sums():
    torch.manual_seed(3)
    model, x = Sum().double().eval(), torch.randn(40, 12).double()
    return model, (x, model(x).detach())


def _dense(model, data, changes):
    """The gradient along changes of layers (A,) and the products Δ_aᵀ G Δ_b (A, A) in the GGN, by nested autograd."""
    inputs, targets = data
    zero = torch.zeros(len(changes), dtype=torch.float64)

    def outputs(t):
        weights = {f"{name}.weight": model.get_submodule(name).weight.detach() for name, _ in changes}
        for step, (name, change) in zip(t, changes, strict=True):
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + step * change
        return torch.func.functional_call(model, weights, (inputs,))

    along = torch.autograd.functional.jacobian(outputs, zero).flatten(0, -2)
    at = outputs(zero).detach()
    curved = torch.autograd.functional.hessian(lambda f: CE(f, targets), at).view(at.numel(), at.numel())
    gradient = torch.autograd.functional.jacobian(lambda t: CE(outputs(t), targets), zero)
    return gradient, along.t() @ curved @ along


@pytest.mark.parametrize("case", [_images, _texts])
def test_products_of_all_pairs_are_those_of_the_dense_ggn(case):
    model, data = case()
    formats = ["int2", "int3", "rank-2"]
    made = {name: pf.changes.of_format(model, name) for name in formats}
    keys = [(layer, name) for layer in made["int2"] for name in formats if made[name][layer].any()]
    changes = [(layer, made[name][layer]) for layer, name in keys]
    gradient, products = _dense(model, data, changes)
    batches = [tuple(part[:2] for part in data), tuple(part[2:] for part in data)]

    def folds(**how):
        return pf.allocate(model, CE, batches, formats, bits=64, **how)._plan.folds

    exact = folds(probes=None)
    assert len(exact.shares) == len(data[0])  # fewer samples than folds: each is one
    torch.testing.assert_close(exact.shares.sum(), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(total(exact), (gradient, products), rtol=1e-9, atol=1e-12)
    for sample in range(len(data[0])):
        own = _dense(model, tuple(part[sample : sample + 1] for part in data), changes)
        torch.testing.assert_close((exact.first[sample], exact.gram[sample]), own, rtol=1e-9, atol=1e-12)

    found = torch.stack([total(folds(probes=16, seed=seed))[1] for seed in range(1 if case is _images else 16)])
    if case is _images:  # its 3 columns are no more than the probes, and all sent
        torch.testing.assert_close(found[0], products, rtol=1e-9, atol=1e-12)
        return
    off = (found.mean(dim=0) - products).abs() / (found.std(dim=0) / len(found) ** 0.5)
    assert off.max() < 5
    assert 0.5 < off.square().mean().sqrt() < 1.5


def test_one_sample_has_no_interval():
    model, (images, labels) = _images()
    plan = pf.allocate(model, CE, (images[:1], labels[:1]), ["int4", "int8"], bits=6)
    assert plan.predicted.interval() is None
    assert f"{plan.predicted.value:.6g} [–]" in str(plan)
    assert str(plan).endswith("there is no interval, since a single sample does not show how samples differ")
    two = pf.allocate(model, CE, (images[:2], labels[:2]), ["int4", "int8"], bits=6)
    assert "a single sample" not in str(two)


def test_a_plan_can_be_kept_and_written_with_its_bytes_and_interval():
    model, data = _images()
    formats = ["int3", "int4-g16", "fp8", "mxfp4", "2:4", "rank-2", "keep", "gguf:q4_0", "bitsandbytes:nf4"]
    plan = pf.allocate(model, CE, data, formats, bits=4, rounds=0, probes=2)
    kept = pickle.loads(pickle.dumps(plan))
    assert str(kept) == str(plan)
    assert str(kept.frontier([4, 8])) == str(plan.frontier([4, 8]))
    assert all(map(torch.equal, kept.apply(model).parameters(), plan.apply(model).parameters()))
    told = pf.allocate(model, CE, data, ["int3", "int8"], bits=4, rounds=0, probes=2, tool="torchao").to_dict()
    assert (told["tool"], told["bytes"] > 0) == ("torchao", True)
    assert told["interval"][0] < told["predicted"]["value"] < told["interval"][1]
    assert (plan.to_dict()["tool"], plan.to_dict()["bytes"]) == (None, None)


def total(folds):
    """The first order and the products of all samples."""
    return folds.shares @ folds.first, torch.einsum("f,fab->ab", folds.shares, folds.gram)


@pytest.mark.parametrize("case", [_images, _texts])
def test_without_a_choice_the_prediction_is_the_expansion(case):
    model, data = case()
    changes = [*pf.changes.of_format(model, "int3").items()]
    plan = pf.allocate(model, CE, data, ["int3"], bits=3, probes=None, measured=False)
    gradient, products = _dense(model, data, changes)
    assert plan.predicted == pytest.approx(float(gradient.sum() + products.sum() / 2), rel=1e-9)
    each = []
    for sample in range(len(data[0])):
        first, second = _dense(model, tuple(part[sample : sample + 1] for part in data), changes)
        each.append(float(first.sum() + second.sum() / 2))
    assert plan.predicted.stderr == pytest.approx(np.std(each, ddof=1) / len(each) ** 0.5, rel=1e-9)
    assert (plan.predicted.exact, plan.predicted.dof, plan.predicted.method) == (False, len(each) - 1, "ggn")
    assert "to second order" in str(plan)
    one = pf.allocate(model, CE, tuple(part[:1] for part in data), ["int3"], bits=3, probes=None, measured=False)
    assert one.predicted == pytest.approx(each[0], rel=1e-9)
    assert one.predicted.interval() is None


def _losses(model, data):
    """The loss of each sample."""
    with torch.no_grad():
        each = nn.functional.cross_entropy(model(data[0]), data[1], reduction="none", ignore_index=-100)
    return each.flatten(1).sum(dim=1) if each.ndim > 1 else each


@pytest.mark.parametrize("case", [_images, _texts])
def test_without_a_choice_what_other_data_show_is_what_these_show(case):
    model, data = case()
    plan = pf.allocate(model, CE, data, ["int3"], bits=3, probes=2)
    each = _losses(plan.apply(model), data) - _losses(model, data)
    each = each / (data[1].numel() // len(data[1]))  # of a sample's terms the mean
    assert plan.loss_change == pytest.approx(each.mean().item(), rel=1e-9)
    assert plan.predicted.value == pytest.approx(plan.loss_change, rel=1e-9)
    assert plan.predicted.stderr == pytest.approx(each.std().item() / len(each) ** 0.5, rel=1e-9)
    assert (plan.predicted.exact, plan.predicted.dof, plan.predicted.method) == (False, len(each) - 1, "definition")
    assert f"on these by {plan.loss_change:.3g}" in str(plan)


def test_folds_of_targets_that_are_ignored_and_losses_that_are_sums():
    model, (tokens, targets) = _texts()
    targets = torch.where(torch.rand(targets.shape, generator=torch.Generator().manual_seed(0)) < 0.4, -100, targets)
    targets[3] = -100  # a sample, and here a fold, without any
    plan = pf.allocate(model, CE, (tokens, targets), ["int3"], bits=3)
    made = plan.apply(model)
    with torch.no_grad():
        wanted = CE(made(tokens), targets) - CE(model(tokens), targets)
    assert plan.loss_change == pytest.approx(wanted.item(), rel=1e-9)
    assert plan.predicted.dof == len(tokens) - 2
    summed = pf.allocate(model, nn.CrossEntropyLoss(reduction="sum"), (tokens, targets), ["int3"], bits=3)
    count = int((targets != -100).sum())
    assert summed.loss_change == pytest.approx(count * wanted.item(), rel=1e-9)
    assert summed.predicted.stderr == pytest.approx(count * plan.predicted.stderr, rel=1e-9)


def test_held_out_data_give_the_interval_and_tell_that_a_model_has_fitted_the_others():
    torch.manual_seed(0)
    x, y = torch.randn(400, 6).double(), torch.randint(3, (400,))
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3)).double()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    own, other, third = ((x[part], y[part]) for part in (slice(40), slice(40, 200), slice(200, 400)))
    for _ in range(200):  # labels that are noise are learnt by heart
        optimiser.zero_grad()
        CE(model(own[0]), own[1]).backward()
        optimiser.step()
    model.eval()
    plan = pf.allocate(model, CE, own, ["int4", "int8"], bits=6, held_out=other)
    each = _losses(plan.apply(model), other) - _losses(model, other)
    assert plan.predicted.value == pytest.approx(each.mean().item(), rel=1e-5)
    assert plan.predicted.samples == 160
    assert plan.predicted.stderr == pytest.approx(each.std().item() / len(each) ** 0.5, rel=1e-5)
    assert "and that of held_out" in str(plan)
    fair = pf.allocate(model, CE, other, ["int4", "int8"], bits=6, held_out=third)
    assert "held_out" not in str(fair)
    few = pf.allocate(model, CE, other, ["int4", "int8"], bits=6, held_out=tuple(part[:2] for part in third))
    assert (few.predicted.samples, few.predicted.dof) == (2, 1.0)
    with pytest.raises(pf.errors.InputError, match="held_out= is measured"):
        pf.allocate(model, CE, own, ["int4"], bits=6, held_out=other, measured=False)


def test_choices_are_priced_by_samples_that_had_no_part_in_them():
    """What a choice costs its own data is too little for others; what is predicted is not. Of drawn derivatives."""
    generator = torch.Generator().manual_seed(0)
    layers, kept = 8, (2.0, 3.0, 4.0)
    sizes = torch.tensor([1.0, 0.8, 0.6] * layers).double()  # of the derivatives along each change
    options = [
        allocate._Option({f"{layer}": pf.changes.named(f"int{bits:.0f}")}, bits, bits, (3 * layer + place,))
        for layer in range(layers)
        for place, bits in enumerate(kept)
    ]
    group, like = [layer for layer in range(layers) for _ in kept], pf.results.Estimate(0.0, None, 64, "ggn", False, "")
    own = predicted = truth = 0.0
    for _ in range(50):
        along = (sizes * torch.randn(16, 3 * layers, dtype=torch.float64, generator=generator)).view(16, 1, -1)
        gram = torch.einsum("fna,fnb->fab", along, along)
        first = torch.zeros(16, 3 * layers, dtype=torch.float64)
        none = torch.zeros(3 * layers, dtype=torch.float64)
        folds = allocate._Folds(torch.full((16,), 1 / 16).double(), first, gram, torch.tensor(group), none)
        choices, others = folds.problems(options, group)
        plan = allocate._Plan(
            options, choices, folds, others, {}, layers, like, 1.0, "", True, False, (), None, {}, {}, {}
        )
        chosen, _ = plan.choices.best(3.0 * layers)
        prices = folds.prices([*chosen])
        own += float(folds.shares @ prices)
        worse = [(places, folds.prices([*problem.good(3.0 * layers)]) - prices) for places, problem in plan.left_out]
        predicted += float(folds.shares @ prices) + allocate._hidden(folds.shares, worse)
        truth += 0.5 * float(sizes[chosen].square().sum())
    assert own < 0.9 * truth
    assert 0.9 * truth < predicted < 1.1 * truth


def test_a_change_as_large_as_the_loss_is_said_to_be_beyond_second_order():
    model, data = _images()
    notes = {}
    for kept in ("int2", "int8"):
        plan = pf.allocate(model, CE, data, [kept], bits=8)
        assert plan._plan.loss == pytest.approx(CE(model(data[0]), data[1]).item(), rel=1e-9)
        notes[kept] = [note for note in plan.predicted.notes if "half of the loss" in note]
        assert bool(notes[kept]) == (plan.predicted > 0.5 * plan._plan.loss)
    assert not notes["int8"]
    model[5].weight.data *= 20  # far from a minimum of the loss
    plan = pf.allocate(model, CE, data, ["modelopt:int2"], bits=2)
    assert plan.predicted > 0.5 * plan._plan.loss
    assert "what the loss does is what measured=True finds" in str(plan)


def _cross_validated(plan, of_formats, model, data, bits):
    """Return the mean loss of the best choice, by how much more others are expected to lose, and the choice."""

    def losses(choice):
        return _losses(dataclasses.replace(plan, _formats=choice).apply(model), data) / data[1][0].numel()

    best = of_formats.best(bits)
    own, hidden = losses(best._formats), 0.0
    for places, choice in best._of_other_folds:
        held_back = places[torch.arange(len(own)) % len(places)]
        worse = losses(choice) - own
        hidden += held_back.double().mean().item() * (worse[held_back].mean() - worse[~held_back].mean()).item()
    return own.mean().item(), max(0.0, hidden), best.choice


@pytest.mark.parametrize(("case", "scale"), [(_images, 40), (_texts, 5)])
def test_of_choices_without_the_coarsest_formats_that_of_the_least_cross_validated_loss_is_taken(case, scale):
    model, data = case()
    for values in model.parameters():
        values.data *= scale  # so that second order is a poor guide
    formats, found = ["modelopt:int2", "modelopt:int3", "modelopt:int4"], []  # whose lowest bits are the coarsest
    with torch.no_grad():
        before = CE(model(data[0]), data[1]).item()
    for budget in (3, 3.5, 4):
        plan = pf.allocate(model, CE, data, formats, bits=budget, rounds=0)
        plans = [plan._plan, *(plan._plan.without(formats[:count]) for count in (1, 2))]
        tried = [_cross_validated(plan, each, model, data, budget) for each in plans if each.fits(budget)]
        taken = min(range(len(tried)), key=lambda place: sum(tried[place][:2]))
        own, hidden, choice = tried[taken]
        assert plan.choice == choice
        assert plan.loss_change == pytest.approx(own - before, rel=1e-9)
        assert plan.predicted == pytest.approx(own + hidden - before, rel=1e-9)
        assert plan.frontier([budget]).plans[0].choice == tried[0][2]
        assert ("taken instead of the best by second order, which is expected" in str(plan)) == (taken > 0)
        found.append(taken)
    assert any(found)


@pytest.mark.parametrize("case", [_images, _texts])
def test_at_a_choice_the_expansion_is_that_of_the_changed_model(case, monkeypatch):
    model, data = case()
    formats, found, measured = ["int2", "int3", "int4"], {}, allocate._Read.measured

    def at_the_choice(read, bits, *options):
        best = read.plan.best(bits)
        found["there"], found["changed"] = read.at(best._formats), best.apply(model)
        return measured(read, bits, *options)

    monkeypatch.setattr(allocate._Read, "measured", at_the_choice)
    before = copy.deepcopy(model.state_dict())
    pf.allocate(model, CE, data, formats, bits=3, probes=None)
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
    made = {name: pf.changes.of_format(model, name) for name in formats}
    gradient, products = _dense(
        found["changed"], data, [(layer, made[name][layer]) for layer in made["int2"] for name in formats]
    )
    folds = found["there"].folds
    torch.testing.assert_close(total(folds), (gradient, products), rtol=1e-9, atol=1e-12)
    places = [*range(0, len(gradient), 3)]  # int2 for every layer
    more = -folds.made
    more[places] += 1
    assert folds.made.sum() == len(places)
    price = float(gradient @ more + more @ products @ more / 2)
    assert float(folds.shares @ folds.prices(places)) == pytest.approx(price, rel=1e-9)
    assert found["there"].best(3).choice.keys() == made["int2"].keys()


def _trained(seed):
    """A deep narrow network that has learnt four classes which overlap, and 256 samples of them."""
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 16), *(nn.Linear(16, 16) for _ in range(8))]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Linear(16, 4)).double()
    generator = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()

    def drawn(count):
        labels = torch.randint(4, (count,), generator=generator)
        return centres[labels] + torch.randn(count, 8, generator=generator).double(), labels

    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(400):
        x, labels = drawn(128)
        optimiser.zero_grad()
        CE(model(x), labels).backward()
        optimiser.step()
    return model.eval(), drawn(256)


def test_expansions_at_the_choice_find_better_ones_and_none_that_is_worse():
    formats, sums = ["int2", "int3", "int4"], np.zeros(3)
    for seed in range(1, 8):
        model, data = _trained(seed)
        plans = [pf.allocate(model, CE, data, formats, bits=2.5, rounds=rounds) for rounds in (0, 1, 3)]
        changes = [plan.loss_change for plan in plans]
        assert changes == sorted(changes, reverse=True)
        assert all(plan.bits <= 2.5 for plan in plans)
        wanted = _losses(plans[2].apply(model), data).mean() - _losses(model, data).mean()
        assert changes[2] == pytest.approx(wanted.item(), rel=1e-9)
        sums += changes
    assert sums[2] < 0.9 * sums[0]


def test_formats_that_a_tool_does_not_keep_some_layers_in_are_named_with_the_reason():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4)).eval()
    data, formats = (torch.randn(32, 64), torch.randint(4, (32,))), ["int4-g128", "int8"]
    plan = pf.allocate(model, CE, data, formats, bits=8, tool="torchao")
    wanted = "no int4-g128 in 1 of the layers: torchao takes no groups of 128 in rows of 64 entries"
    assert wanted in str(plan)
    assert "[" in str(plan).split("on unseen data")[1].split("(95 %)")[0]
    assert f"on these by {plan.loss_change:.3g} from {CE(model(data[0]), data[1]).item():.4g}" in str(plan)
    with pytest.raises(pf.errors.InputError, match=wanted):
        pf.allocate(model, CE, data, formats, bits=5, tool="torchao")
    with pytest.raises(pf.errors.InputError, match=r"there are int\[2-8\], with -gN for groups, fp8"):
        pf.allocate(model, CE, data, ["q4"], bits=5, tool="llm-compressor")


def test_one_format_for_all_is_taken_where_choices_lose_more_on_samples_that_had_no_part_in_them():
    taken = []
    for seed in range(1, 7):
        model, data = _trained(seed)
        few = tuple(part[:16] for part in data)
        before = _losses(model, few).mean().item()
        plan = pf.allocate(model, CE, few, ["int3", "int4", "int5"], bits=4, rounds=0)
        own, hidden, choice = _cross_validated(plan, plan._plan, model, few, 4)
        same = pf.allocate(model, CE, few, ["int4"], bits=4)
        assert same.predicted == pytest.approx(same.loss_change, rel=1e-9)  # it is chosen whatever the data are
        taken.append(plan.choice == same.choice)
        assert taken[-1] == (same.loss_change < own + hidden - before)
        assert plan.choice == (same.choice if taken[-1] else choice)
        assert plan.predicted == pytest.approx(min(same.loss_change, own + hidden - before), rel=1e-9)
    assert len({*taken}) == 2


@pytest.mark.parametrize("taken", [0, 1])
def test_a_choice_without_the_coarsest_formats_gives_way_only_to_one_that_others_are_expected_to_lose_less_by(
    taken, monkeypatch
):
    """By what choosing among all formats hides, such a choice is ahead; of two among all formats the losses tell."""
    tried, calls = allocate._Read._tried, []

    def shifted(self, best):
        found = tried(self, best)
        calls.append(len(found))
        if len(calls) == 1:
            return [dataclasses.replace(one, hidden=9.0 * (place != taken)) for place, one in enumerate(found)]
        (step,) = found
        return [dataclasses.replace(step, losses=step.losses._replace(changes=step.losses.changes - 1), hidden=2.0)]

    monkeypatch.setattr(allocate._Read, "_tried", shifted)
    model, data = _trained(4)
    plan = pf.allocate(model, CE, data, ["int2", "int3", "int4"], bits=3, rounds=1)
    assert calls == [2, 1]
    assert (plan.loss_change < -0.5) == (taken == 0)


def test_by_default_the_expansion_is_made_once_more_and_up_to_three_times_where_the_change_is_large(monkeypatch):
    sweeps = []

    class Counted(allocate.ChangeSweep):
        def found(self):
            sweeps.append(self)
            return super().found()

    monkeypatch.setattr(allocate, "ChangeSweep", Counted)
    model, data = _trained(3)
    formats = ["int2", "int3", "int8"]
    for bits, rounds in ((2.5, 3), (8, 1)):
        plan, again = (pf.allocate(model, CE, data, formats, bits=bits, rounds=count) for count in (None, rounds))
        assert plan.choice == again.choice
        first = pf.allocate(model, CE, data, formats, bits=bits, rounds=0)
        assert (first.loss_change > 0.5 * CE(model(data[0]), data[1]).item()) == (rounds == 3)
    for loss, names, count in ((CE, ["int8"], 1), ("kl", formats, 1), (CE, formats, 2)):
        sweeps.clear()
        pf.allocate(model, loss, data, names, bits=8)
        assert len(sweeps) == count


def test_folds_are_the_same_however_batches_are_cut():
    model, data = _images()
    cut = [tuple(part[:1] for part in data), tuple(part[1:] for part in data)]
    found = [pf.allocate(model, CE, each, ["int2", "int3"], bits=2.5)._plan.folds for each in (data, cut)]
    torch.testing.assert_close(found[0].gram, found[1].gram, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_the_best_of_all_choices(seed):
    generator = np.random.default_rng(seed)
    factor = generator.normal(size=(12, 18)) * generator.uniform(0.2, 2, size=18)
    sizes = np.tile([2.0, 3.0, 8.0], 6) * np.repeat(generator.integers(1, 9, 6), 3)
    problem = ChoiceProblem(np.repeat(np.arange(6), 3), 0.3 * generator.normal(size=18), factor.T @ factor, sizes)
    budget = 0.5 * (sizes[::3].sum() + sizes[2::3].sum())
    chosen, gap = problem.best(budget)
    values = {}
    for picks in itertools.product(range(3), repeat=6):
        places = np.arange(6) * 3 + picks
        if sizes[places].sum() <= budget:
            values[tuple(places)] = problem.costs[places].sum() + problem.products[np.ix_(places, places)].sum() / 2
    assert values[tuple(chosen)] == pytest.approx(min(values.values()))
    assert gap >= 0
    alone = tuple(problem.by_single_costs(budget))
    assert values[alone] >= values[tuple(chosen)]


def test_errors_that_add_up_are_not_made_together():
    model, data = _sums()
    loss, formats = nn.MSELoss(), ["int2", "int8"]
    alone = pf.cost_of_change(model, loss, data, pf.changes.of_format(model, "int2"), measured=False)
    assert alone["a", "predicted"] < alone["c", "predicted"]  # so that single costs round a and b
    plan = pf.allocate(model, loss, data, formats, bits=4)
    assert plan.choice in ({"a": "int2", "b": "int8", "c": "int2"}, {"a": "int8", "b": "int2", "c": "int2"})
    assert plan.bits == pytest.approx(4)
    made = plan.apply(model)
    assert plan.predicted == pytest.approx(loss(made(data[0]), data[1]).item(), rel=1e-9)  # it was 0
    singly = pf.changes.of_format(model, "int2", layers=["a", "b"])
    pf.changes.add(model, singly)
    assert loss(model(data[0]), data[1]).item() > 1.2 * plan.predicted
    assert plan.gap >= 0


def test_frontier_keeps_to_its_budgets_and_has_each_choice_once(tmp_path):
    model, data = _images()
    plan = pf.allocate(model, CE, data, ["int2", "int3", "int4", "keep"], bits=3, measured=False)
    frontier = plan.frontier([2, 2.5, 3, 4, 64, 65])
    assert all(plan.bits <= budget + 1e-9 for plan, budget in zip(frontier.plans, [2, 2.5, 3, 4, 64], strict=True))
    assert frontier.plans[0].choice == dict.fromkeys(plan.choice, "int2")
    assert frontier.plans[2].choice == plan.choice
    _, axes = frontier.plot(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 1000
    assert axes.get_ylabel() == "change of the loss on these data, to second order"
    assert len(frontier.to_frame()) == 5
    assert json.loads(plan.to_json())["choice"] == plan.choice
    assert "bits a weight of" in str(plan)


def test_frontier_is_of_these_data_to_second_order_and_has_no_intervals():
    model, data = _trained(2)
    few = tuple(part[:40] for part in data)
    plan = pf.allocate(model, CE, few, ["int3", "int4", "int8"], bits=4, rounds=0)
    frontier = plan.frontier()
    assert len({tuple(each.choice.items()) for each in frontier.plans}) == len(frontier.plans)
    for each in (*frontier.plans, plan):
        gradient, products = _dense(
            model, few, [(name, pf.changes.of_format(model, kind)[name]) for name, kind in each.choice.items()]
        )
        order = float(gradient.sum() + products.sum() / 2)
        if each is plan:
            assert (
                f"the plan of {plan.bits:.4g} bits is at {order:.3g} to second order, and at {plan.loss_change:.3g} as"
                in str(frontier)
            )
        else:
            assert each.predicted.value == pytest.approx(order, rel=1e-9)
            assert each.predicted.interval() is None
            assert f"on these data the loss changes by {order:.6g}, to second order" in str(each)
    table, _, told = str(frontier).rpartition("\n")
    assert "change to second order, unmeasured" in table
    assert "[" not in table
    assert told.startswith("changes of the loss on these data, without what choosing hides and so without intervals; ")


@pytest.mark.parametrize("case", [_images, _texts])
@pytest.mark.parametrize("budget", [{"bits": 2.9}, {"size": 20}, {"bits": 3.2, "fixed": {"*": "int4"}}])
def test_a_budget_that_is_too_small_is_noticed_before_the_sweep(case, budget, monkeypatch):
    model, data = case()
    monkeypatch.setattr(allocate.ChangeSweep, "_values", lambda self, run: pytest.fail("it sweeps"))
    with pytest.raises(pf.errors.InputError, match=r"the cheapest choice takes [34] bits a weight, \d+ bytes: int"):
        pf.allocate(model, CE, data, ["int3", "int8"], **budget)


def test_a_layer_that_did_not_run_yet_may_make_a_budget_large_enough():
    experts = Experts().double().eval()
    batch = (torch.randn(4, 6).double().abs(), torch.randint(3, (4,)))
    data = [batch, (-batch[0], batch[1])]
    how = {"fixed": {"a": "int8", "b": "int2"}, "rounds": 0, "progress": False}
    plan = pf.allocate(experts, CE, data, ["int2", "int8"], bits=5.5, **how)
    assert (plan.choice, plan.bits) == ({"a": "int8", "b": "int2"}, 5)


class Experts(nn.Module):
    """Two layers, of which each batch goes through one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


def test_long_searches_show_how_far_they_are(monkeypatch, capsys):
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    model, data = _images()
    plan = pf.allocate(model, CE, data, ["int2", "int3"], bits=2.5, rounds=0)
    assert "choosing formats: 1 of 1 after 0 s" in capsys.readouterr().err
    plan.frontier([2, 2.5])
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("choosing formats: ") for line in lines)
    assert lines[-1] == "choosing formats: 2 of 2 after 0 s"
    assert len(lines) > 8  # within a search too
    quiet = pf.allocate(model, CE, data, ["int2", "int3"], bits=2.5, rounds=0, progress=False)
    quiet.frontier([2, 2.5])
    assert capsys.readouterr().err == ""


def test_layers_of_one_weight_and_layers_named_together_have_one_format():
    model, data = _texts(tied=True)
    plan = pf.allocate(model, CE, data, ["int2", "int4"], bits=3)
    assert plan.weights == 28 + 16
    assert plan.choice["embed"] == plan.choice["head"]
    made = plan.apply(model)
    assert made.head.weight is made.embed.weight
    change = pf.changes.of_format(model, plan.choice["embed"])["head.weight"]
    torch.testing.assert_close(made.embed.weight, model.embed.weight + change)
    # Both uses of the weight change: the prediction is of the whole weight.
    gradient, products = _dense_of_tied(model, data, change)
    alone = pf.allocate(
        model, CE, data, [plan.choice["embed"]], bits=4, layers=["embed", "head"], probes=None, measured=False
    )
    assert alone.predicted == pytest.approx(gradient + products / 2, rel=1e-9)

    model, data = _images()
    plan = pf.allocate(model, CE, data, ["int2", "int4"], size=80, together=[["0", "5"]], fixed={"3": "int3"})
    assert plan.choice["3"] == "int3"
    assert plan.choice["0"] == plan.choice["5"]
    assert plan.bits * plan.weights <= 8 * 80


def _dense_of_tied(model, data, change):
    inputs, targets = data
    t = torch.zeros((), dtype=torch.float64)

    def outputs(t):
        weight = model.embed.weight.detach() + t * change
        return torch.func.functional_call(model, {"embed.weight": weight}, (inputs,))

    along, at = torch.autograd.functional.jacobian(outputs, t).flatten(), outputs(t).detach()
    curved = torch.autograd.functional.hessian(lambda f: CE(f, targets), at).view(at.numel(), at.numel())
    return float(torch.autograd.functional.jacobian(lambda t: CE(outputs(t), targets), t)), float(
        along @ curved @ along
    )


def test_formats_are_what_their_names_say():
    w = torch.tensor([[0.9, -0.3, 0.05, 0.0], [2.0, 1.0, -0.5, 0.25]])
    kept = {name: pf.changes.named(name).function(w) for name in ("int3", "fp8", "mxfp4", "nvfp4", "2:4", "keep")}
    torch.testing.assert_close(kept["int3"][0], 0.9 * torch.tensor([6 / 7, -2 / 7, 0.0, 0.0]))  # -1 and 3 times 1.8 / 7
    # 0.9 is 1.8 times a power of two, and from 1.75 times on the scale is the next, 2^-2, in which it is 3.6.
    torch.testing.assert_close(kept["mxfp4"].float(), torch.tensor([[1.0, -0.25, 0.0, 0.0], [2.0, 1.0, -0.5, 0.25]]))
    torch.testing.assert_close(kept["2:4"], torch.tensor([[0.9, -0.3, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]]))
    assert (kept["fp8"] - w).abs().max() < w.abs().max() / 16
    assert (kept["nvfp4"] - w).abs().max() < w.abs().max() / 5
    assert kept["keep"] is w
    bits = {name: pf.changes.named(name).bits_of(torch.empty(64, 256)) for name in ("int4-g128", "mxfp4", "nvfp4")}
    assert bits == {"int4-g128": 4.125, "mxfp4": 4.25, "nvfp4": 4.5}
    assert pf.changes.named("rank-16").bits_of(torch.empty(64, 256)) == 32 * 16 * 320 / (64 * 256)
    assert pf.changes.named("keep").bits_of(torch.empty(2, 2, dtype=torch.bfloat16)) == 16
    model = nn.Linear(300, 2)
    rounded = pf.changes.rounded(model, 4, per="group", group_size=128)[""]
    assert torch.equal(pf.changes.of_format(model, "int4-g128")[""], rounded)


def _bad(function):
    return pf.changes.Format("mine", 4, function)


BAD = {
    "no budget": ({}, "one budget is wanted"),
    "two budgets": ({"bits": 4, "size": 3}, "one budget is wanted"),
    "too small": ({"bits": 2}, r"the cheapest choice takes 3 bits a weight, \d+ bytes: int3 for 3 layers"),
    "no format": (
        {"bits": 4, "formats": ["int9"]},
        "'int9' is no format that is known; integers have 2 to 8 bits; there are int2",
    ),
    "no formats": ({"bits": 4, "formats": []}, "an empty list"),
    "formats that are no names": ({"bits": 4, "formats": 4}, "formats: names such as 'int4' are wanted, got 4"),
    "fixed without formats": ({"bits": 4, "fixed": ["0"]}, "fixed: a dict of formats by names of layers is wanted"),
    "another shape": ({"bits": 4, "formats": [_bad(lambda w: w[:1])]}, r"layer '0': format 'mine': a matrix of shape"),
    "NaN": ({"bits": 4, "formats": [_bad(lambda w: w / 0)]}, "layer '0': format 'mine': .*NaN"),
    "fixed": ({"bits": 4, "fixed": {"9": "int4"}}, "'9' is none of these layers"),
    "together": ({"bits": 4, "together": [["0", "7"]]}, "'7' is none of these layers"),
    "fixed apart": ({"bits": 4, "together": [["0", "3"]], "fixed": {"0": "int4", "3": "int5"}}, "'0', '3' have one"),
    "probes": ({"bits": 4, "probes": 0}, "probes=0"),
    "rounds": ({"bits": 4, "rounds": -1}, "rounds=-1"),
    "rounds unmeasured": ({"bits": 4, "rounds": 1, "measured": False}, "rounds=1: measured=False measures no choice"),
    "rounds of KL": ({"bits": 4, "rounds": 1, "loss": "kl"}, "rounds=1: loss='kl' is expanded at the model's own"),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses(case):
    model, data = _images()
    given, message = BAD[case]
    with pytest.raises(pf.errors.InputError, match=message):
        pf.allocate(model, data=data, **{"loss": CE, "formats": ["int3", "int4"], **given})


def _exported(tmp_path, tool, formats, bits):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    data = torch.randn(20, 32), torch.randint(32, (20,))
    fixed = dict(zip(("0", "2", "4"), formats, strict=True))
    plan = pf.allocate(model, CE, data, formats, bits=bits, fixed=fixed, tool=tool)
    plan.export(tool, tmp_path / "plan.json")
    return json.loads((tmp_path / "plan.json").read_text())


def test_exports_for_gptqmodel(tmp_path):
    found = _exported(tmp_path, "gptqmodel", ["int4-g16", "int8", "keep"], 32)
    assert (found["bits"], found["group_size"], found["sym"]) == (4, 16, True)
    rules = found["dynamic"]
    assert {key: rule for key, rule in rules.items() if rule} == {
        "+:^0$": {"bits": 4, "group_size": 16}, "+:^2$": {"bits": 8, "group_size": -1}
    }  # fmt: skip
    (others,) = (key[2:] for key in rules if key.startswith("-:"))
    assert [name for name in ("0", "2", "4", "20", "other") if re.match(others, name)] == ["4", "20", "other"]


def test_exports_for_llm_compressor_fit_its_schemas(tmp_path):
    found = _exported(tmp_path, "llm-compressor", ["int4-g16", "fp8", "nvfp4"], 32)
    groups = found["allocation_stage"]["allocation_modifiers"]["QuantizationModifier"]["config_groups"]
    assert {key: group["targets"] for key, group in groups.items()} == {
        "int4-g16": ["re:^0$"], "fp8": ["re:^2$"], "nvfp4": ["re:^4$"]
    }  # fmt: skip
    schemas = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
    read = {key: schemas.QuantizationScheme.model_validate(group).weights for key, group in groups.items()}
    assert (read["int4-g16"].num_bits, read["int4-g16"].group_size, read["int4-g16"].type) == (4, 16, "int")
    assert read["nvfp4"] == schemas.quant_scheme.NVFP4A16["weights"]
    assert read["fp8"].strategy == "channel"


def test_exports_for_torchao_are_read_by_it(tmp_path):
    found = _exported(tmp_path, "torchao", ["int4-g16", "int8", "keep"], 32)
    assert [*found["_data"]["fqn_to_config"]] == ["0", "2", "4"]
    core = pytest.importorskip("torchao.core.config", reason="torchao is not installed")
    from torchao.quantization import quantize_

    read = core.config_from_dict(found)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    plain = model[4].weight
    quantize_(model, read, filter_fn=None)
    assert model[4].weight is plain
    assert "Intx" in type(model[0].weight).__name__
    assert model(torch.randn(2, 32)).isfinite().all()


def test_a_format_or_layer_that_a_tool_has_no_word_for_is_named(tmp_path):
    model, data = _images()
    plan = pf.allocate(model, CE, data, ["int3", "rank-1"], bits=64, layers=["3", "5"], fixed={"3": "rank-1"})
    with pytest.raises(pf.errors.InputError, match="layer '3': torchao cannot be told of its format 'rank-1'"):
        plan.export("torchao", tmp_path / "plan.json")
    with pytest.raises(pf.errors.InputError, match="choose one of"):
        plan.export("mlx", tmp_path / "plan.json")
