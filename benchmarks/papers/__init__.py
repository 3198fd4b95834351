"""Redo the figures of the papers: each an experiment, and one row in the table below."""

from pyflatness.errors import InputError
from pyflatness.messages import near

from . import (
    c24_pairs,
    c24_tightness,
    c24_transformers,
    c24_trends,
    grid,
    p19_fig1,
    p19_fig2,
    p19_mnist,
    p19_table1,
    p21_fig3,
    p21_fig4,
    p21_fig4_authors,
    p21_fig6,
    p21_fig7,
    p21_fig8,
    p21_labels,
    theorems,
    valley,
)
from .experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    p21_fig3.EXPERIMENT,
    p21_fig4.EXPERIMENT,
    p21_fig4_authors.EXPERIMENT,
    p21_fig6.EXPERIMENT,
    p21_fig7.EXPERIMENT,
    p21_fig8.EXPERIMENT,
    p21_labels.EXPERIMENT,
    theorems.THEOREM5,
    p19_fig1.EXPERIMENT,
    p19_fig2.EXPERIMENT,
    *p19_mnist.FIGURES,
    p19_table1.EXPERIMENT,
    theorems.ADVERSARIAL,
    c24_trends.CONVOLUTIONAL,
    c24_transformers.EXPERIMENT,
    c24_tightness.EXPERIMENT,
    c24_pairs.CONVOLUTIONAL,
    c24_pairs.PERCEPTRON,
    c24_pairs.LENET,
    c24_trends.PERCEPTRON,
    grid.EXPERIMENT,
    valley.EXPERIMENT,
)


def named(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises:
        InputError: there is none of that name.
    """
    table = {experiment.name: experiment for experiment in EXPERIMENTS}
    if name not in table:
        listed = near(name, table, len(table))
        raise InputError(f"{name!r}: no such experiment; there are {listed}; see --list")
    return table[name]
