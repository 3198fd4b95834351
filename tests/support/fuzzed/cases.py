"""Random networks with a loss, data, and batches, from a seed."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support.fuzzed import losses, networks
from support.fuzzed.drawing import CONVOLUTIONS, Returned
from support.fuzzed.losses import Problem
from support.fuzzed.networks import Network
from support.fuzzed.truth import Truth, plain_copy

Loss = Callable[[Any, Tensor], Tensor]


@dataclass
class Case:
    """A network with a loss and data, and how it is measured.

    Attributes:
        seed: that all of it comes from.
        rng: for what is drawn later.
        model: in eval mode, with layers that run (``names``).
        inputs: samples first.
        problem: loss and targets.
        cut: sizes of the batches; empty for one pair of tensors.
        options: of every call.
    """

    seed: int
    rng: random.Random
    model: nn.Module
    inputs: Tensor
    problem: Problem
    names: tuple[str, ...]
    cut: tuple[int, ...]
    options: dict[str, Any]
    outputs: Tensor

    def data(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Any:
        inputs = self.inputs if inputs is None else inputs
        targets = self.problem.targets if targets is None else targets
        if not self.cut:
            return inputs, targets
        if len(set(self.cut[:-1])) == 1 and self.cut[-1] <= self.cut[0] and self.seed % 2:
            return DataLoader(TensorDataset(inputs, targets), batch_size=self.cut[0])
        return list(zip(inputs.split(self.cut), targets.split(self.cut), strict=True))

    def run(self, inputs: Tensor) -> Tensor:
        """Return the model's outputs as one tensor."""
        with torch.no_grad():
            return plain_copy(self.model)(inputs)

    def truth(self, kept: Tensor | None = None) -> Truth:
        kept = torch.arange(len(self.inputs)) if kept is None else kept
        return Truth(self.model, self.problem, self.inputs[kept], self.problem.targets[kept], self.names)

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.inputs)} samples of {tuple(self.inputs.shape[1:])}"]
        lines += [f"  {number}: {step.text}" for number, step in enumerate(self.model)]
        lines += [f"  outputs {tuple(self.outputs.shape)}, loss {self.problem.text}"]
        lines += [f"  batches {self.cut or 'none'}, {self.options}, layers {', '.join(self.names)}"]
        return "\n".join(lines)


def draw(seed: int) -> Case:
    """Return the case of a seed: the first network drawn that autograd can differentiate twice on its data."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while True:
            network = networks.build(rng)
            model, inputs = network.model, _inputs(rng, generator, network)
            names = _usable(model, inputs)
            if names:
                break
    problem = losses.draw(rng, generator, len(inputs), network.outputs, network.tail)
    options = {"backend": rng.choice(("auto", "compiled", "reference")), **problem.options}
    if rng.random() < 0.35:
        options["memory"] = rng.choice((2_000, 6_000, 20_000))
    with torch.no_grad():
        outputs = model(inputs)
    if rng.random() < 0.15:
        several = problem.text.startswith("callable") and len(network.outputs) > 0 and network.outputs[0] > 1
        model.append(Returned(rng.choice([*(Returned.SEVERAL if several else Returned.KINDS)])))
        problem = replace(problem, loss=_of_several(problem.loss)) if several else problem
    return Case(seed, rng, model, inputs, problem, names, _cut(rng, len(inputs)), options, outputs)


def _of_several(loss: Loss) -> Loss:
    """Return a loss of a tensor that takes it in a dictionary or tuple of parts too."""

    def of_several(outputs: Any, targets: Tensor) -> Tensor:
        parts = outputs.values() if isinstance(outputs, dict) else outputs
        return loss(outputs if isinstance(outputs, Tensor) else torch.cat([*parts], dim=1), targets)

    return of_several


def _inputs(rng: random.Random, generator: torch.Generator, network: Network) -> Tensor:
    samples = rng.choice((1, 2, 3, 3, 4, 4, 5, 6))
    if network.words:
        return torch.randint(networks.WORDS, (samples, *network.shape), generator=generator)
    inputs = torch.randn(samples, *network.shape, generator=generator, dtype=torch.float64)
    if samples > 1 and rng.random() < 0.1:
        inputs[1] = inputs[0]
    if rng.random() < 0.08:
        inputs[rng.randrange(samples)] = 0
    if rng.random() < 0.05:
        inputs[..., 0] = rng.choice((0.0, 0.7))
    return inputs


def _cut(rng: random.Random, samples: int) -> tuple[int, ...]:
    """Return sizes of batches that make up the samples: any, batches of one, equal ones with a ragged last, or none."""
    how = rng.choice(("none", "any", "ones", "equal"))
    if how == "none":
        return ()
    sizes: list[int] = []
    size = 1 if how == "ones" else rng.randint(1, samples)
    while sum(sizes) < samples:
        sizes.append(min(samples - sum(sizes), rng.randint(1, samples) if how == "any" else size))
    return tuple(sizes)


def _usable(model: nn.Module, inputs: Tensor) -> tuple[str, ...]:
    """The layers that ran, in the model's order; none if an in-place operation destroys what a gradient needs."""
    ran: set[str] = set()
    model = plain_copy(model)  # checkpointing would make up for what was destroyed
    layers = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, *CONVOLUTIONS))}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: ran.add(name))
    leaves = [*model.parameters(), *([inputs.clone().requires_grad_()] if inputs.is_floating_point() else [])]
    try:
        model(inputs[:1])  # group norm of one number a group runs on several samples alone
        outputs = model(leaves[-1] if inputs.is_floating_point() else inputs)
        gradients = torch.autograd.grad(outputs.square().sum(), leaves, create_graph=True, allow_unused=True)
        turning = sum(gradient.square().sum() for gradient in gradients if gradient is not None)
        torch.autograd.grad(turning, leaves, allow_unused=True)
    except (RuntimeError, ValueError):
        return ()
    finite = bool(outputs.isfinite().all()) and float(outputs.detach().abs().max()) < 30
    return tuple(name for name in layers if name in ran) if finite else ()
