"""Run the commands on one network: ``measure``, ``spectrum``, ``allocate``, ``layers``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Column, Table
from torch import nn

from .. import api
from ..curvature import allocate as allocation
from ..curvature import spectrum as eigenvalues
from ..curvature.exports import TOOLS as EXPORTS
from ..errors import InputError
from ..messages import printable
from ..model import layers as model_layers
from ..model import selectors
from ..model.kinds import SUPPORTED
from ..model.uses import Use
from ..options import Options
from ..report import Report
from ..scoring import checkpoints, data_specs, specs
from ..scoring.units import Request
from ..scoring.worker import Bench, Maker, Setup
from . import options as given
from .options import PATH, bind, json_option, model_option
from .output import echo, prepare_file, show, show_json

_Writer = Callable[[Report, Path], Any]
_FORMATS: dict[str, _Writer] = {".json": Report.to_json, ".csv": Report.to_csv, ".html": Report.to_html}


@click.command()
@given.config_option
@given.model_option
@given.asked
@click.option("--out", type=PATH, help=f"File to write too; its ending is the format: {', '.join(_FORMATS)}.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar.  [default: on a terminal]")
@json_option
@click.argument("checkpoint", required=False, type=PATH)
def measure(
    selectors: tuple[str, ...],
    measures: tuple[str, ...],
    out: Path | None,
    progress: bool | None,
    as_json: bool,
    checkpoint: Path | None,
    **asked: Any,
) -> None:
    """Measure one network, with the weights of CHECKPOINT if it is given, and print the table of its layers."""
    if out is not None and out.suffix not in _FORMATS:
        raise click.BadParameter(f"{out}: its ending is to be {', '.join(_FORMATS)}", param_hint="--out")
    if out is not None:
        prepare_file(out)
    network, loss, data, how = taken(checkpoint, **asked)
    report = api.measure(network, loss, data, layers=selectors or None, measures=measures, progress=progress, **how)
    if out is not None:
        _FORMATS[out.suffix](report, out)
    if as_json:
        show_json(report.to_dict())
    else:
        click.echo(str(report))


def taken(
    checkpoint: Path | None,
    *,
    model: specs.Function,
    model_args: dict[str, Any],
    data: specs.Function,
    data_args: dict[str, Any],
    loss: str,
    loss_args: dict[str, Any],
    limit: float | None,
    batch_size: int | str | None,
    device: str | None,
    dtype: str | None,
    **how: Any,
) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """Return the network with its weights, the loss and the data that a command was given, and its other options."""
    spec, of_data = given.spec_of("model"), given.spec_of("data")
    criterion, to = given.loss_of(loss, loss_args), given.moved(device, dtype)
    given.bind(model, model_args, "model")
    data_args = data_specs.with_tokenizer(of_data, data_args, spec)
    given.bind(data, data_args, "data")
    size = None if batch_size == "auto" else batch_size
    makers = Maker(spec, model_args, "--model", to), Maker(of_data, data_args, "--data")
    bench = Bench(Setup("", *makers, Request(criterion, None, (), Options()), size, limit))
    assert bench.network is not None
    if checkpoint is not None:
        try:
            held = checkpoints.read(checkpoint)
            notes = (*held.notes, *checkpoints.load(bench.network, held.state))
        except InputError as error:
            raise InputError(f"{checkpoint}: {error}") from None
        for note in notes:
            click.echo(printable(f"{checkpoint}: {note}"), err=True)
    return bench.network, criterion, bench.data, how


@click.command()
@given.config_option
@given.model_option
@given.asked_of_a_network
@given.curvature_option
@click.option("-k", "--eigenvalues", "k", type=click.IntRange(0), default=5, show_default=True, help="How many.")
@click.option("--density", is_flag=True, help="Also estimate the density of all eigenvalues.")
@click.option("--out", type=PATH, help="JSON file to write too, which pyflatness store add takes.")
@json_option
@click.argument("checkpoint", required=False, type=PATH)
def spectrum(
    selectors: tuple[str, ...], out: Path | None, as_json: bool, checkpoint: Path | None, **asked: Any
) -> None:
    """Show the largest eigenvalues of a network's loss Hessian, with the weights of CHECKPOINT if it is given.

    Without --layers it is the Hessian in all trainable parameters.
    """
    if out is not None:
        prepare_file(out)
    network, loss, data, how = taken(checkpoint, **asked)
    found = eigenvalues.spectrum(network, loss, data, layers=selectors or None, **how)
    if out is not None:
        found.to_json(out)
    if as_json:
        facts = {"eigenvalues": found.eigenvalues.tolist(), "residuals": found.residuals.tolist()}
        show_json({**facts, "method": found.method, "converged": found.converged})
    else:
        click.echo(str(found))


@click.command()
@given.config_option
@given.model_option
@given.asked_of_a_network
@given.several_option(
    "--formats",
    required=True,
    help="Formats to choose from: int2 to int8, int4-g128 and the like, fp8, mxfp4, nvfp4, 2:4, rank-16, keep.",
)
@click.option("--bits", type=float, help="Budget in bits a weight. One of --bits and --size is needed.")
@click.option("--size", type=int, help="Budget in bytes of the layers' weights.")
@click.option(
    "--together",
    metavar="NAME,…",
    multiple=True,
    help="Layers that get one format, by their names or globs; may be repeated. 'vllm': what vLLM runs as one.",
)
@click.option(
    "--probes", type=click.IntRange(1), default=16, show_default=True, help="Number of random probes of each sample."
)
@click.option("--frontier", is_flag=True, help="Show what other budgets are predicted to cost too.")
@click.option(
    "--export",
    nargs=2,
    metavar="TOOL FILE",
    help=f"Plan for a tool, with its formats, and write the choice for it: {', '.join(EXPORTS)}.",
)
@json_option
@click.argument("checkpoint", required=False, type=PATH)
def allocate(
    selectors: tuple[str, ...],
    formats: tuple[str, ...],
    together: tuple[str, ...],
    frontier: bool,
    export: tuple[str, str] | None,
    as_json: bool,
    checkpoint: Path | None,
    **asked: Any,
) -> None:
    """Choose a format for each layer so that the loss is predicted to change least under a budget of bits.

    The network has the weights of CHECKPOINT if it is given. Interactions of layers count: see docs/allocation.md.
    """
    if export is not None:
        prepare_file(Path(export[1]))
    network, loss, data, how = taken(checkpoint, **asked)
    groups = "vllm" if together == ("vllm",) else [[name.strip() for name in names.split(",")] for names in together]
    tool = None if export is None else export[0]
    plan = allocation.allocate(
        network, loss, data, formats, layers=selectors or None, together=groups, tool=tool, **how
    )
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


@click.command()
@model_option
@json_option
def layers(model: specs.Function, model_args: dict[str, Any], as_json: bool) -> None:
    """Show the model's layers that can be measured: name, type, weight matrix.

    Of parameters that no module calls, those that may turn out to be weights are among them.
    """
    network = model_layers.unwrap(specs.build_model(bind(model, model_args, "model")))
    found = {name: (_kind(layer), _shape(layer)) for name, layer in selectors.layers(network).items()}
    if as_json:
        show_json([{"name": name, "type": kind, "shape": shape} for name, (kind, shape) in found.items()])
        return
    table = Table(Column("name", no_wrap=True), "type", "weight matrix, d × m", box=box.SIMPLE_HEAD)
    for name, (kind, shape) in found.items():
        size = "open until the model runs" if shape is None else "{} × {}".format(*shape)
        table.add_row(printable(name) or "(the model)", kind, size)
    if not found:
        click.echo(f"{type(network).__name__} has no layer that can be measured ({SUPPORTED})")
        return
    show(table)


def _kind(layer: nn.Module) -> str:
    if not isinstance(layer, Use):
        return type(layer).__name__
    holder = type(layer.source.places[0][0]).__name__
    return holder if layer.source.of_module else f"parameter of {holder}"


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (d, m); None where it is open until the model runs."""
    if any(map(nn.parameter.is_lazy, module.parameters())):
        return None
    d, m = model_layers.matrix(module)[0].shape
    return d, m
