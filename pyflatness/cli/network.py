"""Run the commands on one network, ``measure``, ``spectrum``, ``allocate`` and ``layers``, with shared options."""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import torch
from click.shell_completion import CompletionItem
from rich import box
from rich.table import Column, Table
from torch import nn
from torch.nn import functional as F

from .. import api, losses
from ..curvature import allocate as allocation
from ..curvature import spectrum as eigenvalues
from ..curvature.exports import TOOLS as EXPORTS
from ..errors import InputError, printable
from ..losses import auto, divergence
from ..measures import MEASURES, named
from ..messages import near
from ..model import layers as model_layers
from ..model import selectors
from ..model.kinds import SUPPORTED
from ..model.uses import Use
from ..options import MAX_PASSES, check_dtype
from ..report import Report
from ..scoring import checkpoints, data_specs, specs
from ..scoring.worker import Bench, Maker, Setup
from .options import Count, Json, Keywords, Names, command, plain, several, takes
from .output import echo, prepare_file, show, show_json

_Writer = Callable[[Report, Path], Any]
_EXPORT = f"Plan for a tool, with its formats, and write the choice for it: {', '.join(EXPORTS)}."
_FORMATS: dict[str, _Writer] = {".json": Report.to_json, ".csv": Report.to_csv, ".html": Report.to_html}


def _measures(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of measures, of which a text may have several, separated by commas."""
    names = several(given)
    try:
        rows = [row for name in names for row in named(name)] if names else named(names)  # of none it is an error
    except InputError as error:
        raise InputError(str(error).removeprefix("measures: ")) from None
    return tuple(dict.fromkeys(row.name for row in rows))


def complete_measures(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the completions of the last name that is typed, for the shell."""
    before, comma, last = typed.rpartition(",")
    known = (*(row.name for row in MEASURES), "sweep", "all")
    return [CompletionItem(before + comma + name) for name in known if name.startswith(last)]


def complete_losses(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the losses with names of their own, for completion in the shell; there are others."""
    return [CompletionItem(name) for name in (auto.AUTO, *losses.names()) if name.startswith(typed)]


def limit_of(given: str) -> float | None:
    """Return a number of samples, or a part of them, written with a point: ``1`` is one sample, ``1.0`` is all."""
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        part = float(given)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise InputError(f"{given}: a whole number of samples is wanted, or a part of them between 0 and 1")
    return part if part < 1 else None


def _batch_size(given: str) -> int | str:
    if given == "auto":
        return given
    if not given.isdigit() or int(given) == 0:
        raise InputError(f"{given!r}: a number of samples is wanted, or 'auto'")
    return int(given)


def _fixed(given: tuple[str, ...]) -> dict[str, str]:
    """Return the formats of layers by their names or globs."""
    found: dict[str, str] = {}
    for text in several(given):
        name, _, held = (part.strip() for part in text.rpartition("="))
        if not (name and held):
            raise InputError(f"{text!r}: NAME=FORMAT is wanted, as in lm_head=int8")
        if found.setdefault(name, held) != held:
            raise InputError(f"{name!r} is {found[name]!r} and {held!r}")
    return found


def _resolved(resolve: Callable[[str], specs.Function], spec: str) -> str:
    """Return a SPEC that names a callable."""
    resolve(spec)
    return spec


SPEC = takes(functools.partial(_resolved, specs.resolve), "SPEC")
_DATA = takes(functools.partial(_resolved, data_specs.resolve), "SPEC")
Curvature = Literal["auto", "ggn", "hessian"]
_MEASURES = "See pyflatness measures; 'sweep'; 'all'. Of several layers there is a row for the network, with no layer."
Measures = Annotated[tuple[str, ...], takes(_measures, "NAME,…", shell_complete=complete_measures, help=_MEASURES)]
DEFAULT_MEASURES = (MEASURES[0].name,)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Hold what makes the network.

    Attributes:
        model: what returns the model: file.py:callable or package.module:callable. Or hf:FOLDER, hf:ORG/NAME@REVISION
            (from the local cache), timm:NAME, torchvision:NAME.
        model_args: keyword arguments of that callable: k=v, with commas or repeated, or a JSON object.
    """

    model: Annotated[str, SPEC]
    model_args: Keywords


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Hold what a network is measured on, with which loss, and where.

    Attributes:
        data: what returns batches, a DataLoader, a list or a tuple of tensors: file.py:callable or
            package.module:callable. Or .npz, .pt, .txt, .jsonl, .parquet, a folder of images or of a saved data set.
        data_args: keyword arguments of that callable: k=v, with commas or repeated, or a JSON object.
        loss: the loss it was trained with: cross_entropy, mse_loss, … or a class of torch.nn: HuberLoss, …; auto: that
            of a Hugging Face model.
        loss_args: options of that loss: k=v, with commas or repeated, or a JSON object.
        layers: names, globs, re:… or type:…; with commas or repeated.  [default: all that can be measured]
        seed: seed of the random numbers of estimates.
        limit: measure on the first N samples, or on this part of all of them, such as 0.1.
        batch_size: cut batches to N samples; auto: in halves when memory does not suffice.  [default: as the data have
            them]
        device: where the model runs: cpu, cuda, cuda:1, …
        dtype: dtype of the weights, such as bfloat16.  [default: as the model is made]
    """

    data: Annotated[str, _DATA]
    data_args: Keywords
    loss: Annotated[str, {"metavar": "NAME", "shell_complete": complete_losses}] = "auto"
    loss_args: Keywords
    layers: Annotated[tuple[str, ...], takes(several, "SELECTOR,…")] = ()
    seed: int = 0
    limit: Annotated[float | None, takes(limit_of, "N|PART")] = None
    batch_size: Annotated[int | str | None, takes(_batch_size, "N|auto")] = None
    device: Annotated[str | None, {"metavar": "DEVICE"}] = None
    dtype: str | None = None

    def source(self, model: str) -> Maker:
        """Return the maker of the data; that of texts has the tokenizer of the model that is named."""
        return maker("data", self.data, data_specs.with_tokenizer(self.data, self.data_args, model))


@dataclass(frozen=True, kw_only=True)
class Network(Setting, Model):
    """Hold which network is measured."""

    def made(self, checkpoint: Path | None, *besides: str) -> tuple[nn.Module, Any, Any]:
        """Return the network with its weights, the loss, which may be one of ``besides``, and the data."""
        known = self.loss in besides and not self.loss_args
        criterion, to = self.loss if known else loss_of(self.loss, self.loss_args), moved(self.device, self.dtype)
        bench = self._bench(criterion, maker("model", self.model, self.model_args, to), self.source(self.model))
        assert bench.network is not None
        if checkpoint is not None:
            try:
                held = checkpoints.read(checkpoint)
                notes = (*held.notes, *checkpoints.load(bench.network, held.state))
            except InputError as error:
                raise InputError(f"{checkpoint}: {error}") from None
            echo(*(f"{checkpoint}: {note}" for note in notes), err=True)
        return bench.network, criterion, bench.data

    def held_out(self, data: str) -> Any:
        """Return the data of ``--held-out``, made and cut as those of ``--data`` are."""
        made = replace(replace(self, data=data).source(self.model), name="--held-out")
        return self._bench(auto.AUTO, None, made).data

    def _bench(self, loss: Any, model: Maker | None, data: Maker) -> Bench:
        size = None if self.batch_size == "auto" else self.batch_size
        return Bench(Setup(model, data, loss, batch_size=size, limit=self.limit))


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Hold how values are found: the options of :class:`.MeasureHow` that have these names."""

    curvature: Curvature = "auto"
    probes: Annotated[int | str | None, takes(plain, "K|adaptive")] = None
    rtol: float | None = None
    fraction: Annotated[float | str | None, takes(plain, "PART|auto")] = None
    max_passes: Count = MAX_PASSES


def moved(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return the arguments of ``nn.Module.to`` for these options."""
    to: dict[str, Any] = {}
    if device is not None:
        try:
            to["device"] = torch.device(device)
        except RuntimeError as error:
            raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if dtype is not None:
        to["dtype"] = check_dtype("--dtype", dtype)
    return to


def maker(name: str, spec: str, arguments: dict[str, Any], to: Mapping[str, Any] | None = None) -> Maker:
    """Return the maker of the model or the data, after a check of the arguments against its signature."""
    made = Maker(spec, arguments, f"--{name}", to or {})
    function = made.function()
    try:
        specs.check_arguments(function, arguments)
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=f"--{name}-args") from None
    return made


def loss_of(name: str, options: dict[str, Any]) -> Any:
    """Return the loss of ``--loss`` and ``--loss-args``: a name, a function with its options, or a module."""
    if auto.is_auto(name) and not options:
        return name
    tensors = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    kind = getattr(nn, name, None) if name.endswith("Loss") else None
    try:
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            loss: Any = kind(**tensors)
        elif name not in losses.names():
            raise InputError(f"{name!r} is not known; did you mean {_near(name)}?")
        else:
            loss = functools.partial(getattr(F, name), **tensors) if tensors else name
        losses.resolve(loss)
    except TypeError as error:
        raise click.BadParameter(f"{json.dumps(options)}: {error}", param_hint="--loss-args") from None
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--loss") from None
    return loss


def _near(name: str) -> str:
    """Return the names of losses that a name which does not exist may mean, for a message."""
    of_torch = [each for each in dir(nn) if each.endswith("Loss")]
    # Ours twice: they come first where nothing is near, and win where torch's class has the same letters.
    plain = {each.lower().replace("_", ""): each for each in (*losses.names(), *of_torch, *losses.names())}
    return ", ".join(plain[each] for each in near(name.lower().replace("_", ""), plain).split(", "))


@command(api.measure, config=True)
def measure(
    checkpoint: Path | None = None,
    *,
    network: Network,
    measures: Measures = DEFAULT_MEASURES,
    estimates: Estimates,
    out: Path | None = None,
    progress: bool | None = None,
    as_json: Json = False,
) -> None:
    """Measure one network, with the weights of CHECKPOINT if it is given, and print the table of its layers.

    Args:
        progress: show a progress bar.  [default: on a terminal]
        out: file to write too; its ending is the format: .json, .csv, .html.
    """
    if out is not None and out.suffix not in _FORMATS:
        raise click.BadParameter(f"{out}: its ending is to be {', '.join(_FORMATS)}", param_hint="--out")
    prepare_file(out)
    asked: dict[str, Any] = {"layers": network.layers or None, "seed": network.seed, **vars(estimates)}
    report = api.measure(*network.made(checkpoint), measures=measures, progress=progress, **asked)
    if out is not None:
        _FORMATS[out.suffix](report, out)
    if as_json:
        show_json(report.to_dict())
    else:
        click.echo(str(report))


@command(eigenvalues.spectrum, config=True)
def spectrum(
    checkpoint: Path | None = None,
    *,
    network: Network,
    curvature: Curvature = "auto",
    k: Annotated[int, {"names": ["-k", "--eigenvalues"], "type": click.IntRange(0)}] = 5,
    density: bool = False,
    out: Path | None = None,
    as_json: Json = False,
) -> None:
    """Show the largest eigenvalues of a network's loss Hessian, with the weights of CHECKPOINT if it is given.

    Without --layers it is the Hessian in all trainable parameters.

    Args:
        k: how many.
        out: JSON file to write too, which pyflatness store add takes.
    """
    prepare_file(out)
    asked: dict[str, Any] = {"layers": network.layers or None, "seed": network.seed, "curvature": curvature}
    found = eigenvalues.spectrum(*network.made(checkpoint), **asked, k=k, density=density)
    if out is not None:
        found.to_json(out)
    if as_json:
        facts = {"eigenvalues": found.eigenvalues.tolist(), "residuals": found.residuals.tolist()}
        show_json({**facts, "method": found.method, "converged": found.converged})
    else:
        click.echo(str(found))


@command(allocation.allocate, config=True)
def allocate(
    checkpoint: Path | None = None,
    *,
    network: Network,
    formats: Names,
    bits: float | None = None,
    size: int | None = None,
    fixed: Annotated[dict[str, str], takes(_fixed, "NAME=FORMAT,…", multiple=True, required=False)],
    together: Annotated[tuple[str, ...], {"metavar": "NAME,…"}] = (),
    probes: Count = 16,
    rounds: Annotated[int | None, {"type": click.IntRange(0)}] = None,
    held_out: Annotated[str | None, _DATA] = None,
    frontier: bool = False,
    export: Annotated[tuple[str, str] | None, {"metavar": "TOOL FILE", "help": _EXPORT}] = None,
    as_json: Json = False,
) -> None:
    """Choose a format for each layer so that the loss is predicted to change least under a budget of bits.

    The network has the weights of CHECKPOINT if it is given. Interactions of layers count: see docs/allocation.md.

    Args:
        loss: the loss it was trained with: cross_entropy, … or a class of torch.nn; auto: that of a Hugging Face model.
            kl: the KL divergence of the changed model's predictions from the model's.
        formats: formats to choose from: int2 to int8, int4-g128 and the like, fp8, mxfp4, nvfp4, 2:4, rank-16, keep;
            another tool's as gguf:q4_0 or bitsandbytes:nf4.
        bits: budget in bits a weight. One of --bits and --size is needed.
        fixed: the format of a layer, by its name or a glob, such as lm_head=int8; with commas or repeated. It counts in
            the budget.
        together: layers that get one format, by their names or globs; may be repeated. 'vllm': what vLLM runs as one.
        probes: number of random probes of each sample.
        held_out: data that neither the model nor the choice has seen, which the interval is then of: as --data, with
            its --data-args, --limit and --batch-size.
        frontier: show what other budgets are predicted to cost too, to second order and not measured.
    """
    prepare_file(None if export is None else Path(export[1]))
    groups = "vllm" if together == ("vllm",) else [[name.strip() for name in names.split(",")] for names in together]
    tool = None if export is None else export[0]
    allocation.checked(formats, fixed, tool, bits, size)
    asked: dict[str, Any] = {"layers": network.layers or None, "seed": network.seed, "bits": bits, "size": size}
    asked |= {"fixed": fixed, "together": groups, "probes": probes, "rounds": rounds, "tool": tool}
    asked["held_out"] = None if held_out is None else network.held_out(held_out)
    plan = allocation.allocate(*network.made(checkpoint, divergence.NAME), formats, **asked)
    if export is not None:
        plan.export(*export)
    if as_json:
        show_json(plan.to_dict() | ({"frontier": plan.frontier().to_dict()} if frontier else {}))
        return
    echo(*str(plan).splitlines())
    if frontier:
        echo(*str(plan.frontier()).splitlines())
    if export is not None:
        echo(f"wrote {export[1]} for {export[0]}")


@command()
def layers(*, model: Model, as_json: Json = False) -> None:
    """Show the model's layers that can be measured: name, type, weight matrix.

    Of parameters that no module calls, those that may turn out to be weights are among them.
    """
    network = model_layers.unwrap(maker("model", model.model, model.model_args).network())
    found: list[dict[str, Any]] = []
    for name, layer in selectors.layers(network).items():
        kind = type(layer).__name__
        if isinstance(layer, Use):
            holder = type(layer.source.places[0][0]).__name__
            kind = holder if layer.source.of_module else f"parameter of {holder}"
        lazy = any(map(nn.parameter.is_lazy, layer.parameters()))  # open until the model runs
        found.append({"name": name, "type": kind, "shape": None if lazy else model_layers.matrix(layer)[0].shape})
    if as_json:
        show_json(found)
        return
    table = Table(Column("name", no_wrap=True), "type", "weight matrix, d × m", box=box.SIMPLE_HEAD)
    for row in found:
        size = "open until the model runs" if row["shape"] is None else "{} × {}".format(*row["shape"])
        table.add_row(printable(row["name"]) or "(the model)", row["type"], size)
    if not found:
        click.echo(f"{type(network).__name__} has no layer that can be measured ({SUPPORTED})")
        return
    show(table)
