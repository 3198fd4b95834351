"""Several cotangents go through a model's last operations at once: each of these has what one after the other has."""

import torch
from torch import Tensor
from torch.nn import functional as F

from pyflatness.passes import graph, linearity
from pyflatness.passes.tail import Tail
from support.combinations import every

IMAGES, ROWS = (3, 4, 6, 6), (3, 4)


def normal(like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=like.dtype)


OPERATIONS = {
    "AddmmBackward0": (ROWS, lambda h: torch.addmm(normal(h, 5), h, normal(h, 4, 5))),
    "MmBackward0": (ROWS, lambda h: h @ normal(h, 4, 5)),
    "ReluBackward0": (ROWS, F.relu),
    "ViewBackward0": (IMAGES, lambda h: h.view(3, -1)),
    "UnsafeViewBackward0": (ROWS, lambda h: torch.ops.aten._unsafe_view(h, (3, 2, 2))),
    "MeanBackward1": (IMAGES, lambda h: h.mean(dim=(2, 3))),
    "AddBackward0": (ROWS, lambda h: h + h),
    "ConvolutionBackward0": (IMAGES, lambda h: F.conv2d(h, normal(h, 4, 2, 3, 3), stride=2, padding=1, groups=2)),
    "MaxPool2DWithIndicesBackward0": (IMAGES, lambda h: F.max_pool2d(h, 2)),
    "NativeBatchNormBackward0": (IMAGES, lambda h: F.batch_norm(h, normal(h, 4), normal(h, 4).exp(), normal(h, 4))),
}
OF_CUDA = {"CudnnBatchNormBackward0"}


def test_all_operations_of_the_table_are_here() -> None:
    assert {*OPERATIONS} | OF_CUDA == graph._AT_ONCE
    assert all(graph.of(name).at_once for name in OPERATIONS)


@every(together=1, dtype=[torch.float32, torch.float64], name=[*OPERATIONS])
def test_cotangents_at_once_are_those_one_after_the_other(name: str, dtype: torch.dtype) -> None:
    shape, operation = OPERATIONS[name]
    inputs = normal(torch.empty(0, dtype=dtype), *shape).requires_grad_()
    outputs = operation(inputs)
    assert outputs.grad_fn is not None
    assert outputs.grad_fn.name() == name
    edge = torch.autograd.graph.get_gradient_edge(inputs)
    tail = Tail(outputs, linearity.users_of(outputs), {"inputs": edge})
    assert tail.names == ["inputs"]
    cotangents = normal(outputs, 5, *outputs.shape)
    found, _ = tail.send(cotangents)
    each = [torch.autograd.grad(outputs, inputs, one, retain_graph=True)[0] for one in cotangents]
    torch.testing.assert_close(found["inputs"], torch.stack(each))
