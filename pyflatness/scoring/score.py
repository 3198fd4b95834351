"""Define the public call that scores many models."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import Unpack

from .. import losses
from ..errors import InputError
from ..losses import auto
from ..measures import named
from ..messages import check_path, shown
from ..model.state import in_eval_mode
from ..numerics.process_groups import joined
from ..options import CALL, EVERY, MeasureHow, Options, check_count, check_flag, check_names
from ..session import public
from . import checkpoints, data_specs, executors, keys, pretrained
from .run import Models, ScoringRun, keep
from .scores import Scores
from .store import Store
from .units import Row, WorkUnit, rows
from .worker import Maker, Outcome, Setup

Model = nn.Module | str | Path


@public(*(name for name in EVERY if name not in (*CALL, "per_sample")), "eval", "process_group")
def score(
    models: Mapping[str, Model] | Iterable[str | Path],
    loss: Any = "auto",
    data: Any = ...,
    *,
    model: str | Callable[..., nn.Module] | None = None,
    layers: str | Sequence[str] | None = None,
    measures: str | Sequence[str] | None = "relative_flatness",
    store: str | Path | None = None,
    executor: str | Executor | None = None,
    workers: int = 1,
    retry: bool = False,
    version: str | None = None,
    spectrum: int | None = None,
    **how: Unpack[MeasureHow],
) -> Scores:
    """Return measures of many models on one data set, with each one's loss and accuracy from the same pass.

    A model that cannot be read or measured is a row with its error, and the others go on. With a store nothing is
    computed twice: values are found again by the content of what they depend on, not by names or times, so that a call
    that was interrupted goes on where it stopped, and one that asks for more computes what is new.

    The ranks of a process group measure one model after another, each together. Every rank passes the same models and
    all data, of which it measures its part; the first one writes the store.

    Args:
        models: networks or paths of checkpoints by name; or paths alone, which are then the names: files, folders and
            patterns such as ``"runs/*/epoch_*.pt"``. A network can be named, too: ``"hf:folder"``,
            ``"hf:org/name@revision"`` from the local cache of Hugging Face's hub. All that are named are held at once.
        loss: an ``nn`` loss module, an ``F`` function, its name (``"cross_entropy"``), or a callable
            (outputs, targets) -> scalar. ``"auto"``: that of a network of Hugging Face's.
        data: a tuple of tensors (inputs, targets), or an iterable of batches, such as a DataLoader; or a function that
            returns it, or its name ``"file.py:function"``, which every worker calls once.
        model: what makes the network that paths are checkpoints of: a class or function that is called without
            arguments, or its name, ``"file.py:callable"`` or ``"hf:folder"``.
        layers: names, globs, ``re:…`` or ``type:…``; None: all that can be measured, as for
            :func:`pyflatness.measure`. With several layers a measure has a row for the network too.
        measures: names (``pyflatness measures`` lists them), None, ``"sweep"`` or ``"all"``, as for
            :func:`pyflatness.measure`.
        store: path of an SQLite file in which values are kept; made if it is not there.
        executor: where to measure. None: here, one model after the other. ``"processes"``: in ``workers`` new processes
            of this machine, which read the data and the weights by themselves; a script needs the guard
            ``if __name__ == "__main__":``. ``"ray"`` or ``"slurm"``: as tasks of a cluster, ``workers`` at a time, see
            :class:`.ray_executor.Ray` and :class:`.slurm_executor.Slurm`, of which one with options can be passed. Or
            any executor as ``concurrent.futures`` has them.
        workers: how many processes, or tasks at a time.
        retry: compute again what failed before.
        version: what stands for your code in the store's keys, such as ``"3"``: then a value stays until the version
            changes, whatever is edited. None: your source files count, and what is in no file that can be imported (a
            notebook, the script that runs, a closure) is measured anew by each call, see docs/store.md.
        spectrum: how many of the largest eigenvalues of each model's loss Hessian, in all of its trainable parameters,
            to compute, with the density of all eigenvalues: ``pf.spectrum(model, loss, data, k=spectrum,
            density=True)``, by some 600 products with the Hessian for each model. The store keeps them, and
            ``pyflatness report`` shows them. What fails is an error there, and no row.
        process_group: whose ranks make the call together (docs/ranks.md). None: all ranks, where ``torch.distributed``
            is initialised; False: this process alone.

    Returns:
        A row for each model, layer and measure: ``scores[checkpoint, measure].value``, ``scores.to_frame()``.

    Raises:
        InputError: models, data, loss or options that do not fit; what concerns one model alone is in its rows.
        StoreError: a store that cannot be read or written.
        MissingExtraError: an executor that is not installed.
        RankError: another rank ends, or does not come; of what was measured nothing is lost in a store.

    Example:
        >>> import torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> networks = {f"seed {seed}": torch.nn.Linear(4, 3).eval() for seed in range(2)}
        >>> scores = pf.score(networks, "cross_entropy", (torch.randn(100, 4), torch.randint(3, (100,))))
        >>> [row.checkpoint for row in scores], scores["seed 0", "relative_flatness"].exact
        (['seed 0', 'seed 1'], True)
    """
    options = Options.of(how)
    if not auto.is_auto(loss):
        losses.resolve(loss)
    selectors = None if layers is None else tuple(check_names("layers", layers))
    if selectors == ():
        raise InputError("layers: an empty list; pass None for all layers")
    retry, path = check_flag("retry", retry), None if store is None else check_path("store", store)
    if version is not None and not isinstance(version, str):
        raise InputError(f"version={shown(version)}: a text that stands for your code is wanted, such as '1'")
    names = tuple(row.name for row in named(measures))
    if isinstance(model, nn.Module):
        raise InputError("model: what makes the network is wanted, got a network; pass models={name: network}")
    made = None if model is None else Maker(model, name="model=")
    eigenvalues = 0 if spectrum is None else check_count("spectrum", spectrum, 1)
    if eigenvalues and store is None:
        raise InputError("spectrum=: spectra are kept in a store; pass store= too, or call pf.spectrum for each model")
    with joined(how.get("process_group")) as ranks, contextlib.ExitStack() as stack:
        named_models = _by_name(models)
        for network in named_models.values() if check_flag("eval", how.get("eval", False)) else ():
            if isinstance(network, nn.Module):
                stack.enter_context(in_eval_mode(network))
        source = Maker(data, _for_data(data, model, models), "data=")
        run = ScoringRun(named_models, Setup(made, source, loss, names, selectors, options, version=version), ranks)
        where = _executor(executor, check_count("workers", workers, 1), stack)
        if ranks.rank > 0:
            run.go((), where, lambda unit, outcome: None)
            scores = Scores((), 0)
        elif path is None:
            scores = _scored(run, where)
        else:
            held = stack.enter_context(Store(path, write=True, command="pf.score in Python"))
            scores = _kept(run, where, held, retry=retry, spectrum=eigenvalues)
        found: Scores = ranks.first("the scores", scores)
        return found


def _by_name(models: Any) -> Models:
    if not isinstance(models, Iterable) or isinstance(models, (str, bytes, nn.Module, Tensor)):
        raise InputError(
            f"models: networks or paths by name, or several paths, are wanted, got {type(models).__name__} "
            f"{shown(models)}"
        )
    pairs = [*models.items()] if isinstance(models, Mapping) else [(path, path) for path in models]
    for name, held in pairs:
        if not isinstance(held, (str, Path, nn.Module)) or isinstance(name, nn.Module):
            raise InputError(f"models: {shown(held)}: a path is wanted, or a network by its name, {{name: network}}")
    if isinstance(models, Mapping):
        return {str(name): _held(held) for name, held in pairs}
    named_ones = [held for held, _ in pairs if pretrained.is_named(held)]
    paths = checkpoints.find(path for path, _ in pairs if not pretrained.is_named(path))
    return {name: _held(name) for name in named_ones} | {str(path): path for path in paths}


def _for_data(data: Any, model: Any, models: Any) -> dict[str, Any]:
    """Return the arguments of data that are named: of texts the tokenizer, if all networks are of one name."""
    every = [model, *(models.values() if isinstance(models, Mapping) else models)]
    named_ones = [*dict.fromkeys(filter(pretrained.is_named, every))]
    return data_specs.with_tokenizer(data, {}, named_ones[0]) if len(named_ones) == 1 else {}


def _held(held: Model) -> Path | nn.Module:
    """Return a network, made if it is named, or the path of a checkpoint."""
    if isinstance(held, str) and pretrained.is_named(held):
        return Maker(held, name="models").network()
    return Path(held) if isinstance(held, str) else held


def _executor(given: str | Executor | None, workers: int, stack: contextlib.ExitStack) -> Executor | None:
    """Return the executor that is meant, None for this process; one that is made here ends with the call."""
    if isinstance(given, str):
        made = executors.named(given, workers)
        if made is not None:
            stack.callback(made.shutdown, cancel_futures=True)
        return made
    if given is not None and not callable(getattr(given, "submit", None)):
        raise InputError(f"executor={shown(given)}: a name, or an object with a method submit() is wanted")
    return given


def _scored(run: ScoringRun, executor: Executor | None) -> Scores:
    units = {name: run.units(name, run.pairs(name)) for name in run.models}
    outcomes: dict[int, Outcome] = {}
    every = [unit for own in units.values() for unit in own]
    run.go(every, executor, lambda unit, outcome: outcomes.update({id(unit): outcome}))
    found: list[Row] = []
    for name, own in units.items():
        held = {pair: one for unit in own for pair, one in outcomes[id(unit)].held.items()}
        found += rows(name, run.pairs(name), held)
    return Scores(tuple(found), len(every))


def _kept(run: ScoringRun, executor: Executor | None, store: Store, *, retry: bool, spectrum: int) -> Scores:
    kept = keep(run, store, retry=retry, spectrum=spectrum)
    unknown: dict[str, None] = {}  # in the order in which it was met

    def take(unit: WorkUnit, outcome: Outcome) -> None:
        kept.commit(store, unit, outcome)
        unknown.update(dict.fromkeys(outcome.unknown))

    run.go(kept.units, executor, take)
    every = (
        row
        for name, content in kept.contents.items()
        for row in rows(name, run.pairs(name), store.values(kept.setting, content))
    )
    return Scores(tuple(every), len(kept.units), (*kept.notes, *map(keys.measured_anew, unknown)))
