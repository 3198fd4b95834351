"""Run ``pyflatness allocate``: a format for each layer's weights under a budget of bits."""

from pathlib import Path
from typing import Any

import click

from ..curvature.allocate import allocate as allocated
from ..scoring import data_specs, specs
from . import options as given
from .options import bind, json_option, model_option, spec_of
from .output import echo, prepare_file, show_json


@click.command(short_help="Choose how many bits each layer gets.")
@model_option
@given.spec_option("data", "batches, as for pyflatness score; the choice is made on them", data_specs.resolve)
@click.option(
    "--loss",
    metavar="NAME",
    default="auto",
    show_default=True,
    shell_complete=given.complete_losses,
    help="The loss it was trained with: cross_entropy, mse_loss, …; auto: that of a Hugging Face model.",
)
@click.option(
    "--formats",
    metavar="NAME,…",
    required=True,
    help="Formats to choose from: int2 to int8, int4-g128 and the like, fp8, mxfp4, nvfp4, 2:4, rank-16, keep.",
)
@click.option("--bits", type=float, help="Budget in bits a weight. One of --bits and --size is needed.")
@click.option("--size", type=int, help="Budget in bytes of the layers' weights.")
@click.option("--layers", metavar="SELECTOR", multiple=True, help="Layers to choose for; all by default.")
@click.option(
    "--together", metavar="NAME,…", multiple=True, help="Layers that get one format, by their names; may be repeated."
)
@click.option(
    "--probes", type=click.IntRange(4), default=16, show_default=True, help="Number of random probes of each sample."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the probes.")
@click.option("--frontier", is_flag=True, help="Show what other budgets are predicted to cost too.")
@click.option(
    "--export",
    nargs=2,
    metavar="TOOL FILE",
    help="Write the choice for llm-compressor, gptqmodel or torchao.",
)
@json_option
def allocate(
    model: specs.Function,
    model_args: dict[str, Any],
    data: specs.Function,
    data_args: dict[str, Any],
    loss: str,
    formats: str,
    layers: tuple[str, ...],
    together: tuple[str, ...],
    frontier: bool,
    export: tuple[str, str] | None,
    as_json: bool,
    **budget: Any,
) -> None:
    """Choose a format for each layer so that the loss is predicted to change least under a budget of bits.

    Interactions of layers count: see docs/allocation.md.
    """
    if export is not None:
        prepare_file(Path(export[1]))
    data_args = data_specs.with_tokenizer(spec_of("data"), data_args, spec_of("model"))
    network = specs.build_model(bind(model, model_args, "model"))
    plan = allocated(
        network,
        loss,
        bind(data, data_args, "data")(),
        [name.strip() for name in formats.split(",") if name.strip()],
        layers=layers or None,
        together=[[name.strip() for name in names.split(",")] for names in together],
        eval=True,
        **budget,
    )
    if export is not None:
        plan.export(*export)
    if as_json:
        show_json(plan.to_dict() | ({"frontier": plan.frontier().to_dict()} if frontier else {}))
        return
    echo(*str(plan).splitlines())
    if frontier:
        echo(*str(plan.frontier()).splitlines())
