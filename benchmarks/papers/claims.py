"""Hold findings against claims: a claim is seen, or its opposite is, or the interval does not decide."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyflatness.report.intervals import student_t
from pyflatness.statistics.intervals import FEWEST

from .experiment import Finding

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEEN, AGAINST, EDGE, OPEN = "seen", "against it", "at the edge", "not decided"
MARGIN = 0.02
"""An end nearer to the border than this fraction of the interval may be on its other side on another machine."""


class Claim(NamedTuple):
    """Represent what a finding is said to be.

    Attributes:
        finding: a number with its interval.
        sign: 1: it is above the border; -1: it is below.
        border: that it is held against.
        named: what a sentence calls it; "": as the finding does.
    """

    finding: Finding
    sign: int = 1
    border: float = 0.0
    named: str = ""

    def decided(self) -> str:
        """Return ``SEEN`` or ``AGAINST`` where the whole interval is on one side of the border, or else ``OPEN``.

        Where the border is at an end of the interval, within the rounding of a training, it is ``EDGE``.
        """
        low, high = self.finding.low, self.finding.high
        if low is None or high is None:
            return OPEN
        if min(abs(low - self.border), abs(high - self.border)) < MARGIN * (high - low):
            return EDGE
        if low <= self.border <= high:
            return OPEN
        return SEEN if (low > self.border) == (self.sign > 0) else AGAINST


def grouped(claims: Sequence[Claim]) -> str:
    """Return sentences that say of all claims, by what was decided, what came out."""
    groups = {
        said: [
            f"{claim.named or claim.finding.what} {shown(claim.finding)}" for claim in claims if claim.decided() == said
        ]
        for said in (SEEN, AGAINST, EDGE, OPEN)
    }
    return " ".join(f"{said.capitalize()}: {'; '.join(those)}." for said, those in groups.items() if those)


def shown(finding: Finding) -> str:
    """Return a number with its interval, for a sentence; two digits behind the point, or those that tell it from 0."""
    if finding.value is None:
        return "not defined"
    ends = [end for end in (finding.low, finding.high) if end is not None]
    value, *rest = (_short(number) for number in (finding.value, *ends))
    return f"{value} [{', '.join(rest)}]" if rest else value


def average(what: str, values: Sequence[float], paper: str = "") -> Finding:
    """Return the mean of independent values, with the 95 % interval by Student's t if there are at least five."""
    if not values:
        return Finding(what, None, paper=paper)
    mean = statistics.fmean(values)
    if len(values) < FEWEST:
        return Finding(what, mean, paper=paper)
    half = student_t(0.95, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Finding(what, mean, mean - half, mean + half, paper)


def number(finding: Finding) -> float:
    """Return a finding's value; NaN where there is none."""
    return math.nan if finding.value is None else finding.value


def error_bars(axes: "Axes", places: Sequence[float], findings: Sequence[Finding], label: str | None = None) -> None:
    """Draw findings with their intervals, as far as they have some, joined by a line."""
    values = [number(item) for item in findings]
    below, above = (
        [0.0 if end is None else abs(end - value) for end, value in zip(ends, values, strict=True)]
        for ends in ([item.low for item in findings], [item.high for item in findings])
    )
    axes.errorbar(places, values, [below, above], fmt="o-", capsize=3, label=label)


def _short(number: float) -> str:
    return f"{number:.2f}" if abs(number) >= 0.005 or abs(number) < 1e-12 else f"{number:.1g}"
