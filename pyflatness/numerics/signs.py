"""Draw random signs that belong to a sample of the data, whatever its batch.

The generator is counter-based: bits are a hash of (seed, stream, probe, sample, place), by the finaliser of SplitMix64
(Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"). So a sampled value is the same for every
division into batches, and on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Signs:
    """Represent the random signs of some probes."""

    seed: int  # of the user
    draws: Sequence[int]  # the numbers of the probes

    def __call__(self, stream: int, samples: Tensor, *shape: int) -> Tensor:
        """Return ±1, (probes, n, *shape) int8, for samples with int64 numbers (n,); streams are independent."""
        count = torch.Size(shape).numel()
        words = self._words(stream, samples, torch.arange(-(-count // 64), device=samples.device))
        places = torch.arange(8, dtype=torch.uint8, device=samples.device)
        bits = (words.view(torch.uint8).unsqueeze(-1) >> places).bitwise_and_(1)
        signs: Tensor = bits.view(torch.int8).flatten(2)[..., :count].mul(2).sub_(1)
        return signs.view(*signs.shape[:2], *shape)

    def at(self, stream: int, samples: Tensor, places: Tensor) -> Tensor:
        """Return each sample's signs at ``places`` (k,), (probes, n, k) int8."""
        words = self._words(stream, samples, places // 64)
        return (words >> (places % 64)).bitwise_and_(1).to(torch.int8).mul_(2).sub_(1)

    def uniform(self, stream: int, samples: Tensor, count: int) -> Tensor:
        """Return numbers (probes, n, count) float64, uniform in [0, 1); signs need another stream."""
        words = self._words(stream, samples, torch.arange(count, device=samples.device))
        return _shifted(words, 11).double() * 2.0**-53

    def _words(self, stream: int, samples: Tensor, numbers: Tensor) -> Tensor:
        """Return the words of 64 random bits with these numbers (k,), (probes, n, k)."""
        draws = torch.tensor(self.draws, dtype=torch.int64, device=samples.device)
        state = _mixed(torch.tensor([self.seed, stream], dtype=torch.int64, device=samples.device))
        state = _mixed(_mixed(state[0] + _STEP * state[1]) + _STEP * draws).view(-1, 1)
        state = _mixed(state + _STEP * samples).unsqueeze(2)
        return _mixed(state + _STEP * numbers)


class RandomVectors:
    """Draw vectors (N,) float64, uniform in [-1, 1), one after another, with the same bits on every device.

    Random signs are enough for a trace but not for a search: half of them have no component along (1, -1, 0, …, 0).
    """

    def __init__(self, seed: int, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._signs, self._drawn = Signs(seed, [0]), 0

    def draw(self) -> Tensor:
        """Return the next vector."""
        self._drawn += 1  # starts at 1, as the hash of zeros is 0 and a first vector of one entry would be 0
        number = torch.tensor([self._drawn], dtype=torch.int64, device=self.device)
        vector = torch.empty(self.size, dtype=torch.float64, device=self.device)
        for start in range(0, self.size, _CHUNK):
            stop = min(start + _CHUNK, self.size)
            words = self._signs._words(0, number, torch.arange(start, stop, device=self.device)).flatten()
            torch.mul((words >> 11).double(), 2.0**-52, out=vector[start:stop])
        return vector


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_CHUNK = 2**18  # numbers at a time, which stay in a processor's caches
_STEP = _signed(0x9E3779B97F4A7C15)


def _mixed(x: Tensor) -> Tensor:
    """Return the image of x under a bijection of int64 in which every bit depends on every bit."""
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    mixed: Tensor = x ^ _shifted(x, 31)
    return mixed


def _shifted(x: Tensor, places: int) -> Tensor:
    """Return x shifted to the right with zeros on the left, in place of torch's shift, which repeats the sign."""
    shifted: Tensor = (x >> places) & (2 ** (64 - places) - 1)
    return shifted
