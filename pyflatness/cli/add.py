"""Run ``pyflatness add``: a spectrum, a landscape or a history from its file into a store."""

from pathlib import Path

import click

from ..errors import InputError
from ..messages import printable
from ..scoring import attached
from ..scoring.store import Store
from . import invocation

_PATH = click.Path(path_type=Path)


@click.command(name="add", short_help="Put a spectrum, a landscape or a history into a store.")
@click.argument("store", type=_PATH)
@click.argument("name")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=_PATH)
@click.option("--label", default="", help="Name that tells results of one kind of the same checkpoint from each other.")
def add(store: Path, name: str, files: tuple[Path, ...], label: str) -> None:
    """Put each FILE into STORE, for its page: spectra and landscapes of the checkpoint NAME, or the history NAME.

    They are files that spectrum.to_json(FILE), landscape.to_npz(FILE) and history.to_json(FILE) wrote in Python. What
    STORE has of the same checkpoint, kind and label, or of the same history, is replaced.
    """
    results = {file: _read(file) for file in files}
    with Store(store, write=True, command=invocation.command()) as held:
        for file, result in results.items():
            attached.add(held, name, result, label)
            click.echo(printable(f"{file}: {attached.kind_of(result)[0]} of {name}"))


def _read(file: Path) -> attached.Result:
    try:
        return attached.read(file.read_bytes(), str(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror})") from None
