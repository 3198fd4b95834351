"""Define the options of the command line that name a callable of the user's, and their arguments as JSON."""

import json
from collections.abc import Callable
from typing import Any

import click

from ..errors import InputError
from ..scoring import specs
from ..scoring.specs import Function

NAMED_MODELS = " Or hf:FOLDER, hf:ORG/NAME@REVISION (from the local cache), timm:NAME, torchvision:NAME."


def option(
    name: str, what: str, resolve: Callable[[str], Function] = specs.resolve, more: str = ""
) -> Callable[[Function], Function]:
    """Return two click options: ``--name SPEC``, which arrives as a callable, and ``--name-args JSON``, as a dict.

    Args:
        name: of the option.
        what: what the callable returns.
        resolve: SPEC -> callable.
        more: of the help.
    """

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
            callback=lambda context, parameter, text: _usage(resolve, _noted(context, name, text)),
            help=f"file.py:callable or package.module:callable that returns {what}.{more}",
        )
        return spec(arguments(command))

    return add


def text(name: str) -> str:
    """Return the SPEC of ``--name`` as it was given, for workers that resolve it by themselves."""
    found: str = click.get_current_context().meta[name]
    return found


def _noted(context: click.Context, name: str, text: str) -> str:
    context.meta[name] = text
    return text


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
