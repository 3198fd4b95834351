"""Of a batch that is not cut, autograd's graph shows of which sample a row is; operations move rows by an index."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pyflatness as pf
from pyflatness.passes import kept_rows, linearity
from pyflatness.passes.recorder import Recorder
from support.truth import hessian

N, ROWS, WIDTH = 3, 7, 4
OF_ROW = torch.tensor([0, 2, 1, 0, 1, 2, 2])  # the sample of each row
ORDER = torch.tensor([3, 0, 5, 1, 6, 2, 4])
COLUMNS = OF_ROW.view(-1, 1).expand(-1, WIDTH)


def summed(h: Tensor) -> Tensor:
    """Return the sum of each sample's rows."""
    return h.new_zeros(N, WIDTH).index_add(0, OF_ROW, h)


def put(h: Tensor, *, accumulate: bool) -> Tensor:
    """Return the rows in another order, put there."""
    return h.new_zeros(ROWS, WIDTH).index_put((ORDER,), h, accumulate=accumulate)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": summed,
    "index_add_": lambda h: h.new_zeros(N, WIDTH).index_add_(0, OF_ROW, h),
    "scatter_add": lambda h: h.new_zeros(N, WIDTH).scatter_add(0, COLUMNS, h),
    "scatter_reduce sum": lambda h: h.new_zeros(N, WIDTH).scatter_reduce(0, COLUMNS, h, "sum"),
    "scatter_reduce mean": lambda h: h.new_zeros(N, WIDTH).scatter_reduce(0, COLUMNS.contiguous(), h, "mean"),
    "scatter_reduce amax": lambda h: h.new_zeros(N, WIDTH).scatter_reduce(0, COLUMNS, h, "amax", include_self=False),
    "index": lambda h: summed(h[ORDER][ORDER.argsort()]),
    "repeated index": lambda h: summed(h + h[ORDER.argsort()][ORDER]),
    "index_select": lambda h: summed(h.index_select(0, ORDER).index_select(0, ORDER.argsort())),
    "index_put": lambda h: summed(put(h, accumulate=False)[ORDER]),
    "index_put, accumulated": lambda h: summed(put(h, accumulate=True)[ORDER]),
    "index_copy": lambda h: summed(h.new_zeros(ROWS, WIDTH).index_copy(0, ORDER, h)[ORDER]),
    "cat": lambda h: summed(torch.cat([h, h.relu()], dim=1)[:, 2:6]),
    "views of heads": lambda h: summed((2 * h.view(ROWS * 2, WIDTH // 2)).view(ROWS, WIDTH)),
    "some rows alone": lambda h: h.new_zeros(N, WIDTH).index_add(0, OF_ROW[2:], h[2:].relu()) + summed(h.relu()),
    "softmax over a sample's rows": lambda h: summed(h.exp() / summed(h.exp())[OF_ROW]),
}
NOT_LINEAR = {"softmax over a sample's rows", "product"}
NOT_SHOWN = {"some rows alone"}  # a slice along the rows, which the graph names no index for


class Behind(nn.Module):
    """A linear layer with some operation behind it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH).double(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def found(function: Callable[[Tensor], Tensor]) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the owners that the graph shows, those that gradients have, and whether the graph proves linearity.

    Gradients have none where a row is of several samples.
    """
    torch.manual_seed(0)
    model = Behind(function).requires_grad_(False)
    recorder = Recorder({"layer": model.layer})
    with recorder.attached(), recorder.recording():
        outputs = model(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        users = linearity.users_of(outputs)
        (shown,) = kept_rows.owners(outputs, users, recorder.calls, N).get("layer", [None])
        reached = []
        for sample in range(N):
            cotangent = torch.zeros_like(outputs)
            cotangent[sample] = torch.randn_like(cotangent[sample])
            reached.append(recorder.gradients(outputs, cotangent)["layer"][0].any(dim=1))
        proven = "layer" in linearity.proven(users, linearity.edges_of(recorder.calls))
    numbers = torch.stack(reached).int()
    owners = torch.where(numbers.any(dim=0), numbers.argmax(dim=0), -1) if bool((numbers.sum(0) <= 1).all()) else None
    return shown, owners, proven


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_shows_what_gradients_do(name):
    shown, owners, proven = found(FUNCTIONS[name])
    assert owners is not None
    assert owners[owners >= 0].equal(OF_ROW[owners >= 0])  # behind a maximum nothing arrives at some
    assert (shown is None) == (name in NOT_SHOWN)
    if shown is not None:
        assert shown.equal(OF_ROW)
    assert proven == (name not in NOT_LINEAR)


@pytest.mark.parametrize(
    "function",
    [
        lambda h: summed(h) + h.mean(dim=0),
        lambda h: summed(h + h[:1]),
        lambda h: summed(h[ORDER]) + summed(h),
        lambda h: summed(h).flip(0) + summed(h),
        lambda h: summed(h.cumsum(dim=0)),
    ],
)
def test_rows_of_several_samples_have_no_owner(function):
    shown, owners, _ = found(function)
    assert owners is None
    assert shown is None


def test_rows_that_no_output_takes_have_none():
    shown, owners, _ = found(lambda h: h.new_zeros(N, WIDTH).index_add(0, OF_ROW[ORDER[:4]], h[ORDER[:4]]))
    expected = torch.full((ROWS,), -1)
    expected[ORDER[:4]] = OF_ROW[ORDER[:4]]
    assert shown is not None
    assert owners is not None
    assert shown.equal(owners)
    assert shown.equal(expected)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "prod"])
def test_a_reduction_is_linear_unless_it_is_a_product(reduce):
    def network(x: Tensor) -> Tensor:
        return x.new_zeros(N, WIDTH).scatter_reduce(0, COLUMNS, x, reduce, include_self=False)

    torch.manual_seed(1)
    model, x, y = Behind(network), torch.randn(ROWS, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (N,))

    class Rows:
        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

    value = pf.measure(
        model, "cross_entropy", [Rows(x)], measures="trace", forward=lambda m, batch: (m(batch.rows), y)
    )["layer", "trace"]

    def risk(weight: Tensor) -> Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(model, {"layer.weight": weight}, (x,)), y)

    expected = hessian(risk, model.layer.weight.detach()).flatten().view(WIDTH**2, -1).trace().item()
    assert value.exact
    assert value.value == pytest.approx(expected, rel=1e-10)
    assert ("hessian" in value.method) == (reduce == "prod")


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda h: h.new_zeros(N, WIDTH).index_add(0, OF_ROW[OF_ROW > 0], h[OF_ROW > 0]) + summed(h),
    "put by a mask": lambda h: summed(h.new_zeros(ROWS, WIDTH).index_put((OF_ROW >= 0,), h)),
    "put by a smaller mask": lambda h: summed(h.new_zeros(ROWS, WIDTH).index_put((OF_ROW > 0,), h[OF_ROW > 0])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_are_indices(name):
    shown, owners, _ = found(OTHERS[name])
    assert owners is not None
    assert shown is not None
    assert shown[owners >= 0].equal(owners[owners >= 0])


@pytest.mark.parametrize("rows", [1, ROWS])
def test_rows_that_are_broadcast_are_not_shown(rows):
    def function(h: Tensor) -> Tensor:
        several = h.new_zeros(N, ROWS, WIDTH).index_put((torch.tensor([0, 1]),), h[None, :rows], accumulate=True)
        return several.sum(dim=1) + summed(h)

    shown, owners, _ = found(function)
    assert owners is None
    assert shown is None
