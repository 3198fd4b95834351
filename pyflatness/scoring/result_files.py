"""Keep results that are more than a number in a store: spectra and landscapes of models, histories of trainings.

A result is kept as the file that its own class writes and reads: JSON, or ``.npz`` of a landscape. What is of a model
is found by the content of its weights, as values are, and a history by the name of its training.
"""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..curvature.landscape import Landscape
from ..curvature.spectra import Spectrum
from ..errors import InputError
from ..messages import check_path, instead, shown
from ..session import public
from ..statistics.tables import aliases
from ..training.history import History
from .store import Store, versions

Result = Spectrum | Landscape | History


class NamedResult(NamedTuple):
    """Hold a result of a store, or the error in its place, its model or training, and what tells it from others."""

    name: str
    kind: str
    label: str
    result: Result | None
    error: str = ""


class ResultFile(NamedTuple):
    """Hold what a store has of a result."""

    content: str  # of the model's weights; empty for a history
    training: str  # the name of a history
    kind: str  # of the result
    label: str  # tells it from others of its kind
    setting: str  # hashes of what else it was computed of, and of its options; empty where that is not known
    file: bytes  # its content; empty where there is an error
    error: str = ""  # why there is no result


def read(file: bytes, what: str) -> Result:
    """Return the result that a file holds."""
    if file.startswith(b"PK"):  # an archive, as .npz files are
        return Landscape.read(file, what)
    try:
        text = file.decode()
        return History.from_json(text) if '"records"' in text[:100] else Spectrum.from_json(text)
    except (UnicodeDecodeError, InputError, OSError) as error:
        raise InputError(
            f"{what}: the file of a spectrum (to_json), a history (to_json) or a landscape (save) is wanted ({error})"
        ) from None


@public()
def add_to_store(store: str | Path, name: str, result: Result, *, label: str = "") -> None:
    """Put a spectrum, a landscape or a history into a store of :func:`pyflatness.score`, so that its page shows it.

    A result of the same model, kind and label, or of the same training, is replaced. So a history can be put there
    after each record, over ranks by one of them. Of a spectrum all but the eigenvectors are kept.

    Args:
        store: path of the store; for a history it is made if it is not there.
        name: of the model that a spectrum or landscape is of, as the store has it, or of its file; of a history, any
            name for the training.
        result: what :func:`pyflatness.spectrum`, :func:`pyflatness.landscape` or :func:`pyflatness.track` returned.
        label: tells several spectra, or several landscapes, of one model from each other, such as ``"layer 3"``.

    Raises:
        InputError: another result; no such model in the store, or several; a label of a history.
        StoreError: a store that cannot be read or written.

    Example:
        >>> import tempfile, torch, pyflatness as pf
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(4, 3).eval()
        >>> data = torch.randn(100, 4), torch.randint(3, (100,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     scores = pf.score({"linear": model}, "cross_entropy", data, store=f"{folder}/runs.sqlite")
        ...     found = pf.spectrum(model, "cross_entropy", data, density=True)
        ...     pf.add_to_store(f"{folder}/runs.sqlite", "linear", found)
    """
    new = kind_of(result) == "history"  # others are of a model that is there
    with Store(check_path("store", store), write=True, new=new, command="pf.add_to_store in Python") as held:
        add(held, name, result, label)


def add(store: Store, name: str, result: Result, label: str = "") -> None:
    """Put a result into a store that is open; see :func:`add_to_store`."""
    kind = kind_of(result)
    if kind == "history" and label:
        raise InputError(f"label={shown(label)}: a history is told from others by the name of its training alone")
    of = ""
    if kind != "history":
        rows = store.select("SELECT name, content FROM checkpoints ORDER BY id")
        contents = {row["name"]: str(row["content"]) for row in rows}
        of = contents[meant(name, [*contents])]
    content = result.content() if isinstance(result, Landscape) else result.to_json().encode()
    put(store, ResultFile(of, "" if of else name, kind, label, "", content))


def put(store: Store, entry: ResultFile) -> None:
    """Write a result into a store; it takes the place of one of the same model or training, kind and label.

    One that is known to be of other data or another loss stays, where the label is the same, as of all tuples: then
    the label of the new one says by a hash of which they are.
    """
    names, of = (*ResultFile._fields, "versions", "added"), entry.setting.split(" ")[0]
    with store.changes() as connection:
        there = connection.execute(
            "SELECT setting FROM result_files WHERE content = ? AND training = ? AND kind = ? AND label = ?", entry[:4]
        ).fetchone()
        if of and there is not None and there["setting"].split(" ")[0] not in ("", of):
            entry = entry._replace(label=f"{entry.label} {of[:8]}")
        connection.execute(
            f"INSERT OR REPLACE INTO result_files ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
            (*entry, versions(), time.time()),
        )
        store.note_run(connection)


def there(store: Store, kind: str, setting: str, *, failed: bool) -> set[str]:
    """Return the contents of weights of which there is a result in a setting; of those that failed with ``failed``."""
    rows = store.select("SELECT content, error FROM result_files WHERE kind = ? AND setting = ?", (kind, setting))
    return {row["content"] for row in rows if failed or not row["error"]}


def failures(store: Store, setting: str, contents: Iterable[str]) -> list[tuple[str, str]]:
    """Return the models of which a result could not be computed in a setting, each with its error."""
    chosen = {*contents}
    rows = store.select(
        "SELECT name, error, content FROM result_files JOIN checkpoints USING (content) "
        "WHERE setting = ? AND error != '' ORDER BY checkpoints.id",
        (setting,),
    )
    return [(row["name"], row["error"]) for row in rows if row["content"] in chosen]


def found(store: Store) -> list[NamedResult]:
    """Return what a store holds besides numbers, in the order of its models, and then histories."""
    rows = store.select(
        "SELECT coalesce(name, training) AS name, kind, label, file, error "
        "FROM result_files LEFT JOIN checkpoints USING (content) WHERE name NOT NULL OR result_files.content = '' "
        "ORDER BY name IS NULL, checkpoints.id, result_files.id"
    )
    named = []
    for row in rows:
        result = None if row["error"] else read(row["file"], f"{store.path}: {row['name']}")
        named.append(NamedResult(row["name"], row["kind"], row["label"], result, row["error"]))
    return named


def kind_of(result: object) -> str:
    """Return the name of a result's kind."""
    if isinstance(result, Result):
        return type(result).__name__.lower()
    raise InputError(
        f"result: what pf.spectrum, pf.landscape or pf.track returned is wanted, got {type(result).__name__}; values "
        "of measures come into a store by pf.score(…, store=…)"
    )


def meant(given: str, names: Sequence[str]) -> str:
    """Return the checkpoint that is meant by its name, or by that of its file with or without the ending."""
    among = [name for name in names if given in aliases(name)]
    among = [given] if given in among else among
    if len(among) > 1:
        raise InputError(
            f"checkpoint {given!r} is the name of {len(among)}; pass the whole name: {', '.join(among[:5])}"
        )
    if not among:
        there = instead(given, names) if names else "it has none yet; score them first"
        raise InputError(f"checkpoint {given!r} is not in the store; {there}")
    return among[0]
