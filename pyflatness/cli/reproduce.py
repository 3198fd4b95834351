"""Run ``pyflatness reproduce``: redo a figure of the papers."""

import json
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.table import Table

from ..messages import printable
from .output import json_option, show, show_json
from .paths import prepare_folder, write_whole


@click.command(short_help="Redo a figure of the papers.")
@click.argument("name", required=False, shell_complete=lambda context, parameter, typed: _names(typed))
@click.option("--list", "listed", is_flag=True, help="List the experiments.")
@click.option("--scale", type=click.Choice(["small", "paper"]), default="small", show_default=True,
              help="small: minutes on two cores, no data needed; paper: the paper's settings and data.")  # fmt: skip
@click.option("--data-dir", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of data sets, as torchvision or Hugging Face leave them, or NAME.npz.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("reproduced"), show_default=True,
              help="Folder for the results; what a later run goes on from is in its subfolder work.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True,
              help="Where networks are trained and measured, e.g. cuda, which goes on from work-cuda.")  # fmt: skip
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE",
              help="Change a setting of the scale, e.g. seeds=2; may be repeated.")  # fmt: skip
@json_option
def reproduce(
    name: str | None,
    listed: bool,
    scale: str,
    data_dir: Path | None,
    out: Path,
    device: str,
    changes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Redo a figure of the papers on flatness.

    NAME is one of those that --list shows. The command writes a figure, all numbers as JSON and a page with a table and
    a verdict. When it is interrupted, the same command goes on where it stopped.
    """
    from .. import experiments
    from ..experiments import reproducing

    if listed or name is None:
        _list(experiments.EXPERIMENTS, as_json)
        return
    experiment = experiments.named(name)
    settings = dict(_setting(change) for change in changes)
    prepare_folder(out)
    found, files = reproducing.reproduce(experiment, out / "work", scale, data_dir, settings, device=device)
    for file, content in files.items():
        write_whole(out / file, content)
    if as_json:
        rows = [*map(vars, found.findings)]
        paths = [str(out / file) for file in files]
        show_json({"findings": rows, "verdict": found.verdict, "failures": dict(found.failures), "files": paths})
        return
    table = Table("", "here", "95 % interval", "paper", box=box.SIMPLE_HEAD)
    for item in found.findings:
        table.add_row(item.what, reproducing.number(item.value), reproducing.interval(item), item.paper)
    show(table)
    for point, why in found.failures.items():
        click.echo(printable(f"{point}: {why}"))
    click.echo(printable(found.verdict))
    click.echo(printable(f"{', '.join(files)} are in {out}"))


def _names(typed: str) -> list[str]:
    """Return the experiments whose names begin so, for the shell."""
    from ..experiments import EXPERIMENTS

    return [row.name for row in EXPERIMENTS if row.name.startswith(typed)]


def _list(rows: Any, as_json: bool) -> None:
    if as_json:
        facts = ("name", "figure", "title", "seconds", "data")
        show_json([{fact: getattr(row, fact) for fact in facts} for row in rows])
        return
    table = Table("name", "figure", "what", "small scale", "data at paper scale", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(row.name, row.figure, row.title, f"{row.seconds} s", row.data or "none")
    show(table)
    click.echo("small scale: seconds of one core, measured, with the training of networks that experiments share")


def _setting(text: str) -> tuple[str, Any]:
    """Return a setting's name and value, which is JSON, or else text."""
    name, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"{text!r}: NAME=VALUE is wanted", param_hint="--set")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
