"""The exceptions of pyflatness: one family, messages that carry what was received and what to do.

And what torch says in its own, which have one class for nearly everything.
"""

_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")
_NOT_TWICE = ("is not implemented", "once_differentiable", "differentiate twice")


class FlatnessError(Exception):
    """Base of every error that pyflatness raises on purpose."""


class InputError(FlatnessError, ValueError):
    """A model, layer, loss, batch or option that cannot be measured as given."""


class NonFiniteError(InputError):
    """NaN or infinity in weights, features or logits."""


class NotYetError(FlatnessError, NotImplementedError):
    """A sound request that this version does not serve yet."""


class BackendError(FlatnessError, RuntimeError):
    """A backend that does not exist, or that cannot run here."""


class MissingExtraError(FlatnessError, ImportError):
    """An optional dependency is not installed."""


def shown(value: object) -> str:
    """Return what was received as one short line, for a message."""
    line = " ".join(repr(value).split())
    return line if len(line) <= 80 else line[:79] + "…"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch says that memory did not suffice."""
    return any(text in str(error) for text in _OUT_OF_MEMORY)


def lacks_a_second_derivative(error: Exception) -> bool:
    """Return whether torch says that an operation can be differentiated once only."""
    return any(text in str(error) for text in _NOT_TWICE)
