"""Turn functions into commands, whose parameters are arguments and options, and read options from a YAML file."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import click

from ..errors import InputError

PATH = click.Path(path_type=Path)


def command(*calls: Any, config: bool = False) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator that makes a command of a function: positional parameters are arguments, others are options.

    A parameter whose type is a dataclass stands for an option for each of its fields. Help is the text on a parameter
    in the docstring of the function, of its dataclasses, or of the ``calls`` to which it passes options.
    """

    def make(function: Callable[..., None]) -> click.Command:
        own = inspect.signature(function).parameters
        groups: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
        texts: dict[str, str] = {}
        for source in (*calls, *(base for group in groups.values() for base in group.__mro__), function):
            texts |= _texts(source)
        parameters: list[click.Parameter] = [_CONFIG] if config else []
        for name, one in own.items():
            every = inspect.signature(groups[name]).parameters.values() if name in groups else [one]
            parameters += [_parameter(held, texts.get(held.name)) for held in every]

        def run(**given: Any) -> None:
            for name, group in groups.items():
                given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
            function(**given)

        what, *_ = (inspect.getdoc(function) or "").partition("\n\nArgs:")
        return click.Command(function.__name__.strip("_"), params=parameters, callback=run, help=what)

    return make


def _texts(source: Any) -> dict[str, str]:
    """Return the texts on parameters in a docstring, with options as the command line has them."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(source) or "", re.MULTILINE)
    return {name: _of_command_line(" ".join(text.split())) for name, text in entries}


def _of_command_line(text: str) -> str:
    def code(found: re.Match[str]) -> str:  # such as probes="adaptive", which is --probes adaptive
        named = re.sub(r"^(\w+)=", lambda name: f"--{name[1].replace('_', '-')} ", found[1])
        return named.replace('"', "").strip()

    first = text if text.startswith("`") else text[:1].upper() + text[1:]
    words = re.sub(r":\w+:`~?(.*?)`", r"\1", re.sub("``(.*?)``", code, first))
    return words.replace("; None:", "; without it:").replace(" None:", " Without it:")


_ARGUMENT = re.compile(r"\b(exclude|given|interval|max_loss|seeds|settings|strata|test)=['\"]?(?:math\.)?(\w*)['\"]?")


def with_options(message: str) -> str:
    """Return a message of the statistics with options in place of arguments."""
    return _ARGUMENT.sub(lambda found: f"--{found[1].replace('_', '-')} {found[2]}".rstrip(), message)


@contextlib.contextmanager
def errors_of_options() -> Iterator[None]:
    """Name options in place of arguments in errors of the statistics, see :func:`with_options`."""
    try:
        yield
    except InputError as error:
        raise InputError(with_options(str(error))) from None


def _parameter(of: inspect.Parameter, text: str | None) -> click.Parameter:
    """Return an option or an argument for a parameter; its type may be annotated with what click takes besides."""
    kind, more = get_args(of.annotation) if get_origin(of.annotation) is Annotated else (of.annotation, {})
    given: dict[str, Any] = {}
    if type(None) in get_args(kind):
        kind, *_ = get_args(kind)
    if get_origin(kind) is tuple:
        kind, last = get_args(kind)
        given = {"multiple": True} if last is ... else {"nargs": 2}
    if get_origin(kind) is Literal:
        kind = click.Choice(get_args(kind))
    given["type"] = str if "callback" in more else PATH if kind is Path else kind
    required = of.default is of.empty
    if of.kind is not of.KEYWORD_ONLY:
        several = -1 if given.pop("multiple", False) else 1
        return click.Argument([of.name], required=required, nargs=several, **given, **more)
    names = [f"--{of.name.removeprefix('as_').replace('_', '-')}"]
    if kind is bool:
        names = [f"{names[0]}/--no-{names[0][2:]}"] if of.default is None else names
        given["is_flag"] = True
    given |= {"required": True} if required else {"default": of.default}
    given |= {"help": text, "show_default": of.default != "", **more}
    return click.Option([of.name, *given.pop("names", names)], **given)


def takes(convert: Callable[[Any], Any], metavar: str | None = None, **more: Any) -> dict[str, Any]:
    """Return the settings of an option whose text, or texts, a function converts; see :func:`_parameter`."""

    def callback(context: click.Context, parameter: click.Parameter, given: Any) -> Any:
        try:
            return None if given is None else convert(given)
        except InputError as error:
            raise click.BadParameter(str(error)) from None

    return {"callback": callback, "metavar": metavar, **more}


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
        parts = value if isinstance(value, list) else [value]
        return [json.dumps(part) if isinstance(part, (dict, list)) else str(part) for part in parts]
    return json.dumps(value) if isinstance(value, (dict, list)) else value


_CONFIG = click.Option(
    ["--config"],
    type=PATH,
    is_eager=True,
    expose_value=False,
    callback=_take_file,
    help="YAML file of these options; the checkpoints are under 'checkpoints'.",
)


def several(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return names from texts that may hold several, separated by commas outside of brackets and of ``re:…``."""
    split = [[text] if text.startswith("re:") else re.split(r",(?![^\[{(]*[\]})])", text) for text in given]
    return tuple(name.strip() for names in split for name in names if name.strip())


def _keywords(given: tuple[str, ...]) -> dict[str, Any]:
    """Return keyword arguments from texts that are JSON or ``k=v`` each."""
    return {name: value for text in given for name, value in json_object(text).items()}


_PAIR = re.compile(r"(\w+)=(.*?)(?=,\w+=|$)", re.DOTALL)


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object of keyword arguments, or ``k=v,k=v``, whose values are JSON, True, False, None or texts."""
    if re.match(r"\w+=", text):
        return {name: plain(value) for name, value in _PAIR.findall(text)}
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise InputError(f"{text!r} is neither k=v nor JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise InputError(f"{text!r}: keyword arguments are wanted, as k=v or a JSON object")
    return arguments


def plain(text: str) -> Any:
    """Return the value of a text that is JSON, True, False or None; another text stays as it is."""
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text


# Types of parameters, with their settings on the command line.
Json = Annotated[bool, {"help": "Print JSON instead of a table, for programs."}]
Names = Annotated[tuple[str, ...], takes(several, "NAME,…")]
Columns = Annotated[tuple[str, ...], takes(several, "COLUMN,…")]
Column = Annotated[str | None, {"metavar": "COLUMN"}]
Keywords = Annotated[dict[str, Any], takes(_keywords, "K=V,…|JSON", multiple=True, required=False)]
Count = Annotated[int, {"type": click.IntRange(1)}]
Interval = Literal["bootstrap", "fisher"]
_METADATA = "CSV or JSON file with columns to add to the checkpoints, by their names."
Metadata = Annotated[Path | None, {"names": ["--metadata"], "help": _METADATA}]
_MAX_LOSS = (
    "Leave out networks with a larger loss; inf leaves none out.  [default: those at chance, or with a loss above five "
    "times the median and no accuracy above half way from chance to 1]"
)
MaxLoss = Annotated[float | None, {"help": _MAX_LOSS}]
