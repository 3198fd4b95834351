"""``python -m benchmarks.papers`` as a function; the benchmarks are no part of a source distribution."""

import pytest

from support import ROOT

if not (ROOT / "benchmarks" / "papers").is_dir():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def status():
    """A function that runs the command and returns its exit status, or the text of its error."""
    from benchmarks.papers.__main__ import main

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        return exit_.value.code or 0

    return run
