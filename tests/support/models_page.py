"""Print the table of architectures in docs/models.md, of what is measured: ``python tests/support/models_page.py``.

``--write`` puts it there. How a layer is measured is read off the small configuration, which the tests hold against
brute force; what share of the weights that is, off the full one on the meta device.
"""

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from support import ROOT
from support.architectures import ARCHITECTURES, Architecture, exact
from support.full_architectures import FULL, of_full

PAGE = ROOT / "docs" / "models.md"
HEADING = "| architecture | weights | measured | of these exact | left out, and why |\n|---|---|---|---|---|\n"
PASSES = 2048  # of an exact value, unless the user allows more
_METHODS = ("hessian", "ggn", "head")  # from the one that takes most passes


def table() -> str:
    """Return the table."""
    return HEADING + "".join(f"{row(architecture)}\n" for architecture in ARCHITECTURES)


def on_page() -> str:
    """Return the table that the page has."""
    text = PAGE.read_text(encoding="utf-8")
    start = text.index(HEADING)
    return text[start : text.index("\n\n", start) + 1]


def methods(architecture: Architecture) -> tuple[dict[str, str], dict[str, str]]:
    """Return how layers of a small configuration are measured, and why weights are left out; by names with # in them.

    The method is that of relative flatness, which is "head" where a formula serves.
    """
    _, report = exact(architecture)
    how: dict[str, str] = {}
    for layer in report.layers:
        method = report[layer, "relative_flatness"].method
        pattern = numberless(layer)
        how[pattern] = min(method, how.get(pattern, method), key=_METHODS.index)
    reasons = {numberless(name): report.why_uncovered[name] for name in report.uncovered}
    return how, {name: reason.removeprefix("its weight is ") for name, reason in reasons.items()}


def numberless(name: str) -> str:
    """Return a name with # for its numbers."""
    return re.sub(r"\d+", "#", name)


def row(architecture: Architecture) -> str:
    """Return the line of the table on an architecture."""
    found, (how, reasons) = of_full(architecture.name), methods(architecture)
    measured = sum(layer.entries for layer in found.layers.values())
    exact = 0
    for name, layer in found.layers.items():
        passes = {"head": 0, "ggn": found.passes, "hessian": layer.products}[how[numberless(name)]]
        exact += layer.entries if passes <= PASSES else 0
    left_out: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(numberless, found.uncovered)):
        left_out.setdefault(reasons[name], []).append(f"`{name.removeprefix('base_model.model.')}`")
    listed = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left_out.items())
    cells = (
        f"{architecture.name}: {FULL[architecture.name].says}",
        f"{found.entries / 1e6:,.1f} M",
        _percent(measured / found.entries),
        _percent(exact / measured),
        listed or "–",
    )
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--write" in sys.argv:
        PAGE.write_text(PAGE.read_text(encoding="utf-8").replace(on_page(), table()), encoding="utf-8")
    else:
        print(table(), end="")
