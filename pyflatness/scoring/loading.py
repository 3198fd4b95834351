"""Put a checkpoint's weights into a model, and say what does not fit and what nearly would."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..model import layers

State = dict[str, Tensor]

_PREFIXES = ("module.", "model.")  # of DataParallel and DistributedDataParallel; of a LightningModule's attribute
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")  # wherever torch.compile was
_SHOWN_LINES, _SHOWN_LENGTH = 4, 160


def load(model: nn.Module, state: State) -> tuple[str, ...]:
    """Put the weights into the model, all of them and nothing else; their precision becomes the model's.

    A file may hold any of the names of weights that are one parameter in the model (tied). Where the names are those of
    the model but for ``module.`` or ``model.`` in front of all, or ``_orig_mod.`` in between, these are taken off.

    Returns:
        Notes, which say what was taken off.

    Raises:
        InputError: names, shapes or kinds of numbers that are not the model's, or tied weights that differ. The model
            is then left with a part of the weights.
    """
    model = layers.unwrap(model)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    taken, fitting = next(
        ((taken, names) for taken, names in _renamed([*state]) if own.keys() >= {*names}), ("", [*state])
    )
    renamed = dict(zip(fitting, state.values(), strict=True))
    for name in own:
        if name in renamed and _kind(own[name]) != _kind(renamed[name]):
            raise InputError(f"does not fit the model: {name} is {renamed[name].dtype}, in the model {own[name].dtype}")
    try:
        model.load_state_dict({**renamed, **_tied(own, renamed)})
    except RuntimeError as error:
        raise InputError(f"does not fit the model: {_shortened(str(error))}{_nearest(own, state)}") from None
    return (f"{taken!r} was taken off the names",) if taken else ()


def _renamed(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield names without what wrappers put into them, less and less, and what was taken off."""
    yield "", names
    bare = [_COMPILED.sub("", name) for name in names]
    for taken, current in (("", names), ("_orig_mod.", bare)):
        if taken and len({*bare}) == len(names):
            yield taken, current
        while (prefix := _common(current)) is not None:
            taken, current = taken + prefix, [name.removeprefix(prefix) for name in current]
            yield taken, current


def _common(names: list[str]) -> str | None:
    return next((prefix for prefix in _PREFIXES if names and all(name.startswith(prefix) for name in names)), None)


def _nearest(own: Mapping[str, Tensor], state: State) -> str:
    """Return what prefix, taken off or put in front, makes most names those of weights of the same shape."""

    def shared(outer: Mapping[str, Tensor], inner: Mapping[str, Tensor]) -> tuple[str, int]:
        counts: Counter[str] = Counter()
        for name, tensor in outer.items():
            for dot in re.finditer(r"\.", name):
                rest = inner.get(name[dot.end() :])
                if rest is not None and rest.shape == tensor.shape:
                    counts[name[: dot.end()]] += 1
        return max(counts.items(), key=lambda item: item[1], default=("", 0))

    as_they_are = sum(name in own and own[name].shape == state[name].shape for name in state)
    (off, without), (on, with_it) = shared(state, own), shared(own, state)
    if max(without, with_it) <= as_they_are:
        return ""
    if without < with_it:
        return f" With {on!r} in front, {with_it} of the model's {len(own)} would fit."
    others = [name for name in state if not name.startswith(off)]
    rest = f"; {', '.join(others[:3])}{' …' if others[3:] else ''} would be left over" if others else ""
    return f" Without {off!r} in front, {without} of the model's {len(own)} would fit{rest}."


def _tied(own: State, state: State) -> State:
    """Return what is missing in ``state`` but shares its parameter with a weight that is there."""
    groups = defaultdict(list)
    for name, tensor in own.items():
        if not nn.parameter.is_lazy(tensor):
            groups[tensor.data_ptr(), tensor.shape, tensor.stride()].append(name)
    found = {}
    for names in groups.values():
        present = [name for name in names if name in state]
        for name in present[1:]:
            if own[name].numel() and not torch.equal(state[name], state[present[0]]):
                raise InputError(f"does not fit the model: {present[0]} and {name}, one weight in the model, differ")
        if present:
            found.update({name: state[present[0]] for name in names if name not in state})
    return found


def _kind(tensor: Tensor) -> str:
    if tensor.is_floating_point() or tensor.is_complex():
        return "complex" if tensor.is_complex() else "floating-point"
    return "boolean" if tensor.dtype == torch.bool else "integer"


def _shortened(message: str) -> str:
    """Return what torch says of missing and unexpected names on one line each, of wrong shapes on one per name."""
    lines = [line.strip() for line in message.splitlines()[1:]]
    shown = [line if len(line) <= _SHOWN_LENGTH else line[:_SHOWN_LENGTH] + " …" for line in lines[:_SHOWN_LINES]]
    more = len(lines) - len(shown)
    return " ".join(shown) + (f" And {more} more." if more else "")
