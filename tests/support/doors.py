"""Every public call that takes a model, or a head as tensors, with a small network that all of them can measure."""

import inspect
import warnings

import torch
from torch import nn

import pyflatness as pf

N, M, C = 12, 4, 3
X = torch.randn(N, M, generator=torch.Generator().manual_seed(0))
Y = torch.arange(N) % C
LOSS = nn.CrossEntropyLoss()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(M, 6), nn.ReLU(), nn.Linear(6, C)).eval()


class Returning(nn.Sequential):
    """The network with something else as its outputs."""

    def __init__(self, last):
        super().__init__(*net())
        self.last = last

    def forward(self, x):
        return self.last(super().forward(x))


DOUBLED = {name: 2 * value for name, value in net().state_dict().items()}


def head():
    """Features, weight, bias and targets."""
    generator = torch.Generator().manual_seed(1)
    return X, torch.randn(C, M, generator=generator), torch.randn(C, generator=generator), Y


def of_layout(kind):
    """Tensors that are not dense; torch warns of some that they are new or old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": X.to_sparse,
            "sparse rows": X.to_sparse_csr,
            "nested": lambda: torch.nested.nested_tensor([X[:5], X[5:]]),
            "jagged": lambda: torch.nested.nested_tensor([X[:5], X[5:]], layout=torch.jagged),
            "quantised": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
            "nested labels": lambda: torch.nested.nested_tensor([Y[:5], Y[5:]]),
        }[kind]()


def _few(call, **fewer):
    """The call with fewer draws, unless it is asked for others; its signature is the call's."""

    def called(*args, **options):
        return call(*args, **{**fewer, **options})

    called.__signature__ = inspect.signature(call)
    return called


def _gap(model, loss, data, **options):
    return pf.generalization_gap(model, loss, data, data, **options)


def _cost_of_change(model, loss, data, **options):
    return pf.cost_of_change(
        model, loss, data, {"0": torch.full((6, 4), 0.1, dtype=torch.float32, device="cpu")}, **options
    )


def _critical_sharpness(model, loss, data, **options):
    step = torch.linspace(-1, 1, 24, dtype=torch.float32, device="cpu").view(6, 4)
    try:  # the loss falls along it or along its opposite
        return pf.measures.critical_sharpness(model, loss, data, {"0.weight": step}, **options)
    except pf.errors.InputError as error:
        if "rises along it" not in str(error):
            raise
        return pf.measures.critical_sharpness(model, loss, data, {"0.weight": -step}, **options)


def _linear_interpolation(model, loss, data, **options):
    return pf.linear_interpolation(model, loss, data, DOUBLED, **{"points": 3, **options})


def _reparameterize(model, loss, data, **options):
    return pf.reparameterize(model, {"0": 2.0}, data, **options)


_gap.__signature__ = inspect.signature(pf.generalization_gap)
_cost_of_change.__signature__ = inspect.signature(pf.cost_of_change)
_critical_sharpness.__signature__ = inspect.signature(pf.measures.critical_sharpness)
_linear_interpolation.__signature__ = inspect.signature(pf.linear_interpolation)
_reparameterize.__signature__ = inspect.signature(pf.reparameterize)

# name -> (model, loss, data, **options)
ON_MODELS = {
    "relative_flatness": pf.relative_flatness,
    "block_traces": pf.block_traces,
    "measure": pf.measure,
    "verify": pf.verify,
    "representation": pf.representation,
    "bounds": pf.theory.bounds,
    "mls_adversarial": _few(pf.measures.mls_adversarial, steps=2),
    "pac_bayes": _few(pf.measures.pac_bayes, probes=2, steps=2),
    "adaptive_sharpness_mc": _few(pf.measures.adaptive_sharpness_mc, probes=2),
    "feature_robustness": _few(pf.theory.feature_robustness, probes=2),
    "matrix_robustness": _few(pf.theory.matrix_robustness, matrix=torch.eye(6), rho=[0.1]),
    "largest_robustness": _few(pf.theory.largest_robustness, rho=0.1, starts=1, steps=2),
    "generalization_gap": _gap,
    "generalization_bound": _few(pf.theory.generalization_bound, folds=2, probes=2),
    "cost_of_change": _cost_of_change,
    "allocate": _few(pf.allocate, formats=["int3", "int8"], bits=5),
    "importance": pf.importance,
    "worst_case_sharpness": _few(pf.worst_case_sharpness, steps=2),
    "keskar_sharpness": _few(pf.measures.keskar_sharpness, steps=2),
    "critical_sharpness": _critical_sharpness,
    "spectrum": _few(pf.spectrum, k=1),
    "landscape": _few(pf.landscape, points=3),
    "linear_interpolation": _linear_interpolation,
    "reparameterize": _reparameterize,
}
# name -> (features, weight, bias, targets, **options)
ON_TENSORS = {
    "head_flatness": pf.head_flatness,
    "flatness_penalty": pf.flatness_penalty,
    "representativeness": _few(pf.theory.representativeness, folds=2, probes=2),
    "authors_representativeness": _few(pf.theory.authors_representativeness, folds=2),
    "label_constancy": _few(pf.theory.label_constancy, labels=lambda x: Y.to(x.device), rho=[0.1], probes=2),
}
WITHOUT_LOSS = {"reparameterize"}
WITHOUT_USE_OF_LOSS = {"representation", "bounds", "mls_adversarial", "pac_bayes", *WITHOUT_LOSS}


def takes(call, option):
    """Whether a call has an option."""
    return option in inspect.signature(call).parameters
