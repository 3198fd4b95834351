"""Run ``pyflatness layers``: which layers of a model are of a kind that can be measured, and their names."""

from typing import Any

import click
from rich import box
from rich.table import Table
from torch import nn

from ..messages import printable
from ..model import layers as model_layers
from ..model import selectors
from ..model.kinds import SUPPORTED
from ..model.uses import Use
from ..scoring import specs
from .options import bind, json_option, model_option
from .output import show, show_json


@click.command()
@model_option
@json_option
def layers(model: specs.Function, model_args: dict[str, Any], as_json: bool) -> None:
    """Show the model's layers that can be measured: name, type, weight matrix.

    Of parameters that no module calls, those that may turn out to be weights are among them.
    """
    network = model_layers.unwrap(specs.build_model(bind(model, model_args, "model")))
    found = {name: (_kind(layer), _shape(layer)) for name, layer in selectors.layers(network).items()}
    if as_json:
        show_json([{"name": name, "type": kind, "shape": shape} for name, (kind, shape) in found.items()])
        return
    table = Table("name", "type", "weight matrix, d × m", box=box.SIMPLE_HEAD)
    for name, (kind, shape) in found.items():
        size = "open until the model runs" if shape is None else "{} × {}".format(*shape)
        table.add_row(printable(name) or "(the model)", kind, size)
    if not found:
        click.echo(f"{type(network).__name__} has no layer that can be measured ({SUPPORTED})")
        return
    show(table)


def _kind(layer: nn.Module) -> str:
    if not isinstance(layer, Use):
        return type(layer).__name__
    holder = type(layer.source.places[0][0]).__name__
    return holder if layer.source.of_module else f"parameter of {holder}"


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """Return (d, m); None where it is open until the model runs."""
    if any(map(nn.parameter.is_lazy, module.parameters())):
        return None
    d, m = model_layers.matrix(module)[0].shape
    return d, m
