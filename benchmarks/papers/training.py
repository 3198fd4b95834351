"""Train many networks of one architecture at once, by ``torch.func.vmap`` over their stacked parameters.

Networks that share an optimiser and a batch size are one group: each has weights, a learning rate and an order of the
samples of its own, and all of them take a step together. An optimiser's step is proportional to its learning rate, so
one of rate 1 moves all of them, and each network then goes its own rate's part of the way, with decoupled weight decay:

    θ_k ← θ_k + rate_k (step(θ_k) - θ_k) - rate_k decay_k θ_k

A network that has reached the target is saved and leaves its group. Groups are saved now and then, so that training
that was interrupted goes on.

**To exactly one loss.** Measures of flatness fall with the training loss, so networks that stopped at different losses
are told apart by how far they were trained. With ``exact=True`` the loss on all training data is held against the
target after every epoch. Of the epoch in which it was reached a step that reached it is found again by bisection, and
that step is shortened so that the loss is the target: θ + t Δθ, 0 < t ≤ 1, as a smaller learning rate would have made
it.

**Followed on the way.** :func:`followed` trains by stochastic gradient descent on ½ |f(x) - y|², y the class as a unit
vector, as "From Loss Flatness to Compressed Representations" (C24) does, and keeps the weights after some steps.
"""

import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, stack_module_state, vmap
from torch.nn import functional as F

from pyflatness import progress

Data = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

_SAVED_EVERY = 20.0  # seconds
_FOLLOWED_SAVED_EVERY = 300.0  # the same, of groups of up to a gigabyte
_TOLERANCE = 1e-4  # of a loss that is to be exact, relative to the target

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}

INITIALIZATIONS: dict[str, Callable[[Tensor], Any]] = {
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "uniform": functools.partial(nn.init.uniform_, a=-0.1, b=0.1),
    "normal": functools.partial(nn.init.normal_, std=math.sqrt(0.1)),
}
"""Of weights, with biases at 0."""


@dataclass(frozen=True)
class Recipe:
    """Describe how one network is trained.

    Attributes:
        optimizer: a name in :data:`OPTIMIZERS`.
        batch_size: of a step.
        learning_rate: constant.
        seed: of the initial weights and of the order of the samples.
        initialization: a name in :data:`INITIALIZATIONS`; "" leaves the layers' own.
        weight_decay: decoupled.
    """

    optimizer: str
    batch_size: int
    learning_rate: float
    seed: int
    initialization: str = "xavier_normal"
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Until:
    """Say when training ends.

    Attributes:
        loss: a network is done after the first epoch with a smaller mean loss, as it was while it was trained.
        epochs: the most; a network that is not done by then did not converge.
        together: the most networks that are trained at once. On a CPU convolutions gain nothing from more than one.
        exact: a network is done where its loss on all data is ``loss``, within an epoch.
    """

    loss: float
    epochs: int
    together: int = 16
    exact: bool = False


@dataclass(frozen=True)
class Descent:
    """Represent how one network that is followed is trained: learning rate, batch size, seed of weights and order."""

    learning_rate: float
    batch_size: int
    seed: int

    @property
    def name(self) -> str:
        """Return its name in files and tables."""
        return f"lr{self.learning_rate:g}_bs{self.batch_size}_seed{self.seed}"


def train(
    network: Callable[[], nn.Module],
    recipes: Mapping[str, Recipe],
    data: Data,
    until: Until,
    folder: Path,
    shown: bool | None = None,
) -> dict[str, Path]:
    """Train a network by each recipe, and return its checkpoints by the recipes' names.

    The checkpoints' metadata have the recipe, the epochs and steps, the loss, whether the network converged, and on
    what it was trained. What is in the folder already is not trained again, wherever it was trained. The first weights
    and the order of the samples are the same on every device.

    Args:
        network: makes one, without buffers.
        recipes: by name.
        data: inputs (n, …) and labels (n,), on the device where the networks are to be trained.
        until: when training ends.
        folder: for the checkpoints; made if it is not there.
        shown: whether a progress bar is; None: on a terminal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.safetensors" for name in recipes}
    with progress.bar("training", len(recipes), shown) as advance:
        for names in _groups(recipes, until.together):
            asked = {name: _asked(recipes[name], until, len(data[1])) for name in names}
            missing = [name for name in names if not _is_there(paths[name], asked[name], until)]
            advance(len(names) - len(missing), "")
            for name in missing:
                del paths[name]
            if missing and until.epochs:
                of_group = {name: recipes[name] for name in names}
                group = _Group(network, of_group, _saved_group(folder, asked), missing, data[0].device)
                for name, state, facts in group.trained(data, until, advance):
                    paths[name] = folder / f"{name}.safetensors"
                    save(state, asked[name] | facts, paths[name])
                    advance(1, "")
    return {name: paths[name] for name in recipes if name in paths}


def device_name(device: torch.device) -> str:
    """Return what a reader knows a device by: the name of a GPU of Nvidia's, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def metadata(path: Path) -> dict[str, str]:
    """Return what a checkpoint says of its training; nothing if it was not trained here."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def _asked(recipe: Recipe, until: Until, samples: int) -> dict[str, Any]:
    """Return what a network's weights follow from, besides the architecture and the samples themselves."""
    return {**asdict(recipe), "samples": samples, "target": until.loss, "exact": until.exact}


def _is_there(path: Path, asked: Mapping[str, Any], until: Until) -> bool:
    """Return whether a checkpoint is there that was trained as is asked, or about which nothing is known."""
    if not path.exists():
        return False
    told = metadata(path)
    if any(told.get(key) != text for key, text in _texts(asked).items()):
        return not told
    ended = told["converged"] == "true" or not math.isfinite(float(told["loss"]))
    return ended or until.epochs in (0, int(told["epochs"]))


def _saved_group(folder: Path, asked: Mapping[str, Any]) -> Path:
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    return folder / f".group-{key}.safetensors"


def _groups(recipes: Mapping[str, Recipe], together: int) -> Iterator[list[str]]:
    """Yield names of recipes that can be trained together, in the order of their first ones."""
    held: dict[tuple[str, int], list[str]] = {}
    for name, recipe in recipes.items():
        held.setdefault((recipe.optimizer, recipe.batch_size), []).append(name)
    places = {name: place for place, name in enumerate(recipes)}
    chunks = (names[start : start + together] for names in held.values() for start in range(0, len(names), together))
    yield from sorted(chunks, key=lambda names: places[names[0]])


class _Group:
    """Hold the stacked parameters of networks that are trained together, one slice of dimension 0 each.

    Args:
        network: makes one.
        recipes: of all networks of the group, which are the same whenever training goes on.
        path: where the group is saved.
        missing: the networks that are not done yet.
        device: where they are trained.
    """

    def __init__(
        self,
        network: Callable[[], nn.Module],
        recipes: Mapping[str, Recipe],
        path: Path,
        missing: Sequence[str],
        device: torch.device,
    ) -> None:
        first = next(iter(recipes.values()))
        self._names, self._epoch, self._recipes = [*recipes], 0, recipes
        self._title = f"{first.optimizer}, batches of {first.batch_size}"
        self._batch_size = first.batch_size
        self._path = path
        made = [initialized(network, recipe.seed, recipe.initialization).to(device) for recipe in recipes.values()]
        self._parameters, _ = stack_module_state(made)
        self._optimizer = OPTIMIZERS[first.optimizer]([*self._parameters.values()], lr=1.0)
        self._loss = _of_weights(made[0], F.cross_entropy)
        self._gradients = vmap(grad_and_value(self._loss))
        if self._path.exists():
            self._load()
        self._keep([name in missing for name in self._names])

    def trained(
        self, data: Data, until: Until, advance: progress.Advance
    ) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
        """Train, and yield each network's name, parameters and metadata when it is done."""
        saved = time.monotonic()
        where = f"{device_name(data[0].device)}, torch {torch.__version__}"
        while self._names:
            losses, path = self._train_epoch(*data, kept=until.exact)
            self._epoch += 1
            steps = -(-len(data[1]) // self._batch_size)
            if until.exact:
                with torch.no_grad():
                    losses = vmap(self._loss, in_dims=(0, None, None))(self._parameters, *data).cpu()
            reached = (losses <= until.loss) if until.exact else (losses < until.loss)
            done = reached | ~losses.isfinite() | (self._epoch >= until.epochs)
            advance(0, f"{self._title}: epoch {self._epoch}, loss {losses.median():.3g}")
            for place in done.nonzero()[:, 0].tolist():
                state, loss, taken = _of(self._parameters, place), float(losses[place]), steps
                if until.exact and reached[place]:
                    path_of = [_of(weights, place) for weights in path]
                    state, loss, taken = crossing(
                        until.loss, path_of, lambda weights: float(self._loss(weights, *data))
                    )
                facts = {"epochs": self._epoch, "steps": (self._epoch - 1) * steps + taken, "loss": loss}
                yield self._names[place], state, facts | {"converged": bool(reached[place]), "trained_on": where}
            self._keep([not ended for ended in done.tolist()])
            if time.monotonic() - saved > _SAVED_EVERY:
                self._save()
                saved = time.monotonic()
        self._path.unlink(missing_ok=True)

    def _train_epoch(self, inputs: Tensor, labels: Tensor, *, kept: bool) -> tuple[Tensor, list[Weights]]:
        """Take each network through all samples once.

        Returns:
            The mean loss on the way, (networks,), and the parameters after each number of steps if they are to be kept.
        """
        recipes = [self._recipes[name] for name in self._names]
        orders = torch.stack([order(recipe.seed, self._epoch, len(labels)) for recipe in recipes])
        rates = torch.tensor([recipe.learning_rate for recipe in recipes], dtype=torch.float64)
        decays = rates * torch.tensor([recipe.weight_decay for recipe in recipes], dtype=torch.float64)
        parts = {name: (_of_each(rates, p), _of_each(decays, p)) for name, p in self._parameters.items()}
        totals = torch.zeros(len(self._names), device=inputs.device)
        path = []
        for places in orders.to(inputs.device).split(self._batch_size, dim=1):
            gradients, losses = self._gradients(self._parameters, inputs[places], labels[places])
            totals += losses.detach() * places.shape[1]
            before = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
            path += [before] if kept else []
            for name, parameter in self._parameters.items():
                parameter.grad = gradients[name]
            self._optimizer.step()
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    (rate, decay), start = parts[name], before[name]
                    parameter.copy_(start + rate * (parameter - start) - decay * start)
        return totals.cpu() / len(labels), [*path, self._parameters]

    def _keep(self, kept: Sequence[bool]) -> None:
        """Let go of the other networks."""
        places = torch.tensor([place for place, stays in enumerate(kept) if stays], dtype=torch.long)
        for parameter in self._parameters.values():
            parameter.grad = None
            held = self._optimizer.state[parameter]
            for key, value in held.items():
                if value.shape == parameter.shape:  # not the number of steps
                    held[key] = value[places]
            parameter.data = parameter.data[places]
        self._names = [name for name, stays in zip(self._names, kept, strict=True) if stays]

    def _save(self) -> None:
        states = self._optimizer.state
        tensors = {f"parameter {name}": value.detach() for name, value in self._parameters.items()}
        for name, parameter in self._parameters.items():
            tensors |= {f"state {name} {key}": value for key, value in states[parameter].items()}
        save(tensors, {"epoch": self._epoch, "names": self._names}, self._path)

    def _load(self) -> None:
        from safetensors.torch import load_file

        facts = {key: json.loads(value) for key, value in metadata(self._path).items()}
        tensors = load_file(self._path)
        for name, parameter in self._parameters.items():
            parameter.data = tensors.pop(f"parameter {name}").to(parameter.device)
        for key, value in tensors.items():
            _, name, entry = key.split(" ")
            parameter = self._parameters[name]
            held = value.to(parameter.device) if value.shape == parameter.shape else value  # not the number of steps
            self._optimizer.state[parameter][entry] = held
        self._names, self._epoch = facts["names"], facts["epoch"]


@torch.no_grad()
def crossing(target: float, path: Sequence[Weights], loss_of: Callable[[Weights], float]) -> tuple[Weights, float, int]:
    """Return the weights at which the loss is the target on a path that ends at or below it, the loss, the steps.

    Args:
        target: of the loss.
        path: weights after each step, of which the first ones have a larger loss.
        loss_of: of weights.
    """
    above, below = 0, len(path) - 1
    while below - above > 1:
        middle = (above + below) // 2
        above, below = (above, middle) if loss_of(path[middle]) <= target else (middle, below)
    low, high, weights = 0.0, 1.0, path[below]
    loss = loss_of(weights)
    for _ in range(40):
        if abs(loss - target) <= _TOLERANCE * target:
            break
        share = (low + high) / 2
        weights = {name: torch.lerp(path[above][name], end, share) for name, end in path[below].items()}
        loss = loss_of(weights)
        low, high = (low, share) if loss <= target else (share, high)
    return weights, loss, below


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
) -> dict[Descent, Iterator[Weights]]:
    """Return the weights of each network after each of these numbers of steps, which are read as they are asked for.

    Args:
        network: makes one.
        descents: how each is trained.
        train: inputs and classes, on the device where the networks are to be trained.
        kept: numbers of steps, ascending; the last one ends the training.
        folder: in which the weights are kept, a file for each batch size and number of steps, so that they are not
            trained again.
        shown: whether a progress bar is; None: on a terminal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[Descent, Iterator[Weights]] = {}
    for batch_size in dict.fromkeys(descent.batch_size for descent in descents):
        group = [descent for descent in descents if descent.batch_size == batch_size]
        paths = {step: folder / f"bs{batch_size}_step{step}.safetensors" for step in kept}
        if not paths[kept[-1]].exists():
            _descend(network, group, train, paths, folder / f".bs{batch_size}.safetensors", shown)
        for place, descent in enumerate(group):
            found[descent] = _slices(paths.values(), place)
    return found


def _slices(paths: Iterable[Path], place: int) -> Iterator[Weights]:
    """Yield the weights of one network of each file."""
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, "pt") as file:
            yield {name: file.get_slice(name)[place] for name in file.keys()}  # noqa: SIM118


def _descend(
    network: Callable[[], nn.Module],
    group: Sequence[Descent],
    train: Data,
    paths: Mapping[int, Path],
    begun: Path,
    shown: bool | None,
) -> None:
    """Write the stacked weights of a group after each number of steps, of samples that are drawn with replacement.

    Where the group is at is saved in ``begun`` now and then, from where another call goes on.
    """
    from safetensors.torch import load_file

    x, y = train
    made = [initialized(network, descent.seed) for descent in group]
    stacked, _ = stack_module_state(made)
    weights, start = {name: weight.detach().to(x.device) for name, weight in stacked.items()}, 0
    if begun.exists():
        start = int(metadata(begun)["step"])
        weights = {name: weight.to(x.device) for name, weight in load_file(begun).items()}
    elif 0 in paths:
        save(weights, {}, paths[0])
    rates = torch.tensor([descent.learning_rate for descent in group])
    gradient = vmap(grad(_of_weights(made[0], half_squared_error)))
    generators = {descent.seed: torch.Generator().manual_seed(descent.seed) for descent in group}
    size, saved, last = group[0].batch_size, time.monotonic(), max(paths)
    with progress.bar(f"training, batches of {size}", last, shown) as advance:
        for step in range(1, last + 1):
            drawn = {seed: torch.randint(len(x), (size,), generator=own) for seed, own in generators.items()}
            advance(1, "")
            if step <= start:
                continue
            index = torch.stack([drawn[descent.seed] for descent in group]).to(x.device)
            gradients = gradient(weights, x[index], y[index])
            weights = {name: w - _of_each(rates, w) * gradients[name] for name, w in weights.items()}
            if step in paths:
                save(weights, {}, paths[step])
            if time.monotonic() - saved > _FOLLOWED_SAVED_EVERY:
                save(weights, {"step": step}, begun)
                saved = time.monotonic()
    begun.unlink(missing_ok=True)


def _of_weights(network: nn.Module, loss: Loss) -> Callable[[Weights, Tensor, Tensor], Tensor]:
    """Return a network's loss as a function of its weights, inputs and labels."""
    return lambda weights, inputs, labels: loss(functional_call(network, weights, (inputs,)), labels)


def initialized(network: Callable[[], nn.Module], seed: int, how: str = "") -> nn.Module:
    """Return a network with weights drawn from a seed; the global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone, which is all that is forked
        made = network()
        for parameter in made.parameters() if how else ():
            if parameter.dim() > 1:
                INITIALIZATIONS[how](parameter)
            else:
                nn.init.zeros_(parameter)
    return made


def _of(stacked: Weights, place: int) -> Weights:
    return {name: weight[place].detach().clone() for name, weight in stacked.items()}


def _of_each(numbers: Tensor, parameter: Tensor) -> Tensor:
    """Return a number for each network as a factor of the stacked parameter."""
    return numbers.to(parameter).view(-1, *(1,) * (parameter.dim() - 1))


def order(seed: int, epoch: int, count: int) -> Tensor:
    """Return the order of the samples in an epoch, (count,)."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch))


def save(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], path: Path) -> None:
    """Write a file whole or not at all."""
    from safetensors.torch import save_file

    part = path.with_name(f".{path.name}.part")
    plain = {name: value.contiguous() for name, value in tensors.items()}
    save_file(plain, part, _texts(facts))
    part.replace(path)


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
