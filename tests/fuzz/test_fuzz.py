"""Random networks, losses and data from seeds, held against brute force: no value may be wrong, or falsely exact."""

from dataclasses import replace

import pytest

import pyflatness as pf
from support import fuzz
from support.combinations import in_soak
from support.fuzzed.verdicts import AGREES, CALLS, REFUSED, Total

CHUNK = 25  # networks of a soak test, so that workers share them
SOAK = range(1000, 3000, CHUNK)


@pytest.mark.parametrize("seed", [*range(20), *in_soak(*range(20, 60))])
def test_network(seed):
    verdict = fuzz.judge(seed)
    assert not verdict.failures, f"\n{verdict}"


@pytest.mark.soak
@pytest.mark.parametrize("first", SOAK)
def test_many_networks(first, record_property):
    total = Total()
    for seed in range(first, first + CHUNK):
        total.add(fuzz.judge(seed))
    record_property("fuzz", total.plain())  # summed up in conftest.py
    assert not total.failures, "\n" + "\n\n".join(total.failures)
    assert total.outcomes[AGREES] > 20 * CHUNK
    assert total.outcomes[REFUSED] < 0.1 * total.outcomes[CALLS], str(total)


def test_a_wrong_value_is_seen(monkeypatch):
    """By a library that is off by a millionth, and says that it is exact."""
    measured = pf.measure

    def off(*args, **options):
        report = measured(*args, **options)
        estimates = {key: replace(found, value=found.value * (1 + 1e-6)) for key, found in report._estimates.items()}
        return replace(report, _estimates=estimates)

    monkeypatch.setattr(pf, "measure", off)
    failures = fuzz.judge(0).failures
    assert failures
    assert any(failure.startswith("falsely exact: relative_flatness") for failure in failures)
