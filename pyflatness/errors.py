"""The exceptions of pyflatness: one family, messages that carry what was received and what to do."""


class FlatnessError(Exception):
    """Base of every error that pyflatness raises on purpose."""


class InputError(FlatnessError, ValueError):
    """A model, layer, loss, batch or option that cannot be measured as given."""


class NonFiniteError(InputError):
    """NaN or infinity in weights, features or logits."""


class NoGraphError(InputError):
    """A layer that runs without recording a graph, so that nothing can be differentiated in it."""


class NotYetError(InputError, NotImplementedError):
    """A sound request that this version does not serve yet."""


class BackendError(FlatnessError, RuntimeError):
    """A backend that does not exist, or that cannot run here."""


class MissingExtraError(FlatnessError, ImportError):
    """An optional dependency is not installed."""
