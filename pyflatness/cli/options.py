"""Define the options that several commands share, take them from a YAML file, check their values, and complete them."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from click.shell_completion import CompletionItem
from torch import nn
from torch.nn import functional as F

from .. import losses
from ..errors import InputError
from ..losses import auto
from ..measures import MEASURES, named
from ..options import MAX_PASSES, check_dtype
from ..scoring import data_specs, specs
from ..scoring.specs import Function

C = TypeVar("C", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table, for programs.")


def metadata_option(more: str = "") -> Callable[[C], C]:
    """Return the option ``--metadata FILE``, which arrives as ``table``; ``more`` is of the help."""
    what = "CSV or JSON file with columns to add to the checkpoints, by their names."
    return click.option("--metadata", "table", type=PATH, help=what + more)


max_loss_option = click.option(
    "--max-loss",
    type=float,
    help="Leave out networks with a larger loss; inf leaves none out.  [default: those at chance, or with a loss above "
    "five times the median]",
)
device_option = click.option("--device", metavar="DEVICE", help="Where the model runs: cpu, cuda, cuda:1, …")
dtype_option = click.option("--dtype", help="Dtype of the weights, such as bfloat16.  [default: as the model is made]")


def moved(device: str | None, dtype: str | None) -> dict[str, Any]:
    """Return the arguments of ``nn.Module.to`` for these options."""
    to: dict[str, Any] = {}
    if device is not None:
        try:
            to["device"] = torch.device(device)
        except RuntimeError as error:
            raise InputError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if dtype is not None:
        to["dtype"] = check_dtype("--dtype", dtype)
    return to


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
        parts = value if isinstance(value, list) else [value]
        return [json.dumps(part) if isinstance(part, (dict, list)) else str(part) for part in parts]
    return json.dumps(value) if isinstance(value, (dict, list)) else value


def several(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that may come several in one, with commas between them, but in brackets and ``re:…``."""
    split = [[text] if text.startswith("re:") else re.split(r",(?![^\[{(]*[\]})])", text) for text in given]
    return tuple(name.strip() for names in split for name in names if name.strip())


def several_option(*names: str, metavar: str = "NAME,…", **more: Any) -> Callable[[C], C]:
    """Return an option of names, see :func:`several`; it may be repeated."""
    return click.option(*names, metavar=metavar, multiple=True, callback=several, **more)


def json_value(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    """Return the value of an option that takes keyword arguments, each time as JSON or as ``k=v``."""
    return {name: value for text in given for name, value in _usage(json_object, text).items()}


def keywords_option(name: str, what: str) -> Callable[[C], C]:
    """Return an option of keyword arguments, see :func:`json_value`."""
    return click.option(name, metavar="K=V,…|JSON", multiple=True, callback=json_value, help=what)


def spec_option(
    name: str, what: str, resolve: Callable[[str], Function] = specs.resolve, more: str = "", *, required: bool = True
) -> Callable[[Function], Function]:
    """Return two click options: ``--name SPEC``, which arrives as a callable, and ``--name-args JSON``, as a dict."""

    def resolved(context: click.Context, parameter: click.Parameter, text: str | None) -> Function | None:
        context.meta[name] = text
        return None if text is None else _usage(resolve, text)

    def add(command: Function) -> Function:
        what_it_takes = "Keyword arguments of that callable: k=v, with commas or repeated, or a JSON object."
        arguments = keywords_option(f"--{name}-args", what_it_takes)
        spec = click.option(
            f"--{name}",
            metavar="SPEC",
            required=required,
            callback=resolved,
            help=f"file.py:callable or package.module:callable that returns {what}.{more}",
        )
        return spec(arguments(command))

    return add


def spec_of(name: str) -> str:
    """Return the SPEC of ``--name`` as it was given, for workers that resolve it by themselves."""
    found: str = click.get_current_context().meta[name]
    return found


_LIBRARIES = " Or hf:FOLDER, hf:ORG/NAME@REVISION (from the local cache), timm:NAME, torchvision:NAME."
model_option = spec_option("model", "the model", more=_LIBRARIES)
models_option = spec_option(
    "model", "the model", more=_LIBRARIES + " CHECKPOINTs that are such names need none.", required=False
)


def bind(function: Function, arguments: dict[str, Any], name: str) -> Callable[[], Any]:
    """Return the callable of ``--name`` with its arguments; see :func:`pyflatness.scoring.specs.bind`."""
    try:
        return specs.bind(function, arguments, f"--{name}")
    except InputError as error:
        raise click.BadParameter(str(error), param_hint=f"--{name}-args") from None


def _usage(convert: Callable[[str], Any], text: str) -> Any:
    try:
        return convert(text)
    except InputError as error:
        raise click.BadParameter(str(error)) from None


_PAIR = re.compile(r"(\w+)=(.*?)(?=,\w+=|$)", re.DOTALL)


def json_object(text: str) -> dict[str, Any]:
    """Return a JSON object of keyword arguments, or ``k=v,k=v``, whose values are JSON, True, False, None or texts."""
    if re.match(r"\w+=", text):
        return {name: _plain(value) for name, value in _PAIR.findall(text)}
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise InputError(f"{text!r} is neither k=v nor JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise InputError(f"{text!r}: keyword arguments are wanted, as k=v or a JSON object")
    return arguments


def _plain(text: str) -> Any:
    words = {"True": True, "False": False, "None": None}
    try:
        return words[text] if text in words else json.loads(text)
    except ValueError:
        return text


def measures(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of measures, which may come several in one, with commas between them."""
    names = several(context, parameter, given)
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


def loss_of(name: str, options: dict[str, Any]) -> Any:
    """Return the loss of ``--loss`` and ``--loss-args``: a name, a function with its options, or a module."""
    if auto.is_auto(name) and not options:
        return name
    tensors = {key: torch.tensor(value) if isinstance(value, list) else value for key, value in options.items()}
    kind = getattr(nn, name, None) if name.endswith("Loss") else None
    try:
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            loss: Any = kind(**tensors)
        else:
            losses.resolve(name)
            loss = functools.partial(getattr(F, name), **tensors) if tensors else name
        losses.resolve(loss)
    except TypeError as error:
        raise click.BadParameter(f"{json.dumps(options)}: {error}", param_hint="--loss-args") from None
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--loss") from None
    return loss


_NETWORK: tuple[Callable[[Any], Any], ...] = (
    spec_option(
        "data",
        "batches: a DataLoader, a list or a tuple of tensors; or .npz, .txt, .jsonl, .parquet, a folder of images or "
        "of a saved data set",
        data_specs.resolve,
    ),
    click.option(
        "--loss",
        metavar="NAME",
        default="auto",
        show_default=True,
        shell_complete=complete_losses,
        help="The loss it was trained with: cross_entropy, mse_loss, … or a class of torch.nn: HuberLoss, …; auto: "
        "that of a Hugging Face model.",
    ),
    keywords_option("--loss-args", "Options of that loss: k=v, with commas or repeated, or a JSON object."),
    several_option(
        *("--layers", "selectors"),
        metavar="SELECTOR,…",
        help="Layers: name, glob, re:… or type:…; with commas or repeated.  [default: all that can be measured]",
    ),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random numbers of estimates."),
    click.option(
        "--limit",
        metavar="N|PART",
        callback=limit,
        help="Measure on the first N samples, or on this part of all of them, such as 0.1.",
    ),
    click.option(
        "--batch-size",
        metavar="N|auto",
        callback=batch_size,
        help="Cut batches to N samples; auto: in halves when memory does not suffice.  [default: as the "
        "data have them]",
    ),
    device_option,
    dtype_option,
)
curvature_option = click.option(
    "--curvature",
    type=click.Choice(["auto", "ggn", "hessian"]),
    default="auto",
    show_default=True,
    help="auto: of the Hessian, by its generalised Gauss-Newton part (GGN) where these are the same; ggn: of the "
    "GGN; hessian: as auto, and behind functions that torch did not write, too.",
)
_VALUES: tuple[Callable[[Any], Any], ...] = (
    curvature_option,
    click.option(
        "--measures",
        metavar="NAME,…",
        multiple=True,
        default=[MEASURES[0].name],
        show_default=True,
        callback=measures,
        shell_complete=complete_measures,
        help="See pyflatness measures; 'sweep'; 'all'. Of several layers there is a row for the network, with no "
        "layer.",
    ),
    click.option(
        "--probes",
        metavar="K|adaptive",
        callback=probes,
        help="Estimate values by so many random probes of each sample, with standard errors.  [default: exact values]",
    ),
    click.option(
        "--rtol",
        type=float,
        help="Estimate every value to about this relative standard error, as --probes adaptive does for 0.01; of heads "
        "alone a relative error that is guaranteed.",
    ),
    click.option(
        "--fraction",
        metavar="PART|auto",
        callback=fraction,
        help="Send this part of the data backward, such as 0.1, and estimate all by it, with standard errors; auto: as "
        "much as --rtol takes.  [default: all]",
    ),
    click.option(
        "--max-passes",
        type=click.IntRange(1),
        default=MAX_PASSES,
        show_default=True,
        help="Backward passes of a micro-batch, or Hessian products of a layer, that exact values may take.",
    ),
)


def asked_of_a_network(command: C) -> C:
    """Add the options that say which network is measured, but for the model: on which data, with which loss."""
    for option in reversed(_NETWORK):
        command = option(command)
    return command


def asked(command: C) -> C:
    """Add the options of :func:`asked_of_a_network`, and those that say which values are wanted."""
    for option in reversed(_VALUES):
        command = option(command)
    return asked_of_a_network(command)
