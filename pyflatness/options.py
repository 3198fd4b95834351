"""Define and check the options that calls share, and check single options of calls that have options of their own.

Numbers and switches may come as NumPy's or as tensors without dimensions; from here on they are Python's.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from . import contractions
from .errors import BackendError, InputError
from .messages import check_choice, shown
from .numerics.accumulate import NAN_POLICIES, omits, raises
from .numerics.process_groups import Group

MAX_PASSES = 2048  # backward passes of a micro-batch, or Hessian products of a layer, unless the user says otherwise
_MOST_PROBES = 2**20  # random ones: their standard error is a thousandth of one's, and each has numbers to keep
_CHOICES = {
    "curvature": ("auto", "ggn", "hessian"),
    "conv": ("filter", "affine"),
    "normalize": (None, "std"),
    "nan_policy": NAN_POLICIES,
}


class How(TypedDict, total=False):
    """Say how a call is made: what calls take beside model, loss and data. Each call's signature has those it takes.

    Attributes:
        backend: ``"auto"``, ``"compiled"``, ``"triton"`` (wide heads on a GPU, else as auto) or ``"reference"``.
        nan_policy: what to do about NaN or infinity in a sample: ``"raise"``, ``"propagate"`` (its own value, and so
            the mean, becomes NaN) or ``"omit"`` (left out of the data set, and counted).
        reduction: ``"mean"`` or ``"sum"``, if the loss does not say or means another.
        forward: ``(model, batch) -> (outputs, targets)`` for models and batches that are called otherwise.
        eval: put the model in eval mode for the call, and each module back in its own afterwards. Without it a model
            whose training mode matters (BatchNorm, dropout) is an error.
        memory: bytes to hold at a time beside model, data and result: at a head for the contraction (24 MiB unless
            given, on a GPU 416; a batch's forward pass comes on top), elsewhere (512 MiB, on a GPU a quarter of its
            memory) shared out among a micro-batch's graph, to which batches are cut, and what is made of it. The least
            that is taken at a time is one sample, or at a head sixteen rows and classes; ``estimate.notes`` says so
            where one sample takes more.
        seed: of what is random; another device may have other noise for it. Random signs belong to samples by
            their place in the data: with a number of probes one seed is one value, however data is cut into batches.
        max_passes: backward passes of a micro-batch, or Hessian products of a layer, that an exact value may take, and
            probes that a standard error may; more are an error that says how long they would take.
        progress: show a bar; None: on a terminal, and elsewhere a line every half minute. False: nothing.
        process_group: whose ranks make the call together, each with its own data, and all get the value of the whole
            (docs/ranks.md). None: all ranks, where ``torch.distributed`` is initialised; False: this process alone.
    """

    backend: str
    nan_policy: str
    reduction: str | None
    forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None
    eval: bool
    memory: int | None
    seed: int
    max_passes: int
    progress: bool | None
    process_group: Group


class MeasureHow(How, total=False):
    """Say how layers are measured, beside how the call is made.

    Attributes:
        curvature: ``"auto"``: the Hessian value, by the head, by the GGN where the model is certified to be locally
            linear in the layer's weight (ReLU, pooling, eval BatchNorm, sums), else by Hessian products. ``"ggn"``: the
            GGN value (``exact`` says whether it is the Hessian's too). ``"hessian"``: as ``"auto"``, but behind
            functions that torch did not write too, where ``"auto"`` is an error.
        probes: a sampled value with a standard error, for fewer passes: k random probes for each sample: directions for
            Hessian products, or signs over the columns of its square-root factor. ``"adaptive"``: the columns in groups
            with random signs, heavy ones alone, as many groups a sample as ``rtol`` takes; and where the model is not
            locally linear in the weight, what that lacks of the Hessian by Hessian probes, most of them for samples on
            which the loss has a large gradient. How data is cut into batches may then change the value, within its
            standard error; exact, without one, where each column is alone, and where exact Hessian products are fewer
            than probes. A head needs no passes and stays exact.
        rtol: a standard error aimed at, relative to the value of each layer; it means ``probes="adaptive"``, which has
            0.01 unless this is given. How many probes that takes is found from the outputs and the probes so far, so
            what is reached differs a little; ``stderr`` says what was. The relative flatness of a head alone has an
            error that is guaranteed in its place, see :func:`pyflatness.head_flatness`.
        fraction: the part of the data that is sent backward, in (0, 1]; the others take a forward pass, which says how
            large the trace of each sample's loss Hessian in the outputs is. Samples are drawn in proportion to it by
            the seed and their places, and stand for all by a ratio, with a standard error. ``"auto"``, with ``rtol=``:
            as many as that takes, found from a first part, with one probe each unless ``probes=k`` says more; all of
            them as ``probes="adaptive"`` has them where that is more than half. Of GGN values; the data are read twice
            or more often, in one order.
        conv: ``"filter"``: rows of a convolution are its filters. ``"affine"``: the convolution as one dense matrix of
            all inputs and outputs, a row for every output pixel.
        normalize: ``"std"``: the measure of Theorem 4, invariant to every rescaling of neurons; reads the data twice.
        per_sample: also return each sample's value, (n,), whose mean is the value.
    """

    curvature: str
    probes: int | str | None
    rtol: float | None
    fraction: float | str | None
    conv: str
    normalize: str | None
    per_sample: bool


READING = ("forward", "eval", "progress", "process_group")  # what every call takes that runs a model on data
CALL = ("reduction", *READING)  # and every one that has a loss
EVERY = (*(name for name in MeasureHow.__annotations__ if name not in How.__annotations__), *How.__annotations__)


@dataclass(frozen=True)
class Options:
    """Hold the checked options of a measurement, which :class:`How` and :class:`MeasureHow` describe."""

    curvature: str = "auto"
    probes: int | str | None = None
    conv: str = "filter"
    normalize: str | None = None
    per_sample: bool = False
    backend: str = "auto"
    nan_policy: str = "raise"
    memory: int | None = None
    seed: int = 0
    rtol: float | None = None
    fraction: float | str | None = None
    max_passes: int = MAX_PASSES

    @classmethod
    def of(cls, how: Mapping[str, Any], **others: Any) -> "Options":
        """Return the checked options of a call, without those that say how a model is run."""
        if not how and not others:
            return _DEFAULTS
        names = cls.__dataclass_fields__
        return cls(**{name: given for name, given in how.items() if name in names}, **others)

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_choice("backend", self.backend, contractions.BACKENDS, BackendError)
        self._set("per_sample", check_flag("per_sample", self.per_sample))
        self._set("seed", check_seed("seed", self.seed))
        self._set("max_passes", check_count("max_passes", self.max_passes, 1, "a number of passes"))
        if self.memory is not None:
            self._set("memory", check_count("memory", self.memory, 1, "a number of bytes"))
        if self.probes is not None and not (isinstance(self.probes, str) and self.probes == "adaptive"):
            wanted = "a number of random probes for each sample or 'adaptive'"
            self._set("probes", check_probes("probes", self.probes, 1, wanted))
        if self.fraction is not None:
            self._check_fraction()
        if self.rtol is not None:
            self._check_rtol()

    def _check_fraction(self) -> None:
        if not isinstance(self.fraction, str) or self.fraction != "auto":
            wanted = "a fraction of the samples above 0 and at most 1, or 'auto' with rtol=,"
            fraction = check_number("fraction", self.fraction, wanted, lambda fraction: 0 < fraction <= 1)
            self._set("fraction", fraction if fraction < 1 else None)
        elif self.rtol is None:
            raise InputError("fraction='auto' is as much of the data as a standard error takes: pass rtol= with it")
        elif self.probes is None:
            self._set("probes", 1)
        others = {
            "probes='adaptive'": self.probes == "adaptive",
            "rtol= (but fraction='auto')": self.rtol is not None and self.fraction != "auto",
            "per_sample=True": self.per_sample,
            f"nan_policy={self.nan_policy!r}": not raises(self.nan_policy),
        }
        for name in [name for name, given in others.items() if given and self.fraction is not None]:
            raise InputError(f"fraction={self.fraction!r} does not go with {name}; leave out one of them")

    def _check_rtol(self) -> None:
        if self.probes != "adaptive" and self.fraction != "auto" and self.sampled:
            raise InputError(f"rtol={self.rtol!r} says how many probes to take; pass it without probes=")
        if self.sampled:
            wanted = "a relative standard error between 0 and 1"
            self._set("rtol", check_number("rtol", self.rtol, wanted, lambda rtol: 0 < rtol < 1))
        else:
            wanted = "a relative error from 0 to less than 1"
            self._set("rtol", check_number("rtol", self.rtol, wanted, lambda rtol: 0 <= rtol < 1))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for others

    @property
    def by_sample(self) -> bool:
        """Return whether samples are told apart by their places in the data."""
        return self.per_sample or self.fraction is not None or omits(self.nan_policy)

    @property
    def tolerance(self) -> float:
        """Return the relative error that a value of a head may have for the sake of time."""
        return 0.0 if self.sampled or self.rtol is None else self.rtol

    @property
    def of_layers(self) -> "Options":
        """Return the same options for values of any layers, where ``rtol`` alone means ``probes="adaptive"``."""
        return replace(self, probes="adaptive") if self.tolerance else self

    def normalized(self, how: str | None) -> "Options":
        """Return the same options with ``normalize=how``."""
        return self if how == self.normalize else replace(self, normalize=how)

    @property
    def sampled(self) -> bool:
        """Return whether values are to be sampled."""
        return not (self.probes is None and self.fraction is None)

    @property
    def by_default(self) -> bool:
        """Return whether no option says which values are wanted, and what they may take."""
        return not self.sampled and self.curvature == "auto" and self.max_passes == MAX_PASSES

    @property
    def by_ggn(self) -> bool:
        """Return whether values are to be the GGN's, also where these are not the Hessian's."""
        return self.curvature == "ggn"

    @property
    def draws(self) -> range | None:
        """Return the numbers of each sample's probes; None where values are exact, or say how many themselves."""
        return range(self.probes) if isinstance(self.probes, int) else None

    @property
    def reads(self) -> int:
        """Return how often one sweep reads the data."""
        return 1 + sum(option is not None for option in (self.normalize, self.fraction))


def check_progress(how: Mapping[str, Any]) -> bool | None:
    """Return whether a call shows a bar; None: on a terminal."""
    given = how.get("progress")
    return None if given is None else check_flag("progress", given)


def check_count(name: str, value: Any, least: int, wanted: str = "a whole number", most: float = math.inf) -> int:
    """Return an option that counts something as an int."""
    given = _plain(value)
    if type(given) is not int or not least <= given <= most:
        limits = f"at least {least}" + (f" and at most {most}" if most < math.inf else "")
        raise InputError(f"{name}={shown(value)}: {wanted} is wanted, {limits}")
    return given


def check_probes(name: str, value: Any, least: int, wanted: str = "a whole number") -> int:
    """Return a number of random vectors, see :func:`check_count`."""
    return check_count(name, value, least, wanted, _MOST_PROBES)


def check_seed(name: str, value: Any) -> int:
    """Return a seed as an int."""
    given = _plain(value)
    if type(given) is not int or not -(2**63) <= given < 2**63:
        raise InputError(f"{name}={shown(value)}: an integer of 64 bits is wanted")
    return given


def check_number(
    name: str,
    value: Any,
    wanted: str = "a positive number",
    fits: Callable[[float], bool] = lambda value: 0 < value < math.inf,
) -> float:
    """Return an option that is a real number, or an estimate of one, as a float."""
    given = _plain(value)
    if not _is_real(given) or not fits(float(given)):
        raise InputError(f"{name}={shown(value)}: {wanted} is wanted")
    return float(given)


def check_numbers(
    option: str,
    given: Any,
    wanted: str = "positive numbers",
    fits: Callable[[float], bool] = lambda value: 0 < value < math.inf,
) -> list[float]:
    """Return an option that is several numbers, one at least, as a list."""
    found = check_several(option, given, wanted)
    if not found:
        raise InputError(f"{option}={shown(given)}: {wanted} are wanted, one at least")
    for number in found:
        if not _is_real(_plain(number)) or not fits(float(_plain(number))):
            raise InputError(f"{option}={shown(given)}: {wanted} are wanted, and {shown(number)} is among them")
    return [float(_plain(number)) for number in found]


def check_function(option: str, given: Any, called: str) -> Callable[..., Any]:
    """Return an option that is a function."""
    if not callable(given):
        raise InputError(f"{option}={shown(given)}: a function {called} is wanted")
    return given  # type: ignore[no-any-return]


def check_flag(name: str, value: Any) -> bool:
    """Return a switch as a bool."""
    given = _plain(value)
    if type(given) is not bool:
        raise InputError(f"{name}={shown(value)}: True or False is wanted")
    return given


def check_dtype(option: str, given: Any) -> torch.dtype:
    """Return the dtype of floating-point numbers that has a name."""
    kind = getattr(torch, given, None) if isinstance(given, str) else None
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise InputError(f"{option}: float32 or another type of floating-point numbers is wanted, got {shown(given)}")
    return kind


def check_names(option: str, given: Any, hint: str = "") -> list[str]:
    """Return one name or several as a list, each once."""
    wanted = f"a name or several{hint}"
    found = [given] if isinstance(given, str) else check_several(option, given, wanted)
    for name in found:
        if not isinstance(name, str):
            raise InputError(f"{option}={shown(given)}: {wanted} are wanted, and {shown(name)} is among them")
    return [*dict.fromkeys(found)]


def check_several(option: str, given: Any, wanted: str) -> list[Any]:
    """Return an option that is a list, an array or the like as a list."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
        raise InputError(f"{option}={shown(given)}: {wanted} are wanted")
    return [*given]


def _is_real(given: Any) -> bool:
    """Return whether it is a real number, or an estimate of one."""
    return hasattr(given, "__float__") and not isinstance(given, bool) and getattr(given, "ndim", 0) == 0


def _plain(value: Any) -> Any:
    """Return a NumPy scalar or a tensor without dimensions as the Python number that it holds, None if it has none."""
    if type(value) in (bool, int, float):  # as nearly all are, and a call of a few microseconds asks for four
        return value
    if getattr(value, "ndim", None) != 0 or not hasattr(value, "item"):
        return value
    return None if isinstance(value, Tensor) and value.is_meta else value.item()


_DEFAULTS = Options()  # checked once
