"""Make batches of tokens of texts, with the tokenizer of a model of Hugging Face's transformers."""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..messages import shown
from . import pretrained

Batch = dict[str, Tensor]

_SEPARATORS = {"line": "\n", "paragraph": "\n\n"}


def read_file(
    path: Path,
    *,
    tokenizer: str | None = None,
    length: int | None = None,
    truncate: int | None = None,
    text: str = "text",
    targets: str | None = None,
    sample_by: str = "line",
    count: int | None = None,
    batch_size: int = 8,
) -> list[Batch]:
    """Return batches of the texts in a ``.txt`` or ``.jsonl`` file, see :func:`batches`.

    Args:
        path: of the file, in UTF-8. Of JSON lines each is an object, or a text itself.
        tokenizer: see :func:`.pretrained.tokenizer`.
        length: tokens of a packed sample.
        truncate: tokens that a text is cut to.
        text: the key of JSON objects that has the text.
        targets: the key that has the label of a text; none are taken unless it is given.
        sample_by: what a text of ``.txt`` is: a ``line``, a ``paragraph`` between empty lines, or the ``file``.
        count: take so many texts, from the first on.
        batch_size: of the batches.

    Raises:
        InputError: a file that cannot be read, a line that is no JSON or has no text, no texts at all, or options that
            do not fit each other.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: it cannot be read as text: {error}") from None
    if path.suffix == ".jsonl":
        rows = [*itertools.islice(_objects(content, path), count)]
        texts, labels = [_value(row, text, path) for row in rows], _labels(rows, targets, path)
    elif targets is not None:
        raise InputError(f"targets: {path.name} has texts alone; .jsonl, Parquet and data sets can have labels")
    else:
        texts, labels = [*itertools.islice(_parts(content, sample_by), count)], None
    return batches(texts, labels, tokenizer, length=length, truncate=truncate, batch_size=batch_size)


def batches(
    texts: Sequence[Any],
    labels: Sequence[Any] | None,
    tokenizer: str | None,
    *,
    length: int | None = None,
    truncate: int | None = None,
    batch_size: int = 8,
) -> list[Batch]:
    """Return texts as batches of a model's keyword arguments.

    Without ``length`` a sample is a text; those of a batch are padded on the right to the longest of them, and
    ``attention_mask`` leaves the padding out. With it all texts are packed: their tokens follow each other, with the
    token that ends a text between them where the tokenizer has one, and a sample is ``length`` of them; what is left at
    the end is dropped.

    Args:
        texts: at least one.
        labels: a number, or several, for each text; None: none.
        tokenizer: see :func:`.pretrained.tokenizer`.
        length: tokens of a packed sample.
        truncate: tokens that a text is cut to.
        batch_size: of the batches.

    Raises:
        InputError: no tokenizer, no texts, or what is none; labels that are no numbers, or of packed texts.
    """
    if tokenizer is None:
        raise InputError(
            "tokenizer: texts need one; pass the folder or name of a model of Hugging Face's, as "
            '--data-args \'{"tokenizer": "FOLDER"}\'; of --model hf:… it is the model\'s'
        )
    odd = next((held for held in texts if not isinstance(held, str)), None)
    if odd is not None or not texts:
        raise InputError(f"texts: {'a text is wanted, got ' + shown(odd) if texts else 'there are none'}")
    encoder = pretrained.tokenizer(tokenizer)
    cut = {} if truncate is None else {"truncation": True, "max_length": truncate}
    encoded = encoder([*texts], verbose=False, **cut)
    if length is not None:
        if labels is not None:
            raise InputError("length: packed texts have no labels of their own; pass truncate, or no targets")
        return _packed(encoded["input_ids"], encoder.eos_token_id, length, batch_size)
    if encoder.pad_token is None:
        encoder.pad_token = encoder.eos_token or encoder.convert_ids_to_tokens(0)  # it is masked
    found = []
    for start in range(0, len(texts), batch_size):
        rows = {key: held[start : start + batch_size] for key, held in encoded.items()}
        batch = dict(encoder.pad(rows, padding_side="right", return_tensors="pt"))
        if labels is not None:
            batch["labels"] = _tensor(labels[start : start + batch_size])
        found.append(batch)
    return found


def cut(arrays: Mapping[str, Tensor], batch_size: int) -> list[Batch]:
    """Return arrays of all samples as batches."""
    count = len(next(iter(arrays.values())))
    return [
        {name: array[start : start + batch_size] for name, array in arrays.items()}
        for start in range(0, count, batch_size)
    ]


def _packed(encoded: Sequence[Sequence[int]], end: int | None, length: int, batch_size: int) -> list[Batch]:
    tokens: list[int] = []
    for row in encoded:
        tokens += row
        if end is not None and (not row or row[-1] != end):
            tokens.append(end)
    count = len(tokens) // length
    if count == 0:
        raise InputError(f"length={length}: all texts together have {len(tokens)} tokens")
    return cut(
        {"input_ids": torch.tensor(tokens[: count * length], dtype=torch.int64, device="cpu").view(count, length)},
        batch_size,
    )


def _parts(content: str, sample_by: str) -> Iterator[str]:
    """Yield the texts of a file, without those that are empty."""
    if sample_by not in (*_SEPARATORS, "file"):
        raise InputError(f"sample_by: line, paragraph or file is wanted, got {shown(sample_by)}")
    parts = [content] if sample_by == "file" else content.replace("\r\n", "\n").split(_SEPARATORS[sample_by])
    return (part.strip("\n") for part in parts if part.strip())


def _objects(content: str, path: Path) -> Iterator[Any]:
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}: line {number} is no JSON: {error}") from None


def _value(row: Any, key: str, path: Path) -> Any:
    if isinstance(row, Mapping):
        if key not in row:
            raise InputError(f"{path}: there is no {key!r} in every line; there are {', '.join(map(repr, row))}")
        return row[key]
    return row


def _labels(rows: Sequence[Any], key: str | None, path: Path) -> list[Any] | None:
    return None if key is None else [_value(row, key, path) for row in rows]


def _tensor(labels: Sequence[Any]) -> Tensor:
    try:
        values = np.asarray(labels)
        dtype = torch.float32 if values.dtype.kind == "f" else torch.int64
        return torch.tensor(values, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"targets: numbers are wanted, got {shown(labels[0])}") from None
