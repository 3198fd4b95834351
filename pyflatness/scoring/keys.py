"""Identify what a value depends on by content, so that a value that is there already is not computed again.

Paths and times are no part of it: a file that was moved or touched is the same file, and one whose bytes changed is
another. Hashes are SHA-256.
"""

import hashlib
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import losses
from ..losses import auto
from ..model.data import Batches, leaves, size
from ..model.layers import unwrap
from ..options import Options
from . import checkpoints, described
from .described import Description, Facts, of_json, plain

VALUES_VERSION = 1
"""Raised by a release in which a value changes by more than rounding; then all values are computed again."""

UNREADABLE = "unreadable: "  # begins the key of a file that cannot be read

_NOT_IN_VALUES = (
    "memory",
    "per_sample",
    "max_passes",
)  # options of how a value is computed, and of what is kept beside it
_CHUNK = 2**20  # bytes of a file that are read at a time


def of_file(path: Path) -> str:
    """Return the hash of a checkpoint: of a file's bytes, with those of its shards if it is an index of shards.

    What cannot be read has a key too, made of what is wrong, so that its error is kept like a value.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return f"{UNREADABLE}no regular file"
        found = hashlib.sha256()
        with path.open("rb") as file:
            while content := file.read(_CHUNK):
                found.update(content)
        shards = (
            [path.with_name(name) for name in checkpoints.shards(path)] if path.name.endswith(checkpoints.INDEX) else []
        )
        return of_json([found.hexdigest(), *map(of_file, shards)]) if shards else found.hexdigest()
    except (OSError, ValueError) as error:  # ValueError: no such name can be
        return f"{UNREADABLE}{getattr(error, 'strerror', error)}"


def of_state(module: nn.Module) -> str:
    """Return the hash of a module's weights and buffers: names, shapes, dtypes and values."""
    return of_json([(name, plain(value)) for name, value in module.state_dict().items()])


def of_network(about: Description, network: nn.Module, made: Any = None) -> Facts:
    """Return what makes a network besides its weights: classes, attributes, hooks, dtypes and shapes."""
    network = unwrap(network)
    state = network.state_dict(keep_vars=True)
    of_all = (held for name, held in vars(nn.modules.module).items() if "_hooks" in name and isinstance(held, dict))
    # The file's weights, wherever else the network holds them.
    for weight in (*network.parameters(), *(held for name, held in network.named_buffers() if name in state)):
        about.meet(weight)
    return {
        "entries": [(name, described.kind(value)) for name, value in state.items()],
        "network": of_json(about.of(network)),
        "made": of_json(about.of(made)),
        "hooks": of_json(about.of([[*hooks.values()] for hooks in of_all])),
    }


def of_loss(about: Description, loss: Any) -> Facts:
    """Return what a loss is; a name, its function and its module with the same options are the same."""
    if auto.is_auto(loss):  # what it is follows from the model and the data
        return {"name": auto.AUTO}
    resolved = losses.resolve(loss)
    if resolved.known:
        return {"name": type(resolved).__name__, **_attributes(resolved)}
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    return {"name": name, "loss": of_json(about.of(loss)), "reduction": resolved.reduction}


@dataclass(frozen=True)
class Code:
    """Hold what the user's code is for values."""

    model: Facts | None  # of the network that checkpoints are of
    loss: Facts
    files: Mapping[str, str]  # hashes of source files, by their paths
    unknown: tuple[str, ...]  # what cannot be described, in words; values that depend on it cannot be found again

    @classmethod
    def of(
        cls,
        network: nn.Module | None,
        made: Any,
        loss: Any,
        data: Any,
        version: str | None,
        folders: Iterable[Path] = (),
    ) -> "Code":
        """Return the code of a run."""
        of_model, of_loss_ = Description(version), Description(version)
        model = None if network is None else of_network(of_model, network, made)
        found = of_loss(of_loss_, loss)
        places = {*folders, *of_model.folders, *of_loss_.folders, *described.folder(data)}
        files = {"": version} if version is not None else described.files(places)
        return cls(model, found, files, (*of_model.unknown, *of_loss_.unknown))

    def differs(self, other: "Code") -> bool:
        """Return whether another process has other code, as far as it has loaded the same files."""
        files = any(other.files.get(path, held) != held for path, held in self.files.items())
        return files or (self.model, self.loss) != (other.model, other.loss)


def of_options(options: Options) -> Facts:
    """Return the options that values depend on."""
    return {name: value for name, value in asdict(options).items() if name not in _NOT_IN_VALUES}


def of_data(data: Any, *, ordered: bool, ends: bool = False) -> Facts:
    """Return a fingerprint of data, which does not depend on how they are cut into batches.

    ``ordered``: values depend on the order of the samples, as random draws do. ``ends``: take the first and last batch
    only, where the data can give them without the rest.
    """
    if ends:
        data = _ends(data)
    samples, total, in_order = 0, 0, hashlib.sha256()
    beside: set[str] = set()  # what is in a batch besides its samples
    for batch in Batches(data, torch.device("cpu"), shown=False):
        count = size(batch)
        parts = [*leaves(batch)]
        own = [tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == count]
        beside.update(of_json(plain(other)) for other in parts if not any(other is tensor for tensor in own))
        for digest in _digests(own, count):
            in_order.update(digest)
            total += int.from_bytes(digest, "little")
        samples += count
    facts: Facts = {"samples": samples, "content": f"{total % 2**256:064x}", "beside": sorted(beside)}
    return facts | ({"order": in_order.hexdigest()} if ordered else {}) | ({"ends": True} if ends else {})


def _ends(data: Any) -> Any:
    if isinstance(data, tuple) and data and isinstance(data[0], Tensor):
        return tuple(torch.cat([tensor[:256], tensor[-256:]]) for tensor in data)
    if isinstance(data, (list, tuple)) and data:
        return [data[0], data[-1]]
    if isinstance(data, DataLoader) and data.batch_sampler is not None and hasattr(data.dataset, "__getitem__"):
        places = [*data.batch_sampler]
        return [data.collate_fn([data.dataset[place] for place in places[end]]) for end in (0, -1)]
    return data


def _digests(tensors: list[Tensor], count: int) -> Iterator[bytes]:
    rows = [
        (f"{described.kind(tensor[:1])}".encode(), described.content(tensor).reshape(count, -1).numpy())
        for tensor in tensors
    ]
    for place in range(count):
        digest = hashlib.sha256()
        for kind, row in rows:
            digest.update(kind)
            digest.update(row[place])
        yield digest.digest()


def _attributes(held: Any) -> Facts:
    return {name: plain(value) for name, value in vars(held).items() if not name.startswith("_")}
