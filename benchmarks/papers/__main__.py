"""Redo a figure of the papers: ``python -m benchmarks.papers NAME``, from a clone."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from rich import box
from rich.table import Table

from pyflatness.cli.group import checked
from pyflatness.cli.options import Count, Json, command
from pyflatness.cli.output import prepare_folder, show, show_json, write_whole
from pyflatness.errors import FlatnessError, InputError, printable

from . import EXPERIMENTS, named, reproducing
from . import study as studied
from . import within as within_recipes
from .claims import Claim
from .experiment import Finding


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit, with an error's message in the place of a traceback."""
    try:
        with checked():
            given = sys.argv[1:] if arguments is None else [*arguments]
            for other in (study, within):
                if given[:1] == [other.name]:
                    other.main(given[1:], prog_name=f"python -m benchmarks.papers {other.name}")
            reproduce.main(given, prog_name="python -m benchmarks.papers")
    except FlatnessError as error:
        raise SystemExit(f"Error: {printable(str(error))}") from None


DataDir = Annotated[Path | None, {"type": click.Path(path_type=Path, exists=True, file_okay=False)}]


@command()
def reproduce(
    name: str | None = None,
    *,
    listed: Annotated[bool, {"names": ["--list"]}] = False,
    scale: Literal["small", "paper"] = "small",
    data_dir: DataDir = None,
    out: Path = Path("reproduced"),
    device: str = "cpu",
    changes: Annotated[tuple[str, ...], {"names": ["--set"], "metavar": "NAME=VALUE"}] = (),
    as_json: Json = False,
) -> None:
    """Redo a figure of the papers on flatness.

    NAME is one of those that --list shows. The command writes a figure, all numbers as JSON and a page with a table and
    a verdict. When it is interrupted, the same command goes on where it stopped.

    Args:
        listed: list the experiments.
        scale: small: minutes on two cores, no data; paper: larger, on your data (docs/papers.md).
        data_dir: folder of data sets, as torchvision or Hugging Face leave them, or NAME.npz.
        out: folder for the results; what a later run goes on from is in its subfolder work.
        device: where networks are trained and measured, e.g. cuda, which goes on from work-cuda.
        changes: change a setting of the scale, e.g. seeds=2; may be repeated.
    """
    if listed or name is None:
        _list(as_json)
        return
    experiment = named(name)
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
    show(_decided(found.claims) if found.claims else _numbers(found.findings))
    failures = (f"{point}: {why}" for point, why in found.failures.items())
    verdict = () if found.claims else (found.verdict,)
    page = next(file for file in files if file.endswith(".md"))
    for line in (*failures, *verdict, f"{out / page} has all numbers and sentences; beside it are figure and points"):
        click.echo(printable(line))


def _decided(claimed: Sequence[Claim]) -> Table:
    """Return a table of claims, what was decided, and by which number and interval."""
    table = Table("claim", "verdict", "here", "95 % interval", box=box.SIMPLE_HEAD)
    for claim in claimed:
        item = claim.finding
        what = f"{item.what} {'>' if claim.sign > 0 else '<'} {claim.border:g}"
        table.add_row(what, claim.decided(), reproducing.number(item.value), reproducing.interval(item))
    return table


def _numbers(findings: Sequence[Finding]) -> Table:
    """Return a table of numbers beside the paper's, of an experiment that decides no claim by an interval."""
    table = Table("", "here", "95 % interval", "paper", box=box.SIMPLE_HEAD)
    for item in findings:
        table.add_row(item.what, reproducing.number(item.value), reproducing.interval(item), item.paper)
    return table


@command()
def study(
    *, networks: Count = 2304, data_dir: DataDir = None, out: Path = Path("reproduced"), report: bool = False
) -> None:
    """Train and measure the networks of docs/study.md, one after the other, from where an earlier run stopped.

    Args:
        networks: how many there are to be; those that are there are not trained again.
        data_dir: folder of MNIST, FashionMNIST and CIFAR-10, as for the papers.
        out: folder whose subfolder work/study has the table, the weights and the store.
        report: train nothing; write docs/studies.md anew from the table beside it.
    """
    if report:
        from . import study_report

        click.echo(study_report.restate())
        return
    held = _held(studied.DATA, studied.data, data_dir)
    trainings = [planned for planned in studied.plan() if planned.data in held]
    path = studied.run(trainings, held.__getitem__, out / "work" / "study", networks)
    click.echo(f"{path} has {len(path.read_text(encoding='utf-8').splitlines()) - 1} rows")


@command()
def within(
    *,
    networks: Count = 2880,
    data_dir: DataDir = None,
    out: Path = Path("reproduced"),
    report: bool = False,
    pairs: bool = False,
) -> None:
    """Train and measure the networks of the study within recipes of docs/studies.md, from where an earlier run stopped.

    Args:
        networks: how many there are to be; those that are there are not trained again.
        data_dir: folder of MNIST, FashionMNIST and CIFAR-10, as for the papers.
        out: folder whose subfolder work/within has the table, which begins with the whole seeds that the repository
            has, and the weights and outputs of the networks that were trained there.
        report: train nothing; evaluate the whole seeds, and write docs/studies.md anew.
        pairs: train no new ones; take the first 240 that are there on at the same loss, in three ways.
    """
    if report:
        from . import within_report

        click.echo(within_report.restate(out / "work" / "within"))
        return
    held = _held(within_recipes.DATA, within_recipes.data, data_dir)
    if pairs:
        from . import within_pairs

        click.echo(within_pairs.run(held.__getitem__, out / "work" / "within"))
        return
    trainings = [planned for planned in within_recipes.plan() if planned.data in held]
    folder = out / "work" / "within"
    path = within_recipes.run(trainings, held.__getitem__, folder, networks, begun=within_recipes.POINTS)
    click.echo(f"{path} has {len(path.read_text(encoding='utf-8').splitlines()) - 1} rows")


def _held(names: Sequence[str], read: Callable[[Path | None, str], Any], folder: Path | None) -> dict[str, Any]:
    """Return the data sets that are there, by name, and say which are not."""
    held = {}
    for name in names:
        try:
            held[name] = read(folder, name)
        except InputError as error:
            click.echo(f"left out, {error}", err=True)
    return held


def _list(as_json: bool) -> None:
    if as_json:
        facts = ("name", "figure", "title", "seconds", "long", "data")
        show_json([{fact: getattr(row, fact) for fact in facts} for row in EXPERIMENTS])
        return
    table = Table("name", "figure", "what", "small scale", "paper scale", "data at paper scale", box=box.SIMPLE_HEAD)
    for row in EXPERIMENTS:
        table.add_row(row.name, row.figure, row.title, f"{row.seconds} s", row.long, row.data or "none")
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


if __name__ == "__main__":
    main()
