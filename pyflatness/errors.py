"""Define the exceptions of pyflatness: one family, whose messages carry what was received and what to do."""

from collections.abc import Mapping
from typing import TypeVar

__all__ = [
    "BackendError",
    "FlatnessError",
    "InputError",
    "MissingExtraError",
    "NonFiniteError",
    "NotYetError",
    "RankError",
    "StoreError",
]

_Error = TypeVar("_Error", bound="InputError")


class FlatnessError(Exception):
    """Serve as the base of every error that pyflatness raises on purpose."""


class InputError(FlatnessError, ValueError):
    """Report a model, layer, loss, batch or option that cannot be measured as given.

    Attributes:
        layers: names of layers that it is about, each with the reason, where others may do without these.
    """

    layers: Mapping[str, str] = {}

    def about(self: _Error, layers: Mapping[str, str]) -> _Error:
        """Return the error, with :attr:`layers` set."""
        self.layers = layers
        return self


class NonFiniteError(InputError):
    """Report NaN or infinity in weights, features or logits."""


class NoGraphError(InputError):
    """Report a layer that runs without recording a graph, so that nothing can be differentiated in it."""


class PassesError(InputError):
    """Report an exact value that takes more passes than ``max_passes=`` allows.

    Attributes:
        what: takes them, and how many they are.
        needed: passes of a micro-batch.
    """

    what, needed = "", 0

    def taking(self, what: str, needed: int) -> "PassesError":
        """Return the error, with its attributes set."""
        self.what, self.needed = what, needed
        return self


class NotYetError(InputError, NotImplementedError):
    """Report a sound request that this version does not serve yet."""


class RankError(FlatnessError, RuntimeError):
    """Report another process of a group that failed, does not answer, or makes another call."""


class BackendError(FlatnessError, RuntimeError):
    """Report a backend that does not exist, or that cannot run here."""


class MissingExtraError(FlatnessError, ImportError):
    """Report that an optional dependency is not installed."""


class StoreError(FlatnessError, RuntimeError):
    """Report a store of scores that cannot be read or written."""


def printable(text: str) -> str:
    r"""Return the text with characters that cannot be printed as Python's escapes, such as ``\n`` or ``\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
