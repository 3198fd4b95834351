"""Check the values of options of ``pyflatness score``, and complete them in the shell."""

import click
from click.shell_completion import CompletionItem

from .. import losses
from ..errors import InputError
from ..losses import auto
from ..measures import MEASURES, named

_SETS = ("sweep", "all")


def measures(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of measures, which may come several in one, with commas between them."""
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    try:
        rows = [row for name in names for row in named(name)] if names else named(names)  # of none it is an error
    except InputError as error:
        raise click.BadParameter(str(error).removeprefix("measures: ")) from None
    return tuple(dict.fromkeys(row.name for row in rows))


def complete_measures(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return what the last of the names that are typed may be, for the shell."""
    before, comma, last = typed.rpartition(",")
    known = (*(row.name for row in MEASURES), *_SETS)
    return [CompletionItem(before + comma + name) for name in known if name.startswith(last)]


def complete_losses(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the losses that have names of their own, for the shell; there are others."""
    return [CompletionItem(name) for name in (auto.AUTO, *losses.names()) if name.startswith(typed)]


def limit(context: click.Context, parameter: click.Parameter, given: str | None) -> float | None:
    """Return a number of samples, or a part of them, which has a point in it: ``1`` is one sample, ``1.0`` are all."""
    if given is None or (given.isdigit() and int(given) > 0):
        return None if given is None else int(given)
    try:
        part = float(given)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise click.BadParameter(f"{given}: a whole number of samples is wanted, or a part of them between 0 and 1")
    return part if part < 1 else None


def batch_size(context: click.Context, parameter: click.Parameter, given: str | None) -> int | str | None:
    """Return a number of samples, ``"auto"``, or None."""
    if given is None or given == "auto":
        return given
    if not given.isdigit() or int(given) == 0:
        raise click.BadParameter(f"{given!r}: a number of samples is wanted, or 'auto'")
    return int(given)


def shard(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[int, int] | None:
    """Return which of how many parts."""
    number, _, count = (given or "1/1").partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{given!r}: I/N is wanted, the I-th of N parts, as in 2/4")
    return None if given is None else (int(number), int(count))
