"""What is found out on a few samples before a sweep: which layers run, where they keep the samples, what is linear."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import capture, curvature, data, layers, ownership
from .errors import FlatnessError, InputError
from .ownership import Layout
from .tape import Tape

_SHARE = 16  # one sample of so many of the first batch is looked at, at least two and at most _MOST
_MOST = 16


@dataclass
class Findings:
    """What holds for the batches to come.

    Attributes:
        samples: how many were looked at.
        layouts: of each layer that ran; provisional if only one sample was there.
        linear: whether the model is locally linear in the layer's weight, at these samples.
        sampled: layers where another sample could give another answer.
        outputs: the model's, for these samples.
        bytes: that the graph and the layers' inputs and signals take per sample, about.
        cuttable: whether the model runs on parts of a batch.
    """

    samples: int
    layouts: dict[str, Layout]
    linear: dict[str, bool]
    sampled: frozenset[str]
    outputs: Tensor
    bytes: int
    cuttable: bool


def look(
    model: nn.Module, modules: Mapping[str, nn.Module], tape: Tape, batch: Any, forward: capture.Forward | None
) -> Findings:
    """Runs some samples of a batch, sends a signal back from the first of them and one from all others.

    Raises:
        InputError: a layer is not what its class says, or does not keep its samples apart.
    """
    whole = data.size(batch)
    count = min(whole, max(2, min(_MOST, whole // _SHARE)))
    cuttable = True
    try:
        outputs, stored = _run(model, tape, data.first(batch, count), forward)
    except FlatnessError:
        raise
    except Exception:  # not a batch that can be cut; an error of the model's own comes again
        count, cuttable = whole, False
        outputs, stored = _run(model, tape, batch, forward)
    if outputs.ndim == 0 or len(outputs) % count:
        raise InputError(f"the model's output {tuple(outputs.shape)} does not hold {count} samples in dimension 0")
    first, others = _signals(outputs.detach(), count)
    reading = curvature.read(outputs, tape.calls)
    unproven = [name for name in tape.calls if name not in reading.proven]
    from_first = tape.gradients(outputs, first, create_graph=bool(unproven))
    from_others = tape.gradients(outputs, others, create_graph=bool(unproven))
    with torch.enable_grad():
        together = {
            name: [a + b for a, b in zip(from_first[name], from_others[name], strict=True)] for name in tape.calls
        }
    layouts = {}
    for name in tape.calls:
        dims = 1 if layers.is_convolution(modules[name]) else from_first[name][0].ndim - 1
        layouts[name] = ownership.find(name, from_first[name], from_others[name], count, dims)
    bent = _bent(tape, unproven, together) | curvature.feed_themselves(tape.calls)
    linear = {name: name not in bent for name in tape.calls}
    received = sum(gradient.numel() * gradient.element_size() for calls in together.values() for gradient in calls)
    bytes_of_sample = (stored + 2 * received) // count
    return Findings(count, layouts, linear, reading.sampled, outputs.detach(), bytes_of_sample, cuttable)


def bent_here(outputs: Tensor, tape: Tape, names: Sequence[str]) -> set[str]:
    """Those of some layers in whose output the model is curved at the samples of a forward pass."""
    gradients = tape.gradients(outputs, torch.randn_like(outputs.detach()), create_graph=True)
    return _bent(tape, names, gradients)


def _bent(tape: Tape, names: Sequence[str], gradients: dict[str, list[Tensor]]) -> set[str]:
    return curvature.bent_layers({name: tape.calls[name] for name in names}, gradients)


def _run(model: nn.Module, tape: Tape, batch: Any, forward: capture.Forward | None) -> tuple[Tensor, int]:
    """The outputs, and the bytes that the graph and the kept inputs hold."""
    for _ in range(2):
        with (
            capture.trial(),
            tape.recording(checking=True),
            sdpa_kernel(SDPBackend.MATH),
            _saved_storages() as storages,
        ):
            outputs, _ = capture.run(model, batch, forward)
        if not tape.overwritten():  # else once more, with copies
            break
    for calls in tape.calls.values():
        storages.update({call.inputs.untyped_storage()._cdata: _bytes(call.inputs) for call in calls})
    return outputs, sum(storages.values())


@contextlib.contextmanager
def _saved_storages() -> Iterator[dict[int, int]]:
    """Sizes of the storages that autograd saves inside, parameters apart."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storages[tensor.untyped_storage()._cdata] = _bytes(tensor)
        return tensor.detach()  # the tensor itself would hold its own graph, in a cycle that nothing frees

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _bytes(tensor: Tensor) -> int:
    """Of the tensor, not of its storage, which may be the user's whole data."""
    return tensor.numel() * tensor.element_size()


def _signals(outputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Random numbers in the first sample's outputs, and in those of all others."""
    signal = torch.randn_like(outputs)
    mine = torch.arange(len(outputs), device=outputs.device) < len(outputs) // count
    first = signal * mine.view(-1, *(1,) * (outputs.ndim - 1)).to(signal.dtype)
    return first, signal - first
