"""What comes of holding values against the truth: they agree, say that they are not exact, or are wrong."""

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

import pyflatness as pf
from pyflatness.report import Estimate
from support.fuzzed.cases import Case
from support.fuzzed.truth import Value
from support.unchanged import assert_unchanged, snapshot

RTOL = 1e-9  # of the size of what is added up for a value
AGREES, INEXACT, AT_KINK = "agrees", "not exact, as it says", "failures where the loss has no derivative"
REFUSED, CALLS = "refused", "calls"
WRONG, FALSELY_EXACT, RAW, STATE = "wrong", "falsely exact", "another exception", "state left behind"
FAILURES = (WRONG, FALSELY_EXACT, RAW, STATE)


@dataclass
class Verdict:
    """What came of the comparisons of one network.

    Attributes:
        case: the network.
        counts: (outcome, measure) -> values.
        reasons: refusals by their message, names and numbers left out.
        failures: a line for each value, call or state that failed.
    """

    case: Case
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def call(self, what: str, run: Callable[[], Any]) -> Any:
        """Return the result, or None of a call that was refused; nothing of the model may have changed."""
        before = snapshot(self.case.model)
        result = None
        self.counts[CALLS, what] += 1
        try:
            result = run()
        except pf.errors.FlatnessError as error:
            self.counts[REFUSED, what] += 1
            self.reasons[f"{what}: {_without_names(str(error))}"] += 1
        except Exception:
            self._fail(RAW, what, traceback.format_exc(limit=-6))
        try:
            assert_unchanged(self.case.model, before)
            assert parametrize._cache_enabled == 0
        except AssertionError as error:
            self._fail(STATE, what, str(error)[:300])
        return result

    def compare(self, what: str, estimate: Estimate, hessian: Value, ggn: Value | None = None) -> None:
        """A value against the Hessian's; with ``ggn``, it is to be the GGN's, which may be the Hessian's too."""
        of_hessian, of_its_own = _close(estimate.value, hessian), _close(estimate.value, ggn or hessian)
        if estimate.exact and not of_hessian:
            self._fail(FALSELY_EXACT, what, f"{estimate!r} for {hessian[0]!r}")
        elif not of_its_own:
            self._fail(WRONG, what, f"{estimate!r} for {(ggn or hessian)[0]!r}")
        else:
            self.counts[AGREES if of_hessian else INEXACT, what] += 1

    def compare_each(self, what: str, values: Tensor | None, expected: Sequence[Value]) -> None:
        """Values of samples or neurons."""
        if values is None or len(values) != len(expected):
            self._fail(WRONG, what, f"{values!r} for {len(expected)} values")
            return
        for number, (value, truth) in enumerate(zip(values.tolist(), expected, strict=True)):
            if _close(value, truth):
                self.counts[AGREES, what] += 1
            else:
                self._fail(WRONG, what, f"[{number}]: {value!r} for {truth[0]!r}")

    def compare_sampled(self, what: str, estimate: Estimate, expected: Value) -> None:
        """A sampled value within eight of its standard errors, where they are known; an exact one as any other."""
        if estimate.stderr is None:
            self.compare(what, estimate, expected)
        elif math.isnan(estimate.stderr):
            self.counts[FALSELY_EXACT if estimate.exact else INEXACT, what] += 1
        elif abs(estimate.value - expected[0]) <= 8 * estimate.stderr + RTOL * expected[1] + 1e-13:
            self.counts[FALSELY_EXACT if estimate.exact else AGREES, what] += 1
        else:
            self._fail(WRONG, what, f"{estimate!r} for {expected[0]!r}")

    def leave_out(self) -> None:
        """Count the failures, but for raw exceptions and state, as those of a network without a derivative."""
        for outcome, what in [*self.counts]:
            if outcome in (WRONG, FALSELY_EXACT):
                self.counts[AT_KINK, what] += self.counts.pop((outcome, what))
        self.failures = [line for line in self.failures if line.startswith((RAW, STATE))]

    def hold(self, what: str, condition: bool, detail: str) -> None:
        if not condition:
            self._fail(WRONG, what, detail)

    def _fail(self, outcome: str, what: str, detail: str) -> None:
        self.counts[outcome, what] += 1
        self.failures.append(f"{outcome}: {what}: {detail}")

    def __str__(self) -> str:
        more = [f"and {len(self.failures) - 8} more"] if len(self.failures) > 8 else []
        again = f"again: python tests/support/fuzz.py {self.case.seed}"
        return "\n".join([*self.failures[:8], *more, str(self.case), again])


def _close(value: float, truth: Value) -> bool:
    expected, size = truth
    if math.isnan(expected) or math.isinf(expected):
        return str(value) == str(expected)
    return abs(value - expected) <= RTOL * max(size, abs(expected)) + 1e-13


def _without_names(message: str) -> str:
    message = re.sub(r"'[^']*'(, '[^']*')*", "…", message)
    message = re.sub(r"\([\d, ]*\)|[-+\d.]+(e[-+]?\d+)?", "#", message)
    return message[:120]


@dataclass
class Total:
    """Over networks: values by outcome, refusals by reason, and what failed."""

    networks: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.networks += 1
        self.reasons.update(verdict.reasons)
        for (outcome, _), count in verdict.counts.items():
            self.outcomes[outcome] += count
        if verdict.failures:
            self.failures.append(str(verdict))

    def plain(self) -> dict[str, Any]:
        """Return the total as what can be sent to another process."""
        return {
            "networks": self.networks,
            "outcomes": dict(self.outcomes),
            "reasons": dict(self.reasons),
            "failures": self.failures,
        }

    @classmethod
    def of(cls, parts: dict[str, Any]) -> "Total":
        """Return what :meth:`plain` was made from."""
        return cls(parts["networks"], Counter(parts["outcomes"]), Counter(parts["reasons"]), parts["failures"])

    def __add__(self, other: "Total") -> "Total":
        return Total(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    def __str__(self) -> str:
        values = sum(count for outcome, count in self.outcomes.items() if outcome not in (REFUSED, CALLS))
        lines = [f"{self.networks} networks, {values} values, {len(self.failures)} networks with failures"]
        lines += [f"  {self.outcomes[name]:7d} {name}" for name in (AGREES, INEXACT, AT_KINK, *FAILURES)]
        lines += [f"  {self.outcomes[REFUSED]:7d} calls refused, of {self.outcomes[CALLS]}"]
        lines += [f"  {count:7d} {reason}" for reason, count in self.reasons.most_common()]
        return "\n".join(lines)
