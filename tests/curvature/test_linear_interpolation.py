"""Lines between networks against a loop that mixes state dicts and updates BatchNorm as torch does; barriers."""

import copy

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.optim.swa_utils import update_bn

import pyflatness as pf
from support.grid import Net
from support.unchanged import assert_unchanged, snapshot

LOSS = nn.CrossEntropyLoss()


def network(seed, dtype=torch.float64, norm=True):
    torch.manual_seed(seed)
    norms = [nn.BatchNorm2d(4, momentum=0.3)] if norm else []
    layers = nn.Conv2d(1, 4, 3), *norms, nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4 * 4 * 4, 3)
    model = nn.Sequential(*layers).to(dtype).eval()
    if norm:
        model[1].running_mean.uniform_(-0.1, 0.1)
        model[1].running_var.uniform_(0.5, 2)
    return model


def batches(seed=4, sizes=(7, 9), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(3, (size,), generator=generator),
        )
        for size in sizes
    ]


def mixed(one, other, alpha, refresh=None):
    """The network between two, with its statistics by torch's own update_bn, but that dropout stays off."""
    model = copy.deepcopy(one)
    state = {
        key: torch.lerp(value, other.state_dict()[key], alpha) if value.is_floating_point() else value
        for key, value in one.state_dict().items()
    }
    model.load_state_dict(state)
    if refresh is not None:
        model[4].p = 0.0
        update_bn(refresh, model)
        model.eval()
    return model


def risk(model, held):
    with torch.no_grad():
        outputs = torch.cat([model(x) for x, _ in held]).double()
    targets = torch.cat([y for _, y in held])
    return LOSS(outputs, targets).item(), (outputs.argmax(1) == targets).double().mean().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)])
@pytest.mark.parametrize("refresh", [True, False])
def test_against_a_loop(refresh, dtype, tolerance):
    one, other = network(0, dtype), network(1, dtype)
    train, test = batches(dtype=dtype), batches(5, (8, 3), dtype)
    before = snapshot(one), snapshot(other)
    found = pf.linear_interpolation(one, LOSS, train, other, test=test, points=5, update_bn=None if refresh else False)
    assert_unchanged(one, before[0])
    assert_unchanged(other, before[1])
    assert found.refreshed == refresh
    assert found.coefficients.tolist() == [0, 0.25, 0.5, 0.75, 1]
    networks = [mixed(one, other, alpha, train if refresh else None) for alpha in found.coefficients.tolist()]
    for held, losses, accuracy in (
        (train, found.losses, found.accuracy),
        (test, found.test_losses, found.test_accuracy),
    ):
        expected = [risk(model, held) for model in networks]
        assert losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=tolerance)
        assert accuracy.tolist() == [right for _, right in expected]


def test_a_norm_that_is_called_twice_counts_both_calls():
    def twice():
        def forward(net, x):
            return net.head(net.norm(torch.relu(net.norm(net.body(x)))))

        return Net(forward, body=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), idle=nn.BatchNorm1d(4), head=nn.Linear(4, 3))

    torch.manual_seed(0)
    one, other = (twice().double().eval() for _ in range(2))
    x, y = torch.randn(12, 4).double(), torch.arange(12) % 3
    held = [(x[:5], y[:5]), (x[5:], y[5:])]
    expected = copy.deepcopy(other)
    update_bn(held, expected)
    found = pf.linear_interpolation(one, LOSS, held, other.state_dict(), points=2)
    assert float(found.losses[1]) == pytest.approx(risk(expected.eval(), held)[0], rel=1e-12)


def test_barriers_are_highest_above_the_line_between_the_ends():
    one, other, train = network(0, norm=False), network(1, norm=False), batches()
    found = pf.linear_interpolation(one, LOSS, train, other, test=batches(5), points=6)
    for values, barrier in (
        (found.losses, found.barrier),
        (found.test_losses, found.test_barrier),
        (1 - found.accuracy, found.error_barrier),
        (1 - found.test_accuracy, found.test_error_barrier),
    ):
        above = [
            float(v - ((1 - a) * values[0] + a * values[-1])) for a, v in zip(found.coefficients, values, strict=True)
        ]
        assert barrier == pytest.approx(max(above), abs=1e-12)
    assert not found.refreshed
    assert f"barrier {found.barrier:.6g}" in str(found)
    alone = pf.linear_interpolation(one, LOSS, train, other, points=6)
    assert torch.equal(alone.losses, found.losses)
    assert alone.test_barrier is alone.test_losses is alone.test_error_barrier is None


def test_convex_losses_have_no_barrier():
    torch.manual_seed(0)
    one, other = (nn.Linear(5, 3).double() for _ in range(2))
    held = torch.randn(40, 5).double(), torch.arange(40) % 3
    assert pf.linear_interpolation(one, LOSS, held, other).barrier == 0


def test_one_layer_goes_and_the_others_stay():
    one, other, train = network(0, norm=False), network(1, norm=False), batches()
    found = pf.linear_interpolation(one, LOSS, train, other, layers="0", points=2)
    expected = copy.deepcopy(one)
    expected[0].load_state_dict(other[0].state_dict())
    assert float(found.losses[1]) == pytest.approx(risk(expected, train)[0], rel=1e-12)


def test_losses_that_are_not_finite_are_kept_and_drawn_as_gaps():
    one, other, train = network(0, norm=False), network(1, norm=False), batches()
    other[4].weight.data[0, 0] = torch.nan
    found = pf.linear_interpolation(one, LOSS, train, other, points=3)
    assert found.losses.isnan().tolist() == [False, True, True] or found.losses.isnan().tolist() == [True] * 3
    assert found.barrier != found.barrier
    axes = Figure().subplots()
    assert found.plot(axes=axes)[1] is axes
    assert len(axes.lines) == 2


def test_errors_leave_all_as_it_was():
    one, other, count = network(0), network(1), []

    def forward(model, batch):
        count.append(model[1].training)
        if len(count) == 8:  # in the middle of new statistics
            raise RuntimeError("boom")
        return model(batch[0]), batch[1]

    before = snapshot(one)
    with pytest.raises(pf.errors.InputError, match="boom"):
        pf.linear_interpolation(one, LOSS, batches(), other, forward=forward)
    assert count[-1]
    assert one[1].momentum == 0.3
    assert_unchanged(one, before)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"other": 3}, "other=3: a module or a state dict is wanted"),
        ({"other": network(1, norm=False).state_dict()}, r"a checkpoint of this model .* has no '1\.weight'"),
        ({"other": network(0)}, "other: it has the model's own weights"),
        ({"points": 1}, "points=1: "),
        ({"update_bn": "yes"}, "update_bn='yes': True or False"),
        ({"data": batches(sizes=(4, 1)), "model": nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3))},
         "more than 1 value per channel"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, match):
    model = options.get("model", network(0)).double().eval()
    doubled = {key: 2 * value for key, value in model.state_dict().items()}
    own = {key: options[key] for key in options if key in ("points", "update_bn")}
    with pytest.raises(pf.errors.InputError, match=match):
        pf.linear_interpolation(model, LOSS, options.get("data", batches()), options.get("other", doubled), **own)


def test_no_norm_to_update():
    one, other = network(0, norm=False), network(1, norm=False)
    with pytest.raises(pf.errors.InputError, match="update_bn=True: the model has no BatchNorm"):
        pf.linear_interpolation(one, LOSS, batches(), other, update_bn=True)
