"""What tests on a GPU share: the device, data on it, the states of its generators, and results held against others."""

import dataclasses
import re

import pytest
import torch

import pyflatness as pf
from support.values import facts

in_one_order = pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)
on_a_gpu = pytest.mark.parametrize("cuda_device", ["cuda"], indirect=True)
_NUMBER = re.compile(r"-?(?:0x[0-9a-f.]+p[+-]\d+|\binf\b|\bnan\b)")


def moved(data, device):
    """Batches of tensors on a device."""
    if isinstance(data, torch.Tensor):
        return data.to(device)
    if isinstance(data, dict):
        return {name: moved(value, device) for name, value in data.items()}
    return type(data)(moved(part, device) for part in data)


def random_states():
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def assert_close(found, expected, rel, most=1e-10):
    """Every number of a result is that of another, and so is the rest but for texts in which numbers are rounded."""
    found, expected = (dict(facts(_without_signs(result))) for result in (found, expected))
    assert found.keys() == expected.keys()
    for path, right in expected.items():
        if path.endswith(("backend", "table", "key.directions")) or "notes" in path:  # a key has every bit
            continue
        assert _NUMBER.sub("#", found[path]) == _NUMBER.sub("#", right), path
        numbers = ([float.fromhex(text) for text in _NUMBER.findall(given)] for given in (found[path], right))
        for one, other in zip(*numbers, strict=True):
            assert one == pytest.approx(other, rel=rel, abs=most, nan_ok=True), f"{path}: {one:.12g}, not {other:.12g}"


def _without_signs(result):
    """A result without the signs of eigenvectors, which are another library's on another device, and functions."""
    if isinstance(result, pf.results.Allocation):
        return dataclasses.replace(result, _formats={}, _plan=None)
    if not isinstance(result, pf.results.Spectrum):
        return result
    return dataclasses.replace(
        result, eigenvectors={name: vectors.abs() for name, vectors in result.eigenvectors.items()}
    )
