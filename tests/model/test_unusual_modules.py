"""Modules, layers and data that cannot be measured as they are, each right or refused by name: no error of torch's."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, SequentialSampler

import pyflatness as pf
from support.grid import Net, normal
from support.ranks import outcomes

X, Y = normal(1, 12, 5), torch.arange(12) % 3
LOSS = nn.CrossEntropyLoss()


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double().eval()


def exhausted():
    return next(iter([]))


# --- torch.jit, DTensor -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda net: torch.jit.trace(net, X)], ids=["script", "trace"])
def test_jit_modules_are_refused(compiled):
    net = compiled(mlp())
    for call in (pf.relative_flatness, pf.measure, pf.verify, pf.block_traces, pf.measures.pac_bayes):
        with pytest.raises(
            pf.errors.InputError, match=r"model: it is compiled by torch.jit .* pass the nn.Module that it was"
        ):
            call(net, LOSS, (X, Y))
    within = nn.Sequential(net, nn.ReLU())
    history = pf.track(within, LOSS, (X, Y))
    for call in (
        lambda: pf.measure(within, LOSS, (X, Y)),
        lambda: pf.layers(within),
        lambda: pf.score({"net": within}, LOSS, (X, Y)),
        lambda: pf.importance(within, LOSS, (X, Y)),
        lambda: pf.allocate(within, LOSS, (X, Y), ["int3"], bits=3),
        lambda: pf.changes.rounded(within, 3),
        lambda: pf.changes.of_format(within, "int3"),
        lambda: pf.changes.between(within, within),
        lambda: pf.cost_of_change(within, LOSS, (X, Y), {"0.0": X}),
        lambda: pf.spectrum(within, LOSS, (X, Y), k=1),
        lambda: pf.FlatnessPenalty(within, "0.0", LOSS),
        lambda: history.record(),
    ):
        with pytest.raises(pf.errors.InputError, match=r"model: '0' is compiled by torch.jit"):
            call()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_a_model_with_a_scripted_function_cannot_be_copied():
    net = mlp()
    net.scale = torch.jit.script(torch.nn.functional.relu6)
    for call in (
        lambda: pf.verify(net, LOSS, (X, Y)),
        lambda: pf.allocate(net, LOSS, (X, Y), ["int3"], bits=3).apply(net),
    ):
        with pytest.raises(pf.errors.InputError, match=r"model: it cannot be copied \(ScriptFunction"):
            call()


def sharded(rank, size):
    """Values before and after a model is in one shard, and what another call says then."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = mlp()
    before = pf.measure(net, LOSS, (X, Y)).by_measure()
    fully_shard(net, mesh=init_device_mesh("cpu", (size,)))
    with pytest.raises(pf.errors.InputError) as refused:
        pf.block_traces(net, LOSS, (X, Y))
    after = pf.measure(net, LOSS, (X, Y)).by_measure()
    return {(measure, layer): (float(value), float(after[measure][layer]))
            for measure, values in before.items() for layer, value in values.items()}, str(refused.value)  # fmt: skip


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_weights_in_one_shard():
    """One rank measures such a model by itself; other calls refuse it as they do on several ranks."""
    ((values, refused),) = outcomes("model.test_unusual_modules", ["sharded"], 1)["sharded"]
    assert len(values) > 3
    for (measure, layer), (before, after) in values.items():
        assert after == pytest.approx(before, rel=1e-12), (measure, layer)
    assert "model: its parameter '0.weight' is a DTensor, spread over processes" in refused


# --- StopIteration ----------------------------------------------------------------------------------------------------


class Stopping(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.net, self.at, self.calls = mlp(), at, itertools.count()

    def forward(self, x):
        return self.net(x) if next(self.calls) < self.at else exhausted()


@pytest.mark.parametrize("at", [0, 2])
def test_stop_iteration_of_a_forward_pass_is_an_error_that_says_so(at):
    batches = [*zip(X.split(4), Y.split(4), strict=True)]
    said = r"model: model\(inputs\) on the inputs \(., 5\) float64 raised StopIteration"
    for call in (
        lambda net: pf.relative_flatness(net, LOSS, batches),
        lambda net: pf.relative_flatness(net, LOSS, batches, "net.0"),
        lambda net: pf.measure(net, LOSS, batches, measures="lambda_max"),
        lambda net: pf.measure(net, LOSS, batches, measures="fisher_rao"),
        lambda net: pf.measure(net, LOSS, batches, measures="mls"),
    ):
        with pytest.raises(pf.errors.InputError, match=said):
            call(Stopping(at))


def ending(x, y):
    yield x[:4], y[:4]
    yield x[4:8], exhausted()


class Ending(Dataset):
    """Of 12 samples, of which the last four cannot be read."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i], Y[i] if i < 8 else exhausted()


def test_data_that_end_by_an_error_are_not_taken_for_all():
    with pytest.raises(
        pf.errors.InputError, match="data: reading batch 1 raised StopIteration: something that reads the data"
    ):
        pf.measure(mlp(), LOSS, ending(X, Y), measures="trace")
    for loader in (DataLoader(Ending(), batch_size=4), DataLoader(Ending(), batch_size=4, shuffle=True)):
        with pytest.raises(pf.errors.InputError, match=r"data: the loader ended after \d of its 3 batches"):
            pf.measure(mlp(), LOSS, loader, measures="trace")


def test_loaders_whose_length_is_a_guess_are_read_to_their_end():
    class Guessed(SequentialSampler):
        def __len__(self):
            return 100

    loader = DataLoader([*zip(X, Y, strict=True)], batch_size=4, sampler=Guessed(X))
    assert pf.measure(mlp(), LOSS, loader, measures="trace")["0", "trace"].samples == 12


# --- layers -----------------------------------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class OwnConv(nn.Conv1d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(("kind", "base"), [(OwnLinear, "Linear"), (OwnConv, "Conv1d")])
def test_subclasses_whose_weight_is_no_number_are_said_to_be_that(kind, base):
    own = kind(5, 6, **({} if base == "Linear" else {"kernel_size": 1}))
    own.weight = nn.Parameter(own.weight.detach().to(torch.int8), requires_grad=False)
    said = rf"'own' is a {kind.__name__}, a subclass of {base} whose forward is its own, .* put a plain {base} with"
    for model in (Net(None, own=own, other=nn.Linear(6, 3)), Net(None, own=own)):
        for choice in ("own", f"type:{kind.__name__}", own, None):
            if choice is None and hasattr(model, "other"):
                continue
            with pytest.raises(pf.errors.InputError, match=said):
                pf.measure(model, LOSS, (X, Y), layers=choice)


# --- activation checkpointing -----------------------------------------------------------------------------------------


def checkpointed(how, activation=torch.tanh):
    def inner(net, x):
        return activation(net.b(activation(net.a(x))))

    def forward(net, x):
        if how is None:
            return net.head(inner(net, x))
        return net.head(checkpoint(inner, net, x, use_reentrant=how == "reentrant"))

    torch.manual_seed(0)
    return Net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 6), head=nn.Linear(6, 3)).double()


@pytest.mark.parametrize("activation", [torch.relu, F.silu])
def test_every_measure_goes_through_activation_checkpointing(activation):
    plain = pf.measure(checkpointed(None, activation), LOSS, (X, Y), measures="all", probes=2)
    found = pf.measure(checkpointed("other", activation), LOSS, (X, Y), measures="all", probes=2)
    assert found.skipped.keys() == plain.skipped.keys()
    assert {"sharpness", "relative_flatness", "mls", "fisher_rao"} <= {*found.measures}
    for key, estimate in plain._estimates.items():
        assert found._estimates[key].value == pytest.approx(estimate.value, rel=1e-9, abs=1e-12)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_leaves_the_measures_that_need_no_graph():
    report = pf.measure(checkpointed("reentrant"), LOSS, (X, Y), measures="all")
    assert {"weight_norm", "pac_bayes", "adaptive_sharpness_mc"} <= {*report.measures}
    for measure in ("relative_flatness", "trace", "relative_flatness_std", "lambda_max"):
        assert "runs without recording a graph" in report.skipped[measure]
    for measures in (None, "relative_flatness"):
        with pytest.raises(pf.errors.InputError, match="layer 'a' runs without recording a graph"):
            pf.measure(checkpointed("reentrant"), LOSS, (X, Y), measures=measures)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("older", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_verify_takes_weights_that_older_hooks_make(older):
    net = mlp()
    older(net[0])
    for mode in (False, True, False):  # before any run, after one in training mode, and after one as it is
        for layer in ("0", "2"):
            assert pf.verify(net.eval(), LOSS, (X, Y), layer)
        net.train(mode)(X)
    assert "weight" not in dict(net[0].named_parameters())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_behind_a_layer_is_refused_by_name():
    torch.manual_seed(0)
    net = Net(
        lambda net, x: net.head(checkpoint(torch.tanh, net.a(x), use_reentrant=True)),
        a=nn.Linear(5, 6),
        head=nn.Linear(6, 3),
    )
    for measure in ("relative_flatness", "lambda_max", "sharpness", "mls", "mls_adversarial"):
        with pytest.raises(pf.errors.InputError, match=r"reentrant activation checkpointing.* use_reentrant=False"):
            pf.measure(net.double(), LOSS, (X, Y), layers="a", measures=measure)


RESHAPED = {  # what a layer's replaced forward returns, the model around it, and the model with the layer's own forward
    "tokens merged": (
        lambda out: out.flatten(0, 1),
        lambda net, x: net.layer(x).view(8, 6, 7).mean(1),
        lambda net, x: net.layer(x).mean(1),
    ),
    "one token": (
        lambda out: out.squeeze(1),
        lambda net, x: net.layer(x[:, :1]),
        lambda net, x: net.layer(x[:, 0]),
    ),
}


def replaced(after, forward):
    torch.manual_seed(0)
    net = Net(forward, layer=nn.Linear(5, 7)).double().eval()
    plain = net.layer.forward
    net.layer.forward = lambda inputs: after(plain(inputs))
    return net


@pytest.mark.parametrize("way", RESHAPED)
def test_a_replaced_forward_of_another_shape_is_measured_where_its_rows_are_those_of_the_layer(way):
    after, forward, plain = RESHAPED[way]
    x, y = torch.randn(8, 6, 5).double(), torch.arange(8) % 7
    found, expected = (
        pf.measure(net, LOSS, (x, y), layers="layer", measures="trace")["layer", "trace"].value
        for net in (replaced(after, forward), replaced(lambda out: out, plain))
    )
    assert found == pytest.approx(expected, rel=1e-10)


def test_a_replaced_forward_that_does_more_is_refused():
    net = replaced(lambda out: out.mean(1), lambda net, x: net.layer(x))
    with pytest.raises(pf.errors.InputError, match=r"'layer' \(Linear\): its output is not W φ \+ b.* replaced"):
        pf.measure(net, LOSS, (torch.randn(8, 6, 5).double(), torch.arange(8) % 7), layers="layer")
