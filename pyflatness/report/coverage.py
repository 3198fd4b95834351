"""Note in values of the network which weights they leave out."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from . import Estimate

_LISTED = 4  # names in a note


def marked(
    found: Mapping[tuple[str, str], Estimate], of_layers: Collection[str], left_out: Mapping[str, float]
) -> dict[tuple[str, str], Estimate]:
    """Return estimates in which values of the network that leave out weights are not exact, and have a note of these.

    ``of_layers`` are measures whose value of the network is of its measured layers; ``left_out`` are weights that no
    measured layer has, each with its share of all weights' entries.
    """
    if not left_out:
        return dict(found)
    network = {("", measure) for measure in of_layers}
    more = f" and {len(left_out) - _LISTED} more" if len(left_out) > _LISTED else ""
    names = ", ".join([*left_out][:_LISTED]) + more
    note = f"without {100 * sum(left_out.values()):.3g} % of the weights, which no measured layer has: {names}"
    return {
        key: replace(estimate, exact=False, notes=(*estimate.notes, note)) if key in network else estimate
        for key, estimate in found.items()
    }
