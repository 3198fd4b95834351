"""The sweep as users meet it: selectors, reports, invariances, and models left as they were."""

import json

import pytest
import torch
from torch import nn

import pyflatness as pf
from support.cases import classifier, on_threads
from support.grid import Net
from support.residual import LOSS, X, Y, assert_same, residual

# --- selection and reports --------------------------------------------------------------------------------------------


def test_every_layer_that_ran_by_default():
    net = residual()
    net.add_module("unused", nn.Identity())
    net.unused.layer = nn.Linear(2, 2)
    report = pf.measure(net, LOSS, (X, Y), measures="sweep")
    assert report.layers == ("0", "3.conv1", "3.conv2", "5.conv1", "5.conv2", "8")
    assert report.measures[:3] == ("relative_flatness", "relative_flatness_per_feature", "relative_flatness_columns")
    assert report["weight_norm"].value == pytest.approx(
        sum(report[name, "weight_norm"].value for name in report.layers)
    )
    assert all(report[layer, "trace"].exact for layer in report.layers)


@pytest.mark.parametrize(
    ("selectors", "names"),
    [
        ("8", ["8"]),
        ("3.*", ["3.conv1", "3.conv2"]),
        (["re:.*conv2", "type:Linear"], ["3.conv2", "5.conv2", "8"]),
        (["8", "0", "type:Conv2d"], ["0", "3.conv1", "3.conv2", "5.conv1", "5.conv2", "8"]),
    ],
)
def test_selectors(selectors, names):
    report = pf.measure(residual(), LOSS, (X, Y), layers=selectors, measures="sweep")
    assert list(report.layers) == names


def test_modules_and_shared_modules_as_selectors():
    net = residual()
    assert pf.measure(net, LOSS, (X, Y), layers=[net[3].conv1, net[8]]).layers == ("3.conv1", "8")
    shared = nn.Linear(5, 5)
    twice = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), shared, nn.Linear(5, 3))
    twice.again = shared
    twice.__delattr__("again")
    twice.register_module("alias", nn.Identity())
    twice.alias.inner = shared
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    assert pf.measure(twice, LOSS, (x, y), layers="alias.inner", curvature="ggn").layers == ("2",)


def test_a_named_layer_has_to_run_and_a_pattern_one_of_them():
    net = residual()
    net[6].idle = nn.Linear(2, 2)
    with pytest.raises(pf.errors.InputError, match=r"'6.idle' did not run"):
        pf.measure(net, LOSS, (X, Y), layers=["8", "6.idle"])
    assert pf.measure(net, LOSS, (X, Y), layers="type:Linear").layers == ("8",)


def test_a_report():
    names = ("relative_flatness", "relative_flatness_std", "trace")
    report = pf.measure(residual(), LOSS, (X, Y), measures=names, per_sample=True)
    assert report.measures == names
    for measure in report.measures:
        network = report[measure]
        assert network.value == pytest.approx(sum(report[layer, measure].value for layer in report.layers))
        assert float(network.per_sample.mean()) == pytest.approx(network.value)
        assert network.exact
    facts = json.loads(report.to_json())
    assert facts["trace"]["8"]["value"] == report["8", "trace"].value
    assert len(facts["trace"][""]["per_sample"]) == 20
    lines = str(report).splitlines()
    assert [word for word in lines[0].split() if word != "value" and word != "of"] == [
        *("layer", "relative_flatness", "relative_flatness_std", "trace", "exact")
    ]
    assert len({len(line.rstrip()) for line in lines[2:8]}) == 1
    assert any(line.startswith("network") or " network " in line for line in lines)
    assert any(line.startswith("20 samples, ") for line in lines)


def test_a_report_as_a_file(tmp_path):
    report = pf.measure(residual(), LOSS, (X, Y), layers="8", measures="sweep")
    text = report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(text) == report.to_dict()


def test_one_layer_is_the_same_alone_and_among_others():
    report = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    for layer in report.layers:
        alone = pf.relative_flatness(residual(), LOSS, (X, Y), layer)
        assert alone.value == pytest.approx(report[layer, "relative_flatness"].value, rel=1e-5)
        assert alone.method == ("head" if layer == "8" else "ggn")


# --- invariances ------------------------------------------------------------------------------------------------------


def test_rescaling_layers_and_neurons():
    """Layer-wise factors change no κ, neuron-wise ones no normalised κ; both change the trace."""
    torch.manual_seed(0)
    net = classifier(5, 7, 6, 4).double()
    x, y = torch.randn(9, 5).double(), torch.arange(9) % 4
    x[:, 2] = 1.5
    names = ["relative_flatness", "relative_flatness_std", "trace"]
    before = pf.measure(net, LOSS, (x, y), measures=names)
    for factors, same in ((torch.tensor(3.0), names[:2]), (torch.rand(7) + 0.2, names[1:2])):
        changed = classifier(5, 7, 6, 4).double()
        changed.load_state_dict(net.state_dict())
        with torch.no_grad():
            changed[0].weight.mul_(factors.view(-1, 1))
            changed[0].bias.mul_(factors)
            changed[2].weight.div_(factors)
        torch.testing.assert_close(changed(x), net(x))
        after = pf.measure(changed, LOSS, (x, y), measures=names)
        for layer in before.layers:
            for name in names:
                equal = after[layer, name].value == pytest.approx(before[layer, name].value, rel=1e-9)
                if name in same:
                    assert equal, (layer, name)
                elif layer == "2" or (layer == "0" and name == "trace"):  # κ knows the columns' scale alone
                    assert not equal, (layer, name)


def test_order_threads_and_cuts_do_not_matter():
    expected = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    order = torch.randperm(20)
    assert_same(expected, pf.measure(residual(), LOSS, (X[order], Y[order]), measures="sweep"))
    assert_same(
        expected, pf.measure(residual(), LOSS, list(zip(X.split(7), Y.split(7), strict=True)), measures="sweep")
    )
    with on_threads(1):
        assert_same(expected, pf.measure(residual(), LOSS, (X, Y), measures="sweep"))


# --- the user's state -------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    net = residual().train()
    LOSS(net(X), Y).backward()
    net.eval()
    net[3].conv1.weight.requires_grad_(False)
    net[8].register_forward_hook(lambda *_: None)
    return net


def test_distributed_data_parallel(model):
    expected = pf.measure(model, LOSS, (X, Y), measures="sweep")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model.requires_grad_(True))
        assert_same(expected, pf.measure(wrapped, LOSS, (X, Y), measures="sweep"), rel=1e-12)
    finally:
        torch.distributed.destroy_process_group()


def test_users_hooks_see_the_model_and_change_it():
    """A hook's own factor is a part of the model behind the layer."""
    net, halved = classifier(5, 6, 3), classifier(5, 6, 3)
    halved.load_state_dict(net.state_dict())
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    halved[0].register_forward_hook(lambda module, args, output: output * 0.5)
    behind = nn.Sequential(net[0], Net(lambda self, x: x * 0.5), *net[1:])
    expected = pf.relative_flatness(behind, LOSS, (x, y), "0")
    assert pf.relative_flatness(halved, LOSS, (x, y), "0").value == pytest.approx(expected.value, rel=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = residual()[:6], nn.Sequential(*residual()[6:])

        def forward(self, x):
            x = x.clone().requires_grad_() if reentrant else x
            return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=reentrant))

    plain = pf.measure(residual(), LOSS, (X, Y), measures="sweep")
    if reentrant:
        with pytest.raises(pf.errors.InputError, match="pass use_reentrant=False"):
            pf.measure(Checkpointed(), LOSS, (X, Y))
        return
    report = pf.measure(Checkpointed(), LOSS, (X, Y), measures="sweep")
    for name, other in zip(plain.layers, report.layers, strict=True):
        assert report[other, "trace"].value == pytest.approx(plain[name, "trace"].value, rel=1e-5)


def test_an_input_that_is_overwritten_later():
    """As in frozen networks, where autograd would not notice."""

    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            x = x * 1
            z = self.one(x)
            x.zero_()
            return self.two(torch.relu_(z))

    class Plain(Overwriting):
        def forward(self, x):
            return self.two(torch.relu(self.one(x)))

    torch.manual_seed(0)
    net = Overwriting()
    plain = Plain()
    plain.load_state_dict(net.state_dict())
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    assert_same(
        pf.measure(plain, LOSS, (x, y), measures="sweep"), pf.measure(net, LOSS, (x, y), measures="sweep"), rel=1e-6
    )


def test_transformer_layers_without_their_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.Sequential(layer, Net(lambda self, x: x[:, 0]), nn.Linear(8, 3)).eval()
    x, y = torch.randn(4, 5, 8), torch.arange(4) % 3
    report = pf.measure(net, LOSS, (x, y), curvature="ggn", measures="sweep")
    assert report.layers == ("0.self_attn.in_proj_weight", "0.self_attn.out_proj", "0.linear1", "0.linear2", "2")
    assert torch.backends.mha.get_fastpath_enabled()
