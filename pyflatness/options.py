"""What a user can ask of a measurement, checked once."""

from dataclasses import dataclass

from . import contractions
from .errors import InputError

_CHOICES = {
    "curvature": ("auto", "ggn", "hessian"),
    "conv": ("filter", "affine"),
    "normalize": (None, "std"),
    "nan_policy": ("raise", "propagate", "omit"),
}


@dataclass(frozen=True)
class Options:
    """See :func:`pyflatness.relative_flatness`.

    Raises:
        InputError: a choice that does not exist, or a number that does not fit.
    """

    curvature: str = "auto"
    probes: int | str | None = None
    target_stderr: float | None = None
    conv: str = "filter"
    normalize: str | None = None
    per_sample: bool = False
    backend: str = "auto"
    nan_policy: str = "raise"
    memory: int | None = None
    seed: int = 0
    rtol: float | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise InputError(f"{name}={getattr(self, name)!r} does not exist; choose one of {listed}")
        if self.memory is not None and self.memory < 1:
            raise InputError(f"memory={self.memory}: a number of bytes is wanted")
        if self.probes not in (None, "adaptive") and (type(self.probes) is not int or self.probes < 1):
            raise InputError(
                f"probes={self.probes!r}: a number of random draws for each sample is wanted, at least 1, or 'adaptive'"
            )
        if self.rtol is not None and self.probes != "adaptive" and self.sampled:
            raise InputError(
                f"rtol={self.rtol!r} is for probes='adaptive'; target_stderr= is an absolute one for draws"
            )
        if self.rtol is not None and self.sampled and not 0 < self.rtol < 1:
            raise InputError(f"rtol={self.rtol!r}: a relative standard error between 0 and 1 is wanted")
        if self.rtol is not None and not 0 <= self.rtol < 1:
            raise InputError(f"rtol={self.rtol!r}: a relative error from 0 to less than 1 is wanted")
        if self.target_stderr is not None and not self.target_stderr > 0:
            raise InputError(f"target_stderr={self.target_stderr!r}: a standard error above zero is wanted")
        if self.probes is not None and self.target_stderr is not None:
            raise InputError("probes= and target_stderr= both say how many draws to take; pass one of them")
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise InputError(f"seed={self.seed!r}: an integer of 64 bits is wanted")
        contractions.check(self.backend)

    @property
    def tolerance(self) -> float:
        """The relative error that a value of a head may have for the sake of time."""
        return 0.0 if self.sampled or self.rtol is None else self.rtol

    def refuse_tolerance(self) -> None:
        """Raise if a value of a head was asked for, and this is to be another.

        Raises:
            InputError: ``rtol`` without draws.
        """
        if self.tolerance:
            raise InputError(
                f"rtol={self.rtol!r} is for probes='adaptive', or for the relative flatness of a head; this is another "
                "layer or measure"
            )

    @property
    def sampled(self) -> bool:
        """Whether values are to be sampled."""
        return self.probes is not None or self.target_stderr is not None

    @property
    def reads(self) -> int:
        """How often one sweep reads the data."""
        return (1 if self.normalize is None else 2) + (self.target_stderr is not None)
