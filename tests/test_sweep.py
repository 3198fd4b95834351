"""The sweep as users meet it: selectors, reports, batches of every kind, memory, NaN, and models left as they were."""

import gc
import json
import math

import networks
import pytest
import torch
from cases import TOKEN_TARGETS, TOKENS, C, Tokens, classifier
from test_user_state import assert_unchanged, snapshot
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from pyflatness import runner

LOSS = nn.CrossEntropyLoss()
GENERATOR = torch.Generator().manual_seed(5)
X, Y = torch.randn(20, 3, 8, 8, generator=GENERATOR), torch.arange(20) % 4


class Block(nn.Module):
    """A residual block with in-place operations and eval BatchNorm."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu_(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return torch.relu_(out)


def residual():
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)]
    net = nn.Sequential(
        *stem, Block(6), nn.MaxPool2d(2), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)
    )
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return net.eval()


def values(report):
    return {(layer, measure): report[layer, measure].value for layer in report.layers for measure in report.measures}


def assert_same(report, other, rel=1e-5):
    assert values(report).keys() == values(other).keys()
    for key, value in values(report).items():
        assert values(other)[key] == pytest.approx(value, rel=rel), key


# --- selection and reports --------------------------------------------------------------------------------------------


def test_every_layer_that_ran_by_default():
    net = residual()
    net.add_module("unused", nn.Identity())
    net.unused.layer = nn.Linear(2, 2)
    report = pf.measure(net, LOSS, (X, Y))
    assert report.layers == ("0", "3.conv1", "3.conv2", "5.conv1", "5.conv2", "8")
    assert report.measures == ("relative_flatness", "trace")
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
    report = pf.measure(residual(), LOSS, (X, Y), layers=selectors)
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
    with pytest.raises(pf.InputError, match=r"'6.idle' did not run"):
        pf.measure(net, LOSS, (X, Y), layers=["8", "6.idle"])
    assert pf.measure(net, LOSS, (X, Y), layers="type:Linear").layers == ("8",)


def test_a_report():
    report = pf.measure(residual(), LOSS, (X, Y), measures="all", per_sample=True)
    assert report.measures == ("relative_flatness", "relative_flatness_std", "trace")
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
    report = pf.measure(residual(), LOSS, (X, Y), layers="8")
    text = report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(text) == report.to_dict()


def test_one_layer_is_the_same_alone_and_among_others():
    report = pf.measure(residual(), LOSS, (X, Y))
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
    expected = pf.measure(residual(), LOSS, (X, Y))
    order = torch.randperm(20)
    assert_same(expected, pf.measure(residual(), LOSS, (X[order], Y[order])))
    assert_same(expected, pf.measure(residual(), LOSS, list(zip(X.split(7), Y.split(7), strict=True))))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert_same(expected, pf.measure(residual(), LOSS, (X, Y)))
    finally:
        torch.set_num_threads(threads)


# --- the user's state -------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    net = residual().train()
    LOSS(net(X), Y).backward()
    net.eval()
    net[3].conv1.weight.requires_grad_(False)
    net[8].register_forward_hook(lambda *_: None)
    return net


OPTIONS = [{}, {"normalize": "std"}, {"conv": "affine"}, {"curvature": "ggn", "per_sample": True}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sweep_leaves_no_trace(model, options):
    before = snapshot(model)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=6, shuffle=True)
    pf.measure(model, LOSS, loader, **options)
    pf.block_traces(model, LOSS, loader, "3.conv1")
    assert_unchanged(model, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["data", "forward", "backward"])
def test_an_exception_leaves_no_trace(model, error, where):
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise error("stopped")

    def batches():
        yield X[:5], Y[:5]
        if where == "data":
            raise error("stopped")
        yield X[5:], Y[5:]

    def forward(net, batch):
        outputs = net(batch[0])
        if len(outputs) == 15:
            if where == "forward":
                raise error("stopped")
            outputs = Stop.apply(outputs)
        return outputs, batch[1]

    before = snapshot(model)
    with pytest.raises(error, match="stopped"):
        pf.measure(model, LOSS, batches(), forward=forward)
    assert_unchanged(model, before)


def test_nothing_is_kept_alive(model):
    pf.measure(model, LOSS, (X, Y))
    gc.collect()
    kept = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
    pf.measure(model, LOSS, (X, Y))
    gc.collect()
    assert kept == sum(type(thing) is torch.Tensor for thing in gc.get_objects())


def test_frozen_parameters_and_grad_modes(model):
    expected = pf.measure(model, LOSS, (X, Y))
    model.requires_grad_(False)
    assert_same(expected, pf.measure(model, LOSS, (X, Y)), rel=1e-12)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(expected, pf.measure(model, LOSS, (X.clone(), Y.clone())), rel=1e-12)
    assert_same(expected, pf.measure(model, LOSS, (X.clone().requires_grad_(), Y)), rel=1e-12)


def test_wrapped_and_compiled_models(model):
    expected = pf.measure(model, LOSS, (X, Y))
    assert_same(expected, pf.measure(nn.DataParallel(model), LOSS, (X, Y)), rel=1e-12)
    compiled = torch.compile(model, backend="eager")
    compiled(X)
    assert_same(expected, pf.measure(compiled, LOSS, (X, Y)), rel=1e-12)


def test_distributed_data_parallel(model):
    expected = pf.measure(model, LOSS, (X, Y))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model.requires_grad_(True))
        assert_same(expected, pf.measure(wrapped, LOSS, (X, Y)), rel=1e-12)
    finally:
        torch.distributed.destroy_process_group()


def test_users_hooks_see_the_model_and_change_it():
    """A hook's own factor is a part of the model behind the layer."""
    net, halved = classifier(5, 6, 3), classifier(5, 6, 3)
    halved.load_state_dict(net.state_dict())
    x, y = torch.randn(6, 5), torch.arange(6) % 3
    halved[0].register_forward_hook(lambda module, args, output: output * 0.5)
    behind = nn.Sequential(net[0], networks.Net(lambda self, x: x * 0.5), *net[1:])
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

    plain = pf.measure(residual(), LOSS, (X, Y))
    if reentrant:
        with pytest.raises(pf.InputError, match="pass use_reentrant=False"):
            pf.measure(Checkpointed(), LOSS, (X, Y))
        return
    report = pf.measure(Checkpointed(), LOSS, (X, Y))
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
    assert_same(pf.measure(plain, LOSS, (x, y)), pf.measure(net, LOSS, (x, y)), rel=1e-6)


def test_transformer_layers_without_their_fast_path():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = nn.Sequential(layer, networks.Net(lambda self, x: x[:, 0]), nn.Linear(8, 3)).eval()
    x, y = torch.randn(4, 5, 8), torch.arange(4) % 3
    report = pf.measure(net, LOSS, (x, y), curvature="ggn")
    assert report.layers == ("0.linear1", "0.linear2", "2")  # out_proj is never called as a module
    assert torch.backends.mha.get_fastpath_enabled()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_one_shot_iterators():
    expected = pf.measure(residual(), LOSS, (X, Y))
    assert_same(expected, pf.measure(residual(), LOSS, iter([(X[:9], Y[:9]), (X[9:], Y[9:])])))
    alone = pf.relative_flatness(residual(), LOSS, iter([(X[:9], Y[:9]), (X[9:], Y[9:])]), "0")
    assert alone.value == pytest.approx(expected["0", "relative_flatness"].value, rel=1e-5)
    with pytest.raises(pf.InputError, match="can be read once, and 3 passes"):
        pf.measure(residual(), LOSS, iter([(X, Y)]), measures="all")


def test_first_batches_of_one_sample():
    expected = pf.measure(residual(), LOSS, (X, Y))
    assert_same(expected, pf.measure(residual(), LOSS, [(X[:1], Y[:1]), (X[1:2], Y[1:2]), (X[2:], Y[2:])]))


def test_token_models_in_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, activation_function="relu", use_cache=False
    )
    torch.manual_seed(0)
    net = transformers.GPT2ForTokenClassification(config).eval()
    net.num_labels = 3
    net.classifier = nn.Linear(8, 3)
    ids, labels = torch.randint(11, (4, 6)), torch.randint(3, (4, 6))
    labels[1, 3:] = -100
    batches = [{"input_ids": ids[i : i + 2], "labels": labels[i : i + 2]} for i in (0, 2)]
    name = "transformer.h.0.mlp.c_fc"
    found = pf.relative_flatness(net, LOSS, batches, name, curvature="ggn")
    assert found.samples == 4
    assert not found.exact
    weight = net.get_submodule(name).weight  # (m, d)

    def outputs(w):
        changed = {f"{name}.weight": w}
        return torch.func.functional_call(net, changed, (ids,)).logits.transpose(1, 2)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        jacobian = torch.func.jacrev(outputs)(weight.detach())  # n, C, T, m, d
    p = torch.softmax(net(ids).logits, 2).detach()
    curvature = torch.diag_embed(p) - p.unsqueeze(3) * p.unsqueeze(2)  # n, T, C, C
    curvature = curvature * (labels != -100)[..., None, None]
    traces = torch.einsum("nctms,ntce,netmr->sr", jacobian, curvature, jacobian) / (labels != -100).sum()
    gram = (weight.t() @ weight).detach()
    assert found.value == pytest.approx(float((traces * gram).sum().detach()), rel=1e-3)


def test_causal_language_models_in_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=False)
    torch.manual_seed(0)
    net = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(11, (4, 6))
    batches = [{"input_ids": ids, "labels": ids}]
    found = pf.relative_flatness(net, LOSS, batches, "lm_head", forward=pf.causal_lm)
    assert (found.method, found.exact) == ("head", True)
    assert found.notes == ("weight tied with transformer.wte: derivative through this use only",)
    hidden = net.transformer(ids).last_hidden_state[:, :-1].detach()
    expected = pf.head_flatness(hidden, net.lm_head.weight, None, ids[:, 1:])
    assert found.value == pytest.approx(expected.value, rel=1e-5)
    swept = pf.measure(net, LOSS, batches, layers="lm_head", forward=pf.causal_lm)
    assert swept["lm_head", "relative_flatness"].value == pytest.approx(expected.value, rel=1e-4)


def test_heads_in_the_sweep_are_as_at_the_head():
    """Also normalised, where ignored tokens are left out of the deviations."""
    net = Tokens().double()
    for options in ({}, {"normalize": "std"}):
        head = pf.relative_flatness(net, LOSS, (TOKENS, TOKEN_TARGETS), "head", **options)
        swept = pf.measure(net, LOSS, (TOKENS, TOKEN_TARGETS), layers="head", curvature="ggn", **options)
        assert swept["head", "relative_flatness"].value == pytest.approx(head.value, rel=1e-10)
        assert swept["head", "relative_flatness"].exact


def test_padded_tokens_are_left_out_of_the_deviations():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, C)

        def forward(self, input_ids, attention_mask):
            h = torch.relu(self.body(self.embed(input_ids))) * attention_mask.unsqueeze(2)
            return self.head(h.sum(1))

    torch.manual_seed(0)
    net = Bag().double()
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    batch = {"input_ids": TOKENS, "attention_mask": mask, "labels": torch.tensor([0, 1, 2])}
    deviation = net.embed(TOKENS)[mask != 0].detach().std(dim=0, correction=0)
    rescaled = Bag().double()
    rescaled.load_state_dict(net.state_dict())
    with torch.no_grad():
        rescaled.embed.weight.div_(deviation)
        rescaled.body.weight.mul_(deviation)
    found = pf.measure(net, LOSS, [batch], layers="body", normalize="std")
    expected = pf.measure(rescaled, LOSS, [batch], layers="body")
    assert found["body", "relative_flatness"].value == pytest.approx(expected["body", "relative_flatness"].value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    expected = pf.measure(residual(), LOSS, (X, Y))
    with torch.autocast("cpu", dtype):
        assert_same(expected, pf.measure(residual(), LOSS, (X, Y)), rel=0.1)
    assert_same(expected, pf.measure(residual().to(dtype), LOSS, (X.to(dtype), Y)), rel=0.1)


# --- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_samples(bad, normalize):
    x = X.clone()
    x[6, 0, 0, 0] = bad
    batches, kept = [(x[:5], Y[:5]), (x[5:], Y[5:])], torch.arange(20) != 6
    options = {"normalize": normalize, "per_sample": True}
    with pytest.raises(pf.NonFiniteError, match=r"batch 1: 1 of 15 samples have NaN or infinity .* layer '0'"):
        pf.measure(residual(), LOSS, batches, **options)
    expected = pf.measure(residual(), LOSS, (X[kept], Y[kept]), **options)
    omitted = pf.measure(residual(), LOSS, batches, nan_policy="omit", **options)
    assert_same(expected, omitted, rel=1e-5)
    estimate = omitted["3.conv1", "trace"]
    assert (estimate.samples, estimate.omitted) == (19, 1)
    assert estimate.per_sample.isnan().tolist() == (~kept).tolist()
    assert "19 samples, 1 omitted" in str(omitted)
    if normalize is None:
        passed = pf.measure(residual(), LOSS, batches, nan_policy="propagate", **options)["0", "trace"]
        assert math.isnan(passed.value)
        assert passed.per_sample.isfinite().tolist() == kept.tolist()
        traces = pf.block_traces(residual(), LOSS, batches, "0", nan_policy="omit")
        torch.testing.assert_close(traces, pf.block_traces(residual(), LOSS, (X[kept], Y[kept]), "0"))


def test_non_finite_weights_are_named():
    net = residual()
    with torch.no_grad():
        net[5].conv2.weight[1, 2, 0, 0] = math.nan
    for policy in ("raise", "omit"):
        with pytest.raises(pf.NonFiniteError, match=r"layer '5.conv2': its weight has 1 entries"):
            pf.measure(net, LOSS, (X, Y), nan_policy=policy)


def test_ignored_targets_may_hold_anything():
    net = networks.Net(
        lambda self, x: self.head(torch.relu(self.body(x))), body=nn.Conv1d(2, 3, 1), head=nn.Conv1d(3, 4, 1)
    )
    x, y = torch.randn(5, 2, 6), torch.arange(30).view(5, 6) % 4
    expected_y = y.clone()
    expected_y[2, 1], y[2, 1] = -100, -100
    expected = pf.measure(net, LOSS, (x, y))
    batches = [(x, y)]
    nan_logits = pf.measure(
        net, LOSS, batches, forward=lambda net, b: (net(b[0]).masked_fill((b[1] == -100).unsqueeze(1), math.nan), b[1])
    )
    assert_same(expected, nan_logits, rel=1e-6)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_batches_are_cut_to_the_memory(monkeypatch):
    expected = pf.measure(residual(), LOSS, (X, Y))
    seen = []
    forward = networks_forward(seen)
    assert_same(expected, pf.measure(residual(), LOSS, [(X, Y)], memory=200_000, forward=forward))
    sizes = seen[1:]  # the first is the look at some samples
    assert sum(sizes) == 20
    assert 1 <= max(sizes) < 10
    assert max(sizes) - min(sizes) <= 1


def networks_forward(seen):
    def forward(net, batch):
        seen.append(len(batch[0]))
        return net(batch[0]), batch[1]

    return forward


def test_out_of_memory_halves_the_batch(monkeypatch):
    expected = pf.measure(residual(), LOSS, (X, Y))
    gradients = torch.autograd.grad

    def limited(outputs, *rest, **options):
        if isinstance(outputs, torch.Tensor) and outputs.ndim and len(outputs) > 6:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate")
        return gradients(outputs, *rest, **options)

    monkeypatch.setattr(torch.autograd, "grad", limited)
    seen = []
    assert_same(expected, pf.measure(residual(), LOSS, [(X, Y)], forward=networks_forward(seen)))
    assert seen == [2, 20, 10, 5, 5, 5, 5]
    monkeypatch.setattr(runner, "_OUT_OF_MEMORY", ())
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        pf.measure(residual(), LOSS, [(X, Y)])


def test_batches_that_cannot_be_cut():
    """A mask of the batch's own length stays with the whole batch, or is noticed."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x, mask):
            return self.head(torch.relu(self.body(x)) @ mask)

    net = Masked()
    x, y, mask = torch.randn(6, 6), torch.arange(6) % 3, torch.rand(6, 6)
    batches = [{"x": x, "mask": mask, "labels": y}]
    report = pf.measure(net, LOSS, batches)
    expected = pf.measure(net, LOSS, [(x, y)], forward=lambda net, batch: (net(batch[0], mask), batch[1]))
    assert_same(expected, report)


def test_functional_forms_of_losses():
    net, x, y = classifier(5, 6, 3), torch.randn(6, 5), torch.rand(6, 3)
    assert pf.measure(net, F.mse_loss, (x, y))["trace"].value == pytest.approx(
        pf.measure(net, lambda f, t: (f - t).square().mean(), (x, y))["trace"].value, rel=1e-5
    )
