"""Read pickled NumPy arrays as data: nothing that a file names is imported, looked up or called.

A pickle is a program that can call whatever it names. Here three names of NumPy's are known, each of which stands for
an object that keeps what it is given, and every other name is an error.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyflatness.errors import InputError

_RECONSTRUCT = {f"numpy.{core}.multiarray" for core in ("core", "_core")}


class Kind:
    """Stand for ``numpy.dtype``: keep the name of a type."""

    def __init__(self, name: Any = None, *others: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        """Forget byte order and fields, of which bytes have none."""


class Array:
    """Stand for ``numpy.ndarray``: keep shape, type and bytes."""

    def __init__(self) -> None:
        self._state: Any = None

    def __setstate__(self, state: Any) -> None:
        """Keep what the file says that the array is."""
        self._state = state

    def numbers(self, path: Path) -> NDArray[np.uint8]:
        """Return the array.

        Raises:
            InputError: anything but bytes that fit the shape.
        """
        try:
            _, shape, kind, by_columns, content = self._state
            if kind.name != "u1":
                raise TypeError(f"numbers of type {kind.name}, not u1")
            values: NDArray[np.uint8] = np.frombuffer(content, np.uint8).reshape(
                shape, order="F" if by_columns else "C"
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise InputError(f"{path}: no array of bytes: {error}") from None
        return values


def _array(*given: Any) -> Array:
    return Array()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for one of NumPy's names."""
        if module in _RECONSTRUCT and name == "_reconstruct":
            return _array
        if module == "numpy" and name in ("ndarray", "dtype"):
            return Array if name == "ndarray" else Kind
        if module == "_codecs" and name == "encode":  # how Python 3 writes bytes for older readers
            return _bytes
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of an array of numbers")


def _bytes(text: Any, encoding: Any = None) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("bytes are written in another way than Python does")
    return text.encode("latin1")


def load(path: Path) -> dict[Any, Any]:
    """Return the dictionary in a pickled file, with an :class:`Array` for each array.

    Raises:
        InputError: it cannot be read, or names anything but arrays.
    """
    try:
        with path.open("rb") as file:
            content = _Reader(file, encoding="bytes").load()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise InputError(f"{path}: no batch of images, or a damaged one: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: a dictionary is wanted, got {type(content).__name__}")
    return content
