"""Bad input: one clear error each, that says what was received."""

import math
from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import TensorDataset

import pyflatness as pf
from pyflatness.model.data import Batches
from support.grid import Net

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(4)), torch.arange(10) % 3
LOSS = nn.CrossEntropyLoss()


def net(*extra):
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), *extra, nn.Linear(8, 3)).eval()


def refused(error, match, model=None, loss=LOSS, data=(X, Y), layer=None, **options):
    with pytest.raises(error, match=match):
        pf.relative_flatness(model or net(), loss, data, layer, **options)


class Encoder(nn.Module):
    def __init__(self, last=lambda z: z):
        super().__init__()
        self.fc1, self.fc2, self.head, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3), last

    def forward(self, x):
        return self.last(self.head(self.fc2(self.fc1(x))))


def test_layers_that_are_not_there():
    refused(pf.errors.InputError, r"nothing in the model matches 'haed'; did you mean head", Encoder(), layer="haed")
    refused(
        pf.errors.InputError, r"nothing in the model matches 'zzz'; did you mean fc1, fc2, head", Encoder(), layer="zzz"
    )
    refused(pf.errors.InputError, r"'fc\*' matches 2 layers, one is wanted: fc1, fc2", Encoder(), layer="fc*")
    refused(pf.errors.InputError, r"'type:Linear' matches 3 layers", Encoder(), layer="type:Linear")
    refused(pf.errors.InputError, r"'re:\(' is not a regular expression", Encoder(), layer="re:(")
    refused(pf.errors.InputError, r"this Linear is not a part of the model", Encoder(), layer=nn.Linear(2, 2))
    refused(pf.errors.InputError, r"a name, glob, .* is wanted, got int", Encoder(), layer=[3])
    refused(pf.errors.InputError, r"the model has no Linear layer", nn.Conv1d(4, 3, 1), data=(X[..., None], Y[:, None]))
    refused(
        pf.errors.InputError, r"layer '1' is a ReLU; what can be measured is Linear, Conv1d.* transformers", layer="1"
    )
    refused(
        pf.errors.InputError, r"is a LayerNorm", net(nn.LayerNorm(8, elementwise_affine=False)), layer="type:LayerNorm"
    )
    with pytest.raises(pf.errors.InputError, match="an empty list"):
        pf.measure(net(), LOSS, (X, Y), layers=[])
    with pytest.raises(pf.errors.InputError, match="has none that can be measured"):
        pf.measure(nn.Sequential(nn.PReLU()), LOSS, (X, Y))
    message = r"measures: 'trase' does not exist; did you mean trace.* `pyflatness measures` lists all"
    with pytest.raises(pf.errors.InputError, match=message):
        pf.measure(net(), LOSS, (X, Y), measures=["trase"])


def test_batches_that_contain_themselves():
    pair, mapping, empty = [X, Y], {"inputs": X, "labels": Y}, []
    for holder in (pair, empty):
        holder.append(holder)
    mapping["inside"] = [mapping]
    for batches, kind in (([pair], "list"), ([mapping], "dict"), (empty, "list"), ([(X, [Y, pair])], "list")):
        for forward in (None, lambda model, batch: (model(X), Y)):
            refused(pf.errors.InputError, f"data: a {kind} in a batch contains itself", data=batches, forward=forward)


def test_tensors_without_values():
    with FakeTensorMode():
        fake, layer = torch.randn(10, 4), nn.Linear(4, 3)
    refused(pf.errors.InputError, r"data\[0\]: \(10, 4\) .* in a FakeTensor has no values", data=(fake, Y))
    refused(pf.errors.InputError, r"data: batch 1: .* in a FakeTensor has no values", data=[(X, Y), (fake, Y)])
    refused(pf.errors.InputError, r"model: 'weight', \(3, 4\), has no values", layer)
    with pytest.raises(pf.errors.InputError, match=r"features: .* in a FakeTensor has no values"):
        pf.head_flatness(fake, torch.randn(3, 4))


def test_calls_inside_of_transforms():
    model, weight = net(), torch.ones(3, 4)
    calls = {
        "relative_flatness": lambda x: pf.relative_flatness(model, LOSS, (x, Y)).value,
        "measure": lambda x: pf.measure(model, LOSS, (x, Y))["trace"].value,
        "spectrum": lambda x: pf.spectrum(model, LOSS, (x, Y)).largest,
        "head_flatness": lambda x: pf.head_flatness(x, weight).value,
    }
    for name, call in calls.items():
        for transform in (lambda f: torch.func.vmap(f)(X[None]), lambda f: torch.func.grad(f)(X)):
            with pytest.raises(pf.errors.InputError, match=f"{name} is called inside of a transform of torch.func"):
                transform(call)
    many = torch.func.vmap(lambda x: pf.flatness_penalty(x, weight, None, Y))(torch.stack([X, 2 * X]))
    assert many.tolist() == [float(pf.flatness_penalty(x, weight, None, Y)) for x in (X, 2 * X)]


class Unused(Encoder):
    def forward(self, x):
        return self.head(self.fc1(x))


def test_a_named_layer_that_did_not_run():
    refused(pf.errors.InputError, r"'fc2' did not run in the model's forward pass", Unused(), layer="fc2")


def test_heads_that_are_not_heads_in_every_batch():
    class Moody(nn.Linear):
        def __call__(self, x):
            z = super().__call__(x)
            return z if len(x) < 5 else z * 2

    model = nn.Sequential(Moody(4, 3))
    refused(pf.errors.InputError, "the model's outputs for the same samples change with the batch they are in", model)


def test_outputs_that_do_not_hold_the_samples():
    refused(pf.errors.InputError, "does not hold 2 samples in dimension 0", Encoder(lambda z: z.t()), layer="fc1")
    refused(pf.errors.InputError, "does not hold 2 samples in dimension 0", Encoder(lambda z: z.sum()), layer="fc1")


def test_layers_that_cannot_be_measured():
    class Summed(nn.Linear):
        def forward(self, x):
            return x * self.weight.sum(1)

    class Patched(nn.Linear):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.forward = lambda x: 2 * nn.Linear.forward(self, x)

    refused(pf.errors.InputError, r"layer '2': its weight is used in sum", net(Summed(8, 8)), layer="2")
    refused(pf.errors.InputError, r"'2' \(Patched\): its output is not W φ \+ b", net(Patched(8, 8)), layer="2")
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 3))
    refused(pf.errors.InputError, "lazy layers whose weights are not initialised", lazy, layer="0")


class Smooth(Encoder):
    def forward(self, x):
        return self.head(torch.tanh(self.fc2(self.fc1(x))))


def test_second_derivatives_that_do_not_exist():
    model = nn.Sequential(nn.Linear(4, 6), nn.Hardsigmoid(), nn.Linear(6, 3))
    message = r"layer '0': an operation behind it has no second derivative \(.*hardsigmoid.*curvature='ggn' gives"
    refused(pf.errors.InputError, message, model, layer="0")
    assert pf.relative_flatness(model, LOSS, (X, Y), "0", curvature="ggn").value > 0


def test_numbers_of_draws():
    refused(pf.errors.InputError, r"probes=0: a number of random probes", Encoder(), layer="fc1", probes=0)
    refused(pf.errors.InputError, r"probes=True: a number of random probes", Encoder(), layer="fc1", probes=True)
    refused(pf.errors.InputError, "seed=None: an integer of 64 bits", Encoder(), layer="fc1", probes=2, seed=None)


def test_more_passes_than_are_sensible():
    def segments():
        def forward(net, x):
            return net.head(torch.relu(net.body(x)))

        return Net(forward, body=nn.Conv2d(1, 2, 1), head=nn.Conv2d(2, 3, 1))

    images, targets = torch.randn(2, 1, 40, 40), torch.zeros(2, 40, 40).long()
    message = (
        r"3200 backward passes a batch \(1600 loss terms of a sample x 2 columns of the loss's factor\), more than "
        r"max_passes=2048, and about \d+ min \d\d s for each 2 samples by .* pass max_passes=3200 .* or probes="
    )
    refused(pf.errors.InputError, message, segments(), data=(images, targets), layer="body")
    assert pf.relative_flatness(segments(), LOSS, (images, targets), "body", probes=2).stderr > 0
    targets[:, 1:] = -100  # a sample's terms that count are few
    assert pf.relative_flatness(segments(), LOSS, (images, targets), "body").value > 0


class Mixing(Encoder):
    def forward(self, x):
        h = torch.relu(self.fc1(x))
        return self.head(torch.relu(self.fc2(h - h.mean(0))))


def test_samples_that_are_mixed():
    refused(pf.errors.InputError, "layer 'fc1': its rows .* cannot be told apart", Mixing(), layer="fc1")
    refused(pf.errors.InputError, "outputs for the same samples change with the batch", Mixing(), layer="fc2")


class Noisy(Encoder):
    def forward(self, x):
        return self.head(nn.functional.dropout(self.fc1(x), 0.5, training=True))


def test_outputs_that_change_from_call_to_call():
    refused(pf.errors.InputError, "draws random numbers", Noisy(), layer="fc1")


class NoGraph(Encoder):
    def forward(self, x):
        with torch.no_grad():
            h = torch.relu(self.fc1(x))
        return self.head(self.fc2(h))


def test_layers_without_a_graph():
    refused(
        pf.errors.InputError,
        r"layer 'fc1' runs without recording a graph: under torch.no_grad\(\)",
        NoGraph(),
        layer="fc1",
    )


def test_block_traces_that_would_not_fit():
    wide = nn.Sequential(nn.Linear(4, 12000), nn.ReLU(), nn.Linear(12000, 3))
    with pytest.raises(pf.errors.InputError, match="a matrix of 12000 x 12000, more than 1024 MiB"):
        pf.block_traces(wide, LOSS, (X, Y), "0")


def test_reports_without_what_is_asked():
    report = pf.measure(net(), LOSS, (X, Y))
    for key, message in {
        ("7", "trace"): "no layer '7'; there are 0, 2, and '' for the network",
        "kappa": "no measure 'kappa'; there are relative_flatness, trace",
        (0, "trace"): r"got \(0, 'trace'\); a layer's name is text, as in report\['0', ",
        ("trace", "0"): r"the layer is first, report\['0', 'trace'\]",
    }.items():
        with pytest.raises(pf.errors.InputError, match=message):
            report[key]
    with pytest.raises(pf.errors.InputError, match=r"nothing in the model matches 'fc1'; did you mean 0, 2\?"):
        pf.measure(net(), LOSS, (X, Y), layers="fc1")
    assert "\n1 sample, " in str(pf.measure(net(), LOSS, (X[:1], Y[:1])))


def test_inputs_and_targets_are_one_argument():
    for call in (pf.measure, pf.relative_flatness):
        name = call.__name__
        message = rf"inputs and targets are one argument, a pair: {name}\(model, loss, \(inputs, targets\)\)"
        with pytest.raises(pf.errors.InputError, match=message):
            call(net(), LOSS, X, Y)


def test_data_of_single_samples():
    for samples in (TensorDataset(X, Y), [*zip(X, Y, strict=True)]):
        with pytest.raises(pf.errors.InputError, match=r"wrap it.* DataLoader\(data(set)?, batch_size=256\)"):
            pf.measure(net(), LOSS, samples)


def test_weights_with_nan_have_no_norm():
    model = net()
    with torch.no_grad():
        model[0].weight[0] = torch.nan
    with pytest.raises(pf.errors.NonFiniteError, match=r"layer '0': its weight has \d entries of NaN or infinity"):
        pf.measure(model, LOSS, (X, Y), measures="weight_norm")
    found = pf.measure(model, LOSS, (X, Y), measures="weight_norm", nan_policy="propagate")
    assert math.isnan(found["weight_norm"].value)


def test_modes_in_which_samples_are_not_independent():
    refused(
        pf.errors.InputError,
        r"'2' \(BatchNorm1d\) is in training mode: call model.eval\(\)",
        net(nn.BatchNorm1d(8)).train(),
    )
    refused(pf.errors.InputError, r"'2' \(Dropout\) is in training mode", net(nn.Dropout(0.1)).train())
    refused(pf.errors.InputError, r"has no running statistics", net(nn.BatchNorm1d(8, track_running_stats=False)))
    pf.relative_flatness(net(nn.Dropout(0.0)).train(), LOSS, (X, Y))
    refused(pf.errors.InputError, "or pass eval=True", net(nn.Dropout(0.1)).train())
    refused(pf.errors.InputError, "or pass eval=True", Encoder(nn.functional.dropout).train())
    refused(pf.errors.InputError, "eval=1: True or False", net(nn.Dropout(0.1)).train(), eval=1)
    refused(pf.errors.InputError, "no running statistics", net(nn.BatchNorm1d(8, track_running_stats=False)), eval=True)


def test_data():
    refused(pf.errors.InputError, "no samples", data=[])
    refused(pf.errors.InputError, r"wanted, got Tensor; pass \(inputs, targets\), or .*'input_ids'", data=X)
    refused(pf.errors.InputError, r"wanted, got dict; .*data=\[batch\]", data={"x": X, "labels": Y})
    refused(pf.errors.InputError, r"`labels`, got a tuple of 1", data=(X,))
    refused(pf.errors.InputError, r"`labels`, got a Tensor", data=[X])
    refused(pf.errors.InputError, r"can be read once, and 2 reads", data=iter([(X, Y)]), normalize="std")
    pf.relative_flatness(net(), LOSS, iter([(X, Y)]))
    refused(
        pf.errors.InputError, r"a pair \(outputs, targets\) is wanted", forward=lambda model, batch: model(batch[0])
    )
    refused(pf.errors.InputError, r"a tensor is wanted, got list; pass torch\.tensor", data=[(X, Y.tolist())])
    refused(pf.errors.InputError, r"fit the model, such as inputs\.float\(\)", data=[(X.double(), Y)])


def test_a_model_without_numbers():
    refused(pf.errors.InputError, "meta device", net().to("meta"))


def test_data_goes_to_the_models_device():
    """Every tensor of a batch, whatever holds it; the meta device stands for another one."""
    pair = namedtuple("pair", "x y")
    for batch in ((X, Y), [X, {"y": Y, "name": "a"}], [X, UserDict(y=Y)], pair(X, Y)):
        (moved,) = Batches([batch], torch.device("meta"))
        assert type(moved) is type(batch)
        flat = [*moved] if isinstance(moved[1], torch.Tensor) else [moved[0], moved[1]["y"]]
        assert [part.device.type for part in flat] == ["meta", "meta"]


def test_targets():
    refused(pf.errors.InputError, r"class -1 does not exist .*ignore_index is -100", data=(X, Y - 1))
    refused(pf.errors.InputError, r"batch 1: targets", data=[(X, Y), (X, Y + 1)])
    refused(pf.errors.InputError, r"are wanted, got torch.bool", data=(X, Y > 1))
    refused(pf.errors.InputError, r"shape \(10,\) are wanted .* got \(10, 2\)", data=(X, Y[:, None].expand(10, 2)))
    refused(pf.errors.InputError, r"shape \(10, 3\) is wanted, got \(10, 2\)", data=(X, torch.rand(10, 2)))
    refused(pf.errors.InputError, "every one is ignored", data=(X, torch.full((10,), -100)))
    refused(pf.errors.InputError, r"shape \(10, 3\) is wanted, got \(10,\)", loss=nn.MSELoss(), data=(X, Y.float()))
    refused(
        pf.errors.InputError, "floating-point labels", loss=nn.BCEWithLogitsLoss(), data=(X, torch.ones(10, 3).long())
    )
    refused(pf.errors.InputError, "one per sample", loss=lambda f, y: f.sum(1).mean(), data=[(X, Y[:4])])


def test_losses():
    refused(pf.errors.InputError, "an nn loss module, an F function", loss=3)
    refused(pf.errors.InputError, "an nn loss module, an F function", loss=[1])
    refused(pf.errors.InputError, "reduction 'median'", reduction="median")
    refused(pf.errors.InputError, "2 class weights for 3 classes", loss=nn.CrossEntropyLoss(weight=torch.ones(2)))
    labels = torch.ones(10, 3)
    per_sample = nn.BCEWithLogitsLoss(weight=torch.ones(10, 1))
    refused(pf.errors.InputError, "one entry per sample", loss=per_sample, data=(X, labels))
    wrong = nn.BCEWithLogitsLoss(pos_weight=torch.ones(5))
    refused(pf.errors.InputError, r"pos_weight of shape \(5,\) does not fit", loss=wrong, data=(X, labels))
    refused(pf.errors.InputError, "couples samples", loss=lambda f, y: (f - f.mean(0)).square().mean())
    weighted = nn.NLLLoss(torch.ones(3), reduction="sum")
    refused(pf.errors.InputError, r"outputs in float64 and does not take them .*loss\.double\(\)", loss=weighted)
    refused(pf.errors.InputError, "follow the outputs' dtype", loss=lambda f, y: (f @ torch.ones(3, 1)).square().mean())
    refused(pf.errors.InputError, "a scalar tensor is wanted", loss=lambda f, y: f)


# --- NaN and infinity -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weights_are_named(bad):
    model = net()
    with torch.no_grad():
        model[2].weight[1, 2] = bad
    refused(pf.errors.NonFiniteError, "layer '2': its weight has 1 entries", model)
    refused(pf.errors.NonFiniteError, "layer '2': its weight has 1 entries", model, nan_policy="omit")
    assert math.isnan(float(pf.relative_flatness(model, LOSS, (X, Y), nan_policy="propagate")))


@pytest.mark.parametrize("normalize", [None, "std"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_features(bad, normalize):
    x = X.clone()
    x[6, 0] = bad
    model = nn.Sequential(nn.Linear(4, 3))
    batches = [(x[:5], Y[:5]), (x[5:], Y[5:])]
    options = {"per_sample": True, "normalize": normalize}
    refused(
        pf.errors.NonFiniteError,
        r"batch 1: 1 of 5 rows .* features of layer '0' \(the first is row 1\)",
        model,
        data=batches,
    )
    kept = torch.arange(10) != 6
    expected = pf.relative_flatness(model, LOSS, (X[kept], Y[kept]), **options)
    omitted = pf.relative_flatness(model, LOSS, batches, nan_policy="omit", **options)
    assert omitted.value == pytest.approx(expected.value, rel=1e-6)
    assert (omitted.samples, omitted.omitted) == (9, 1)
    assert omitted.per_sample.isnan().tolist() == (~kept).tolist()
    assert float(omitted.per_sample.nanmean()) == pytest.approx(omitted.value, rel=1e-12)
    passed = pf.relative_flatness(model, LOSS, batches, nan_policy="propagate", **options)
    assert math.isnan(passed.value)
    assert passed.per_sample.isfinite().tolist() == kept.tolist()


def test_overflowing_logits_are_named():
    model = nn.Sequential(nn.Linear(4, 3))
    refused(pf.errors.NonFiniteError, "batch 0: 10 of 10 rows have NaN or infinity in the", model, data=(X * 1e38, Y))


def test_everything_omitted():
    refused(
        pf.errors.NonFiniteError,
        "all 10 samples",
        nn.Sequential(nn.Linear(4, 3)),
        data=(X * math.nan, Y),
        nan_policy="omit",
    )


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_nothing_left_to_normalise(backend):
    """All features zero, or no finite sample: no columns, no rows."""
    flat = pf.head_flatness(torch.zeros(20, 4), torch.randn(3, 4), normalize="std", backend=backend)
    assert flat.value == 0
    options = {"normalize": "std", "backend": backend}
    assert math.isnan(pf.head_flatness(X * math.nan, torch.randn(3, 4), nan_policy="propagate", **options).value)
    with pytest.raises(pf.errors.NonFiniteError, match="all 10 samples"):
        pf.head_flatness(X * math.nan, torch.randn(3, 4), nan_policy="omit", **options)


def test_padding_that_the_loss_ignores_may_hold_anything():
    x, y = X.clone(), Y.clone()
    x[3], y[3] = math.nan, -100
    kept = torch.arange(10) != 3
    model = nn.Sequential(nn.Linear(4, 3))
    for options in ({}, {"normalize": "std"}):
        value = pf.relative_flatness(model, LOSS, (x, y), **options)
        assert value.value == pytest.approx(
            float(pf.relative_flatness(model, LOSS, (X[kept], Y[kept]), **options)), rel=1e-6
        )


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((X, torch.ones(3, 5)), r"features \(10, 4\) do not fit weight \(3, 5\)"),
        ((X, torch.ones(0, 4)), r"do not fit weight \(0, 4\)"),
        ((X[:0], torch.ones(3, 4)), "no samples"),
        ((X[0], torch.ones(3, 4)), r"features: 2 dimensions are wanted, got shape \(4,\)"),
        ((X, torch.ones(3, 4, 1)), r"weight: 2 dimensions are wanted"),
        ((X, torch.ones(3, 4), torch.ones(2)), "bias has 2 entries for 3 rows"),
        ((X, torch.ones(3, 4).double()), r"weight is torch.float64 on cpu, features are torch.float32 on cpu"),
        (
            (X.long(), torch.ones(3, 4).long()),
            "features is torch.int64; float16, bfloat16, float32 or float64 is wanted",
        ),
        ((X.half(), torch.ones(3, 4).double()), r"weight is torch.float64 on cpu, features are torch.float16"),
        ((X.tolist(), torch.ones(3, 4)), "features: a tensor is wanted, got list"),
        ((X, torch.ones(3, 4), None, Y.tolist()), "targets: a tensor is wanted, got list"),
        ((X, torch.ones(3, 4), None, Y + 1), "class 3 does not exist"),
    ],
)
def test_head_tensors(arguments, match):
    with pytest.raises(pf.errors.FlatnessError, match=match):
        pf.head_flatness(*arguments)


def test_losses_that_need_targets():
    w = torch.ones(3, 4)
    for loss, message in {
        nn.CrossEntropyLoss(weight=torch.ones(3)): "class weights cannot do without",
        nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)): "pos_weight cannot do without",
        (lambda f, y: f.sum(1).mean()): "got none",
    }.items():
        with pytest.raises(pf.errors.InputError, match=message):
            pf.head_flatness(X, w, loss=loss)
    assert float(pf.head_flatness(X, w, loss="mse_loss")) > 0
    assert float(pf.head_flatness(X, w, loss="binary_cross_entropy_with_logits")) > 0
