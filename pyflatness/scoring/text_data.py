"""Make batches of tokens of texts, with the tokenizer of a model of Hugging Face's transformers."""

import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..messages import shown
from ..model.data import part
from ..model.hugging_face import IGNORED
from ..options import check_count
from . import pretrained

Batch = dict[str, Tensor]
C = TypeVar("C", bound=Callable[..., Any])

_SEPARATORS = {"line": "\n", "paragraph": "\n\n"}


def taking(*others: Callable[..., Any]) -> Callable[[C], C]:
    """Return a decorator that puts options of others, in place of ``**…``, into the signature of a function."""
    every = [option for other in others for option in inspect.signature(other).parameters.values()]
    options = {one.name: one.replace(kind=one.KEYWORD_ONLY) for one in every if one.default is not one.empty}

    def add(function: C) -> C:
        *own, _ = inspect.signature(function).parameters.values()
        more = [option for name, option in options.items() if name not in {p.name for p in own}]
        vars(function)["__signature__"] = inspect.Signature([*own, *more])
        return function

    return add


def check_sizes(count: int | None, batch_size: int) -> None:
    """Raise an InputError unless options of a reader of files count samples."""
    if count is not None:
        check_count("count", count, 1, "a number of samples")
    check_count("batch_size", batch_size, 1, "a number of samples")


def batches(
    texts: Sequence[Any],
    labels: Sequence[Any] | None,
    *,
    tokenizer: str | None = None,
    length: int | None = None,
    truncate: int | None = None,
    mask: float | None = None,
    seed: int = 0,
    batch_size: int = 8,
) -> list[Batch]:
    """Return texts as batches of a model's keyword arguments.

    Without ``length`` a sample is a text, cut to ``truncate`` tokens; those of a batch are padded on the right to the
    longest of them, and ``attention_mask`` leaves the padding out. With it all texts are packed: their tokens follow
    each other, with the token that ends a text between them where the tokenizer has one, and a sample is ``length`` of
    them; what is left at the end is dropped.

    With ``mask``, a probability, tokens are drawn for a masked language model to find, by transformers' own collator:
    of those that are drawn 80 % are masked, 10 % are replaced by random ones, and the labels of all others are ignored.
    The same seed draws the same, text by text, whatever the batches are. Labels are a number, or several, for each
    text, or a text that is to be made of it.
    """
    if tokenizer is None:
        raise InputError(
            "tokenizer: texts need one; pass the folder or name of a model of Hugging Face's, as "
            '--data-args \'{"tokenizer": "FOLDER"}\'; of --model hf:… it is the model\'s'
        )
    odd = next((held for held in texts if not isinstance(held, str)), None)
    if odd is not None or not texts:
        raise InputError(f"texts: {'a text is wanted, got ' + shown(odd) if texts else 'there are none'}")
    if labels is not None and (length is not None or mask is not None):
        packed = length is not None
        raise InputError(
            f"{'length' if packed else 'mask'}: {'packed' if packed else 'masked'} texts have no labels of their own; "
            f"pass {'truncate' if packed else 'no mask'}, or no targets"
        )
    for name, size in (("length", length), ("truncate", truncate)):
        if size is not None:
            check_count(name, size, 1, "a number of tokens")
    encoder = pretrained.tokenizer(tokenizer)
    if encoder.pad_token is None:
        encoder.pad_token = encoder.eos_token or encoder.convert_ids_to_tokens(0)  # it is masked
    cut = {} if truncate is None else {"truncation": True, "max_length": truncate}
    encoded = dict(encoder([*texts], verbose=False, **cut))
    if length is not None:
        encoded = {"input_ids": _packed(encoded["input_ids"], encoder.eos_token_id, length)}
    found: Any = labels
    if mask is not None:
        encoded["input_ids"], found = _masked(encoded["input_ids"], encoder, mask, seed)
    elif labels is not None and all(isinstance(label, str) for label in labels):
        found = encoder(text_target=[*labels], verbose=False, **cut)["input_ids"]
    elif labels is not None:
        found = _tensor(labels)  # of one dtype in all batches
    made = []
    for start in range(0, len(encoded["input_ids"]), batch_size):
        rows = {key: held[start : start + batch_size] for key, held in encoded.items()}
        batch = rows if length is not None else encoder.pad(rows, padding_side="right")
        made.append({key: torch.tensor(held, dtype=torch.int64, device="cpu") for key, held in batch.items()})
        if found is not None:
            some = found[start : start + batch_size]
            made[-1]["labels"] = some if isinstance(found, Tensor) else _padded(some)
    return made


@taking(batches)
def read_file(
    path: Path,
    *,
    text: str = "text",
    targets: str | None = None,
    sample_by: str = "line",
    count: int | None = None,
    batch_size: int = 8,
    **tokens: Any,
) -> list[Batch]:
    """Return batches of the texts in a ``.txt`` or ``.jsonl`` file, in UTF-8, of the first ``count``.

    See :func:`batches`. Of JSON lines each is a text, or an object whose key ``text`` has it, and ``targets`` the
    label. A text of ``.txt`` is a ``line``, a ``paragraph`` between empty lines, or the ``file``.
    """
    check_sizes(count, batch_size)
    try:
        content = path.read_text(encoding="utf-8-sig")  # a mark of the byte order is no part of the first text
    except (OSError, UnicodeError) as error:
        raise InputError(f"{path}: it cannot be read as text: {error}") from None
    if path.suffix == ".jsonl":
        rows = [*itertools.islice(_objects(content, path), count)]
        plain = next((row for row in rows if not isinstance(row, Mapping)), None)
        if targets is not None and plain is not None:
            raise InputError(f"{path}: a line is no object, and has no {targets!r} besides its text: {shown(plain)}")
        texts = [_value(row, text, path) for row in rows]
        labels = None if targets is None else [_value(row, targets, path) for row in rows]
    elif targets is not None:
        raise InputError(f"targets: {path.name} has texts alone; .jsonl, Parquet and data sets can have labels")
    else:
        texts, labels = [*itertools.islice(_parts(content, sample_by), count)], None
    return batches(texts, labels, **tokens, batch_size=batch_size)


def _masked(
    encoded: Sequence[Sequence[int]], encoder: Any, mask: float, seed: int
) -> tuple[list[list[int]], list[list[int]]]:
    import transformers

    if not isinstance(mask, (int, float)) or not 0 < mask < 1:
        raise InputError(f"mask: a probability between 0 and 1 is wanted, got {shown(mask)}")
    if encoder.mask_token is None:
        raise InputError("mask: the tokenizer has no token for masks; is its model a masked language model?")
    collator = transformers.DataCollatorForLanguageModeling(encoder, mlm_probability=mask, seed=seed)
    each = [collator.torch_call([{"input_ids": [*row]}]) for row in encoded]
    return tuple([one[name][0].tolist() for one in each] for name in ("input_ids", "labels"))  # type: ignore[return-value]


def _padded(labels: Sequence[Sequence[int]]) -> Tensor:
    """Return labels of tokens as one tensor, ignored where a text has no more."""
    longest = max(map(len, labels))
    rows = [[*row, *[IGNORED] * (longest - len(row))] for row in labels]
    return torch.tensor(rows, dtype=torch.int64, device="cpu")


def cut(arrays: Mapping[str, Tensor], batch_size: int) -> list[Batch]:
    """Return arrays of all samples as batches."""
    count = len(next(iter(arrays.values())))
    return [part(arrays, start, min(start + batch_size, count)) for start in range(0, count, batch_size)]


def _packed(encoded: Sequence[Sequence[int]], end: int | None, length: int) -> list[list[int]]:
    tokens: list[int] = []
    for row in encoded:
        tokens += row
        if end is not None and (not row or row[-1] != end):
            tokens.append(end)
    count = len(tokens) // length
    if count == 0:
        raise InputError(f"length={length}: all texts together have {len(tokens)} tokens")
    return [tokens[place * length : (place + 1) * length] for place in range(count)]


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


def _tensor(labels: Sequence[Any]) -> Tensor:
    try:
        values = np.asarray(labels)
        dtype = torch.float32 if values.dtype.kind == "f" else torch.int64
        return torch.tensor(values, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"targets: numbers are wanted, got {shown(labels[0])}") from None
