"""Run ``pyflatness spectrum``: the largest eigenvalues of a network's loss Hessian, and the density of all."""

from pathlib import Path
from typing import Any

import click

from ..curvature import spectrum as eigenvalues
from . import options as given
from .measure import taken
from .options import PATH, json_option
from .output import prepare_file, show_json


@click.command()
@given.config_option
@given.model_option
@given.asked_of_a_network
@given.curvature_option
@click.option("-k", "--eigenvalues", "k", type=click.IntRange(0), default=5, show_default=True, help="How many.")
@click.option("--density", is_flag=True, help="Also estimate the density of all eigenvalues.")
@click.option("--out", type=PATH, help="JSON file to write too, which pyflatness store add takes.")
@json_option
@click.argument("checkpoint", required=False, type=PATH)
def spectrum(
    selectors: tuple[str, ...],
    curvature: str,
    seed: int,
    k: int,
    density: bool,
    out: Path | None,
    as_json: bool,
    checkpoint: Path | None,
    **asked: Any,
) -> None:
    """Show the largest eigenvalues of a network's loss Hessian, with the weights of CHECKPOINT if it is given.

    Without --layers it is the Hessian in all trainable parameters.
    """
    if out is not None:
        prepare_file(out)
    network, loss, data = taken(checkpoint, **asked)
    chosen = selectors or None
    found = eigenvalues.spectrum(
        network, loss, data, layers=chosen, k=k, density=density, curvature=curvature, seed=seed
    )
    if out is not None:
        found.to_json(out)
    if as_json:
        facts = {"eigenvalues": found.eigenvalues.tolist(), "residuals": found.residuals.tolist()}
        show_json({**facts, "method": found.method, "converged": found.converged})
    else:
        click.echo(str(found))
