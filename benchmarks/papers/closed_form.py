"""Gradients of small ReLU networks in closed form, for thousands of short steps on one core.

Convolutions are products with a table of their windows, features before samples: :func:`torch.nn.functional.unfold` of
the numbers of the pixels says which feature each window reads. A step takes half the time that autograd takes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class _Layer:
    """Represent a layer, out = W windows(in) + b, with in (features, n).

    Attributes:
        weight: (outputs, k), a view of the layer's.
        bias: (outputs, 1), a view too.
        gradients: of both, (outputs, k) and (outputs,), views too.
        rows: (k · positions,) feature, from 1, that each window has at each place, 0 for padding; None: a linear layer.
        inverse: (features,) place in ``rows`` of each feature where each is there once; None otherwise.
    """

    weight: Tensor
    bias: Tensor
    gradients: tuple[Tensor, Tensor]
    rows: Tensor | None
    inverse: Tensor | None

    @classmethod
    def of(cls, layer: nn.Linear | nn.Conv2d, shape: torch.Size) -> "_Layer":
        """Return it for inputs of a shape without samples."""
        weight, bias = layer.weight, layer.bias
        assert bias is not None
        assert weight.grad is not None
        assert bias.grad is not None
        rows = inverse = None
        if isinstance(layer, nn.Conv2d):
            numbers = torch.arange(1.0, shape.numel() + 1).view(1, *shape)
            how = (layer.kernel_size, layer.dilation, layer.padding, layer.stride)
            rows = F.unfold(numbers, *how)[0].long().flatten()  # type: ignore[arg-type]
            if torch.equal(rows.sort().values, torch.arange(1, shape.numel() + 1)):
                inverse = rows.argsort()
        gradients = (weight.grad.flatten(1), bias.grad)
        return cls(weight.detach().flatten(1), bias.detach()[:, None], gradients, rows, inverse)

    def windows(self, inputs: Tensor) -> Tensor:
        """Return (k, positions · n)."""
        if self.rows is None:
            return inputs
        if self.inverse is None:
            read = F.pad(inputs, (0, 0, 1, 0)).index_select(0, self.rows)
        else:
            read = inputs.index_select(0, self.rows - 1)
        return read.view(self.weight.shape[1], -1)

    def back(self, signal: Tensor, inputs: Tensor) -> Tensor:
        """Return the gradient of the inputs (features, n) by that of the windows."""
        if self.rows is None:
            return signal
        signal = signal.view(len(self.rows), -1)
        if self.inverse is not None:
            return signal.index_select(0, self.inverse)
        return signal.new_zeros(len(inputs) + 1, inputs.shape[1]).index_add_(0, self.rows, signal)[1:]


class ClosedForm:
    """Write gradients of the mean cross-entropy of a chain of linear and convolutional layers with ReLU between them.

    Args:
        network: such a chain, whose parameters have gradients that stay where they are.
        x: all inputs (n, …).
        y: their labels (n,).
    """

    def __init__(self, network: nn.Sequential, x: Tensor, y: Tensor) -> None:
        shape, self.layers, self.y = x.shape[1:], [], y
        for module in network:
            if isinstance(module, nn.Linear | nn.Conv2d):
                self.layers.append(_Layer.of(module, shape))
            shape = module(torch.zeros(1, *shape)).shape[1:]
        first = self.layers[0].windows(x.flatten(1).t())
        self.first = first.view(-1, len(x)).t().contiguous()  # (n, k · positions): windows of all inputs

    @torch.no_grad()
    def backward(self, samples: Tensor) -> Tensor:
        """Write the gradient for samples with these numbers (n,), and return their mean loss."""
        n = len(samples)
        inputs = [self.first[samples].t().contiguous()]
        windows = [inputs[0].view(self.layers[0].weight.shape[1], -1)]
        for layer, following in zip(self.layers, self.layers[1:], strict=False):
            inputs.append(torch.addmm(layer.bias, layer.weight, windows[-1]).relu_().view(-1, n))
            windows.append(following.windows(inputs[-1]))
        logits, labels = torch.addmm(self.layers[-1].bias, self.layers[-1].weight, windows[-1]), self.y[samples]
        loss = (logits.logsumexp(0) - logits.gather(0, labels[None])[0]).mean()
        signal = logits.softmax(0).sub_(F.one_hot(labels, len(logits)).t()).div_(n)
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            signal = signal.reshape(len(layer.weight), -1)
            torch.mm(signal, windows[number].t(), out=layer.gradients[0])
            torch.sum(signal, 1, out=layer.gradients[1])
            if number:
                signal = layer.back(layer.weight.t() @ signal, inputs[number])
                signal = torch.ops.aten.threshold_backward(signal, inputs[number], 0)
        return loss
