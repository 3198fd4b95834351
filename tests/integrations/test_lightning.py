"""The callback for Lightning: what it measures, logs and keeps, and that the training does not notice."""

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import trainings
from support.trainings import lightning_module, lightning_trainer, loaders, rows

pl = pytest.importorskip("lightning.pytorch")
FlatnessCallback = pytest.importorskip("pyflatness.integrations.lightning").FlatnessCallback

pytestmark = trainings.quiet(pytest)


def fit(package, callbacks=(), batches=None, module=None, **options):
    """Fit, and return the module, its trainer, and all that the training depends on as it is afterwards."""
    package.seed_everything(0)
    module, trainer = module or lightning_module(package), lightning_trainer(package, callbacks, **options)
    batches = batches or loaders()
    trainer.fit(module, *batches)
    optimizer = [str(state) for state in trainer.optimizers[0].state.values()]
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    found = {
        **{"weights": trainings.bits(module), "losses": torch.stack(module.losses).tolist(), "optimizer": optimizer},
        **{"random": trainings.random_states(), "grads": [grad.tolist() for grad in grads]},
        **{"modes": [each.training for each in module.modules()]},
        **{"drawn": [loader.dataset.own.bit_generator.state for loader in batches]},
        **{"val_loss": trainer.callback_metrics["val_loss"].item()},
    }
    return module, trainer, found


CALLBACKS = {
    "val": {"data": "val", "measures": ["relative_flatness", "trace"]},
    "train, sampled": {"data": "train", "probes": 2, "model": "net"},
    "train, some batches": {"data": "train", "limit_batches": 2, "measures": ["relative_flatness", "lambda_max"]},
    "own": {"data": loaders()[1], "every_n_epochs": 2},
}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("options", CALLBACKS.values(), ids=CALLBACKS)
def test_a_training_is_what_it_is_without_the_callback(package, options):
    package = pytest.importorskip(package)
    callback = FlatnessCallback(**options)
    *_, expected = fit(package)
    *_, found = fit(package, [callback])
    assert found == expected
    assert len({row["epoch"] for row in rows(callback)}) == 3 // options.get("every_n_epochs", 1)


@pytest.mark.parametrize("data", ["train", loaders()[1]], ids=["the batch", "own"])
def test_a_budget_measures_steps(data):
    *_, expected = fit(pl)
    callback = FlatnessCallback(data=data if data == "train" else [*data], budget=0.999, strict=True)
    *_, found = fit(pl, [callback])
    assert found == expected
    first = callback.history[0]
    assert first.step == 1
    assert first.reports["live"]["relative_flatness"].stderr > 0
    restored = FlatnessCallback(budget=0.5)
    restored.load_state_dict(callback.state_dict())
    assert restored.history == callback.history
    assert restored._budget.spent > 0
    with pytest.raises(pf.errors.InputError, match="budget= reads a part"):
        FlatnessCallback(data="val", budget=0.5)


def test_nan_under_a_budget_is_said_once():
    """In whatever batch, and of however many samples."""
    inputs = torch.ones(4, trainings.FEATURES)
    batches = [
        (inputs.masked_fill((torch.arange(4) < count)[:, None], torch.nan), torch.zeros(4, dtype=torch.long))
        for count in (1, 2, 3)
    ]
    callback = FlatnessCallback(data=batches, budget=0.999)
    with pytest.warns(
        RuntimeWarning, match="flatness: step 1 is not measured: NonFiniteError: batch 0: 1 of 4"
    ) as said:
        fit(pl, [callback])
    assert sum("is not measured" in str(one.message) for one in said) == 1
    assert len(callback.history) == 0


def test_a_penalty_in_a_training_step():
    """It is made when the fit begins, and added to the loss that the module computes."""

    class Penalised(type(lightning_module(pl))):
        def on_fit_start(self):
            self.penalty = pf.FlatnessPenalty(self, "net.head", probes=4)

        def training_step(self, batch, index):
            outputs = self(batch[0])
            loss = self.criterion(outputs, batch[1]) + self.strength * self.penalty(outputs, batch[1])
            self.losses.append(loss.detach())
            return loss

    values = []
    for strength in (0.0, 0.3):
        module = Penalised()
        module.strength = strength
        train, val = loaders(noise=0)
        fit(pl, batches=(train, val), module=module)
        module.penalty.remove()
        values.append(pf.relative_flatness(module.net.eval(), "cross_entropy", [*train], "head").value)
    assert values[1] < 0.95 * values[0]


def test_it_does_not_use_the_workers_of_a_loader():
    kept = {"num_workers": 1, "persistent_workers": True}
    *_, expected = fit(pl, batches=loaders(**kept))
    callbacks = [FlatnessCallback(data=data, name=data, model="net") for data in ("train", "val")]
    *_, found = fit(pl, callbacks, batches=loaders(**kept))
    assert found == expected
    assert all(callback.history.records for callback in callbacks)


def test_values_are_those_of_the_model_at_that_time():
    train, val = loaders(noise=0)
    callback = FlatnessCallback(data="val", measures=["relative_flatness", "fisher_rao"], model="net")
    module, *_ = fit(pl, [callback], batches=(train, val))
    whole = torch.stack([x for x, _ in val.dataset]), val.dataset.targets
    report = pf.measure(module.net.eval(), nn.CrossEntropyLoss(), whole, measures=["relative_flatness", "fisher_rao"])
    expected = [
        (layer, measure, pytest.approx(found.value, rel=1e-6))
        for measure, values in report.by_measure().items()
        for layer, found in values.items()
    ]
    last = [row for row in rows(callback) if row["epoch"] == 2]
    assert [(row["layer"], row["measure"], row["value"]) for row in last] == expected
    assert {(row["samples"], row["step"], row["exact"]) for row in last} == {(12, 9, True)}


def test_values_go_to_the_loggers(tmp_path, capsys):
    csv, board = pl.loggers.CSVLogger(tmp_path, name="csv"), pl.loggers.TensorBoardLogger(tmp_path, name="board")
    callback = FlatnessCallback(layers="net.head")
    fit(pl, [callback], logger=[csv, board])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(board.log_dir).Reload()
    for layer, tag in {"net.head": "relative_flatness/net.head", "": "network/relative_flatness"}.items():
        values = [row["value"] for row in rows(callback) if row["layer"] == layer]
        scalars = events.Scalars(f"flatness/{tag}")
        assert [scalar.value for scalar in scalars] == pytest.approx(values)
        assert [scalar.step for scalar in scalars] == [2, 5, 8]  # as Lightning's own of an epoch
        assert f"flatness/{tag}" in (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    assert len(events.Scalars("flatness/seconds")) == 3
    assert "flatness: measured on the training data in" in capsys.readouterr().out


def test_other_callbacks_may_monitor_the_values(tmp_path):
    monitor = "flatness/network/relative_flatness"
    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor=monitor, save_on_train_epoch_end=True)
    callback = FlatnessCallback()
    fit(pl, [best, callback], enable_checkpointing=True)
    assert best.best_model_score.item() == pytest.approx(min(r["value"] for r in rows(callback) if not r["layer"]))


def test_neither_the_sanity_check_nor_validation_measures():
    callback = FlatnessCallback()
    module, trainer, _ = fit(pl, [callback], max_epochs=1, num_sanity_val_steps=2)
    measured = rows(callback)
    assert {row["epoch"] for row in measured} == {0}
    trainer.validate(module, loaders()[1], verbose=False)
    assert rows(callback) == measured


@pytest.mark.parametrize("with_validation", [True, False])
def test_a_resumed_training_goes_on_with_the_history(tmp_path, with_validation):
    every = {"every_n_epochs": 2, "data": "train"}
    batches, limit = loaders(noise=0), 1.0 if with_validation else 0

    def trained(epochs, checkpoint=None):
        callback = FlatnessCallback(**every)
        save = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
        pl.seed_everything(0)
        trainer = lightning_trainer(
            pl, [callback, save], max_epochs=epochs, limit_val_batches=limit, enable_checkpointing=True
        )
        trainer.fit(lightning_module(pl), *batches, ckpt_path=checkpoint)
        return callback, save

    first, save = trained(2)
    second, _ = trained(4, save.last_model_path)
    assert [row["epoch"] for row in rows(first) if not row["layer"]] == [1]
    assert [row["epoch"] for row in rows(second) if not row["layer"]] == [1, 3]
    assert rows(second)[: len(rows(first))] == rows(first)


def test_the_trainers_limits_hold():
    callback = FlatnessCallback(data="val")
    fit(pl, [callback], max_epochs=1, limit_val_batches=2)
    assert {row["samples"] for row in rows(callback)} == {10}
