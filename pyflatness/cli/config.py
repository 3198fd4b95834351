"""Take the options of a command from a YAML file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

C = TypeVar("C", bound=Callable[..., Any])


def option(command: C) -> C:
    """Add ``--config FILE``: options by their names; the command line's own take precedence.

    Lists are options that may be repeated, mappings the JSON that some take, and ``checkpoints`` are the arguments.
    """
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_take,
        help="YAML file of these options; the checkpoints are under 'checkpoints'.",
    )(command)


def _take(context: click.Context, parameter: click.Parameter, path: Path | None) -> None:
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
    by_name = {name: held for held in context.command.params for name in _names(held)}
    for name, value in content.items():
        held = by_name.get(str(name))
        if held is None or held is parameter:
            raise click.BadParameter(f"{path}: there is no option {name!r}; there are {', '.join(sorted(by_name))}")
        context.default_map = {**(context.default_map or {}), str(held.name): _given(held, value)}


def _names(parameter: click.Parameter) -> list[str]:
    if isinstance(parameter, click.Argument):
        return ["checkpoints"]
    return [name.lstrip("-") for name in parameter.opts]


def _given(parameter: click.Parameter, value: Any) -> Any:
    """Return a value as the command line would have it."""
    import json

    if parameter.multiple or parameter.nargs == -1:
        return [str(part) for part in (value if isinstance(value, list) else [value])]
    return json.dumps(value) if isinstance(value, (dict, list)) else value
