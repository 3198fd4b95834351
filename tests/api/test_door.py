"""Every public call given every bad input: one error of ours that names what was received, and a model as it was."""

import enum
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import doors
from support.doors import LOSS, ON_MODELS, ON_TENSORS, WITHOUT_LOSS, WITHOUT_USE_OF_LOSS, C, Returning, X, Y, of_layout
from support.public import CALLS
from support.unchanged import assert_unchanged, snapshot


class Use(enum.Enum):
    """How far a call has to look at its loss before it sees that it is a bad one."""

    NAMED = "named"
    CALLED = "called"
    DIFFERENTIATED = "differentiated"


DATA = {
    "none": (lambda: None, "data: .* got NoneType"),
    "a loss": (lambda: LOSS, r"got CrossEntropyLoss; the order of arguments is \(model, loss, data\)"),
    "a dataset": (lambda: torch.utils.data.TensorDataset(X, Y), r"DataLoader\(dataset"),
    "enumerate": (lambda: enumerate([(X, Y)]), "got enumerate; it yields .* pass the loader itself"),
    "pairs of enumerate": (
        lambda: [*enumerate([(X, Y)])],
        "pair of the number 0 and a tuple, as enumerate|no floating-point",
    ),
    "arrays": (lambda: (X.numpy(), Y.numpy()), r"data\[0\]: .* got ndarray; pass torch.from_numpy"),
    "batches of arrays": (lambda: [(X.numpy(), Y.numpy())], "batch 0: .* got ndarray; pass torch.from_numpy"),
    "targets that are an array": (lambda: (X, Y.numpy()), r"data\[1\]: a tensor is wanted, got ndarray"),
    "a mapping of arrays": (lambda: [{"x": X.numpy(), "labels": Y.numpy()}], "got ndarray; pass torch.from_numpy"),
    "float64": (
        lambda: (X.double(), Y),
        r"on the inputs \(12, 4\) float64 raised .* \(its parameters are float32 on cpu\)",
    ),
    "integers": (
        lambda: (X.long(), Y),
        r"\(12, 4\) int64 raised .* parameters are float32|layer '0': input is torch.int64; .*wanted|no floating-point",
    ),
    "another width": (lambda: (X[:, :3], Y), r"on the inputs \(12, 3\) float32 raised .* parameters are float32"),
    "a mapping of lists": (
        lambda: [{"x": X.tolist(), "labels": Y.tolist()}],
        "a dict of list, list; .*return_tensors='pt'",
    ),
    "texts": (lambda: [("a", "b")], "batch 0 holds no tensor .* a tuple of str, str"),
    "a batch without tensors later": (lambda: [(X, Y), "end"], "batch 1 holds no tensor .* a str"),
    "a list of tensors": (lambda: [X, Y], "got a Tensor .*a tuple of tensors is cut into batches"),
    "one": (lambda: [(X,)], "got a tuple of 1"),
    "no dimension": (lambda: (X, torch.tensor(1)), r"shapes \[\(12, 4\), \(\)\]"),
    "a spent generator": (
        lambda: iter([]),
        "an iterator that was read before is at its end|can be read once, and .* are needed",
    ),
    "a path": (lambda: "cifar10", "a tuple of tensors or an iterable of batches is wanted, got str"),
    "other lengths": (lambda: (X, Y[:5]), r"different lengths: \[12, 5\]"),
    "no samples": (lambda: (X[:0], Y[:0]), "there are no samples"),
    "meta": (lambda: (X.to("meta"), Y), r"data\[0\]: \(12, 4\) of torch.float32 on the meta device"),
    "meta targets": (lambda: (X, Y.to("meta")), r"data\[1\]: \(12,\) of torch.int64 on the meta device"),
    "a batch of meta": (lambda: [(X, Y.to("meta"))], r"batch 0: \(12,\) of torch.int64 on the meta device"),
    "sparse": (lambda: (of_layout("sparse"), Y), r"data\[0\]: .* layout torch.sparse_coo; pass tensor.to_dense"),
    "sparse rows": (lambda: (of_layout("sparse rows"), Y), r"data\[0\]: .* layout torch.sparse_csr"),
    "nested": (
        lambda: (of_layout("jagged"), Y[:2]),
        r"data\[0\]: .* a nested one; pad it",
    ),
    "a batch of nested": (
        lambda: [(of_layout("jagged"), Y[:2])],
        "batch 0: .* a nested one; pad it",
    ),
    "quantised": (lambda: (of_layout("quantised"), Y), "got torch.qint8; pass .*dequantize"),
}


MODELS = {
    "a class": (
        lambda: nn.Linear,
        "model: .* the class Linear itself; pass an instance of it",
    ),
    "a state dict": (lambda: doors.net().state_dict(), r"got OrderedDict; load it into the model first"),
    "several outputs": (lambda: Returning(lambda z: (z, z)), "returns a tuple with several tensors, .*; pass forward="),
    "a dict": (
        lambda: Returning(lambda z: {"out": z}),
        "a dict with a tensor by another name than `logits`, .* forward=",
    ),
    "nothing": (lambda: Returning(lambda z: None), "no tensor, tuple or object with `logits` came out, got NoneType"),
    "an array": (lambda: Returning(lambda z: z.detach().numpy()), "came out, got ndarray; pass forward="),
    "a function": (lambda: F.relu, "model: a torch.nn.Module is wanted, got function"),
    "no parameters": (nn.ReLU, "one with parameters is wanted, got ReLU"),
    "meta": (
        lambda: doors.net().to("meta"),
        r"'0.weight', \(6, 4\), has no values .it is on the meta device, .* load the model first",
    ),
    "half of it meta": (
        lambda: nn.Sequential(doors.net()[0], nn.ReLU(), nn.Linear(6, C, device="meta")),
        r"'2.weight', \(3, 6\), has no values .it is on the meta device",
    ),
    "training": (lambda: nn.Sequential(*doors.net(), nn.Dropout(0.5)), r"'3' \(Dropout\) is in training mode"),
}

LOSSES = {
    "none": (None, Use.NAMED, "loss: .* got NoneType"),
    "data": ((X, Y), Use.NAMED, r"loss: .* got tuple; the order of arguments is \(model, loss, data\)"),
    "a class": (nn.CrossEntropyLoss, Use.NAMED, "the class CrossEntropyLoss itself; pass an instance of it"),
    "no name": ("hinge", Use.NAMED, "'hinge' is not known; choose cross_entropy"),
    "no reduction": (nn.MSELoss(reduction="none"), Use.NAMED, "reduction 'none' gives no number"),
    "arguments swapped": (
        lambda y, f: F.cross_entropy(f, y),
        Use.CALLED,
        r"<lambda> is called as loss\(outputs, targets\), with outputs \(12, 3\) of torch.float64 and targets \(12,\)",
    ),
    "three arguments": (
        nn.TripletMarginLoss(),
        Use.CALLED,
        "nn.TripletMarginLoss is called .* TypeError: .* 'negative'",
    ),
    "targets of another shape": (
        nn.SoftMarginLoss(),
        Use.CALLED,
        "nn.SoftMarginLoss is called .* The size",
    ),
    "a number": (lambda f, y: 3, Use.CALLED, "a scalar tensor is wanted from a custom loss, got 3"),
    "not reduced": (lambda f, y: f, Use.CALLED, "a scalar tensor is wanted"),
    "class weights": (
        lambda f, y: F.cross_entropy(f, y, torch.tensor([1.0, 2.0, 3.0])),
        Use.CALLED,
        r"float64 and does not take them .* pass nn.CrossEntropyLoss\(weight=…",
    ),
    "class weights in float64": (
        lambda f, y: F.cross_entropy(f, y, torch.tensor([1.0, 2.0, 3.0]).double()),
        Use.DIFFERENTIATED,
        r"is not the mean .* pass nn.CrossEntropyLoss\(weight=…",
    ),
    "no derivative": (
        lambda f, y: (f.argmax(1) != y).double().mean(),
        Use.DIFFERENTIATED,
        "does not come from the outputs by operations that torch differentiates",
    ),
    "no second derivative": (
        nn.MultiMarginLoss(),
        Use.DIFFERENTIATED,
        r"has no second derivative.* \(.*multi_margin_loss",
    ),
}

OPTIONS = [
    ("layer", 3, "layer: .* got int 3"),
    ("layer", 2, "got int 2; '2' is the name of one"),
    ("layer", nn.Linear, "got a class; 'type:Linear' is for all layers of it"),
    ("layer", b"0", "got bytes b'0'"),
    ("layer", X, r"got Tensor tensor\("),
    ("layers", 3, "layer: .* got int 3"),
    ("layers", nn.Linear, "got a class; 'type:Linear'"),
    ("layers", [None], "got NoneType None"),
    ("measures", 3, "measures=3: a name or several"),
    ("measures", [3], r"measures=\[3\]: a name or several"),
    ("memory", float("nan"), "memory=nan: a number of bytes is wanted"),
    ("memory", "1GB", "memory='1GB': a number of bytes is wanted"),
    ("memory", 1e9, r"memory=1000000000.0: a number of bytes"),
    ("memory", True, "memory=True"),
    ("memory", 0, "memory=0: .* at least 1"),
    ("per_sample", None, "per_sample=None: True or False is wanted"),
    ("per_sample", "yes", "per_sample='yes': True or False"),
    ("per_sample", 1, "per_sample=1: True or False"),
    ("probes", 10**12, "probes=1000000000000: .* at most 1048576"),
    ("probes", "many", "probes='many': (.* or 'adaptive'|a whole number)"),
    ("probes", np.array([1, 2]), r"probes=array\(\[1, 2\]\)"),
    ("rtol", "1%", "rtol='1%'"),
    ("rtol", float("nan"), "rtol=nan"),
    ("seed", 0.5, "seed=0.5: an integer of 64 bits"),
    ("seed", True, "seed=True"),
    ("seed", 2**63, "seed=9223372036854775808"),
    ("nan_policy", None, "nan_policy=None does not exist; choose one of 'raise'"),
    ("nan_policy", np.array(["raise", "omit"]), r"nan_policy=array\(\['raise', 'omit'\]"),
    ("normalize", False, "normalize=False does not exist"),
    ("curvature", 3, "curvature=3 does not exist"),
    ("conv", [], r"conv=\[\] does not exist"),
    ("backend", None, "backend=None does not exist"),
    ("progress", "yes", "progress='yes': True or False"),
    ("reduction", 3, "reduction 3 gives no number"),
    ("forward", 3, r"forward=3: a function \(model, batch\)"),
    ("samples", 2.5, "samples=2.5: a number of samples"),
    ("samples", True, "samples=True"),
    ("probes", 2.5, "probes=2.5: a (whole number|number of random probes)"),
    ("probes", 10**12, "probes=1000000000000: .* at most 1048576"),
    ("points", 2.5, "points=2.5: "),
    ("steps", 2.5, "steps=2.5: "),
    ("folds", "2", "folds='2': a whole number"),
    ("top", 0, "top=0: a number of singular values"),
    ("rho", "a", "rho='a': (a positive number|(positive )?numbers are)"),
    ("drop", 1, "drop=1: a number between 0 and 1"),
    ("tolerance", "x", "tolerance='x': a positive number"),
    ("kappa", "a", "kappa='a': a number"),
    ("rho", [], r"rho=\[\]: (a positive number is wanted|(positive )?numbers are wanted, one at least)"),
    ("measures", torch.tensor(0.5), "measures=tensor.*a name or several .*are wanted"),
    (
        "measures",
        "relative_flatnes",
        "'relative_flatnes' (does not exist; did you mean relative_flatness|is no measure of)",
    ),
    ("backend", np.array(["auto", "auto"]), r"backend=array\(.* does not exist; choose one of 'auto'"),
    ("norm", np.array(["l2", "linf"]), r"norm=array\(.* does not exist; choose one of 'l2'"),
    ("which", 3, "which=3 does not exist; choose one of 'largest'"),
    ("normalization", X, r"normalization=tensor\(.* does not exist; choose one of 'auto'"),
    ("span", X.to("meta"), r"span=tensor\(.*: a positive number, the smallest and largest"),
    ("out", 3, "out=3: the path of a file is wanted"),
    ("out", "", "out='': the path of a file is wanted"),
    ("powers", 3, "powers=3: whole numbers are wanted"),
    ("squared", None, "squared=None: True or False"),
    ("scaled", None, "scaled=None: True or False"),
    ("normalized", 3, "normalized=3: True or False"),
    ("inplace", None, "inplace=None: True or False"),
    ("sharpness", [1], r"sharpness=\[1\]: a number or 'all'"),
    ("initial", 3, "initial: it does not fit the model"),
]

_SPARSE = torch.eye(C, 4).to_sparse()
TENSORS = {
    "features: none": ({"features": None}, "features: a tensor is wanted, got NoneType"),
    "features: array": ({"features": X.numpy()}, "features: .* got ndarray; pass torch.from_numpy"),
    "features: meta": ({"features": X.to("meta")}, r"features: \(12, 4\) of torch.float32 on the meta device"),
    "features: sparse": ({"features": of_layout("sparse")}, "features: .* layout torch.sparse_coo"),
    "features: rows": ({"features": of_layout("sparse rows")}, "features: .* layout torch.sparse_csr"),
    "features: nested": ({"features": of_layout("nested")}, "features: .* a nested one"),
    "features: integers": ({"features": X.long()}, "features is torch.int64; float16"),
    "features: float64": ({"features": X.double()}, "weight is torch.float32 on cpu, features are torch.float64"),
    "features: one": ({"features": X[0]}, r"features: 2 dimensions are wanted, got shape \(4,\)"),
    "weight: none": ({"weight": None}, "weight: a tensor is wanted, got NoneType"),
    "weight: module": ({"weight": nn.Linear(4, C)}, "weight: a tensor is wanted, got Linear"),
    "weight: sparse": ({"weight": _SPARSE}, "weight: .* layout torch.sparse_coo"),
    "weight: meta": ({"weight": torch.empty(C, 4, device="meta")}, r"weight: \(3, 4\) .* on the meta device"),
    "weight: transposed": ({"weight": torch.zeros(4, C)}, r"features \(12, 4\) do not fit weight \(4, 3\)"),
    "bias: sparse": ({"bias": torch.ones(C).to_sparse()}, "bias: .* layout torch.sparse_coo"),
    "bias: number": ({"bias": 0.0}, "bias: a tensor is wanted, got float"),
    "targets: array": ({"targets": Y.numpy()}, "targets: .* got ndarray; pass torch.from_numpy"),
    "targets: meta": ({"targets": Y.to("meta")}, r"targets: \(12,\) of torch.int64 on the meta device"),
    "targets: sparse": ({"targets": Y.to_sparse()}, "targets: .* layout torch.sparse_coo"),
    "targets: nested": ({"targets": of_layout("nested labels")}, "targets: .* a nested one"),
    "targets: fewer": ({"targets": Y[:5]}, r"targets: .* got \(5,\)"),
    "fit: number": ({"fit": 3}, r"fit=3: a function \(features, targets\) -> \(weight, bias\) is wanted"),
    "labels: tensor": ({"labels": Y}, r"labels=tensor.*: a function of features \(n, m\)"),
    "labels: none": ({"labels": lambda x: None, "targets": None}, "targets: a tensor is wanted, got NoneType"),
    "rho: negative": ({"rho": [0.1, -1]}, "rho=.*(, and -1 is among them|a positive number is wanted)"),
    "test: number": ({"test": 3}, r"test=3: a pair \(features, targets\)"),
    "loss: class": ({"loss": nn.CrossEntropyLoss}, "the class CrossEntropyLoss itself"),
    "loss: swapped": (
        {"loss": lambda y, f: F.cross_entropy(f, y)},
        r"is called as loss\(outputs, targets\)|a callable has no (loss of a single sample|formula at a head)",
    ),
    "rtol: one": ({"rtol": 1.0}, "rtol=1.0: a relative error from 0"),
    "per_sample: none": ({"per_sample": None}, "per_sample=None"),
    "rho: text": ({"rho": "a"}, "rho='a'"),
    "seed: text": ({"seed": "a"}, "seed='a': an integer"),
    "folds: half": ({"folds": 2.5}, "folds=2.5"),
    "probes: many": ({"probes": 10**12}, "probes=1000000000000"),
}


def refused(call, match, model, *args, error=pf.errors.FlatnessError, **options):
    """The error, which is one line or so; and the model is as it was."""
    before = snapshot(model) if isinstance(model, nn.Module) else None
    with pytest.raises(error, match=match) as caught:
        call(model, *args, **options)
    assert len(str(caught.value)) < 1000
    if before is not None and not any(p.is_meta for p in model.parameters()):
        assert_unchanged(model, before)


@pytest.mark.parametrize("name", ON_MODELS)
def test_data(name):
    for kind, (make, match) in DATA.items():
        if not (name == "verify" and "later" in kind):  # it reads the first batch alone
            refused(ON_MODELS[name], match, doors.net(), LOSS, make())


@pytest.mark.parametrize("name", ON_MODELS)
def test_models(name):
    for make, match in MODELS.values():
        refused(ON_MODELS[name], match, make(), LOSS, (X, Y))


@pytest.mark.parametrize("name", [name for name in ON_MODELS if name not in WITHOUT_LOSS])
def test_losses(name):
    only_called = {
        "generalization_gap",
        "adaptive_sharpness_mc",
        "matrix_robustness",
        "critical_sharpness",
        "linear_interpolation",
    }
    once = {"worst_case_sharpness", "keskar_sharpness", "largest_robustness"}  # gradients, and no second derivatives
    for case, (loss, use, match) in LOSSES.items():
        if use is not Use.NAMED and name in WITHOUT_USE_OF_LOSS:
            continue
        if (use is Use.DIFFERENTIATED and name in only_called) or (case == "no second derivative" and name in once):
            continue
        refused(ON_MODELS[name], match, doors.net(), loss, (X, Y))


@pytest.mark.parametrize("name", ON_MODELS)
def test_options(name):
    call = ON_MODELS[name]
    for option, value, match in OPTIONS:
        if doors.takes(call, option):
            refused(call, match, doors.net(), LOSS, (X, Y), **{option: value})


@pytest.mark.parametrize("name", ON_TENSORS)
def test_tensors(name):
    call = ON_TENSORS[name]
    for changed, match in TENSORS.values():
        if all(doors.takes(call, option) for option in changed):
            given = dict(zip(("features", "weight", "bias", "targets"), doors.head(), strict=True))
            with pytest.raises(pf.errors.FlatnessError, match=match):
                call(**{**given, **changed})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: pf.measure(doors.net(), LOSS, (X, Y), "fc*"), r"takes 3 .*, got 4; .* by name, as in layers='fc\*'"),
        (lambda: pf.representation(doors.net(), LOSS, (X, Y), "0"), "by name, as in layers='0'"),
        (lambda: pf.head_flatness(*doors.head(), "mse_loss"), "takes 4 .*, got 5; .* as in loss='mse_loss'"),
        (lambda: pf.relative_flatness(doors.net(), LOSS, (X, Y), "0", "ggn"), "as in curvature='ggn'"),
        (lambda: pf.measure(doors.net(), LOSS, (X, Y), layer="0"), "no argument 'layer'; did you mean layers"),
        (lambda: pf.relative_flatness(doors.net(), LOSS, (X, Y), normalise="std"), "did you mean normalize"),
        (lambda: pf.relative_flatness(doors.net(), LOSS), "missing 1 required positional argument: 'data'"),
    ],
)
def test_calls_that_do_not_fit_are_type_errors_as_in_python(call, match):
    with pytest.raises(TypeError, match=match):
        call()


def test_every_public_call_is_here():
    """Those that take a model, or features and a weight; of `score` it is what makes one, of a row for each."""
    assert {name for name, call in CALLS.items() if doors.takes(call, "model")} == {
        *(*ON_MODELS, "causal_lm", "layers", "score"),  # of `layers` the model does not run
        *("interpolation_error", "invariances"),  # of targets as outputs are; measures of two models
        "track",  # its records are what measure returns, of models in any mode
    }
    assert {name for name, call in CALLS.items() if doors.takes(call, "weight")} == {*ON_TENSORS}


def test_good_inputs_of_the_door():
    """What the cases are made from passes, so that each of them fails for its own reason."""
    for call in ON_MODELS.values():
        call(doors.net(), LOSS, (X, Y))
    for call in ON_TENSORS.values():
        call(*doors.head())


@pytest.mark.parametrize("number", [np.int64(3), np.array(3), torch.tensor(3), np.uint8(3)])
def test_whole_numbers_of_numpy_and_torch(number):
    expected = pf.relative_flatness(doors.net(), LOSS, (X, Y), "0", probes=3, seed=3)
    found = pf.relative_flatness(doors.net(), LOSS, (X, Y), "0", probes=number, seed=number)
    assert found == expected


@pytest.mark.parametrize("true", [np.bool_(True), torch.tensor(True)])
def test_switches_of_numpy_and_torch(true):
    assert len(pf.relative_flatness(doors.net(), LOSS, (X, Y), per_sample=true).per_sample) == len(X)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5)])
def test_numbers_of_numpy_and_torch(number):
    found = pf.measures.adaptive_sharpness_mc(doors.net(), LOSS, (X, Y), rho=number, probes=2)
    assert found == pf.measures.adaptive_sharpness_mc(doors.net(), LOSS, (X, Y), rho=0.5, probes=2)


def test_memory_that_one_sample_exceeds_is_a_note():
    """The value is the same; a budget that holds, or that nobody gave, says nothing."""
    given, held, default = (
        pf.relative_flatness(doors.net(), LOSS, (X, Y), "0", memory=memory) for memory in (1, 2**26, None)
    )
    (note,) = given.notes
    assert re.fullmatch(r"one sample takes about [\d,]+ bytes at a time, more than memory=1", note)
    assert held.notes == default.notes == ()
    assert given.value == pytest.approx(default.value, rel=1e-6)


def test_long_values_are_cut():
    with pytest.raises(pf.errors.InputError) as caught:
        pf.relative_flatness(doors.net(), X.repeat(100, 1), (X, Y))
    assert re.fullmatch(r"[^\n]{,400}", str(caught.value))
