"""What a user can ask of a measurement, checked once."""

from dataclasses import dataclass

from . import contractions
from .errors import InputError, NotYetError

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
        InputError: a choice that does not exist.
        NotYetError: sampling.
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

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(repr, choices))
                raise InputError(f"{name}={getattr(self, name)!r} does not exist; choose one of {listed}")
        if self.memory is not None and self.memory < 1:
            raise InputError(f"memory={self.memory}: a number of bytes is wanted")
        contractions.check(self.backend)

    def check_not_sampled(self) -> None:
        """Raise if a sampled value is asked for; a head needs none and stays exact."""
        if self.probes is not None or self.target_stderr is not None:
            raise NotYetError("probes= and target_stderr= (sampled values) are not there yet but at a head")
