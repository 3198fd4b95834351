"""Define the options that several commands share, take them from a YAML file, check their values, and complete them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from .. import losses
from ..errors import InputError
from ..losses import auto
from ..measures import MEASURES, named
from ..scoring import specs
from ..scoring.specs import Function

C = TypeVar("C", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, for programs.")


def metadata_option(more: str = "") -> Callable[[C], C]:
    """Return the option ``--metadata FILE``, which arrives as ``table``; ``more`` is of the help."""
    what = "CSV or JSON file with columns to add to the checkpoints, by their names."
    return click.option("--metadata", "table", type=PATH, help=what + more)


def config_option(command: C) -> C:
    """Add ``--config FILE``: options by their names; the command line's own take precedence.

    Lists are options that may be repeated, mappings the JSON that some take, and ``checkpoints`` are the arguments.
    """
    return click.option(
        "--config",
        type=PATH,
        is_eager=True,
        expose_value=False,
        callback=_take_file,
        help="YAML file of these options; the checkpoints are under 'checkpoints'.",
    )(command)


def _take_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    try:
        import yaml
    except ImportError:
        raise click.BadParameter("YAML files need PyYAML: pip install 'pyflatness[cli]'") from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise click.BadParameter(f"{path}: names of options with their values are wanted, got {type(content).__name__}")
    by_name = {
        name.lstrip("-"): held
        for held in context.command.params
        for name in (["checkpoints"] if isinstance(held, click.Argument) else held.opts)
    }
    for name, value in content.items():
        held = by_name.get(str(name))
        if held is None or held is parameter:
            raise click.BadParameter(f"{path}: there is no option {name!r}; there are {', '.join(sorted(by_name))}")
        context.default_map = {**(context.default_map or {}), str(held.name): _given(held, value)}


def _given(parameter: click.Parameter, value: Any) -> Any:
    """Return a value as the command line would have it."""
    if parameter.multiple or parameter.nargs == -1:
        return [str(part) for part in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def spec_option(
    name: str, what: str, resolve: Callable[[str], Function] = specs.resolve, more: str = ""
) -> Callable[[Function], Function]:
    """Return two click options: ``--name SPEC``, which arrives as a callable, and ``--name-args JSON``, as a dict.

    Args:
        name: of the option.
        what: what the callable returns.
        resolve: SPEC -> callable.
        more: of the help.
    """

    def resolved(context: click.Context, parameter: click.Parameter, text: str) -> Function:
        context.meta[name] = text
        return _usage(resolve, text)  # type: ignore[no-any-return]

    def add(command: Function) -> Function:
        arguments = click.option(
            f"--{name}-args",
            metavar="JSON",
            default="{}",
            callback=json_value,
            help="Keyword arguments of that callable.",
        )
        spec = click.option(
            f"--{name}",
            metavar="SPEC",
            required=True,
            callback=resolved,
            help=f"file.py:callable or package.module:callable that returns {what}.{more}",
        )
        return spec(arguments(command))

    return add


def spec_of(name: str) -> str:
    """Return the SPEC of ``--name`` as it was given, for workers that resolve it by themselves."""
    found: str = click.get_current_context().meta[name]
    return found


model_option = spec_option(
    "model",
    "the model",
    more=" Or hf:FOLDER, hf:ORG/NAME@REVISION (from the local cache), timm:NAME, torchvision:NAME.",
)


def bind(function: Function, arguments: dict[str, Any], name: str) -> Callable[[], Any]:
    """Return the callable of ``--name`` with its arguments; see :func:`pyflatness.scoring.specs.bind`.

    Raises:
        click.BadParameter: the arguments do not fit.
    """
    try:
        return specs.bind(function, arguments, f"--{name}")
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=f"--{name}-args") from None


def _usage(convert: Callable[[str], Any], text: str) -> Any:
    try:
        return convert(text)
    except InputError as error:
        raise click.BadParameter(str(error)) from None


def json_value(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, Any]:
    """Return the value of an option that takes keyword arguments as JSON."""
    found: dict[str, Any] = _usage(json_object, text)
    return found


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object of keyword arguments.

    Raises:
        InputError: something else.
    """
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise InputError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise InputError(f"{text!r}: a JSON object of keyword arguments is wanted")
    return arguments


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
    known = (*(row.name for row in MEASURES), "sweep", "all")
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


def probes(context: click.Context, parameter: click.Parameter, given: str | None) -> int | str | None:
    """Return a number of probes, or the text that is given in its place."""
    return int(given) if given and given.lstrip("-").isdigit() else given


def fraction(context: click.Context, parameter: click.Parameter, given: str | None) -> float | str | None:
    """Return a part of the data, or the text that is given in its place."""
    try:
        return None if given is None else float(given)
    except ValueError:
        return given
