"""Define the public calls: from tensors, or a model and its data, to numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from . import head, losses, plan
from .errors import InputError
from .losses import auto
from .measures import RELATIVE_FLATNESS, are_named, head_sums, named, tensor_head
from .measures.layer_values import LayerValues
from .messages import check_module
from .model import selectors, uses, walk
from .model.checks import check_kinds
from .model.layers import unwrap
from .model.selectors import Selector
from .numerics.process_groups import joined
from .options import CALL, EVERY, MeasureHow, Options
from .report import Estimate, Report, coverage
from .session import public, session


@public("normalize", "per_sample", "rtol", "nan_policy", "reduction", "backend", "process_group")
def head_flatness(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    loss: Any = "cross_entropy",
    **how: Unpack[MeasureHow],
) -> Estimate:
    """Return the relative flatness of a linear head from its input features: exact, no derivative is taken.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')   (Petzka et al. 2021, Definition 3); for cross-entropy
    κ = mean_i |φ_i|² var_{p_i}(w), the variance of the rows of w under the softmax p_i of row i.

    Args:
        features: φ, (n, m) or (n, …, m), of any floating-point dtype; dimension 0 counts samples, those between are
            positions. Half precision is computed in float32.
        weight: w, (d, m), of the features' dtype and device (half precision may stand beside float32). A ``DTensor``
            whose rows are spread over ranks, for cross-entropy: all of these have the same features (docs/ranks.md).
        bias: (d,) or None.
        targets: what ``loss`` takes, with classes last: class indices (n, …), or values (n, …, d). None where the
            curvature does not depend on them (cross-entropy without class weights, squared error, binary
            cross-entropy without ``pos_weight``).
        loss: ``"cross_entropy"``, ``"mse_loss"``, ``"binary_cross_entropy_with_logits"``, the ``F`` function, an ``nn``
            loss module with its options, or a callable (outputs, targets) -> scalar.
        rtol: how far the value may be off, relative to it, for the sake of time. At a cross-entropy head of many
            classes, classes are then left out of the second of its two products where all of them together matter no
            more than that, which is guaranteed: ``estimate.max_error`` says what the value can be off by. 0: exact. On
            CUDA the exact value is faster, so it is returned whatever ``rtol`` is.

    Returns:
        The value in units of the loss, exact up to rounding, or to within its ``max_error``.

    Raises:
        InputError: shapes, dtypes, devices, targets or options that do not fit; the message says what was received.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.
        BackendError: a backend that does not exist or cannot run here.

    Example:
        >>> import torch, pyflatness as pf
        >>> w = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> phi = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        >>> pf.head_flatness(phi, w)
        Estimate(1.47459: exact, method head, 2 samples, ... backend)
    """
    options = Options.of(how)
    resolved = losses.resolve(loss, how.get("reduction"))
    with joined(how.get("process_group")) as group, torch.inference_mode(False), torch.no_grad():
        source = tensor_head.from_tensors(features, weight, bias, targets, resolved, group)
        return head_sums.Total(source, resolved, options).estimate()


@public(*EVERY)
def relative_flatness(
    model: nn.Module, loss: Any = "auto", data: Any = ..., layer: Selector | None = None, **how: Unpack[MeasureHow]
) -> Estimate:
    """Return the relative flatness κ of one layer of a model, with the loss over all of ``data`` as one batch.

    κ(w) = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')   (Petzka et al. 2021, Definition 3), for w the (d, m) weight matrix
    of ``layer``; a convolution's rows are its filters, and κ the sum over its groups. At the model's head (a Linear or
    1×1 convolution whose output is the model's output, established on every batch) it costs a forward pass; elsewhere a
    forward pass and one backward pass per column of the loss Hessian's square-root factor: C - 1 for cross-entropy with
    C classes, and these for each of a sample's positions that has a loss term.

    Args:
        model: called as ``model(inputs)``, in eval mode (or with ``eval=True``); left as it was found, also after an
            error or Ctrl-C. Calls of several threads take turns.
        loss: the loss the model was trained with: an ``nn`` module, ``F`` function, name or callable
            (outputs, targets) -> scalar. Options (class weights, smoothing, ``ignore_index``, …) and reduction count.
            ``"auto"``: that of a model of Hugging Face's transformers, as it computes it itself: cross-entropy over all
            tokens of the data that are not ignored, or over samples; squared error or binary cross-entropy by
            ``config.problem_type``.
        data: a tuple of tensors (inputs, targets), or an iterable of batches such as a DataLoader; a batch is a pair,
            whatever follows in it, or a mapping with ``labels`` of which the rest are the model's keyword arguments.
            How data is cut into batches does not change the value. Moved to the model's device. Models of transformers
            have their labels shifted, or given to their decoder, as they do it themselves.
        layer: qualified name, glob, ``re:…``, ``type:…`` or module; None takes the last Linear that ran.

    Returns:
        The value in units of the loss, its method and backend, and how many samples it is over.

    Raises:
        InputError: a layer, batch, target, loss, mode or option that does not fit; the message names it.
        NonFiniteError: NaN or infinity, under ``nan_policy="raise"``.
        BackendError: a backend that does not exist or cannot run here.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> x, y = torch.randn(100, 4), torch.randint(3, (100,))
        >>> pf.relative_flatness(model, torch.nn.CrossEntropyLoss(), (x, y))
        Estimate(0.399134: exact, method head, layer '2', 100 samples, ... backend)
        >>> pf.relative_flatness(model, torch.nn.CrossEntropyLoss(), (x, y), "0")
        Estimate(...: exact, method ggn, layer '0', 100 samples, ... backend)
    """
    options = Options.of(how)
    reads = plan.plan([RELATIVE_FLATNESS], options).reads
    with session(*(model, loss, data, options, how), reads=reads, ordered=options.by_sample, sharded=True) as task:
        measurement, name = plan.of_layer(RELATIVE_FLATNESS, task, layer)
        return measurement.estimates()[name, RELATIVE_FLATNESS.name]


@public(*CALL, "curvature", "conv", "normalize", "backend", "nan_policy", "memory", "max_passes")
def block_traces(
    model: nn.Module, loss: Any = "auto", data: Any = ..., layer: Selector | None = None, **how: Unpack[MeasureHow]
) -> Tensor:
    """Return the matrix T of block Hessian traces of one layer, of which relative flatness is ⟨w wᵀ, T⟩.

    T[s, s'] = Tr(∂²E/∂w_s∂w_s'), (d, d)   (Petzka et al. 2021, Definition 3). Between rows of different groups of a
    convolution, which see different channels, it is zero.

    Args:
        layer: a name, glob, ``re:…``, ``type:…`` or module; None takes the last Linear that ran.
        conv: with ``"affine"`` d is the number of all outputs of the convolution.
        normalize: ``"std"``: of the layer with rescaled features and columns.

    Returns:
        (d, d) float64 on the model's device.

    Raises:
        FlatnessError: as :func:`relative_flatness`; also for a d whose matrix would take more than 1 GiB.

    Example:
        >>> import torch, pyflatness as pf
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> data = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([0, 1])
        >>> pf.block_traces(model, torch.nn.CrossEntropyLoss(), data).numpy().round(6)
        array([[ 0.294918, -0.294918],
               [-0.294918,  0.294918]])
    """
    options = Options.of(how)
    with session(*(model, loss, data, options, how), reads=options.reads, ordered=options.by_sample) as task:
        name, _ = head.find(task, layer)
        traces = LayerValues(task.only(name)).block_traces()
        for doubt in task.forward.doubts:
            raise InputError(f"layer {name!r}: no block traces, since {doubt}")
        return traces


@public(*EVERY)
def measure(
    model: nn.Module,
    loss: Any = "auto",
    data: Any = ...,
    *,
    layers: Selector | Sequence[Selector] | None = None,
    measures: str | Sequence[str] | None = None,
    **how: Unpack[MeasureHow],
) -> Report:
    """Return measures of many layers of a model, computed in one sweep over the data.

    The cost is a forward pass and one backward pass per column of the loss Hessian's square-root factor (C - 1 for
    cross-entropy), whatever the number of layers and measures; the sum over layers is the network's value. Relative
    flatness of the head takes no backward pass, and is exact also where others are sampled. Behind
    layers that are not piecewise linear (smooth activations) it is Hessian products, and there the measures count:
    relative flatness alone takes min(d, m) for a layer of d outputs and m inputs (times its positions), with any others
    d. One sweep more for measures that are normalised in another way; measures that are not of the sweep have costs of
    their own (``pyflatness measures``). Where an exact value takes more than a hundred backward passes, a line on
    standard error says before how long. A language model with the loss ``"auto"`` is then measured by one probe of the
    GGN, unless an option says otherwise.

    Args:
        layers: a selector or several, each a name, glob, ``re:…``, ``type:…`` or module; None: every layer that can be
            measured and ran.
        measures: a name or several, as ``pyflatness measures`` lists them. None: relative flatness and the trace.
            ``"sweep"``: all that one sweep gives. ``"all"``: every measure. A measure that cannot be had is left
            out, and ``report.skipped`` says why; it is an error if none that was named can be had.
        nan_policy: ``"raise"``, ``"propagate"`` or ``"omit"``; a sample is left out of all layers.
        memory: bytes to hold at a time beside model, data and result (512 MiB, on a GPU a quarter of its memory),
            shared out among a micro-batch's graph, to which batches are cut, and what is made of it. It does not go
            below one sample's graph; w wᵀ and its root for relative flatness of a layer with fewer outputs d than
            inputs (about 24 d² bytes); about six float64 matrices of a weight's size for normalised sharpness; up to
            nine copies of the parameters for measures over all of them. On top come, by its size too, the Hessians of
            one layer's rows (``relative_flatness_max``), and 1 GiB of vectors for Lanczos (that and ``lambda_max``), or
            ``memory`` where that is more.

    Returns:
        ``report[layer, measure]`` and ``report[measure]`` are estimates, ``str(report)`` is a table;
        ``report.uncovered`` names the weights that no measured layer has (attention's packed projections, …).
        With ``layers=None`` a network's value that leaves out some is not exact.

    Raises:
        FlatnessError: as :func:`relative_flatness`.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> report = pf.measure(model, torch.nn.CrossEntropyLoss(), data)
        >>> report["0", "trace"].exact
        True
    """
    options = Options.of(how).of_layers
    wanted, by_name = named(measures), are_named(measures)
    steps = plan.plan(wanted, options, networks=measures is not None and measures != "sweep")
    may_sample = auto.is_auto(loss) and options.by_default
    with session(
        model, loss, data, options, how, reads=steps.reads, ordered=options.by_sample, placed=may_sample, sharded=True
    ) as task:
        task = (plan.by_one_probe(task) if may_sample else task).of(layers)
        measurement = plan.Measurement(steps, task, named=by_name)
        found = measurement.estimates()
        covered = [module for name, module in task.selection.modules.items() if name in measurement.measured]
        left_out = uses.left_out(task.model, covered)
        why = uses.reasons(task.model, left_out)
    measured = {name for name, _ in found}
    names = tuple(name for name in task.selection.modules if name in measured)
    found = coverage.marked(found, [row.name for row in wanted if row.of_layers], left_out) if layers is None else found
    with_values = tuple(row.name for row in wanted if any(row.name == m for _, m in found))
    network_of = {row.name: row.network_of for row in wanted if ("", row.name) in found}
    return Report(names, with_values, found, measurement.skipped, left_out, why, network_of)


@public()
def layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that can be measured, by the names that ``layers=`` takes, in the model's order.

    Parameters that no module calls, and that may turn out to be weights, have modules that stand for them.

    Args:
        model: any module; it does not run, so that some of its layers may not run either.

    Example:
        >>> import torch, pyflatness as pf
        >>> [*pf.layers(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)))]
        ['0', '2']
    """
    model = unwrap(check_module("model", model))
    check_kinds(walk.named_modules(model), spread=True)
    return selectors.layers(model)
