"""The callback for Lightning in trainings of many kinds, and what it skips."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyflatness as pf
from support import trainings
from support.trainings import lightning_module, lightning_trainer, loaders, rows

pl = pytest.importorskip("lightning.pytorch")
FlatnessCallback = pytest.importorskip("pyflatness.integrations.lightning").FlatnessCallback

pytestmark = trainings.quiet(pytest)


def fit(callbacks, module=None, batches=None, **options):
    module = lightning_module(pl) if module is None else module
    torch.manual_seed(0)
    trainer = lightning_trainer(pl, callbacks, **{"max_epochs": 2, **options})
    trainer.fit(module, *(batches or loaders(noise=0)))
    return module


def network_values(callback, measure="relative_flatness"):
    return [row["value"] for row in rows(callback) if not row["layer"] and row["measure"] == measure]


def at_the_end(module, data=None):
    """The value of the module as it is after the training."""
    return pf.measure(module.eval(), nn.CrossEntropyLoss(), data or loaders(noise=0)[1])["relative_flatness"].value


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}, {"max_epochs": -1, "max_steps": 4}],
    ids=["accumulation", "clipping", "steps"],
)
def test_trainings_of_many_kinds(options):
    callback = FlatnessCallback(data="val", strict=True)
    module = fit([callback], **options)
    assert network_values(callback)[-1] == pytest.approx(at_the_end(module), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_a_model_is_measured_in_the_precision_of_its_training(precision):
    callback = FlatnessCallback(data="val", strict=True)
    module = fit([callback], precision=precision).double()
    data = [(x.double(), y) for x, y in loaders(noise=0)[1]]
    tolerance = 1e-10 if precision == "64-true" else 5e-2
    assert network_values(callback)[-1] == pytest.approx(at_the_end(module, data), rel=tolerance)
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("part", [pytest.param("module", marks=pytest.mark.soak), "net"])
def test_compiled_models(part):
    torch.compiler.reset()
    expected, callback = FlatnessCallback(data="val"), FlatnessCallback(data="val", strict=True)
    fit([expected])
    module = lightning_module(pl, logs=False)  # torch cannot trace Lightning's self.log
    if part == "net":
        module.net = torch.compile(module.net, backend="eager")
    else:
        module = torch.compile(module, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's compiler
        fit([callback], module)
    assert network_values(callback) == pytest.approx(network_values(expected), rel=1e-6)


def test_averaged_weights_stay_apart():
    """Weights that a callback averages are not those that training goes on with, which are measured."""
    *callbacks, last = (FlatnessCallback(data="val", strict=True) for _ in range(3))
    averages = [pl.callbacks.EMAWeightAveraging(decay=0.5), pl.callbacks.StochasticWeightAveraging(0.05, 0.8)]
    plain = fit([callbacks[0]])
    fit([averages[0], callbacks[1]])
    assert network_values(callbacks[1]) == network_values(callbacks[0])
    assert network_values(callbacks[0])[-1] == pytest.approx(at_the_end(plain), rel=1e-6)
    module = fit([averages[1], last], max_epochs=3)  # one more, in which averaged weights get their BatchNorm
    assert len(network_values(last)) == 4
    assert network_values(last)[-1] == pytest.approx(at_the_end(module), rel=1e-6)


def test_a_copy_with_averaged_weights_is_measured_by_its_name():
    module = lightning_module(pl)
    module.ema = torch.optim.swa_utils.AveragedModel(module.net)
    callback = FlatnessCallback(data="val", model="ema.module", strict=True)
    fit([callback], module)
    assert len(set(network_values(callback))) == 1  # nobody updates it


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_model_and_loss_may_be_made_when_the_fit_is_set_up(hook):
    module = lightning_module(pl, criterion=False)

    def made(*_, **__):
        module.part, module.loss_fn = module.net, nn.CrossEntropyLoss()

    setattr(module, hook, made)
    callback = FlatnessCallback(data="val", model="part", strict=True)
    fit([callback], module, max_epochs=1)
    assert network_values(callback) == [pytest.approx(at_the_end(module), rel=1e-6)]


def test_batches_go_through_the_modules_hooks_as_in_validation():
    class Scaled(type(lightning_module(pl))):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert not self.trainer.training or self.training  # no augmentation of what is measured
            return batch[0] * 2, batch[1]

    module, callback = lightning_module(pl), FlatnessCallback(data="val", strict=True)
    module.__class__ = Scaled
    fit([callback], module)
    doubled = [(x * 2, y) for x, y in loaders(noise=0)[1]]
    assert network_values(callback)[-1] == pytest.approx(at_the_end(module, doubled), rel=1e-6)


def test_forward_and_data_of_the_users():
    inputs, targets = torch.randn(7, trainings.FEATURES), torch.arange(7) % 3
    batches = [{"x": inputs, "y": targets}]
    callbacks = [
        FlatnessCallback(name="a", data=batches, forward=lambda model, batch: (model(batch["x"]), batch["y"])),
        FlatnessCallback(name="b", data=(inputs, targets), strict=True),
    ]
    fit(callbacks)
    assert network_values(callbacks[0]) == pytest.approx(network_values(callbacks[1]), rel=1e-12)


def test_what_is_refused_is_left_out_with_a_warning():
    callback = FlatnessCallback(measures=["neuron_flatness", "trace"], probes=4)
    with pytest.warns(RuntimeWarning, match="flatness: neuron_flatness is left out from now on: .*probes") as found:
        fit([callback])
    assert sum("neuron_flatness is" in str(warning.message) for warning in found) == 1
    assert len(network_values(callback, "trace")) == 2
    assert {row["measure"] for row in rows(callback)} == {"trace"}


CASES = {
    "no loader": (
        lambda **k: FlatnessCallback(data="val", **k),
        {"limit_val_batches": 0},
        "trainer has 0 such loaders",
    ),
    "bad batches": (lambda **k: FlatnessCallback(data=[torch.ones(3)], **k), {}, r"batches are \(inputs, targets\)"),
    "model's own error": (lambda **k: FlatnessCallback(data=[(torch.ones(3, 1), torch.ones(3))], **k), {}, "shapes"),
}


@pytest.mark.parametrize(("made", "options", "message"), CASES.values(), ids=CASES)
def test_what_is_not_possible_is_skipped_or_an_error(made, options, message):
    callback = made()
    with pytest.warns(RuntimeWarning, match=rf"epoch \d is not measured: .*{message}"):
        module = fit([callback], max_epochs=1, **options)
    assert len(module.losses) == 3
    assert len(callback.history) == 0
    with pytest.raises((pf.errors.InputError, RuntimeError), match=message):
        fit([made(strict=True)], **options)


def test_layers_that_are_not_there_are_an_error_at_the_beginning():
    module = lightning_module(pl)
    with pytest.raises(pf.errors.InputError, match="nothing in the model matches 'nowhere'"):
        fit([FlatnessCallback("nowhere", every_n_epochs=5)], module)
    assert not module.losses


def test_weights_that_are_spread_are_refused():
    class DeepSpeedStrategy(pl.strategies.SingleDeviceStrategy):
        """Named as Lightning's, which needs DeepSpeed."""

    with pytest.warns(RuntimeWarning, match="under DeepSpeedStrategy the weights are not in the module"):
        fit([FlatnessCallback(data="val")], strategy=DeepSpeedStrategy("cpu"), accelerator="auto", max_epochs=1)


def test_two_losses_or_none_are_an_error_at_the_beginning():
    module = lightning_module(pl, criterion=False)
    with pytest.raises(pf.errors.InputError, match=r"has no attribute loss or criterion or .*pass the loss"):
        fit([FlatnessCallback(data="val")], module)
    module.loss_fn, module.criterion = F.cross_entropy, nn.MSELoss()
    with pytest.raises(pf.errors.InputError, match=r"has several losses \(criterion, loss_fn\)"):
        fit([FlatnessCallback(data="val")], module)
    assert module.losses == []
    with pytest.raises(pf.errors.InputError, match="has no module of that name"):
        fit([FlatnessCallback(loss="cross_entropy", model="network")], module)
    fit([FlatnessCallback(data="val", loss="cross_entropy", strict=True)], module)


BAD = {
    "a measure": ({"measures": "flatness"}, pf.errors.InputError, "does not exist"),
    "an argument": ({"probe": 3}, TypeError, "did you mean probes"),
    "an option's value": ({"curvature": "full"}, pf.errors.InputError, "choose one of"),
    "data": ({"data": "test"}, pf.errors.InputError, "'train', 'val'"),
    "an iterator": ({"data": iter([])}, pf.errors.InputError, "can be read once"),
    "epochs": ({"every_n_epochs": 0}, pf.errors.InputError, "at least 1"),
    "batches": ({"limit_batches": 0.5}, pf.errors.InputError, "whole number"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        FlatnessCallback(**options)
