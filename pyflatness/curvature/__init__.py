"""Ask questions about curvature that are not one number a layer: spectra, and what changes of the weights cost."""

from . import changes

__all__ = ["changes"]
