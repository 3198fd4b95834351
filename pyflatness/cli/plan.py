"""Run ``pyflatness plan``: what a measurement would take on machines that are not there."""

from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.table import Table

from ..errors import InputError
from ..messages import duration
from ..options import check_dtype
from ..scoring import planned, specs
from . import options as given
from .options import bind, json_option, model_option, spec_of
from .output import show, show_json


@click.command()
@model_option
@click.option(
    "--ranks",
    metavar="N,…",
    multiple=True,
    default=["8"],
    show_default=True,
    callback=given.numbers,
    help="Number of processes that share the work; with commas or repeated.",
)
@click.option(
    "--samples", type=click.IntRange(1), default=1024, show_default=True, help="Number of samples in the data."
)
@click.option(
    "--batch", type=click.IntRange(1), default=1, show_default=True, help="Number of samples in a micro-batch."
)
@click.option("--length", type=click.IntRange(1), help="Number of tokens in a sample, of a language model.")
@click.option("--shape", metavar="3x32x32", help="Shape of a sample that is no tokens.")
@click.option(
    "--probes", metavar="K", default="8", show_default=True, help="Number of random probes of each sample, or 'exact'."
)
@given.several_option(
    "--layers", metavar="SELECTOR,…", help="Layers to measure, with commas or repeated; all by default."
)
@given.dtype_option
@click.option(
    "--flops-per-second",
    type=click.FloatRange(0, min_open=True),
    help="Operations that each process does in a second, to tell the time.",
)
@json_option
def plan(
    model: specs.Function,
    model_args: dict[str, Any],
    ranks: tuple[int, ...],
    samples: int,
    batch: int,
    length: int | None,
    shape: str | None,
    probes: str,
    layers: tuple[str, ...],
    dtype: str | None,
    flops_per_second: float | None,
    as_json: bool,
) -> None:
    """Show what relative flatness of a model's layers would take of each rank: memory, messages, operations.

    No weights are made or read: of a Hugging Face model config.json is enough.
    """
    if (length is None) == (shape is None):
        raise click.UsageError("pass --length, the tokens of a sample, or else --shape, of a sample that is not tokens")
    spec = spec_of("model")
    build = bind(model, planned.without_weights(spec, model_args), "model")
    shaped = planned.Batch(batch, length, () if shape is None else _shape(shape))
    precision = None if dtype is None else check_dtype("--dtype", dtype)
    if probes != "exact" and (not probes.isdecimal() or int(probes) < 1):
        raise InputError(f"--probes {probes!r}: a number above zero, or exact, is wanted")
    number = None if probes == "exact" else int(probes)
    work = planned.work(lambda: specs.build_model(build), shaped, layers or None, precision)
    plans = [
        planned.planned(
            work, size, samples=samples, batch=batch, probes=number, sharded=sharded, flops_per_second=flops_per_second
        )
        for size in ranks
        for sharded in (False, True)
    ]
    if as_json:
        rows = [{**asdict(row), "memory": row.memory} for row in plans]
        show_json({"work": asdict(work), "plans": rows})  # of bytes and whole numbers
        return
    click.echo(
        f"{len(work.layers)} layers with {work.layer_weights:,} of {work.parameters:,} parameters; exact values take "
        f"{work.passes:,} backward passes a micro-batch"
    )
    show(_table(plans))


def _table(plans: list[planned.Planned]) -> Table:
    headings = (f"{row.ranks} ranks, {'FSDP2' if row.sharded else 'whole weights'}" for row in plans)
    table = Table("of each rank", *headings, box=box.SIMPLE_HEAD)
    rows = {
        "weights": [_size(row.weights) for row in plans],
        "weights that come and go": [_size(row.gathered) for row in plans],
        "graph and inputs of layers": [_size(row.graph) for row in plans],
        "gradients in layers' outputs": [_size(row.gradients) for row in plans],
        "Gram matrices of inputs": [_size(row.grams) for row in plans],
        "memory of these": [_size(row.memory) for row in plans],
        "micro-batches": [f"{row.micro_batches:,}" for row in plans],
        "backward passes of each": [f"{row.passes:,}" for row in plans],
        "reductions": [f"{row.reductions:,}" for row in plans],
        "messages": [f"{row.messages:,}" for row in plans],
        "received": [_size(row.received) for row in plans],
        "operations": [f"{row.flops:.3g}" for row in plans],
    }
    if any(row.seconds is not None for row in plans):
        rows["time of the operations"] = ["" if row.seconds is None else duration(row.seconds) for row in plans]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _size(count: int) -> str:
    """Return bytes in decimal units, with three digits."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _shape(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split("x"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"--shape {text!r}: sizes above zero are wanted, as in 3x32x32")
    return sizes
