"""Plan a measurement on machines that are not there: bytes, backward passes, messages and operations, without weights.

The model is made of fake tensors (:mod:`torch._subclasses.fake_tensor`), which have shapes and no memory. One
micro-batch of them goes forward with the layers recorded and one cotangent goes back, as in :mod:`..sweep.layer_sweep`;
what autograd saves and what matrix products take is counted meanwhile. Messages are those of a measurement that is
really made, of layers with the same names and one weight each, whose ranks all say the same.
"""

import functools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from .. import api, losses
from ..contractions import LayerContraction, backends
from ..contractions.factor import multiply_adds
from ..errors import InputError
from ..measures import RELATIVE_FLATNESS
from ..messages import reason
from ..model import calling, hugging_face, layers, selectors
from ..numerics.ranks import Ranks
from ..passes.batch_layout import check_outputs
from ..passes.dry_run import places_of, saved_storages
from ..passes.recorder import Recorder, frozen
from . import pretrained

_QUANTITIES = (str(RELATIVE_FLATNESS.quantity),)
_BUFFERS = 2**27  # bytes, of a contraction
_ASKED = 128  # bytes, of the two messages before a part of a tensor, about
_LOOKS = 3  # passes of the dry run on the first batch: one forward, two backward


@dataclass(frozen=True)
class Batch:
    """Say what goes through the model."""

    samples: int = 1  # of a micro-batch
    length: int | None = None  # tokens of a sample; None: its inputs are ``shape``
    shape: tuple[int, ...] = ()  # of a sample's input of floating-point numbers

    def of(self, model: nn.Module) -> Any:
        """Return the micro-batch as the model's data have it, of fake tensors inside of :func:`imagined`."""
        if self.length is None:
            inputs = torch.zeros(self.samples, *self.shape, dtype=next(model.parameters()).dtype, device="cpu")
            return inputs, torch.zeros(self.samples, dtype=torch.int64, device="cpu")
        tokens = torch.zeros(self.samples, self.length, dtype=torch.int64, device="cpu")
        if hugging_face.inner(model) is not None:
            return {"input_ids": tokens, "labels": tokens}
        return tokens, tokens


@dataclass(frozen=True)
class Work:
    """Hold what one micro-batch takes, on whatever machine."""

    parameters: int  # of the model, how many
    weights: int  # bytes of parameters and buffers
    layers: tuple[str, ...]  # that are measured, and ran
    layer_weights: int  # their weights, how many
    layer_bytes: tuple[int, ...]  # of each layer's weight and, behind them, of each bias
    blocks: tuple[int, ...]  # bytes of each block that FSDP2 would gather by itself, see :func:`_blocks`
    graph: int  # bytes that autograd saves and of layers' inputs, without weights
    inputs: int  # bytes of layers' inputs
    gradients: int  # bytes of the gradients in layers' outputs of one cotangent
    grams: int  # bytes of the Gram matrices of layers' inputs, which are kept for all cotangents
    outputs: int  # bytes of the outputs
    passes: int  # backward passes of exact values
    forward: int  # operations of a forward pass, two for a multiply-add
    backward: int  # of a backward pass to the layers' outputs
    contraction: int  # of contracting all layers with one cotangent
    factors: int  # of the factors of all layers' w wᵀ, which are made once, or under FSDP2 for each cotangent


@dataclass(frozen=True)
class Planned:
    """Hold what a rank takes for one read of the data by relative flatness of the layers, in bytes and numbers."""

    ranks: int  # how many
    sharded: bool  # whether weights are spread by FSDP2; else each rank has all
    weights: int  # bytes of the weights that a rank keeps
    gathered: int  # that come and go: the largest block, what belongs to no block, and a layer's weight
    graph: int  # bytes of a micro-batch's graph with the layers' inputs
    gradients: int  # bytes of the gradients in layers' outputs
    grams: int  # bytes of the Gram matrices of layers' inputs; none where a layer's weight comes and goes
    micro_batches: int  # of a rank
    passes: int  # backward passes of a micro-batch
    reductions: int  # at the ends of reads
    messages: int  # exchanges that a rank takes part in
    received: int  # bytes that a rank receives in them
    flops: int  # operations of a rank
    seconds: float | None  # that these take at the stated rate; None: none is stated

    @property
    def memory(self) -> int:
        """Return the bytes of a rank in all."""
        return self.weights + self.gathered + self.graph + self.gradients + self.grams


@contextmanager
def imagined() -> Iterator[None]:
    """Let tensors have no memory inside."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    try:
        with FakeTensorMode():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"plan: the model asks for values of tensors ({reason(error)}), and there are none without weights; write "
            "its callable so that it makes the model and its forward pass without them"
        ) from error


def without_weights(spec: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of what makes a SPEC's model, so that it makes no weights if it is known by name."""
    if not pretrained.is_named(spec):
        return dict(arguments)
    weights = {"weights": False} if spec.startswith("hf:") else {}
    return {**arguments, **weights, "device": "meta"}


def work(
    build: Callable[[], nn.Module], batch: Batch, chosen: Sequence[str] | None = None, dtype: torch.dtype | None = None
) -> Work:
    """Return what a micro-batch takes of a model, for chosen layers or all that are measured by default."""
    with torch.device("meta"):
        model = layers.unwrap(build()).to(dtype=dtype).eval()
    with imagined():
        _imagine(model)
        selected = selectors.select(model, chosen).modules
        recorder = Recorder(selected)
        with recorder.attached(), frozen(model):
            return _of(model, selected, recorder, batch)


def _imagine(model: nn.Module) -> None:
    """Put fake tensors of the CPU in the place of a model's tensors on the meta device.

    Models ask for values of masks, say, on the meta device, and do without them where torch traces them.
    """
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = made.setdefault(id(parameter), nn.Parameter(_like(parameter), parameter.requires_grad))
                vars(fake).update(vars(parameter))
                module._parameters[name] = fake  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), _like(buffer))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _of(model: nn.Module, selected: Mapping[str, nn.Module], recorder: Recorder, batch: Batch) -> Work:
    """Return what a micro-batch takes of a model of fake tensors, with its layers hooked."""
    with _counted() as forward, recorder.recording(batch.samples), saved_storages() as storages:
        outputs, _ = calling.run(model, batch.of(model), None)
    check_outputs(outputs, batch.samples)
    if outputs.ndim < 2:
        raise InputError(f"plan: outputs (n, classes, …) are wanted, of cross-entropy; the model's are {outputs.shape}")
    calls = {name: made for name, made in recorder.calls.items() if made}
    inputs = {call.inputs.untyped_storage()._cdata: _bytes(call.inputs) for made in calls.values() for call in made}
    storages.update(inputs)
    parameters = [*model.parameters()]
    for tensor in (*parameters, *model.buffers()):
        storages.pop(tensor.untyped_storage()._cdata, None)  # of which views are saved
    with _counted() as backward:
        recorder.gradients(outputs, torch.zeros_like(outputs), calls)
    weights = {name: layers.as_matrix(selected[name], _weight(selected[name])) for name in calls}
    contractions = {
        name: _contraction(selected[name], weight)
        for name, weight in weights.items()
        if not layers.kind_of(selected[name]).tokens  # whose rows are looked up
    }
    places = {name: places_of(selected[name], calls[name], batch.samples) for name in contractions}
    terms = outputs.numel() // (len(outputs) * outputs.shape[1])
    biases = [bias for name in calls if isinstance(bias := getattr(selected[name], "bias", None), Tensor)]
    return Work(
        parameters=sum(parameter.numel() for parameter in parameters),
        weights=sum(map(_bytes, (*parameters, *model.buffers()))),
        layers=tuple(calls),
        layer_weights=sum(weight.numel() for weight in weights.values()),
        layer_bytes=tuple(map(_bytes, (*weights.values(), *biases))),
        blocks=tuple(sum(map(_bytes, block.parameters())) for block in _blocks(model)),
        graph=sum(storages.values()),
        inputs=sum(inputs.values()),
        gradients=sum(_bytes(call.output) for made in calls.values() for call in made),
        grams=batch.samples * sum(each.kept(places[name]) for name, each in contractions.items()),
        outputs=_bytes(outputs),
        passes=terms * losses.resolve("cross_entropy").columns(outputs.shape[1]),
        forward=forward.get_total_flops(),
        backward=backward.get_total_flops(),
        contraction=sum(
            2
            * batch.samples
            * layers.kind_of(selected[name]).groups
            * round(min(each.multiply_adds(places[name], 1).values()))
            for name, each in contractions.items()
        ),
        factors=2 * sum(multiply_adds(*weights[name].shape) for name in contractions),
    )


def planned(
    work: Work,
    ranks: int,
    *,
    samples: int,
    batch: int,
    probes: int | None,
    sharded: bool,
    flops_per_second: float | None = None,
) -> Planned:
    """Return what each of some ranks takes for relative flatness of the layers."""
    micro_batches = -(-samples // (ranks * batch))
    passes = work.passes if probes is None else probes
    messages, received = rehearsed(work.layers, ranks, probes)
    gathered, factors = 0, work.factors
    if sharded:
        root = work.weights - sum(work.blocks)
        gathered = root + max(work.blocks, default=0) + max(work.layer_bytes, default=0)
        looks = _LOOKS + micro_batches * (1 + passes)
        contracted = micro_batches * passes
        # The root's weights stay from a forward pass to the first backward pass, those of blocks do not.
        kept = 1 + micro_batches
        wholes = looks * work.weights - kept * root + contracted * sum(work.layer_bytes)
        count = looks * (len(work.blocks) + 1) - kept + contracted * len(work.layer_bytes)
        if ranks > 1:
            messages += 3 * count  # one that asks, one that says that all are ready, and the parts
            received += wholes * (ranks - 1) // ranks + count * (ranks - 1) * _ASKED
        factors *= passes * micro_batches
    flops = micro_batches * (work.forward + passes * (work.backward + work.contraction)) + factors
    return Planned(
        ranks=ranks,
        sharded=sharded,
        weights=-(-work.weights // ranks) if sharded else work.weights,
        gathered=gathered,
        graph=work.graph,
        gradients=work.gradients,
        grams=0 if sharded else work.grams,
        micro_batches=micro_batches,
        passes=passes,
        reductions=1,
        messages=messages,
        received=received,
        flops=flops,
        seconds=None if flops_per_second is None else flops / flops_per_second,
    )


def _counted() -> FlopCounterMode:
    """Return what counts the operations of matrix products inside, attention as torch runs it on CPUs among them."""
    aten = torch.ops.aten

    def attention(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        },
    )


def _contraction(module: nn.Module, weight: Tensor) -> LayerContraction:
    """Return the contraction of a layer as a matrix library makes it, which is how GPUs do."""
    kind = layers.kind_of(module)
    matrix = weight.reshape(kind.groups, -1, weight.shape[1])
    return LayerContraction(matrix, kind.geometry, backends.reference, _QUANTITIES, memory=_BUFFERS)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost lists of modules, which FSDP2 is mostly told to gather by themselves."""
    if isinstance(model, nn.ModuleList):
        return [*model]
    return [block for child in model.children() for block in _blocks(child)]


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()


def _bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


class _Rehearsing(Ranks):
    """Stand for the first of some ranks that all say and find the same, and count what they send each other."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.processes = size, [*range(size)]
        self.messages = self.received = 0

    def _collective(self, call: Callable[..., Any], *held: Any) -> None:
        found, sent = held
        self.messages += 1
        self.received += (self.size - 1) * sent_bytes(sent)
        for place in range(self.size):
            found[place] = sent


def sent_bytes(sent: Any) -> int:
    """Return the bytes of what a rank sends: a tensor's, or those of a pickled object."""
    return sent.numel() * sent.itemsize if isinstance(sent, Tensor) else len(pickle.dumps(sent))


@functools.cache
def rehearsed(names: tuple[str, ...], ranks: int, probes: int | None) -> tuple[int, int]:
    """Return the messages of a measurement of layers of these names, and the bytes that a rank receives."""
    if ranks == 1:
        return 0, 0
    group = _Rehearsing(ranks)
    network = nn.Module() if any(names) else _linear()  # a layer by itself
    for name in filter(None, names):
        *path, last = name.split(".")
        parent = network
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, _linear())
    found = [network.get_submodule(name) for name in names]

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return sum((layer(inputs) for layer in found), start=torch.zeros_like(inputs)).tanh(), targets

    with group.agreed("the call"):
        api.measure(
            network,
            nn.CrossEntropyLoss(),
            (torch.ones(1, 2, dtype=torch.float32, device="cpu"), torch.zeros(1, dtype=torch.int64, device="cpu")),
            measures=[RELATIVE_FLATNESS.name],
            curvature="ggn",
            probes=probes,
            forward=forward,
            process_group=group,
            progress=False,
        )
    return group.messages, group.received


def _linear() -> nn.Linear:
    """Return a layer whose weights are not drawn: the user's random numbers stay."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, 2, 2, device="cpu", dtype=torch.float32)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer
