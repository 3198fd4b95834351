"""Read image data sets of Hugging Face's hub without its library: Parquet, or what ``save_to_disk`` writes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyflatness.errors import InputError

from .encoded import decoded

_IMAGES, _LABELS = ("image", "img"), ("label", "fine_label", "labels")


def read(folder: Path, name: str, split: str) -> tuple[Tensor, Tensor] | None:
    """Return a split of a data set; None if its folder has no files of that split.

    Files are searched in ``folder/name`` and below it: ``train-00000-of-00001.parquet`` and the like, also in a folder
    ``data`` or of a configuration, or ``train/data-00000-of-00001.arrow``.

    Raises:
        InputError: damaged files, or no columns of images and labels.
    """
    root = folder / name
    files = sorted(root.rglob(f"{split}-*.parquet")) or sorted(root.rglob(f"{split}/*.arrow"))
    if not files:
        return None
    from pyarrow import ArrowException

    images: list[bytes] = []
    labels: list[int] = []
    for path in files:
        try:
            columns = _columns(path)
        except (ArrowException, OSError) as error:
            raise InputError(f"{path}: no table, or a damaged one: {error}") from None
        image, label = (next((key for key in keys if key in columns), None) for keys in (_IMAGES, _LABELS))
        if image is None or label is None:
            raise InputError(f"{path}: columns {_IMAGES[0]!r} and {_LABELS[0]!r} are wanted; there are {[*columns]}")
        rows = columns[image].to_pylist()
        if not all(isinstance(row, dict) and isinstance(row.get("bytes"), bytes) for row in rows):
            raise InputError(f"{path}: {image!r} has no bytes of images")
        images += [row["bytes"] for row in rows]
        labels += columns[label].to_pylist()
    return decoded(images, str(root)), torch.tensor(labels)


def _columns(path: Path) -> dict[str, Any]:
    """Return a file's columns by name."""
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        table = parquet.read_table(path)
    else:
        with path.open("rb") as file:
            table = ipc.open_stream(file).read_all()
    return dict(zip(table.column_names, table.columns, strict=True))
