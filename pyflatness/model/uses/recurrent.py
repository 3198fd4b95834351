"""Run ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells step by step, by products that stand-ins see.

Torch computes each of them in one kernel, with all weights and all steps. Here the inputs of all steps are multiplied
by ``weight_ih`` in one product, and the state of each step by ``weight_hh`` (and ``weight_hr``); the rows of all gates
are one layer. This also has second derivatives, which the kernels lack on a GPU.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...messages import IN_TRAINING
from .replaced import Replaced

_CLASSES = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)

State = tuple[Tensor, ...]  # a cell's state: h, and c of an LSTM


def weights(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the weights of a recurrent module with torch's own forward; none for another module."""
    if not isinstance(module, _CLASSES):
        return ()
    plain = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in _CLASSES)
    if not plain or not isinstance(vars(module).get("forward"), (StepByStep, type(None))):
        return ()
    return tuple(name for name in module._parameters if name.startswith("weight_"))


class StepByStep(Replaced):
    """Serve as the ``forward`` of a recurrent module, with the same outputs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, weights(module), f"the {type(module).__name__}")

    def __call__(self, input: Any, hx: Any = None) -> Any:  # noqa: A002
        """Return the module's outputs."""
        own = functools.partial(type(self._module).forward, self._module)
        if not [*self.watched()]:
            return own(input, hx)
        if not isinstance(input, Tensor):
            raise self.refusal("it is called on packed sequences; pad them, or pass batches of one length")
        module: Any = self._module
        if getattr(module, "dropout", 0) > 0 and module.training:
            raise self.refusal(f"it has dropout between its layers and {IN_TRAINING}")
        mine = self._cell if isinstance(module, nn.RNNCellBase) else self._layers
        self.check(mine, own, input, hx)
        return mine(input, hx)

    def _cell(self, inputs: Tensor, hx: Any) -> Any:
        """Return the next state of a cell, for inputs (n, m) or (m,)."""
        single = inputs.ndim == 1
        given = inputs.unsqueeze(0) if single else inputs
        state = self._state(hx, given, single=single)
        state = self._step("", F.linear(given, *self._weight("ih", "")), state)
        found = tuple(part.squeeze(0) for part in state) if single else state
        return found if isinstance(self._module, nn.LSTMCell) else found[0]

    def _layers(self, inputs: Tensor, hx: Any) -> Any:
        """Return outputs and last states of all layers and directions."""
        module: Any = self._module
        single, directions = inputs.ndim == 2, 2 if module.bidirectional else 1
        steps = inputs.unsqueeze(0) if single else inputs if module.batch_first else inputs.transpose(0, 1)
        states = self._state(hx, steps, single=single)
        last: list[State] = []
        for layer in range(module.num_layers):
            each = []
            for direction in range(directions):
                state = tuple(part[layer * directions + direction] for part in states)
                outputs, state = self._run(f"_l{layer}{'_reverse' * direction}", steps, state)
                each.append(outputs)
                last.append(state)
            steps = torch.cat(each, dim=-1) if directions > 1 else each[0]
        outputs = steps.squeeze(0) if single else steps if module.batch_first else steps.transpose(0, 1)
        ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        found = tuple(part.squeeze(1) for part in ends) if single else ends
        return outputs, found if isinstance(module, nn.LSTM) else found[0]

    def _run(self, suffix: str, steps: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the outputs (n, T, ·) of one layer in one direction, and its last state."""
        places = range(steps.shape[1])
        inputs, outputs = F.linear(steps, *self._weight("ih", suffix)), []
        for place in reversed(places) if suffix.endswith("_reverse") else places:
            state = self._step(suffix, inputs[:, place], state)
            outputs.append(state[0])
        if suffix.endswith("_reverse"):
            outputs.reverse()
        return torch.stack(outputs, dim=1), state

    def _step(self, suffix: str, inputs: Tensor, state: State) -> State:
        """Return the next state, from ``inputs`` W_ih x + b_ih and the previous state."""
        module: Any = self._module
        h, hidden = state[0], F.linear(state[0], *self._weight("hh", suffix))
        if isinstance(module, (nn.LSTM, nn.LSTMCell)):
            entry, forget, new, out = (inputs + hidden).chunk(4, dim=1)
            memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(entry) * torch.tanh(new)
            h = torch.sigmoid(out) * torch.tanh(memory)
            return F.linear(h, *self._weight("hr", suffix)) if getattr(module, "proj_size", 0) else h, memory
        if isinstance(module, (nn.GRU, nn.GRUCell)):
            (reset, update, new), (h_reset, h_update, h_new) = inputs.chunk(3, dim=1), hidden.chunk(3, dim=1)
            new = torch.tanh(new + torch.sigmoid(reset + h_reset) * h_new)
            return (new + torch.sigmoid(update + h_update) * (h - new),)
        return ((torch.relu if module.nonlinearity == "relu" else torch.tanh)(inputs + hidden),)

    def _state(self, hx: Any, like: Tensor, *, single: bool) -> State:
        """Return the first state, zeros if none is given; for layers it is stacked by layer and direction."""
        module: Any = self._module
        if hx is not None:
            given = hx if isinstance(hx, (tuple, list)) else (hx,)
            return tuple(part.unsqueeze(-2) if single else part for part in given)
        every = () if isinstance(module, nn.RNNCellBase) else (module.num_layers * (1 + module.bidirectional),)
        memory = [module.hidden_size] if isinstance(module, (nn.LSTM, nn.LSTMCell)) else []
        widths = [getattr(module, "proj_size", 0) or module.hidden_size, *memory]
        return tuple(like.new_zeros(*every, len(like), width) for width in widths)

    def _weight(self, kind: str, suffix: str) -> tuple[Tensor, Tensor | None]:
        """Return a weight and its bias, by the parts of their names."""
        bias = getattr(self._module, f"bias_{kind}{suffix}", None)
        return getattr(self._module, f"weight_{kind}{suffix}"), bias if isinstance(bias, Tensor) else None
