"""What a call may leave behind in a user's model, process and thread; and every public call, on small models."""

import random
import signal
import warnings

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()
X, Y = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)), torch.arange(6) % 3
_HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]


class Many(nn.Module):
    """A classifier with what is not only weights: buffers that it writes to, hooks, parametrisations, checkpointing."""

    def __init__(self):
        super().__init__()
        self.body = parametrizations.weight_norm(nn.Linear(4, 5))
        self.norm = nn.BatchNorm1d(5)
        self.pruned = prune.l1_unstructured(nn.Linear(5, 5), "weight", 3)
        self.tail, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.tail.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.kept = [self.tail]
        self.tail.register_forward_hook(lambda *_: None)

    def forward(self, x):
        self.calls += 1
        self.last = x.sum()[None]
        h = torch.relu(self.norm(self.body(x)))
        h = checkpoint(lambda h: torch.relu(self.pruned(h)), h, use_reentrant=False)
        return self.head(torch.tanh(self.kept[0](h)))


class Plain(nn.Module):
    """Linear layers that ``reparameterize`` follows."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


class Attention(nn.Module):
    """Attention, for the switches of its kernels."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x.unsqueeze(1) * torch.ones(2, 1)).mean(1))


def model(kind):
    """A model of one of these classes, with gradients, in eval mode."""
    torch.manual_seed(5)
    net = kind().double()
    LOSS(net(X.double()), Y).backward()
    return net.eval()


def _data():
    return [(X[:4].double(), Y[:4]), (X[4:].double(), Y[4:])]


def _doubled(net):
    return {name: 2 * value for name, value in net.state_dict().items()}


def _phi():
    return torch.relu(X).double(), torch.linspace(-1, 1, 12).double().view(3, 4), None, Y


def _penalty(net):
    with pf.FlatnessPenalty(net, "body", LOSS, generator=torch.Generator()) as penalty:
        return penalty(net(X.double()), Y).detach().item()


CALLS = {
    "head": (Many, lambda m: pf.relative_flatness(m, LOSS, _data())),
    "normalized": (Plain, lambda m: pf.relative_flatness(m, LOSS, _data(), "body", normalize="std")),
    "parametrised": (Many, lambda m: pf.relative_flatness(m, LOSS, _data(), "body")),
    "probes": (Many, lambda m: pf.relative_flatness(m, LOSS, _data(), "tail", probes=2)),
    "attention": (Attention, lambda m: pf.relative_flatness(m, LOSS, _data(), "encoder.linear1")),
    "block_traces": (Plain, lambda m: pf.block_traces(m, LOSS, _data(), "body")),
    "measure": (Many, lambda m: pf.measure(m, LOSS, _data(), measures="sweep")),
    "measure all": (Plain, lambda m: pf.measure(m, LOSS, _data(), measures="all")),
    "sharpness": (Many, lambda m: pf.measure(m, LOSS, _data(), layers="head", measures=["sharpness", "lambda_max"])),
    "fisher_rao": (Many, lambda m: pf.measure(m, LOSS, _data(), layers="head", measures="fisher_rao")),
    "verify": (Plain, lambda m: pf.verify(m, LOSS, _data(), "body", samples=2)),
    "adaptive_sharpness_mc": (Many, lambda m: pf.measures.adaptive_sharpness_mc(m, LOSS, _data(), probes=2)),
    "pac_bayes": (Many, lambda m: pf.measures.pac_bayes(m, LOSS, _data(), probes=2, steps=2)),
    "mls_adversarial": (Plain, lambda m: pf.measures.mls_adversarial(m, LOSS, _data())),
    "representation": (Many, lambda m: pf.representation(m, LOSS, _data())),
    "bounds": (Plain, lambda m: pf.theory.bounds(m, LOSS, _data())),
    "feature_robustness": (
        Many,
        lambda m: pf.theory.feature_robustness(m, LOSS, _data(), "tail", probes=2, rho=[0.1]),
    ),
    "matrix_robustness": (
        Many,
        lambda m: pf.theory.matrix_robustness(m, LOSS, _data(), "tail", matrix=torch.eye(5), rho=[0.1]),
    ),
    "largest_robustness": (
        Many,
        lambda m: pf.theory.largest_robustness(m, LOSS, _data(), "tail", rho=0.1, starts=1, steps=2),
    ),
    "generalization_bound": (Plain, lambda m: pf.theory.generalization_bound(m, LOSS, _data(), probes=2)),
    "generalization_gap": (Many, lambda m: pf.generalization_gap(m, LOSS, _data(), _data())),
    "cost_of_change": (
        Many,
        lambda m: pf.cost_of_change(m, LOSS, _data(), pf.changes.rounded(m, 4), by_trace=True, probes=2),
    ),
    "importance": (Many, lambda m: dict(pf.importance(m, LOSS, _data(), kind="fisher", layers="*", probes=2))),
    "worst_case_sharpness": (Plain, lambda m: pf.worst_case_sharpness(m, LOSS, _data(), steps=2, bound=True)),
    "keskar_sharpness": (Plain, lambda m: pf.measures.keskar_sharpness(m, LOSS, _data(), steps=2)),
    "spectrum": (Plain, lambda m: pf.spectrum(m, LOSS, _data(), k=1, density=True, probes=1, steps=3)),
    "landscape": (Plain, lambda m: pf.landscape(m, LOSS, _data(), points=3)),
    "landscape, through": (Many, lambda m: pf.landscape(m, LOSS, _data(), through=_doubled(m), points=3)),
    "linear_interpolation": (
        Many,
        lambda m: pf.linear_interpolation(m, LOSS, _data(), _doubled(m), test=_data(), points=3),
    ),
    "track": (Many, lambda m: pf.track(m, LOSS, _data(), layers="*").record().reports),
    "penalty": (Plain, _penalty),
    "reparameterize": (Plain, lambda m: pf.reparameterize(m, {"body": 2.0}, _data()).state_dict()),
    "head_flatness": (Plain, lambda m: pf.head_flatness(*_phi())),
    "flatness_penalty": (Plain, lambda m: pf.flatness_penalty(*_phi())),
    "representativeness": (Plain, lambda m: pf.theory.representativeness(*_phi(), probes=2)),
    "authors_representativeness": (Plain, lambda m: pf.theory.authors_representativeness(*_phi())),
}


def _of_module(module):
    attributes = vars(module)
    return {
        "class": type(module),
        "names": sorted(attributes),
        "training": module.training,
        "tensors": {key: (id(value), value._version) for key, value in attributes.items() if torch.is_tensor(value)},
        "forward": attributes.get("forward"),
        "hooks": {
            name: {key: id(hook) for key, hook in attributes[name].items()} for name in _HOOKS if attributes[name]
        },
        "parameters": {
            key: p if p is None else (id(p), p._version, p.requires_grad, id(p.grad), p.data_ptr(), p.tolist())
            for key, p in module._parameters.items()
        },
        "gradients": [p.grad.tolist() for p in module._parameters.values() if p is not None and p.grad is not None],
        "buffers": {
            key: b if b is None else (id(b), b.requires_grad, b.tolist()) for key, b in module._buffers.items()
        },
    }


_SAVED_TENSORS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", bool)  # since torch 2.7


def of_thread():
    """Return the switches that belong to a thread."""
    return {
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "stacks": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "functions": torch._C._get_torch_function_state(),
        "saved tensors": _SAVED_TENSORS(True),
        "vmap": torch._C._functorch.maybe_current_level(),
    }


def of_process():
    """Return the switches that belong to the process."""
    cuda = torch.backends.cuda
    return {
        "random": (torch.get_rng_state().tolist(), random.getstate()),
        "parametrize": (parametrize._cache_enabled, len(parametrize._cache)),
        "attention": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "stance": torch._dynamo.eval_frame._stance,
        "dtype": torch.get_default_dtype(),
        "forward mode": forward_ad._current_level,
        "handler": signal.getsignal(signal.SIGINT),
        "warnings": list(warnings.filters),
        "threads": torch.get_num_threads(),
    }


def of_model(net):
    """Everything in a model: identities, values, versions, flags, hooks, names of attributes."""
    return {name: _of_module(module) for name, module in net.named_modules()}


def changed(before, after, path=""):
    """The paths at which two of these differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = before.keys() | after.keys()
        return [place for key in keys for place in changed(before.get(key), after.get(key), f"{path}/{key}")]
    return [] if before == after else [f"{path}: {str(before)[:80]} -> {str(after)[:80]}"]


def everything(net):
    """All of these."""
    return {"model": of_model(net), "thread": of_thread(), "process": of_process()}
