"""Measures, one file per family: formula, source and code together; and the table of their names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A measure as users name it.

    Attributes:
        name: in tables and on the command line.
        formula: in one line.
        source: where it is defined.
        normalize: the option of :func:`pyflatness.relative_flatness` that gives it.
        passes: how often it reads the data.
    """

    name: str
    formula: str
    source: str
    normalize: str | None = None
    passes: int = 1


MEASURES = (
    Measure("relative_flatness", "κ = Σ_{s,s'} ⟨w_s, w_s'⟩ Tr(∂²E/∂w_s∂w_s')", "Petzka et al. 2021, Definition 3"),
    Measure(
        "relative_flatness_std",
        "κ with φ_j / σ_j for feature φ_j and w_j σ_j for column w_j",
        "Petzka et al. 2021, Theorem 4",
        normalize="std",
        passes=2,
    ),
)
