"""What a release says of itself."""

import importlib.metadata
import re

import pyflatness as pf
from support import ROOT


def test_there_is_one_version() -> None:
    assert importlib.metadata.version("pyflatness") == pf.__version__
    assert f"\nversion: {pf.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_changelog_begins_with_it() -> None:
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert (newest[1] + ".dev0" if newest[2] == "unreleased" else newest[1]) == pf.__version__
