"""Identify what a value depends on by content, so that a value that is there already is not computed again.

Paths and times are no part of it: a file that was moved or touched is the same file, and one whose bytes changed is
another. Hashes are SHA-256.
"""

import functools
import hashlib
import inspect
import json
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .. import losses
from ..model.data import Batches, leaves, size
from ..options import Options

VALUES_VERSION = 1
"""Raised by a release in which a value changes by more than rounding; then all values are computed again."""

UNREADABLE = "unreadable: "
"""Begins the key of a file that cannot be read."""

Facts = dict[str, Any]

_NOT_IN_VALUES = ("memory", "per_sample")  # options of how a value is computed, and of what is kept beside it
_CHUNK = 2**20  # bytes of a file that are read at a time
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def of_json(facts: Any) -> str:
    """Return the hash of what JSON can hold; the order of a mapping's keys does not matter."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


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
        shards = _shards(path)
        return of_json([found.hexdigest(), *map(of_file, shards)]) if shards else found.hexdigest()
    except OSError as error:
        return f"{UNREADABLE}{error.strerror}"


def _shards(path: Path) -> list[Path]:
    """Return the files that an index of a sharded checkpoint names."""
    if not path.name.endswith(".index.json"):
        return []
    try:
        names = json.loads(path.read_bytes())["weight_map"].values()
        return [path.parent / Path(name).name for name in sorted({*names})]
    except (AttributeError, KeyError, TypeError, ValueError):
        return []


def of_state(module: nn.Module) -> str:
    """Return the hash of a module's weights and buffers: names, shapes, dtypes and values."""
    return of_json([(name, _plain(value)) for name, value in module.state_dict().items()])


def of_network(network: nn.Module) -> Facts:
    """Return what makes a network besides its weights: its structure, dtypes, and the source of its classes."""
    kinds = {type(module) for module in network.modules()}
    state = network.state_dict()
    hidden = [(name, _plain(buffer)) for name, buffer in network.named_buffers() if name not in state]
    return {
        "structure": _without_addresses(network),
        "entries": [(name, _kind(value)) for name, value in state.items()],
        "hidden buffers": hidden,
        "sources": sorted({source for kind in kinds if (source := _source(kind))}),
    }


def of_callable(function: Any, arguments: Mapping[str, Any] | None = None) -> Facts:
    """Return what a function does, as far as that can be told: its name, source file, bound values and arguments."""
    bound: list[Any] = []
    while isinstance(function, functools.partial):
        bound.append([[_plain(value) for value in function.args], _plain(function.keywords)])
        function = function.func
    cells = getattr(function, "__closure__", None) or ()
    return {
        "name": getattr(function, "__qualname__", type(function).__qualname__),
        "source": _source(function),
        "bound": [*bound, *(_plain(cell.cell_contents) for cell in cells)],
        "arguments": _plain(arguments or {}),
    }


def of_loss(loss: Any) -> Facts:
    """Return what a loss is; a name, its function and its module with the same options are the same."""
    resolved = losses.resolve(loss)
    if not isinstance(resolved, losses.CustomLoss):
        return {"name": type(resolved).__name__, **_attributes(resolved)}
    if isinstance(loss, nn.Module):
        return {"name": type(loss).__qualname__, "source": _source(type(loss)), **_attributes(loss)}
    return of_callable(loss) | {"reduction": resolved.reduction}


def of_options(options: Options) -> Facts:
    """Return the options that values depend on."""
    return {name: value for name, value in asdict(options).items() if name not in _NOT_IN_VALUES}


def of_data(data: Any, *, ordered: bool, ends: bool = False) -> Facts:
    """Return a fingerprint of data, which does not depend on how they are cut into batches.

    Args:
        data: see :class:`.data.Batches`.
        ordered: whether values depend on the order of the samples, as random draws do.
        ends: whether to take the first and last batch only, where the data can give them without the rest.

    Raises:
        InputError: no such data.
    """
    if ends:
        data = _ends(data)
    samples, total, in_order = 0, 0, hashlib.sha256()
    beside: set[str] = set()  # what is in a batch besides its samples
    for batch in Batches(data, torch.device("cpu"), shown=False):
        count = size(batch)
        parts = [*leaves(batch)]
        own = [tensor for tensor in parts if isinstance(tensor, Tensor) and tensor.ndim and len(tensor) == count]
        beside.update(of_json(_plain(other)) for other in parts if not any(other is tensor for tensor in own))
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
    """Yield the hash of each sample."""
    rows = [(f"{_kind(tensor[:1])}".encode(), _bytes(tensor).reshape(count, -1).numpy()) for tensor in tensors]
    for place in range(count):
        digest = hashlib.sha256()
        for kind, row in rows:
            digest.update(kind)
            digest.update(row[place])
        yield digest.digest()


def _bytes(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().view(-1).view(torch.uint8)


def _kind(value: Any) -> Any:
    return [str(value.dtype), [*value.shape]] if isinstance(value, Tensor) else _plain(value)


def _plain(value: Any) -> Any:
    """Return a value as JSON that is the same in every process."""
    if isinstance(value, Tensor):
        return [*_kind(value), hashlib.sha256(_bytes(value).numpy().data).hexdigest()]
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(held) for held in value]
    return value if value is None or isinstance(value, (str, int, float)) else _without_addresses(value)


def _attributes(held: Any) -> Facts:
    """Return what an object holds, but for the inner matters of a module."""
    attributes = {name: _plain(value) for name, value in vars(held).items() if not name.startswith("_")}
    return attributes | ({"state": of_state(held)} if isinstance(held, nn.Module) else {})


def _without_addresses(value: Any) -> str:
    return _ADDRESS.sub("", repr(value))


def _source(held: Any) -> str:
    """Return the hash of the file that a class or function is written in; of torch's and built-in ones nothing."""
    if str(getattr(held, "__module__", "")).partition(".")[0] in ("torch", "builtins"):
        return ""
    try:
        path = inspect.getsourcefile(held)
        return of_file(Path(path)) if path is not None and Path(path).is_file() else of_json(inspect.getsource(held))
    except (OSError, TypeError):  # written in C, or in a notebook's cell that is gone
        return ""
