"""Multiply the loss Hessian, or its GGN, by vectors in the space of a network's parameters, all trainable ones or some.

:mod:`.products` does so for layers' weights. Here every parameter is a leaf: also biases, scales of normalisations and
weights that belong to no layer, and a tied parameter once, with all of its uses. All these parameters are one block.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..model import calling, parameters
from ..model.selectors import Selection
from ..passes import linearity, second_derivatives
from ..passes.runner import Run, Runner
from ..passes.task import Task
from .products import Names, Products, for_second_derivatives


class ParameterProducts(Products):
    """Represent E's Hessian or GGN in all trainable parameters, or in ``some``, as a matrix to multiply with.

    ``names`` are those of the parameters, and of the one block.
    """

    _what = "parameter"

    def __init__(self, task: Task, some: Collection[str] | None = None) -> None:
        if some is None:
            self._theta = parameters.trainable(task.model)
        else:
            self._theta = {name: values for name, values in parameters.every(task.model).items() if name in some}
        self.names: Names = tuple(self._theta)
        self._all = some is None
        self._weight_norms = False  # whether any graph so far has a weight norm
        self._replaced: list[nn.Module] = []  # empty while the graph is inspected, which has to be torch's own
        super().__init__(task)
        self._replaced = second_derivatives.convolutions(self._model) + second_derivatives.batch_norms(self._model)

    def notes(self, name: str) -> tuple[str, ...]:
        """Return notes for the reader of a value."""
        return (linearity.TAKEN_AS_THEY_ARE,) if self.custom else ()

    def _made_runner(self) -> Runner:
        def forward(model: Any, batch: Any) -> Any:
            if self._leaves:
                return self._task.run(batch)
            # There are no leaves yet when the memory of the graph is measured.
            return self._task.run(batch, self._fresh())

        return Runner(
            replace(self._task, selection=Selection({}, frozenset(), optional=True)),
            forward=forward,
            by_sample=False,
            certify=False,
            reserve=for_second_derivatives,
            inside=self._parameters_as_leaves,
        )

    def _set_up(self) -> None:
        self.modules = {}
        some = next(iter(self._theta.values()))
        self.device, self.eps = some.device, max(torch.finfo(values.dtype).eps for values in self._theta.values())

    def _seen(self, run: Run) -> tuple[int, float, set[str]]:
        if any(node.name() == "CheckpointFunctionBackward" for node in run.users):
            raise calling.reentrant()
        if self._all and not run.outputs.requires_grad:
            raise calling.without_graph()
        self._weight_norms = self._weight_norms or any(node.name().startswith("WeightNorm") for node in run.users)
        return super()._seen(run)

    @contextlib.contextmanager
    def _parameters_as_leaves(self) -> Iterator[None]:
        """Make the parameters leaves of a twice differentiable graph in the model, inside the context."""
        self._leaves = self._fresh()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(calling.differentiated_in_all_parameters())
                stack.enter_context(parameters.inside(self._model, self._leaves))
                second_derivatives.replace(self._replaced)
                stack.callback(second_derivatives.put_back, self._replaced)
                if self._weight_norms:  # only then, as every operation takes a little longer
                    stack.enter_context(second_derivatives.written_out())
                yield
        finally:
            self._leaves = {}

    def _fresh(self) -> dict[str, Tensor]:
        return {name: values.detach().requires_grad_() for name, values in self._theta.items()}

    def _edges(self, run: Run) -> linearity.Edges:
        return {name: [get_gradient_edge(leaf)] for name, leaf in self._leaves.items()}

    def _check_complete(self, run: Run, value: Tensor, cotangent: Tensor) -> None:
        some = {name: self._leaves[name] for name in sorted(self.custom)}
        if some:
            found = torch.autograd.grad(
                value, [*some.values()], cotangent, create_graph=True, allow_unused=True, retain_graph=True
            )
            for name, gradient in zip(some, found, strict=True):
                linearity.check_complete(f"parameter {name!r}", [] if gradient is None else [gradient])

    def as_parameters(self, names: Names, vector: Tensor) -> dict[str, Tensor]:
        """Return a vector (N,) as tensors of the parameters' shapes."""
        return self.as_weights(names, vector)

    def _shape(self, name: str) -> torch.Size:
        return self._theta[name].shape

    def _as_weight(self, name: str, matrix: Tensor) -> Tensor:
        return matrix

    def _as_matrix(self, name: str, weight: Tensor) -> Tensor:
        return weight
