"""Train networks by stochastic gradient descent on squared error, many at once, and keep them as they were on the way.

The loss is that of "From Loss Flatness to Compressed Representations" (C24): ½ |f(x) - y|², y the class as a unit
vector. Networks of one batch size and step count go through ``torch.func.vmap`` together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from pyflatness import progress

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Descent:
    """Represent how one network is trained: learning rate, batch size, and the seed of weights and order."""

    learning_rate: float
    batch_size: int
    seed: int

    @property
    def name(self) -> str:
        """Return its name in files and tables."""
        return f"lr{self.learning_rate:g}_bs{self.batch_size}_seed{self.seed}"


def half_squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over samples of ½ |f - y|², y the unit vector of the class."""
    return (outputs - torch.eye(outputs.shape[1], device=outputs.device)[labels]).square().sum(dim=1).mean() / 2


def steps_kept(last: int, count: int) -> list[int]:
    """Return about so many numbers of steps from 0 to the last, evenly spaced in the square root."""
    return sorted({round(last * (place / (count - 1)) ** 2) for place in range(count)})


def followed(
    network: Callable[[], nn.Module],
    descents: Sequence[Descent],
    train: Data,
    kept: Sequence[int],
    folder: Path,
    shown: bool | None = None,
) -> dict[Descent, list[dict[str, Tensor]]]:
    """Return the weights of each network after each of these numbers of steps.

    Args:
        network: makes one.
        descents: how each is trained.
        train: inputs and classes, on the device where the networks are to be trained.
        kept: numbers of steps, ascending; the last one ends the training.
        folder: in which the weights are kept, a file for each batch size, so that they are not trained again.
        shown: whether a progress bar is; None: on a terminal.
    """
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Descent, list[dict[str, Tensor]]] = {}
    for batch_size in dict.fromkeys(descent.batch_size for descent in descents):
        group = [descent for descent in descents if descent.batch_size == batch_size]
        path = folder / f"bs{batch_size}.safetensors"
        if not path.exists():
            states = _descended(network, group, train, kept, shown)
            part = path.with_suffix(".part")
            save_file({f"{step} {name}": w for step, state in states.items() for name, w in state.items()}, part)
            part.replace(path)
        held = load_file(path)
        names = [name for name, _ in network().named_parameters()]
        for place, descent in enumerate(group):
            found[descent] = [{name: held[f"{step} {name}"][place] for name in names} for step in kept]
    return found


def _descended(
    network: Callable[[], nn.Module], group: Sequence[Descent], train: Data, kept: Sequence[int], shown: bool | None
) -> dict[int, dict[str, Tensor]]:
    """Return the stacked weights of a group after each number of steps."""
    made = []
    with torch.random.fork_rng(devices=[]):
        for descent in group:
            torch.manual_seed(descent.seed)
            made.append(network())

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return half_squared_error(functional_call(made[0], weights, (x,)), y)

    stacked, _ = stack_module_state(made)
    weights = {name: weight.detach().to(train[0].device) for name, weight in stacked.items()}
    rates = {name: _rates(group, weight) for name, weight in weights.items()}
    gradient, (x, y) = vmap(grad(loss)), train
    generators = {descent.seed: torch.Generator().manual_seed(descent.seed) for descent in group}
    states = {0: weights}
    with progress.bar(f"training, batches of {group[0].batch_size}", kept[-1], shown) as advance:
        for step in range(1, kept[-1] + 1):
            drawn = {
                seed: torch.randint(len(x), (group[0].batch_size,), generator=own) for seed, own in generators.items()
            }
            index = torch.stack([drawn[descent.seed] for descent in group]).to(x.device)
            slopes = gradient(weights, x[index], y[index])
            weights = {name: weight - rates[name] * slopes[name] for name, weight in weights.items()}
            if step in kept:
                states[step] = weights
            advance(1, "")
    return {step: {name: weight.contiguous() for name, weight in state.items()} for step, state in states.items()}


def _rates(group: Sequence[Descent], weight: Tensor) -> Tensor:
    rates = torch.tensor([descent.learning_rate for descent in group], device=weight.device)
    return rates.view(-1, *(1,) * (weight.ndim - 1))
