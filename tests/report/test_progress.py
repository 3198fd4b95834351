"""Lines in a log, where a terminal would have a bar."""

import pytest

from pyflatness import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on by 12 seconds whenever it is read."""
    seconds = iter(range(0, 10_000, 12))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))


def test_a_log_gets_a_line_every_half_minute(clock, capsys):
    assert [*progress.track(range(7), 7, "sweep", None)] == [*range(7)]
    assert capsys.readouterr().err.splitlines() == ["sweep: 3 of 7 after 36 s", "sweep: 6 of 7 after 72 s"]
    with progress.bar("plan", 9, None) as advance:
        for _ in range(4):
            advance(2, "layer 'a'")
    assert capsys.readouterr().err.splitlines() == ["plan: layer 'a': 6 of 9 after 36 s"]


def test_no_lines_where_they_are_not_wanted_or_not_needed(clock, monkeypatch, capsys):
    assert [*progress.track(range(7), 7, "sweep", False)] == [*range(7)]
    monkeypatch.setattr(progress, "_EVERY", 1e9)
    assert [*progress.track(range(7), 7, "sweep", None)] == [*range(7)]
    assert capsys.readouterr().err == ""
