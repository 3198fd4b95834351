"""Run ``pyflatness measure``: one network, and the table of its layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from torch import nn

from .. import api
from ..errors import InputError
from ..messages import printable
from ..options import Options
from ..report import Report
from ..scoring import checkpoints, data_specs, specs
from ..scoring.units import Request
from ..scoring.worker import Bench, Maker, Setup
from . import options as given
from .options import PATH, json_option
from .output import prepare_file, show_json

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
    curvature: str,
    seed: int,
    probes: int | str | None,
    target_stderr: float | None,
    rtol: float | None,
    fraction: float | str | None,
    max_passes: int,
    **asked: Any,
) -> None:
    """Measure one network, with the weights of CHECKPOINT if it is given, and print the table of its layers."""
    if out is not None and out.suffix not in _FORMATS:
        raise click.BadParameter(f"{out}: its ending is to be {', '.join(_FORMATS)}", param_hint="--out")
    if out is not None:
        prepare_file(out)
    how: dict[str, Any] = {
        "curvature": curvature,
        "seed": seed,
        "probes": probes,
        "target_stderr": target_stderr,
        "rtol": rtol,
    }
    network, loss, data = taken(checkpoint, **asked)
    options: dict[str, Any] = {**how, "layers": selectors or None, "measures": measures, "max_passes": max_passes}
    report = api.measure(network, loss, data, **options, fraction=fraction, progress=progress)
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
) -> tuple[nn.Module, Any, Any]:
    """Return the network with its weights, the loss and the data that a command was given.

    Raises:
        InputError: they cannot be had, or do not fit.
    """
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
    return bench.network, criterion, bench.data
