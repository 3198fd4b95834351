"""Whose row is whose in the sweep: samples in any order, layers that run for some of them, images of several sizes."""

import itertools

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import truth
from support.grid import Net
from support.residual import LOSS


def kappa(net, batches, layer, **options):
    return pf.relative_flatness(net, LOSS, batches, layer, **options).value


def one_by_one(net, batches, layer, **options):
    """Batches of one sample leave nothing to be told apart."""
    singles = [(x[i : i + 1], y[i : i + 1]) for x, y in batches for i in range(len(x))]
    return kappa(net, singles, layer, **options)


@pytest.mark.parametrize("images", ["calls", "flattened"])
def test_three_dimensional_convolutions_on_several_images(images):
    def forward(net, x):
        if images == "calls":
            a, b = (torch.relu(net.conv(part)).flatten(1) for part in x.unbind(1))
        else:
            a, b = torch.relu(net.conv(x.flatten(0, 1))).flatten(1).unflatten(0, (-1, 2)).unbind(1)
        return net.head(a - 2 * b)

    torch.manual_seed(0)
    conv = nn.Conv3d(2, 2, (3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0))
    net = Net(forward, conv=conv, head=nn.Linear(16, 3)).double()
    x, y = torch.randn(4, 2, 2, 3, 2, 2).double(), torch.arange(4) % 3
    expected = truth.of_model(net, LOSS, x, y, "conv")
    assert kappa(net, (x, y), "conv") == pytest.approx(expected, rel=1e-9)
    assert kappa(net, (x, y), "conv", backend="reference") == pytest.approx(expected, rel=1e-9)


def test_gathered_outputs_are_held_to_every_batch():
    def forward(net, x):
        h = torch.relu(net.one(x))
        h = torch.relu(net.mix(h + h.mean(1, keepdim=True)))
        return net.head(h)

    net = Net(forward, one=nn.Linear(4, 5), mix=nn.Linear(5, 5), head=nn.Linear(5, 3)).double()
    x = torch.randn(2, 4, 4).double()
    counts = torch.tensor([[2, 2], [3, 1]])
    batches = [(x, torch.arange(4) < count[:, None]) for count in counts]

    def valid(net, batch):
        return net(batch[0])[batch[1]], torch.zeros(int(batch[1].sum()), dtype=torch.int64)

    kappa(net, batches[:1], "one", forward=valid)
    with pytest.raises(pf.errors.InputError, match=r"layer 'one': .* cannot be told apart"):
        kappa(net, batches, "one", forward=valid)


def test_layers_that_are_dead_at_first():
    """Position-first rows, as many positions as samples, and nothing to tell them apart by in the first samples."""

    def forward(net, x):
        h = torch.relu(net.one(x.transpose(0, 1)))
        return net.head(torch.relu(net.two(h)).sum(0))

    torch.manual_seed(0)
    net = Net(forward, one=nn.Linear(3, 5), two=nn.Linear(5, 5), head=nn.Linear(5, 3)).double()
    with torch.no_grad():
        net.one.bias.zero_()
    x, y = torch.randn(4, 4, 3).double(), torch.arange(4) % 3
    x[:2] = 0
    with torch.no_grad():
        net.two.bias.fill_(-0.1)
    expected = one_by_one(net, [(x, y)], "two")
    assert expected > 0
    assert kappa(net, [(x, y)], "two") == pytest.approx(expected, rel=1e-9)


def test_rows_in_another_order():
    """Sorted inside the model: values of single samples, and signs, would be those of others."""

    def forward(net, x):
        order = x[:, 0].argsort()
        return net.head(torch.relu(net.one(x[order]))[order.argsort()])

    net = Net(forward, one=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
    x, y = torch.randn(6, 4).double().sort(0).values, torch.arange(6) % 3
    batches = [(x, y), (x.flip(0), y)]
    assert kappa(net, batches, "one") == pytest.approx(one_by_one(net, batches, "one"), rel=1e-9)
    with pytest.raises(pf.errors.InputError, match="cannot be told apart"):
        kappa(net, batches, "one", per_sample=True)


@pytest.mark.parametrize("pair", [*itertools.combinations(range(6), 2)], ids=str)
def test_any_two_rows_that_change_places(pair):
    """Code that sorts by length, encodes and puts back may leave even places even, and halves as they were."""
    order = torch.arange(6)
    order[[*pair]] = order[[*reversed(pair)]]

    def forward(net, x):
        places = order if len(x) == 6 else slice(None)
        h = torch.tanh(net.one(x[places]))[places]
        return net.head(h + torch.tanh(net.one(x.sin())) if net.twice else h)

    x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    for twice, options in ((True, {}), (False, {"per_sample": True})):
        net = Net(forward, one=nn.Linear(4, 5), head=nn.Linear(5, 3)).double()
        net.twice = twice
        with pytest.raises(pf.errors.InputError, match=r"layer 'one': its rows \(6, 5\) cannot be told apart"):
            kappa(net, [(x, y)], "one", **options)


@pytest.mark.parametrize("whole", [True, False], ids=["class embeddings", "parts of the batch"])
def test_layers_without_rows_of_every_sample_are_said_to_be_such(whole):
    """The model mixes no samples there, and its other layers have values."""

    def forward(net, x):
        parts = [net.shared(part) for part in x[:, :2].split(1)]
        h = x @ net.shared(torch.ones(4, 2, dtype=x.dtype)).T if whole else torch.cat(parts)
        return net.head(torch.relu(h + net.one(x)))

    net = Net(forward, one=nn.Linear(4, 4), shared=nn.Linear(2, 4), head=nn.Linear(4, 3)).double()
    x, y = torch.randn(4, 4).double(), torch.arange(4) % 3
    with pytest.raises(pf.errors.InputError, match=r"'shared': .* no dimension of samples.* by layers="):
        pf.measure(net, LOSS, (x, y))
    assert kappa(net, (x, y), "one") == pytest.approx(one_by_one(net, [(x, y)], "one"), rel=1e-9)


def test_layers_that_run_in_some_batches_only():
    def forward(net, x):
        h = torch.relu(net.inp(x))
        return net.head(torch.relu(net.a(h) if x[0, 0] > 0 else net.b(h)))

    torch.manual_seed(0)
    sizes = {"inp": nn.Linear(4, 5), "a": nn.Linear(5, 5), "b": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    net = Net(forward, **sizes).double()
    x, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    x[:, 0] = torch.tensor([1.0, -1, -1, -1, 1, 1, 1])
    for cuts in ([1, 3, 3], [1] * 7):
        batches = list(zip(x.split(cuts), y.split(cuts), strict=True))
        report = pf.measure(net, LOSS, batches, measures="sweep")
        assert report.layers == ("inp", "a", "b", "head")
        for layer, rows in (("a", x[:, 0] > 0), ("b", x[:, 0] < 0)):
            share = truth.of_model(net, LOSS, x[rows], y[rows], layer) * int(rows.sum()) / 7
            assert report[layer, "relative_flatness"].value == pytest.approx(share, rel=1e-9)
        traces = pf.block_traces(net, LOSS, batches[::-1], "a")
        assert float(traces.trace()) == pytest.approx(report["a", "trace"].value)


@pytest.mark.parametrize("memory", [None, 1500])
def test_a_layer_that_runs_for_later_samples_only(memory):
    """Parts of a batch differ in the layers that run; a look at the first samples would not see them."""

    def forward(net, x):
        h, large = torch.relu(net.inp(x)), x[:, :1] > 5
        return net.head(torch.where(large, net.late(h), h) if large.any() else h)

    torch.manual_seed(0)
    net = Net(forward, inp=nn.Linear(4, 5), late=nn.Linear(5, 5), head=nn.Linear(5, 3)).double()
    x, y = torch.randn(40, 4).double(), torch.arange(40) % 3
    late = torch.randn(32, 4).double()
    late[-1] += 9
    batches = [(x, y), (late, y[:32])]
    report = pf.measure(net, LOSS, batches, memory=memory, measures="sweep")
    assert report.layers == ("inp", "late", "head")
    with pytest.raises(pf.errors.InputError, match=r"batch 0: targets: a tensor is wanted, got list"):
        pf.measure(net, LOSS, [(x, y.tolist())], normalize="std")


def test_samples_mixed_in_front_of_the_layer_in_batches_of_two():
    net = Net(lambda net, x: net.head(torch.relu(net.one(x - x.mean(0)))), one=nn.Linear(4, 5), head=nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    with pytest.raises(pf.errors.InputError, match="change with the batch they are in"):
        kappa(net, list(zip(x.split(2), y.split(2), strict=True)), "one")


def test_omitted_samples_leave_the_deviations_wherever_they_went_wrong():
    net = Net(lambda net, x: net.head(net.one(x).relu() / (x[:, :1] != 9)), one=nn.Linear(4, 5), head=nn.Linear(5, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    x[2] = 9
    kept = torch.arange(6) != 2
    found = kappa(net, (x, y), "one", normalize="std", nan_policy="omit")
    assert found == pytest.approx(kappa(net, (x[kept], y[kept]), "one", normalize="std"), rel=1e-5)


def test_layers_without_a_dimension_for_samples():
    net = Net(lambda net, x: net.head(torch.relu(net.one(x[0]))[None]), one=nn.Linear(4, 5), head=nn.Linear(5, 3))
    with pytest.raises(
        pf.errors.InputError, match=r"layer 'one' is called on an input \(4,\) without a dimension for samples"
    ):
        kappa(net, (torch.randn(1, 4), torch.tensor([1])), "one")


def test_affine_convolutions_on_images_of_several_sizes():
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 3))
    batches = [(torch.randn(3, 2, size), torch.arange(3)) for size in (6, 8)]
    with pytest.raises(pf.errors.InputError, match=r"on inputs of several sizes \[\(2, 6\), \(2, 8\)\]"):
        kappa(net, batches, "0", conv="affine")


def test_the_size_of_a_mapping_is_that_of_its_labels():
    net = Net(lambda net, x: net.head(torch.relu(net.one(x))), one=nn.Linear(4, 5), head=nn.Linear(5, 3))
    x, y, table = torch.randn(6, 4), torch.arange(6) % 3, torch.zeros(1, 9)
    found = pf.relative_flatness(
        net, LOSS, [{"table": table, "x": x, "labels": y}], "one", forward=lambda net, b: (net(b["x"]), b["labels"])
    )
    assert found.samples == 6
