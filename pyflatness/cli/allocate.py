"""Run ``pyflatness allocate``: a format for each layer's weights under a budget of bits."""

from pathlib import Path
from typing import Any

import click

from ..curvature import allocate as allocation
from . import options as given
from .measure import taken
from .options import PATH, json_option
from .output import echo, prepare_file, show_json


@click.command()
@given.config_option
@given.model_option
@given.asked_of_a_network
@click.option(
    "--formats",
    metavar="NAME,…",
    multiple=True,
    required=True,
    callback=given.several,
    help="Formats to choose from: int2 to int8, int4-g128 and the like, fp8, mxfp4, nvfp4, 2:4, rank-16, keep.",
)
@click.option("--bits", type=float, help="Budget in bits a weight. One of --bits and --size is needed.")
@click.option("--size", type=int, help="Budget in bytes of the layers' weights.")
@click.option(
    "--together", metavar="NAME,…", multiple=True, help="Layers that get one format, by their names; may be repeated."
)
@click.option(
    "--probes", type=click.IntRange(4), default=16, show_default=True, help="Number of random probes of each sample."
)
@click.option("--frontier", is_flag=True, help="Show what other budgets are predicted to cost too.")
@click.option(
    "--export",
    nargs=2,
    metavar="TOOL FILE",
    help="Write the choice for llm-compressor, gptqmodel or torchao.",
)
@json_option
@click.argument("checkpoint", required=False, type=PATH)
def allocate(
    selectors: tuple[str, ...],
    formats: tuple[str, ...],
    bits: float | None,
    size: int | None,
    together: tuple[str, ...],
    probes: int,
    seed: int,
    frontier: bool,
    export: tuple[str, str] | None,
    as_json: bool,
    checkpoint: Path | None,
    **asked: Any,
) -> None:
    """Choose a format for each layer so that the loss is predicted to change least under a budget of bits.

    The network has the weights of CHECKPOINT if it is given. Interactions of layers count: see docs/allocation.md.
    """
    if export is not None:
        prepare_file(Path(export[1]))
    network, loss, data = taken(checkpoint, **asked)
    groups = [[name.strip() for name in names.split(",")] for names in together]
    options: dict[str, Any] = {"bits": bits, "size": size, "probes": probes, "seed": seed}
    plan = allocation.allocate(network, loss, data, formats, layers=selectors or None, together=groups, **options)
    if export is not None:
        plan.export(*export)
    if as_json:
        show_json(plan.to_dict() | ({"frontier": plan.frontier().to_dict()} if frontier else {}))
        return
    echo(*str(plan).splitlines())
    if frontier:
        echo(*str(plan.frontier()).splitlines())
