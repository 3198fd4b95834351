"""Define what an experiment is: what it claims to redo, what it works with, and what it hands back."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyflatness import __version__
from pyflatness.errors import InputError
from pyflatness.scoring.keys import VALUES_VERSION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .claims import Claim

SCALES = ("small", "paper")


@dataclass(frozen=True)
class Bench:
    """Hold what a run of an experiment works with.

    Attributes:
        scale: ``"small"`` or ``"paper"``.
        settings: of the experiment at that scale, by name.
        folder: for what is kept between runs, trained networks and stores, which experiments share.
        data_dir: where the user's data sets are; None if there are none.
        shown: whether progress bars are; None: on a terminal.
        device: where networks are trained and measured.
    """

    scale: str
    settings: Mapping[str, Any]
    folder: Path
    data_dir: Path | None = None
    shown: bool | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009, which torch does not change

    def on_device(self, data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels on the device, where networks follow them."""
        inputs, labels = data
        return inputs.to(self.device), labels.to(self.device)

    def kept(self, name: str, facts: Any) -> Path:
        """Return the folder of networks that follow from some facts, so that those of other settings are not taken.

        Args:
            name: of the kind of networks.
            facts: all that they depend on; what JSON can say.
        """
        return self.folder / f"{name}-{_digest(json.dumps(facts))[:8]}"

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return what a function does, or did when it was called with this key before; numbers, texts and lists.

        The outcome of another version of the package is not taken.

        Args:
            key: names all that the outcome depends on besides.
            compute: the function.
        """
        key = f"{key}; pyflatness {__version__}, values version {VALUES_VERSION}"
        path = self.folder / f"{_digest(key)}.json"
        if not path.exists():
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"key": key, "outcome": compute()}), encoding="utf-8")
            part.replace(path)
        return json.loads(path.read_text(encoding="utf-8"))["outcome"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def note(failures: dict[str, str], name: str, why: str) -> None:
    """Add a reason to those of a network, which keeps the ones that it has."""
    held = failures.get(name)
    if held is None:
        failures[name] = why
    elif f"; {why}; " not in f"; {held}; ":
        failures[name] = f"{held}; {why}"


@dataclass(frozen=True)
class Points:
    """Hold what an experiment measured, from which all that it says follows.

    Attributes:
        columns: a column of numbers or texts by name, with a row for every point; none is left out.
        failures: what could not be computed or did not converge, by name, and why.
        scale: ``"small"`` or ``"paper"``.
        settings: of the experiment at that scale, by name.
    """

    columns: Mapping[str, list[Any]]
    failures: Mapping[str, str]
    scale: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """Hold one number beside what the paper says of it.

    Attributes:
        what: is measured.
        value: what came out; None where it could not be computed.
        low: the lower end of the 95 % interval; None where there is none.
        high: its upper end.
        paper: the paper's own figure or words.
    """

    what: str
    value: float | None
    low: float | None = None
    high: float | None = None
    paper: str = ""


@dataclass(frozen=True)
class Found:
    """Hold what an experiment found.

    Attributes:
        table: a column of numbers or texts by name, with a row for every point; none is left out.
        findings: the numbers that the verdict is about.
        verdict: a paragraph that says what holds and what does not.
        draw: draws the figure.
        failures: what could not be computed or did not converge, by name, and why.
        size: of the figure, in inches.
        tables: in Markdown, by the names of their places on a page.
        claims: what is decided, for the command's table.
    """

    table: Mapping[str, list[Any]]
    findings: tuple[Finding, ...]
    verdict: str
    draw: "Callable[[Figure], None]"
    failures: Mapping[str, str] = field(default_factory=dict)
    size: tuple[float, float] = (9.0, 6.0)
    tables: Mapping[str, str] = field(default_factory=dict)
    claims: "Sequence[Claim]" = ()


@dataclass(frozen=True)
class Experiment:
    """Describe a figure or table of a paper, and how it is redone.

    Attributes:
        name: on the command line.
        figure: the paper's, such as ``"P21, Figure 3"``.
        title: what is shown, in a line.
        claim: what the paper says of it.
        measure: does the work, and returns columns and failures, as in :class:`Points`.
        judge: says what the points tell about the claim.
        seconds: of one core at small scale, from nothing.
        small: settings that two cores finish in minutes with data from any installation.
        paper: the paper's settings.
        data: what ``paper`` needs in the folder of data sets; empty if nothing.
        long: what ``paper`` takes, in words, as far as it was run.
    """

    name: str
    figure: str
    title: str
    claim: str
    measure: Callable[[Bench], tuple[Mapping[str, list[Any]], Mapping[str, str]]]
    judge: Callable[[Points], Found]
    seconds: int
    small: Mapping[str, Any]
    paper: Mapping[str, Any]
    data: str = ""
    long: str = "not run"

    def run(self, bench: Bench) -> Found:
        """Measure, and say what was found."""
        return self.judge(Points(*self.measure(bench), bench.scale, bench.settings))

    def settings(self, scale: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a scale, with some of them changed.

        Raises:
            InputError: no such scale, no such setting, or a value of another type.
        """
        if scale not in SCALES:
            raise InputError(f"scale={scale!r}: {' or '.join(SCALES)} is wanted")
        settings = dict(self.small if scale == "small" else self.paper)
        for name, value in changes.items():
            if name not in settings:
                raise InputError(f"{self.name}: there is no setting {name!r}; there are {', '.join(settings)}")
            held = settings[name]
            if isinstance(value, bool) or not isinstance(
                value, (int, float) if isinstance(held, float) else type(held)
            ):
                raise InputError(
                    f"{self.name}: {name}={value!r}: type {type(held).__name__} is wanted, such as {held!r}"
                )
        return settings | dict(changes)
