"""A measure as a row of the table of measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A measure of the layers' blocks of the loss Hessian.

    Attributes:
        name: in reports, tables and on the command line.
        formula: in one line.
        source: where it is defined.
        quantity: what of the weight gradients it is; see :mod:`pyflatness.contractions.layer`.
        normalize: the option of :func:`pyflatness.relative_flatness` that gives it.
    """

    name: str
    formula: str
    source: str
    quantity: str
    normalize: str | None = None

    @property
    def passes(self) -> int:
        """How often it reads the data."""
        return 1 if self.normalize is None else 2
