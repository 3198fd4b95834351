"""Calls of several threads take turns: the values are those of one thread, and nothing is left behind."""

import dataclasses
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pyflatness as pf
from pyflatness.model import state
from support.traces import CALLS, LOSS, changed, model, of_model, of_process, of_thread

THREADS = 8


def numbers(result):
    """What a call returned, to the last bit."""
    if isinstance(result, pf.results.Report):
        result = result.by_measure()
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, Mapping):
        return {key: numbers(value) for key, value in result.items()}
    if dataclasses.is_dataclass(result):
        return {field.name: numbers(getattr(result, field.name)) for field in dataclasses.fields(result)}
    return [numbers(part) for part in result] if isinstance(result, (tuple, list)) else repr(result)


def test_eight_threads_and_all_calls():
    """Each thread makes a quarter of the calls and begins with another one, so that different ones meet."""
    names = [name for name in CALLS if name != "measure all"]  # takes as long as all others
    expected = {name: numbers(CALLS[name][1](model(CALLS[name][0]))) for name in names}
    step = math.ceil(len(names) / THREADS)
    orders = [(names[step * place :] + names[: step * place])[: 2 * step] for place in range(THREADS)]
    assert {*names} == {name for order in orders for name in order}
    models = [{name: model(CALLS[name][0]) for name in order} for order in orders]
    before = [{name: of_model(net) for name, net in own.items()} for own in models]
    process, together = of_process(), threading.Barrier(THREADS)

    def work(place):
        thread, found = of_thread(), {}
        together.wait()
        for name in orders[place]:
            found[name] = numbers(CALLS[name][1](models[place][name]))
        return found, changed(thread, of_thread())

    with ThreadPoolExecutor(THREADS) as pool:
        for found, left in pool.map(work, range(THREADS)):
            assert left == []
            assert changed({name: expected[name] for name in found}, found) == []
    assert changed(process, of_process()) == []
    for own, was in zip(models, before, strict=True):
        for name, net in own.items():
            assert changed(was[name], of_model(net)) == [], name


def test_threads_on_one_model():
    net = model(CALLS["measure"][0])
    expected, before = numbers(CALLS["measure"][1](net)), of_model(net)
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: numbers(CALLS["measure"][1](net)), range(8))]
    assert found == [expected] * 8
    assert changed(before, of_model(net)) == []


def test_parametrised_weights_are_trained_while_another_model_is_measured():
    """Torch's cache of them is the process's; what it gave to a model in training was without a graph, or stale."""
    torch.manual_seed(0)
    x, y, moved = torch.randn(5, 4), torch.arange(5) % 3, []
    trained = parametrizations.weight_norm(nn.Linear(4, 3))
    steps = torch.optim.SGD(trained.parameters(), 0.1)

    def step():
        before = trained.weight.detach().clone()
        steps.zero_grad()
        LOSS(trained(x), y).backward()
        steps.step()
        moved.append(float((trained.weight.detach() - before).norm()))

    def forward(measured, batch):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return measured(batch[0]), batch[1]

    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 3)).eval()
    pf.relative_flatness(net, LOSS, [(x, y)] * 3, "0", forward=forward)
    assert len(moved) >= 3
    assert min(moved) > 0


def test_no_number_is_drawn_from_torch_s_generator():
    """Else those of a thread in training would depend on what is measured beside it."""
    seen = []

    def watched(measured, batch):
        seen.append(torch.get_rng_state())
        return measured(batch[0]), batch[1]

    x, y = torch.randn(6, 4), torch.arange(6) % 3
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).eval()
    before = torch.get_rng_state()
    pf.measure(net, LOSS, (x, y), measures="all", forward=watched)
    pf.measures.pac_bayes(net, LOSS, (x, y), forward=watched, probes=2, steps=2)
    pf.theory.feature_robustness(net, LOSS, (x, y), "0", forward=watched, probes=2)
    assert len(seen) > 10
    assert all(state.equal(before) for state in seen)


def test_a_call_in_a_call_has_the_turn():
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    net, inner = nn.Sequential(nn.Linear(4, 3)).eval(), nn.Sequential(nn.Linear(4, 3)).eval()
    expected, found = float(pf.relative_flatness(inner, LOSS, (x, y))), []

    def forward(measured, batch):
        found.append(float(pf.relative_flatness(inner, LOSS, (x, y))))
        return measured(batch[0]), batch[1]

    pf.relative_flatness(net, LOSS, (x, y), forward=forward)
    assert set(found) == {expected}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_turn_is_given_back_after_an_error(error):
    net = nn.Linear(4, 3).eval()

    def batches():
        raise error
        yield

    with pytest.raises(error):
        pf.relative_flatness(net, LOSS, batches())
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(state._turn.acquire, timeout=5).result(10)
        pool.submit(state._turn.release).result(10)
