"""Redo the figures of the papers: one file an experiment, and one row in the table below."""

import difflib

from ..errors import InputError
from . import p21_fig6
from .experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (p21_fig6.EXPERIMENT,)


def named(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises:
        InputError: there is none of that name.
    """
    table = {experiment.name: experiment for experiment in EXPERIMENTS}
    if name not in table:
        near = difflib.get_close_matches(name, table) or [*table]
        raise InputError(f"{name!r}: no such experiment; there are {', '.join(near)}; see pyflatness reproduce --list")
    return table[name]
