"""A pytest plugin of ``tests/gpu.py``: which CUDA kernels each test launched, and which tests are run at all.

Environment: ``PYFLATNESS_SHARE``, ``2/6`` for the third of six equal parts of the tests, in an order drawn once for
all, so that each part has something of everything; ``PYFLATNESS_UNTIL``, in seconds since 1970, after which what is
left of them is skipped.
"""

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pyflatness.contractions import cuda

KERNEL = "kernel"
"""The property of a test's report that names a kernel."""

LATE = "the time for these tests is over"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's share."""
    if share := os.environ.get("PYFLATNESS_SHARE"):
        first, parts = map(int, share.split("/"))
        random.Random(0).shuffle(items)
        mine = items[first::parts]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine


@pytest.fixture(autouse=True)
def _launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if time.time() > float(os.environ.get("PYFLATNESS_UNTIL", "inf")):
        pytest.skip(LATE)
    names, right = set(), cuda.on_device

    def on_device(device: Any, function: Any, *arguments: Any, **constants: Any) -> Any:
        names.update({getattr(function, "__name__", "")} - {"", "<lambda>"})  # kernels in Triton's language have none
        return right(device, function, *arguments, **constants)

    monkeypatch.setattr(cuda, "on_device", on_device)
    yield
    request.node.user_properties += [(KERNEL, name) for name in sorted(names)]
