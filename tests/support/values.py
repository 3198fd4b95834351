"""Record every value of a fixed grid of public calls, and compare two recordings bit by bit.

    python tests/support/values.py record FILE [--only GLOB]
    python tests/support/values.py compare OLD NEW [--allow GLOB]...

A recording is a JSON file: for each entry of the grid (:mod:`support.value_grid`) the facts of what the call returned,
or the type and message of what it raised. Floating-point numbers stand as Python's hexadecimal text, so that two
recordings are equal only if every bit is; NaN equals NaN. The calls are public ones alone, so the same grid records
any version of the package: run it with that version's interpreter.
"""

import argparse
import dataclasses
import fnmatch
import json
import os
import platform
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import pyflatness as pf

Facts = dict[str, str]
Entry = tuple[str, Callable[[], Any]]
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")  # of objects without a name; a number in hexadecimal text has a point


def facts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the facts of a result as pairs of a path and a text, which has every bit of numbers."""
    if isinstance(value, BaseException):
        yield f"{path}error", f"{type(value).__name__}: {_ADDRESS.sub('0x…', str(value))}"
    elif isinstance(value, pf.results.Report):
        yield f"{path}table", _printed(value)
        for name in ("layers", "measures", "skipped", "uncovered"):
            yield from facts(getattr(value, name), f"{path}{name}.")
        for measure, held in value.by_measure().items():
            for layer, estimate in held.items():
                yield from facts(estimate, f"{path}{measure}.{layer or 'network'}.")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from facts(getattr(value, field.name), f"{path}{field.name}.")
    elif isinstance(value, nn.Module):
        yield from facts(value.state_dict(), path)
    elif isinstance(value, Mapping):
        yield f"{path}keys", ", ".join(map(str, value))
        for key, held in value.items():
            yield from facts(held, f"{path}{key}.")
    elif isinstance(value, list | tuple):
        yield f"{path}length", str(len(value))
        for place, held in enumerate(value):
            yield from facts(held, f"{path}{place}.")
    elif isinstance(value, Tensor | np.ndarray):
        numbers = ", ".join(_text(number) for number in value.flatten().tolist())
        yield path.removesuffix("."), f"{value.dtype} {tuple(value.shape)}: {numbers}"
    else:
        yield path.removesuffix("."), _text(value)


def _printed(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _text(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return float(value).hex()
    return _ADDRESS.sub("0x…", value if isinstance(value, str) else repr(value))


def recorded(call: Callable[[], Any]) -> Facts:
    """Return the facts of what a call returns or raises."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
        except Exception as error:  # a refusal is a result too
            result = error
    return {path or "value": text for path, text in facts(result)}


def record(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return the recording of entries, with what it was made on.

    Raises:
        ValueError: two entries of one name.
    """
    values: dict[str, Facts] = {}
    for name, call in entries:
        if name in values:
            raise ValueError(f"two entries are named {name!r}")
        values[name] = recorded(call)
    made_on = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "instruction set": os.environ.get("PYFLATNESS_ISA", "the processor's widest"),
    }
    return {"made on": made_on, "values": values}


def differences(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield each fact that two recordings' values differ in: "entry :: path", the old text, the new one.

    Entries that are new alone are none: the grid has grown since the old recording.
    """
    absent: Facts = {}
    for name, before in old.items():
        after = new.get(name, absent)
        for path in [*before, *(path for path in after if path not in before)]:
            texts = before.get(path, "(absent)"), after.get(path, "(absent)")
            if texts[0] != texts[1]:
                yield f"{name} :: {path}", *texts


def compare(old: Mapping[str, Any], new: Mapping[str, Any], allowed: Sequence[str] = ()) -> int:
    """Print what two recordings differ in, and return how many differences no pattern of ``allowed`` matches."""
    if old["made on"] != new["made on"]:
        print(f"made on {old['made on']}\n    and {new['made on']}")
    unexpected = expected = 0
    for name, before, after in differences(old["values"], new["values"]):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed):
            expected += 1
            continue
        unexpected += 1
        print(f"{name}\n  - {_short(before, after)}\n  + {_short(after, before)}{_distance(before, after)}")
    if added := new["values"].keys() - old["values"].keys():
        print(f"{len(added)} entries are in the new recording alone, and have nothing to be compared with")
    total = sum(map(len, old["values"].values()))
    print(f"{unexpected} of {total} facts of {len(old['values'])} entries differ; {expected} others are allowed to")
    return unexpected


def _short(text: str, other: str, room: int = 200) -> str:
    """Return the text from shortly before the first character that is another one."""
    first = next((place for place, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, first - room // 2) if len(text) > room else 0
    return ("…" if start else "") + text[start : start + room] + ("…" if start + room < len(text) else "")


def _distance(before: str, after: str) -> str:
    """Return how far two numbers are apart, relative to the larger; empty if these are no two finite numbers."""
    try:
        a, b = float.fromhex(before), float.fromhex(after)
    except (ValueError, OverflowError):
        return ""
    largest = max(abs(a), abs(b))
    return f"\n    {a:.17g} and {b:.17g}, relative distance {abs(a - b) / largest:.1e}" if 0 < largest < 1e400 else ""


def numbers(values: Mapping[str, Mapping[str, str]]) -> int:
    """Return how many floating-point numbers the values of a recording hold."""
    number = re.compile(r"-?0x[01]\.|\b(?:nan|inf)\b")
    texts = (text for held in values.values() for path, text in held.items() if path.split(".")[-1] != "table")
    return sum(len(number.findall(text)) for text in texts)


def main() -> int:
    """Record or compare, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="record the values of the grid")
    recording.add_argument("file", type=Path)
    recording.add_argument("--only", metavar="GLOB", default="*", help="only entries whose name matches")
    comparing = commands.add_parser("compare", help="print what two recordings differ in; exit status 1 if anything")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument(
        "--allow", metavar="GLOB", action="append", default=[], help="'entry :: path' that may differ"
    )
    options = parser.parse_args()
    if options.command == "compare":
        old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (options.old, options.new))
        return int(compare(old, new, options.allow) > 0)
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of the tests
    from support.value_grid import entries

    torch.set_num_threads(1)  # sums in one order
    start = time.process_time()
    chosen = [entry for entry in entries() if fnmatch.fnmatchcase(entry[0], options.only)]
    found = record(chosen)
    options.file.write_text(json.dumps(found, indent=0, ensure_ascii=False), encoding="utf-8")
    held = found["values"]
    counts = f"{len(held)} entries, {sum(map(len, held.values()))} facts, {numbers(held)} floating-point numbers"
    print(f"{counts} of {Path(pf.__file__).parent} in {time.process_time() - start:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
