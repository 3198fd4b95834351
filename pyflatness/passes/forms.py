"""Choose the form in which a layer is contracted, by its kind."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..model import layers
from ..options import Options
from .layer_form import LayerForm
from .token_form import TokenForm
from .whole_form import WholeForm


def form_of(
    name: str, module: nn.Module, quantities: Sequence[str], options: Options, scale: Tensor | None = None
) -> LayerForm:
    """Return a layer's form; see :class:`.LayerForm`."""
    kind = TokenForm if layers.kind_of(module).tokens else WholeForm if layers.is_together(module) else LayerForm
    return kind(name, module, quantities, options, scale)
