"""Run an experiment, and write what it found: a figure, all numbers as JSON, and a page with table and verdict."""

import contextlib
import io
import json
import math
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyflatness import __version__
from pyflatness.errors import InputError, MissingExtraError

from .experiment import Bench, Experiment, Finding, Found, Points

_DPI = 70  # so that figures stay small enough to be committed


def reproduce(
    experiment: Experiment,
    folder: Path,
    scale: str = "small",
    data_dir: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    shown: bool | None = None,
    device: str = "cpu",
) -> tuple[Found, dict[str, bytes]]:
    """Run an experiment, and return what was found, also as files by their names: a figure, JSON, and a page.

    Args:
        experiment: which.
        folder: of what is kept between runs; made if it is not there. A run that was interrupted goes on where it
            stopped, and experiments share networks. That of another device than the CPU has its type at the end,
            ``work-cuda``, since networks and values are others there.
        scale: ``"small"`` or ``"paper"``.
        data_dir: where the user's data sets are.
        changes: of settings, by name.
        shown: whether progress bars are; None: on a terminal.
        device: where networks are trained and measured, such as ``"cuda"``. First weights and the order of the samples
            are the same on every device. Convolutions of single precision are not rounded to TF32.

    Raises:
        InputError: no such scale or setting, data that are not there, or a device that torch cannot use.
        MissingExtraError: without matplotlib or safetensors.
    """
    settings = experiment.settings(scale, changes or {})
    _require_extras()
    if scale == "paper" and experiment.data and data_dir is None:
        raise InputError(f"{experiment.name}: at paper scale it needs {experiment.data}; say where with --data-dir")
    where = usable(device)
    if where.type != "cpu":
        folder = folder.with_name(f"{folder.name}-{where.type}")
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with _arithmetic():
        found = experiment.run(Bench(scale, settings, folder, data_dir, shown, where))
    told = {
        "seconds": round(time.monotonic() - start, 1),
        "versions": {
            **{"pyflatness": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "device": torch.cuda.get_device_name(where) if where.type == "cuda" else where.type,
        },
    }
    return found, files(experiment, scale, found, {"settings": settings, **told})


def usable(name: str) -> torch.device:
    """Return a device by its name.

    Raises:
        InputError: torch knows none of that name, or cannot use it here.
    """
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # of torch without CUDA, say; of "meta"
        why = str(error).strip().partition("\n")[0]
        raise InputError(f"device: {name!r} cannot be used here ({why}); pass one of this machine, or cpu") from None
    return device


@contextlib.contextmanager
def _arithmetic() -> Iterator[None]:
    """Compute by one thread and without TF32 inside a ``with`` block.

    Networks of this size gain nothing from more threads, and sums do not depend on the machine. TF32 keeps ten bits,
    too few to see that a value stays after a reparameterisation.
    """
    convolutions: Any = torch.backends.cudnn
    threads, precision = torch.get_num_threads(), convolutions.conv.fp32_precision
    torch.set_num_threads(1)
    convolutions.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        convolutions.conv.fp32_precision = "none"  # inherited, as it is unless it was set
        if convolutions.conv.fp32_precision != precision:
            convolutions.conv.fp32_precision = precision


def restated(experiment: Experiment, facts: Mapping[str, Any]) -> tuple[Found, dict[str, bytes]]:
    """Return what :func:`reproduce` does, from the points that are in a JSON file of its, without measuring anew.

    Args:
        experiment: which.
        facts: the file's content.
    """
    columns = {name: [math.nan if cell is None else cell for cell in cells] for name, cells in facts["table"].items()}
    scale, settings = facts["scale"], facts["settings"]
    found = experiment.judge(Points(columns, facts["failures"], scale, settings))
    return found, files(experiment, scale, found, {name: facts[name] for name in ("settings", "seconds", "versions")})


def files(experiment: Experiment, scale: str, found: Found, told: Mapping[str, Any]) -> dict[str, bytes]:
    """Return a figure, JSON, and a page by the names of their files.

    Args:
        experiment: which.
        scale: of the run.
        found: what it found.
        told: what the JSON says of the run besides.
    """
    facts = {
        "experiment": experiment.name,
        "figure": experiment.figure,
        "claim": experiment.claim,
        "scale": scale,
        **told,
        "findings": [vars(finding) for finding in found.findings],
        "verdict": found.verdict,
        "failures": dict(found.failures),
        "table": {name: [*column] for name, column in found.table.items()},
    }
    stem = f"{experiment.name}-{scale}"
    text = page(experiment, scale, found).encode()
    return {f"{stem}.png": image(found), f"{stem}.json": _json(facts), f"{stem}.md": text}


def page(experiment: Experiment, scale: str, found: Found) -> str:
    """Return what was found as Markdown: the claim, the numbers beside the paper's, the verdict, failures."""
    lines = [f"# {experiment.figure}: {experiment.title}", "", f"Scale: {scale}.", "", f"Claim: {experiment.claim}", ""]
    lines += ["| | here | 95 % interval | paper |", "|---|---|---|---|"]
    lines += [f"| {item.what} | {number(item.value)} | {interval(item)} | {item.paper} |" for item in found.findings]
    lines += ["", found.verdict, ""]
    if found.failures:
        lines += ["Failures:", "", *(f"- {name}: {why}" for name, why in found.failures.items()), ""]
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Return a number as tables show it."""
    return "–" if value is None or math.isnan(value) else f"{value:.3g}"


def interval(finding: Finding) -> str:
    """Return a finding's interval as tables show it."""
    return "" if finding.low is None else f"[{number(finding.low)}, {number(finding.high)}]"


def _require_extras() -> None:
    try:
        import matplotlib  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(f"experiments need {error.name}: pip install 'pyflatness[demo]'") from None


def image(found: Found) -> bytes:
    """Return a finding's figure as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=found.size, layout="constrained")
    found.draw(figure)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def _json(facts: Any) -> bytes:
    return (json.dumps(_plain(facts), indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _plain(value: Any) -> Any:
    """Return a value for JSON, which knows no NaN and no types of NumPy's; numbers with six digits."""
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (float, np.floating)):
        return float(f"{float(value):.6g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
