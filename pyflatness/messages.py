"""Turn what came from outside (values, tensors, names, errors of torch's) into text for messages and files.

File names, layers' names and the names in a checkpoint may hold anything: escape sequences that a terminal obeys, bytes
that are not UTF-8, or the beginning of a formula that a spreadsheet would run.
"""

import contextlib
import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .errors import FlatnessError, InputError, printable

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # and tab, CR and LF, which are escaped anyway
_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
ORDER = "the order of arguments is (model, loss, data)"
IN_TRAINING = "is in training mode: call model.eval() first, or pass eval=True"
_LONG_ENOUGH = 3  # letters of a name that is looked for in another one
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_NOT_TWICE = (
    *("is not implemented", "once_differentiable", "differentiate twice", "double backward"),
    "requires create_graph=False",  # of what torch.compile made for one backward pass
)
_SLIPS: tuple[tuple[str, Any, str], ...] = (  # the argument, what is often passed in its place, and what to do then
    ("model", type, "pass an instance of it"),
    ("model", Mapping, "load it into the model first, model.load_state_dict(…)"),
    ("model", (tuple, list, str, Callable), ORDER),
    ("loss", type, "pass an instance of it"),
    ("loss", Iterable, ORDER),
    ("data", Dataset, "it yields single samples: wrap it, DataLoader(dataset, batch_size=256)"),
    ("data", enumerate, "it yields (number, batch) pairs: pass the loader itself"),
    ("data", Mapping, "for one batch pass a list of it, data=[batch]"),
    ("data", Tensor, "pass (inputs, targets), or for a language model [{'input_ids': tokens}]"),
    ("data", Callable, ORDER),
)


def received(argument: str, given: object) -> str:
    """Return what was passed for an argument, and what to do about it if that is a known slip, as a message's end."""
    what = f"the class {given.__name__} itself" if isinstance(given, type) else f"{type(given).__name__}"
    advice = next((advice for name, kinds, advice in _SLIPS if name == argument and isinstance(given, kinds)), "")
    return f"got {what}" + (f"; {advice}" if advice else "")


def unknown_argument(function: str, name: str, known: Collection[str]) -> TypeError:
    """Return the error of an argument that a function does not have, with the ones that may be meant."""
    return TypeError(f"{function}() has no argument {name!r}; did you mean {near(name, known, len(known))}?")


def shown(value: object) -> str:
    """Return what was received as one short line, for a message."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else line[:79] + "…"


def near(name: object, known: Iterable[object], most: int = 5) -> str:
    """Return the known names that one which does not exist may mean, or else the first ones, for a message.

    Names that are a part of it come first, the longest before others, as ``trace`` is of ``hessian_trace``.
    """
    names, given = [*map(str, known)], str(name)
    parts = sorted((one for one in names if len(one) >= _LONG_ENOUGH and one in given), key=len, reverse=True)
    likely = [*dict.fromkeys([*parts, *difflib.get_close_matches(given, names)])]
    return ", ".join((likely or names)[:most])


def instead(name: object, known: Collection[object]) -> str:
    """Return the end of a message on a name that does not exist: all known ones if they are few, else near ones."""
    few = len(known) <= 5
    return f"there are {', '.join(map(str, known))}" if few else f"did you mean {near(name, known)}?"


def in_words(result: object, *facts: str) -> str:
    """Return what a result is printed as: its class, and in brackets its facts but for empty ones."""
    return f"{type(result).__name__}({', '.join(filter(None, facts))})"


def span(numbers: Tensor, form: str = ".6g") -> str:
    """Return the smallest and the largest number as text: "from 0.1 to 3"."""
    low, high = (float(end) for end in numbers.aminmax())
    return f"from {low:{form}} to {high:{form}}"


def with_error(value: float, stderr: float | None) -> str:
    """Return a number as text, to the digits that its standard error leaves: "140 ± 39", "0.6852 ± 0.0020".

    The error has two digits, and the number ends at the same place. Without an error, or where it is NaN, the number
    has six digits.
    """
    if stderr is None or math.isnan(stderr):
        return f"{value:.6g}"
    if not 0 < stderr < math.inf or not math.isfinite(value):
        return f"{value:.6g} ± {stderr:.2g}"
    places = 1 - int(f"{stderr:.1e}".partition("e")[2])  # behind the point, or in front of it where they are negative
    near = round(value, places) + 0.0  # no -0
    if stderr >= 1e-4 and max(abs(near), stderr) < 1e6:
        return f"{near:.{max(places, 0)}f} ± {round(stderr, places):.{max(places, 0)}f}"
    digits = places + 1 + math.floor(math.log10(abs(near))) if near else 1
    return f"{near:.{digits}g} ± {stderr:.2g}"


def reason(error: BaseException) -> str:
    """Return an exception as one line that is safe to print.

    It gives the exception's type, unless that is of pyflatness' own family, and its message.
    """
    text = str(error) if isinstance(error, FlatnessError) else f"{type(error).__name__}: {error}"
    line = printable(" ".join(text.split()))
    return line if len(line) <= 500 else line[:499] + "…"


def duration(seconds: float) -> str:
    """Return a time in hours and minutes, or in minutes and seconds where it is less than an hour."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


def check_tensor(what: str, tensor: object, *, may_be_fake: bool = False) -> Tensor:
    """Return a dense tensor with values in it."""
    if not isinstance(tensor, Tensor):
        hint = "; pass torch.from_numpy(array)" if type(tensor).__module__ == "numpy" else ""
        hint = "; pass torch.tensor(…) of it" if isinstance(tensor, list) else hint
        raise InputError(f"{what}: a tensor is wanted, got {type(tensor).__name__}{hint}")
    if tensor.is_nested:
        raise InputError(f"{what}: a dense tensor is wanted, got a nested one; pad it, torch.nested.to_padded_tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{what}: a dense tensor is wanted, got layout {tensor.layout}; pass tensor.to_dense()")
    if tensor.is_quantized:
        raise InputError(f"{what}: a tensor of numbers is wanted, got {tensor.dtype}; pass tensor.dequantize()")
    if without_values(tensor) and not (may_be_fake and not tensor.is_meta):
        kind = "on the meta device" if tensor.is_meta else f"in a {type(tensor).__name__}"
        raise InputError(f"{what}: {tuple(tensor.shape)} of {tensor.dtype} {kind} has no values; load it")
    return tensor


def without_values(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape and no values."""
    return tensor.is_meta or hasattr(tensor, "fake_mode")  # a FakeTensor


def check_module(what: str, model: object) -> nn.Module:
    """Return a module."""
    if not isinstance(model, nn.Module):
        raise InputError(f"{what}: a torch.nn.Module is wanted, {received(what, model)}")
    return model


def check_choice(
    option: str, given: object, choices: Collection[str | None], error: type[FlatnessError] = InputError
) -> None:
    """Raise if an option is none of its choices."""
    if not (given is None or isinstance(given, str)) or given not in choices:
        raise error(f"{option}={shown(given)} does not exist; choose one of {', '.join(map(repr, choices))}")


def check_path(option: str, given: object) -> Path:
    """Return where a file is, or is to be."""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or os.path.isdir(text):  # noqa: PTH112 (for names that no file can have)
        raise InputError(f"{option}={shown(given)}: the path of a file is wanted")
    return Path(text)


def is_out_of_memory(error: Exception | str) -> bool:
    """Return whether torch says that memory did not suffice."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def lacks_a_second_derivative(error: Exception) -> bool:
    """Return whether torch says that an operation can be differentiated once only."""
    return any(text in str(error) for text in _NOT_TWICE)


@contextlib.contextmanager
def second_derivatives(what: str, advice: str) -> Iterator[None]:
    """Raise a clear error where an operation inside the context can be differentiated once only."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_a_second_derivative(error):
            raise
        raise InputError(f"{what} ({error}); {advice}") from error


def to_cell(text: str) -> str:
    """Return the text as a cell of a CSV file: one printable line that no spreadsheet takes for a formula.

    Characters that cannot be printed become Python's escapes and a backslash becomes two. A cell that would begin with
    ``=``, ``+``, ``-``, ``@`` or the wide form of one gets an apostrophe in front, and so does a cell that begins with
    an apostrophe: :func:`from_cell` gives the text back. Source: OWASP, "CSV Injection".
    """
    cell = printable(text.replace("\\", "\\\\"))
    return f"'{cell}" if cell.startswith((*_FORMULA, "'")) else cell


def from_cell(cell: str) -> str:
    """Return the text that :func:`to_cell` made the cell of."""
    return _ESCAPE.sub(lambda found: found[0].encode().decode("unicode_escape"), cell.removeprefix("'"))
