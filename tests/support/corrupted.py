"""Checkpoints that are damaged in every way that can be told from the file, or that do not fit the network."""

import io
import random
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save

State = dict[str, torch.Tensor]
Damage = Callable[[random.Random, State], bytes]


def safe(state: State) -> bytes:
    return save(state)


def archive(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def legacy(state: State) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def data_start(content: bytes) -> int:
    """Return where the numbers of a safetensors file begin."""
    return 8 + int.from_bytes(content[:8], "little")


def cut(written: Callable[[State], bytes], low: float = 0.0, high: float = 1.0) -> Damage:
    """Return a damage that keeps a part of the file."""

    def damage(rng: random.Random, state: State) -> bytes:
        content = written(state)
        return content[: rng.randint(int(low * len(content)), int(high * len(content)) - 1)]

    return damage


def zero_tailed(rng: random.Random, state: State) -> bytes:
    """Keep an archive's size and not its end."""
    content = archive(state)
    keep = rng.randint(1, len(content) - 64)
    return content[:keep] + bytes(len(content) - keep)


def flipped_header(rng: random.Random, state: State) -> bytes:
    """Flip a bit of a safetensors file's header."""
    content = bytearray(safe(state))
    content[rng.randrange(data_start(bytes(content)))] ^= 1 << rng.randrange(8)
    return bytes(content)


def flipped_part(rng: random.Random, state: State) -> bytes:
    """Flip a bit of an archive's pickle or of its numbers, which have checksums."""
    content = bytearray(archive(state))
    parts = [bytes(tensor.numpy().tobytes()) for tensor in state.values() if tensor.numel()]
    part = rng.choice([*parts, b"ctorch._utils\n_rebuild_tensor_v2\n"])
    content[content.index(part) + rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    return bytes(content)


def changed(written: Callable[[State], bytes], change: Callable[[random.Random, State], State]) -> Damage:
    return lambda rng, state: written(change(rng, dict(state)))


def _reshaped(rng: random.Random, state: State) -> State:
    name = rng.choice([*state])
    return {**state, name: torch.cat([state[name], state[name]], dim=rng.randrange(state[name].dim()))}


def _with_nan(rng: random.Random, state: State) -> State:
    name = rng.choice([*state])
    flat = state[name].clone().reshape(-1)
    flat[rng.randrange(len(flat))] = torch.nan
    return {**state, name: flat.reshape(state[name].shape)}


def _renamed(rng: random.Random, state: State) -> State:
    name = rng.choice([*state])
    return {rng.choice(["x", name.upper(), "net." + name]) if other == name else other: t for other, t in state.items()}


def _without(rng: random.Random, state: State) -> State:
    del state[rng.choice([*state])]
    return state


def _integers(rng: random.Random, state: State) -> State:
    name = rng.choice([*state])
    return {**state, name: state[name].to(rng.choice([torch.int8, torch.int64, torch.bool]))}


def _noise(rng: random.Random, state: State) -> bytes:
    return rng.randbytes(rng.randrange(2000))


def _zeros(rng: random.Random, state: State) -> bytes:
    return bytes(rng.randrange(2000))


CHANGES = {
    "shapes": _reshaped,
    "NaN": _with_nan,
    "renamed": _renamed,
    "a weight less": _without,
    "integers": _integers,
}
WRITERS = {"safetensors": safe, "pt": archive, "pth": legacy}

# By name and ending.
DAMAGES: dict[tuple[str, str], Damage] = {
    **{("cut off", ending): cut(writer) for ending, writer in WRITERS.items()},
    **{("cut off at the very end", ending): cut(writer, 0.99) for ending, writer in WRITERS.items()},
    ("cut off in the header", "safetensors"): lambda rng, state: safe(state)[: rng.randrange(data_start(safe(state)))],
    ("zeros at the end", "pt"): zero_tailed,
    ("a flipped bit in the header", "safetensors"): flipped_header,
    ("a flipped bit", "pt"): flipped_part,
    **{
        (name, ending): changed(writer, change)
        for name, change in CHANGES.items()
        for ending, writer in WRITERS.items()
    },
    **{("noise", ending): _noise for ending in WRITERS},
    **{("zeros", ending): _zeros for ending in WRITERS},
    ("an archive", "safetensors"): lambda rng, state: archive(state),
    ("safetensors", "pt"): lambda rng, state: safe(state),
}


def write(folder: Path, state: State, count: int, seed: int = 0) -> dict[Path, str]:
    """Write so many damaged checkpoints, of every kind in turn, and return the kind of each."""
    rng, found = random.Random(seed), {}
    for number in range(count):
        (name, ending), damage = [*DAMAGES.items()][number % len(DAMAGES)]
        path = folder / f"{number}.{ending}"
        path.write_bytes(damage(rng, state))
        found[path] = f"{name} ({ending})"
    return found
