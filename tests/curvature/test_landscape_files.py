"""Slices in files: gone on with where they stopped, refused where they are of something else; and their figures."""

import io

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import pyflatness as pf

LOSS = nn.CrossEntropyLoss()


def mlp(seed=0, bias=0.0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    model[2].bias.data += bias
    return model


def data(samples=10):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


class Stopping:
    """A forward pass, or batches, that stop with an error from some time on."""

    def __init__(self, after, error=RuntimeError):
        self.left, self.error = after, error

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise self.error("stopped")

    def __call__(self, model, batch):
        self.count()
        return model(batch[0]), batch[1]

    def __iter__(self):
        self.count()
        x, y = data()
        return iter([(x[:6], y[:6]), (x[6:], y[6:])])


def call(out, model=None, held=None, **options):
    return pf.landscape(
        model or mlp(), options.pop("loss", LOSS), held or data(), out=out, **{"points": (10, 9), **options}
    )


def same(one, other):
    assert torch.equal(one.losses, other.losses)
    assert torch.equal(one.accuracy, other.accuracy)
    assert (one.loss, one.samples, one.done, one.labels) == (other.loss, other.samples, other.done, other.labels)
    assert all(map(torch.equal, one.coefficients, other.coefficients))
    for name in ("gradient", "hessian"):
        assert torch.equal(getattr(one.quadratic, name), getattr(other.quadratic, name))


@pytest.mark.parametrize(
    ("where", "memory", "last", "done"),  # 64 points a read, or one, and then a forward pass for each sample
    [("forward", None, 1, 64), ("held", None, 1, 64), ("forward", 1, 17, 88), ("held", 1, 7, 83)],
)
def test_an_interrupted_slice_goes_on_bit_for_bit(tmp_path, memory, last, done, where):
    error = RuntimeError if where == "forward" else KeyboardInterrupt
    counting = Stopping(1 << 30)
    whole, out = call(tmp_path / "whole.npz", memory=memory, **{where: counting}), tmp_path / "a.npz"
    stopping = Stopping((1 << 30) - counting.left - last, error)
    with pytest.raises((pf.errors.InputError, KeyboardInterrupt), match="stopped"):
        call(out, memory=memory, **{where: stopping})
    begun = pf.results.Landscape.from_npz(out)
    assert begun.done == done
    assert torch.equal(begun.losses.view(-1)[:done], whole.losses.view(-1)[:done])
    assert bool(begun.losses.view(-1)[done:].isnan().all())
    assert f"{done} of 90 points are evaluated" in str(begun)
    finished = call(out, memory=memory, **{where: Stopping(1 << 30)})
    same(finished, whole)
    same(pf.results.Landscape.from_npz(out), finished)


def test_a_finished_slice_is_read_from_its_file(tmp_path):
    whole, counting = call(tmp_path / "a.npz"), Stopping(1 << 30)
    same(call(tmp_path / "a.npz", forward=counting), whole)
    assert (1 << 30) - counting.left == 3  # a few samples, the model's own point, and two of its samples alone


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"model": mlp(1)}, "weights"),
        ({"held": data(9)}, "data"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss"),
        ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, "loss"),
        ({"seed": 1}, "directions"),
        ({"directions": {"0": torch.ones(6, 5)}, "points": (10,)}, "directions, grid"),
        ({"points": (9, 10)}, "grid"),
        ({"span": 2}, "grid"),
        ({"accuracy": False}, "accuracy"),
        ({"quadratic": False}, "quadratic"),
    ],
)
def test_a_file_of_another_slice_is_refused_by_name(tmp_path, changed, what):
    call(tmp_path / "a.npz")
    before = (tmp_path / "a.npz").read_bytes()
    with pytest.raises(pf.errors.InputError, match=rf"out='.*a\.npz' is a slice of other .*{what}"):
        call(tmp_path / "a.npz", **changed)
    assert (tmp_path / "a.npz").read_bytes() == before


def test_files_that_are_no_slices(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, losses=np.zeros(3))
    for use in (pf.results.Landscape.from_npz, call):
        with pytest.raises(pf.errors.InputError, match=r"a\.npz.*: no landscape that Landscape\.to_npz wrote"):
            use(path)
    path.write_bytes(b"text")
    with pytest.raises(pf.errors.InputError, match="no landscape"):
        pf.results.Landscape.from_npz(path)
    with pytest.raises(FileNotFoundError):
        pf.results.Landscape.from_npz(tmp_path / "b.npz")
    with pytest.raises(FileNotFoundError):
        call(tmp_path / "none" / "a.npz")


def test_a_write_that_fails_leaves_the_file_before(tmp_path, monkeypatch):
    found = call(None)
    found.to_npz(tmp_path / "a.npz")
    before = (tmp_path / "a.npz").read_bytes()

    def failing(file, **arrays):
        file.write(b"part")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", failing)
    with pytest.raises(OSError, match="disk full"):
        found.to_npz(tmp_path / "a.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert (tmp_path / "a.npz").read_bytes() == before


def test_numpy_reads_the_file_without_pickle(tmp_path):
    found = call(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as held:
        assert np.array_equal(held["losses"], found.losses.numpy())
        assert {*held.files} == {
            "about",
            "accuracy",
            "coefficients_0",
            "coefficients_1",
            "gradient",
            "hessian",
            "losses",
        }
    regression = pf.landscape(mlp(), nn.MSELoss(), (data()[0], torch.zeros(10, 3).double()), quadratic=False, points=3)
    regression.to_npz(tmp_path / "b.npz")
    again = pf.results.Landscape.from_npz(tmp_path / "b.npz")
    assert again.accuracy is None
    assert again.quadratic is None


def test_figures_of_curves_and_planes_have_the_values(tmp_path):
    line = call(None, dimensions=1, points=7)
    _, axes = line.plot(tmp_path / "line.png")
    curve, model = axes.lines
    assert np.array_equal(curve.get_ydata(), line.losses.numpy())
    assert model.get_linestyle() == "--"
    assert np.array_equal(model.get_ydata(), line.quadratic.at(*line.coefficients).numpy())
    assert axes.get_xlabel() == "random direction 1"
    assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")
    _, axes = line.plot(quadratic=False)
    assert len(axes.lines) == 1
    own = Figure().subplots()
    figure, axes = call(None).plot(axes=own)
    assert axes is own
    assert figure is own.figure
    assert len(own.collections) == 2  # filled contours, and the quadratic model's
    assert (own.get_xlabel(), own.get_ylabel()) == ("random direction 1", "random direction 2")


@pytest.mark.parametrize("points", [(9,), (9, 8)])
def test_losses_that_are_not_finite_are_gaps(points):
    found = call(None, points=points, dimensions=len(points))
    found.losses[2:4] = torch.nan
    found.losses[5] = torch.inf
    _, axes = found.plot(io.BytesIO())
    if len(points) == 1:
        assert np.isnan(axes.lines[0].get_ydata()).tolist() == [place in (2, 3, 5) for place in range(9)]
    else:
        filled = axes.collections[0]
        x = found.coefficients[0]
        inside = [path.contains_point((float(x[2] + x[3]) / 2, 0.0)) for path in filled.get_paths()]
        assert not any(inside)
        assert any(path.contains_point((float(x[7] + x[8]) / 2, 0.05)) for path in filled.get_paths())
    found.losses[:] = torch.nan
    with pytest.raises(pf.errors.InputError, match="no loss of the slice is finite"):
        found.plot()


def test_wide_losses_have_logarithmic_levels():
    found = call(None)
    found.losses[:] = torch.logspace(0, 4, 90).view(10, 9)
    assert type(found.plot()[1].collections[0].norm).__name__ == "LogNorm"
    found.losses[:] = 1.0
    found.plot()


@pytest.mark.parametrize("layers", [None, ["0", "2"]])
def test_eigenvectors_are_computed_once(tmp_path, monkeypatch, layers):
    options = {"directions": "eigenvectors", "layers": layers, "memory": 1}  # a point at a time
    counting = Stopping(1 << 30)
    whole, out = call(tmp_path / "whole.npz", forward=counting, **options), tmp_path / "a.npz"
    with pytest.raises(pf.errors.InputError, match="stopped"):
        call(out, forward=Stopping((1 << 30) - counting.left - 7), **options)
    begun = pf.results.Landscape.from_npz(out)
    assert 0 < begun.done < 90
    vectors = torch.stack([torch.cat([c.flatten() for c in each.values()]) for each in begun.directions])
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(2).double(), rtol=0, atol=1e-12)

    def never(*args, **options):
        raise AssertionError("computed again")

    with monkeypatch.context() as patch:
        patch.setattr("pyflatness.curvature.landscape.spectrum", never)
        finished = call(out, **options)
        same(finished, whole)
        assert not finished.directions  # they are for the file
        same(call(out, **options), whole)
        with pytest.raises(pf.errors.InputError, match="slice of other weights"):
            call(out, mlp(bias=1e-6), **options)
        with pytest.raises(pf.errors.InputError, match="slice of other data"):
            call(out, held=data(9), **options)
    with pytest.raises(pf.errors.InputError, match="slice of other directions"):
        call(out, **options | {"layers": "0"})


def test_eigenvectors_of_layers_that_are_no_names_are_computed_again(tmp_path):
    model = mlp()
    options = {"directions": "eigenvectors", "layers": model[0]}
    whole = call(tmp_path / "a.npz", model, **options)
    assert not pf.results.Landscape.from_npz(tmp_path / "a.npz").directions
    same(call(tmp_path / "a.npz", model, **options), whole)


def test_a_file_that_its_own_result_was_saved_over_is_gone_on_with(tmp_path):
    out, options = tmp_path / "a.npz", {"directions": "eigenvectors"}
    whole = call(out, **options)
    whole.to_npz(out)  # without the eigenvectors, which are for the file alone
    same(call(out, **options), whole)


def test_a_file_of_eigenvectors_of_another_network_is_refused(tmp_path):
    out, options = tmp_path / "a.npz", {"directions": "eigenvectors"}
    call(out, **options)
    wider = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double().eval()
    with pytest.raises(pf.errors.InputError, match="slice of other weights"):
        call(out, wider, **options)
