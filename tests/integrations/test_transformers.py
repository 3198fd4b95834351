"""The callback for the Trainer of transformers: what it measures, logs and keeps, and that training does not notice."""

import copy
import sys

import pytest
import torch
from torch import nn

import pyflatness as pf
from pyflatness import progress
from pyflatness.hessian import block_traces
from pyflatness.passes import limit
from support import trainings
from support.trainings import rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
FlatnessTrainerCallback = pytest.importorskip("pyflatness.integrations.transformers").FlatnessTrainerCallback

WORDS, LABELS, LENGTH = 20, 3, 5


def texts(samples, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row[0] % LABELS} for row in tokens]


def classifier():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=WORDS, num_labels=LABELS, max_position_embeddings=LENGTH, **sizes)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def trainer_of(folder, model=None, trainer=transformers.Trainer, **options):
    given = {name: options.pop(name) for name in ("compute_loss_func", "eval_dataset") if name in options}
    few = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.01,
        "seed": 1,
        "logging_steps": 1,
    }
    quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), **{**few, **quiet, **options})
    given = {"eval_dataset": texts(6, 2), **given}
    return trainer(model or classifier(), arguments, train_dataset=texts(14, 1), **given)


def trained(folder, *callbacks, **options):
    """Train, and return the trainer, and all that the training depends on as it is afterwards."""
    trainer = trainer_of(folder, **options)
    made = [FlatnessTrainerCallback(trainer, **each) for each in callbacks]
    for callback in made:
        trainer.add_callback(callback)
    trainer.train()
    state, loader = trainer.accelerator.gradient_state, trainer.callback_handler.train_dataloader
    parameters = [*trainer.model.parameters()]
    found = {
        "weights": [parameter.tolist() for parameter in parameters],
        "grads": [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters],
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "eval_losses": [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row],
        "optimizer": str(trainer.optimizer.state_dict()["state"]),
        "being read": [each is loader for each in state.dataloader_references].count(True),
        "modes": [module.training for module in trainer.model.modules()],
        "random": trainings.random_states(),
    }
    return trainer, found, made


@pytest.mark.parametrize("bf16", [False, True])
def test_a_budget_measures_steps_on_the_batch_that_was_trained_on(tmp_path, capsys, bf16):
    how = {"gradient_accumulation_steps": 2, "bf16": bf16}
    _, expected, _ = trained(tmp_path, **how)
    trainer, found, (callback,) = trained(tmp_path, {"budget": 0.999, "strict": True}, **how)
    assert found == expected
    first = callback.history[0]
    assert (first.step, first.epoch) == (1, 0.5)
    assert 0 < first.reports["live"]["relative_flatness"].samples <= 4
    assert any("flatness/network/relative_flatness" in row for row in trainer.state.log_history)
    assert not trainer.model._forward_pre_hooks
    assert "measured on the training data" in capsys.readouterr().out


CALLBACKS = {
    "val": {"data": "val", "layers": "classifier"},
    "train, sampled": {"data": "train", "probes": 2, "curvature": "ggn"},
    "train, some batches": {"data": "train", "limit_batches": 2, "layers": "classifier", "normalize": "std"},
}
TRAININGS = {
    "plain": {"eval_strategy": "epoch"},
    "accumulation, clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "checkpointing": {"gradient_checkpointing": True},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "eval_strategy": "epoch"},
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_a_training_is_what_it_is_without_the_callback(tmp_path, options):
    _, expected, _ = trained(tmp_path, **options)
    named = [{**each, "name": name} for name, each in CALLBACKS.items()]
    _, found, callbacks = trained(tmp_path, *named, **options)
    assert found == expected
    assert all({row["epoch"] for row in rows(callback)} == {1, 2} for callback in callbacks)


def test_losses_that_are_logged_by_epoch_are_logged(tmp_path):
    _, expected, _ = trained(tmp_path, logging_strategy="epoch")
    _, found, _ = trained(tmp_path, {"layers": "classifier"}, logging_strategy="epoch")
    assert len(found["losses"]) == 2
    assert found == expected


def test_values_are_those_of_the_model_at_that_time(tmp_path):
    options = {"layers": "classifier", "measures": ["relative_flatness", "trace"]}
    trainer, _, (callback,) = trained(tmp_path, {**options, "data": "val", "strict": True})
    report = pf.measure(trainer.model.eval(), "auto", trainer.get_eval_dataloader(), **options)
    last = {(row["measure"], row["layer"]): row["value"] for row in rows(callback) if row["epoch"] == 2}
    values = report.by_measure()
    assert last == {(name, layer): held.value for name in values for layer, held in values[name].items()}


def test_values_go_to_the_log_history_and_tensorboard(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer, _, (callback,) = trained(tmp_path, {"layers": "classifier"}, report_to="tensorboard")
    logged = [row for row in trainer.state.log_history if "flatness/seconds" in row]
    values = [row["value"] for row in rows(callback) if row["layer"]]
    assert [row["flatness/relative_flatness/classifier"] for row in logged] == values
    assert [(row["epoch"], row["step"]) for row in logged] == [(1.0, 4), (2.0, 8)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board")).Reload()
    scalars = events.Scalars("train/flatness/relative_flatness/classifier")
    assert [scalar.value for scalar in scalars] == pytest.approx(values)
    assert "flatness: measured on the training data in" in capsys.readouterr().out


def test_a_long_measurement_says_how_far_it_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # where a bar would be beside the trainer's
    trained(tmp_path, {"layers": "classifier"}, max_steps=1)
    assert "batches: 1 of 4 after 0 s\n" in capsys.readouterr().err


def test_what_a_long_measurement_takes_is_said_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(block_traces, "MANY", 10)
    monkeypatch.setattr(limit, "MANY", 10)
    trained(tmp_path, {"layers": "*.output.dense"}, max_steps=1)
    assert "its exact Hessian value takes 40 Hessian products" in capsys.readouterr().err


def test_a_resumed_training_measures_the_same_epochs(tmp_path):
    epochs = {"num_train_epochs": 4, "save_strategy": "epoch"}
    *_, (whole,) = trained(tmp_path, {"layers": "classifier", "every_n_epochs": 2}, **epochs)
    trainer = trainer_of(tmp_path, **epochs)
    callback = FlatnessTrainerCallback(trainer, layers="classifier", every_n_epochs=2)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert [row["epoch"] for row in rows(whole) if row["layer"]] == [2, 4]
    assert [*callback.history] == [*whole.history][1:]


def test_precision_of_the_training(tmp_path):
    exact = trained(tmp_path, {"layers": "classifier"}, learning_rate=0.0)[2][0]
    half = trained(tmp_path, {"layers": "classifier", "strict": True}, learning_rate=0.0, bf16=True)[2][0]
    values = [[row["value"] for row in rows(callback)] for callback in (exact, half)]
    assert values[1] == pytest.approx(values[0], rel=5e-2)


def test_a_training_that_is_cut_short_is_measured_at_its_end(tmp_path):
    *_, (callback,) = trained(tmp_path, {"layers": "classifier"}, max_steps=6)
    assert [(row["epoch"], row["step"]) for row in rows(callback) if row["layer"]] == [(1, 4), (2, 6)]


def test_evaluation_alone_is_not_measured(tmp_path):
    trainer = trainer_of(tmp_path)
    callback = FlatnessTrainerCallback(trainer)
    trainer.add_callback(callback)
    trainer.evaluate()
    assert len(callback.history) == 0


def test_what_is_not_possible_is_skipped_or_an_error(tmp_path):
    for options, data, message in (
        ({"eval_dataset": {"a": texts(6, 2), "b": texts(6, 3)}}, "val", "several data sets .'a', 'b'."),
        ({}, [{"input_ids": torch.ones(2, LENGTH, dtype=torch.int64)}], "labels"),
    ):
        with pytest.warns(RuntimeWarning, match=f"epoch 1 is not measured: .*{message}"):
            trained(tmp_path, {"data": data}, max_steps=1, **options)
        with pytest.raises(ValueError, match=message):
            trained(tmp_path, {"data": data, "strict": True}, max_steps=1, **options)


def test_of_named_measures_those_that_are_possible_are_given(tmp_path):
    """Exact values behind attention take more than one backward pass, the Fisher-Rao norm none."""
    with pytest.warns(RuntimeWarning, match="relative_flatness is left out from now on"):
        callback = trained(tmp_path, {"measures": ["relative_flatness", "fisher_rao"], "max_passes": 1})[2][0]
    assert [record.reports["live"].measures for record in callback.history] == [("fisher_rao",)] * 2


def test_layers_and_data_that_are_not_there_are_an_error_at_the_beginning(tmp_path):
    steps = []

    class Counted(transformers.Trainer):
        def training_step(self, *given, **more):
            steps.append(1)
            return super().training_step(*given, **more)

    with pytest.raises(pf.errors.InputError, match="nothing in the model matches 'clasifier'; did you mean classifier"):
        trained(tmp_path, {"layers": "clasifier", "every_n_epochs": 5}, trainer=Counted)
    with pytest.raises(pf.errors.InputError, match="the trainer has no eval_dataset; pass data='train'"):
        trained(tmp_path, {"data": "val"}, trainer=Counted, eval_dataset=None)
    assert not steps


def test_a_trainer_may_make_its_loader_without_a_data_set(tmp_path):
    class Own(transformers.Trainer):
        def get_eval_dataloader(self, eval_dataset=None):
            return super().get_eval_dataloader(texts(6, 2))

    found, expected = (
        trained(tmp_path, {"layers": "classifier"}, max_steps=4, **options)[2][0].history
        for options in ({"trainer": Own, "eval_dataset": None}, {})
    )
    assert [record.reports["live"].to_dict() for record in found] == [
        record.reports["live"].to_dict() for record in expected
    ]


def test_what_is_so_in_every_epoch_is_said_once(tmp_path):
    """The reason why nothing is measured, and which weights are not, where no layers were chosen."""
    with pytest.warns(RuntimeWarning, match="is not measured") as said:
        trained(tmp_path, {"data": "val"}, eval_dataset={"a": texts(6, 2), "b": texts(6, 3)}, num_train_epochs=3)
    assert sum("is not measured" in str(one.message) for one in said) == 1

    class Scaled(transformers.BertForSequenceClassification):
        def __init__(self, config):
            super().__init__(config)
            self.mixing = nn.Parameter(torch.eye(LABELS))

        def forward(self, input_ids, labels=None, **kwargs):
            returned = super().forward(input_ids, labels=labels, **kwargs)
            return type(returned)(loss=returned.loss, logits=returned.logits + 0 * self.mixing.cumsum(0).sum())

    with pytest.warns(RuntimeWarning, match=r"not measured, nor in any later epoch: mixing") as said:
        *_, (callback,) = trained(tmp_path, {}, model=Scaled(classifier().config), num_train_epochs=3)
    assert len(callback.history) == 3
    assert sum("nor in any later epoch" in str(one.message) for one in said) == 1


def test_deepspeed_is_refused(tmp_path):
    class Deep(transformers.Trainer):
        def log(self, logs, *rest):
            self.is_deepspeed_enabled = True  # when the training goes on already
            super().log(logs, *rest)

        def evaluate(self):
            raise AssertionError

    with pytest.warns(RuntimeWarning, match="under DeepSpeed the weights"):
        trained(tmp_path, {}, trainer=Deep, num_train_epochs=1)


def test_a_loss_of_the_trainers_has_to_be_passed(tmp_path):
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    for options in ({"label_smoothing_factor": 0.1}, {"compute_loss_func": lambda *args, **kwargs: None}):
        trainer = trainer_of(tmp_path, **options)
        with pytest.raises(pf.errors.InputError, match="pass the one to measure by"):
            FlatnessTrainerCallback(trainer)
        FlatnessTrainerCallback(trainer, loss=loss)
    *_, (callback,) = trained(tmp_path, {"loss": loss, "strict": True}, label_smoothing_factor=0.1)
    assert callback.history


class Plain(nn.Module):
    """A model that is none of transformers."""

    def __init__(self):
        super().__init__()
        self.body = classifier()

    def forward(self, input_ids, labels=None):
        return self.body(input_ids, labels=labels)


def test_of_a_model_of_the_users_own_the_loss_has_to_be_passed(tmp_path):
    """It is asked for before the training: at the end of an epoch a warning came too late."""
    with pytest.raises(pf.errors.InputError, match=r"loss: 'auto' is the loss .* a Plain is none; pass the loss"):
        trained(tmp_path, {}, model=Plain())
    *_, (callback,) = trained(tmp_path, {"loss": "cross_entropy", "strict": True}, model=Plain(), num_train_epochs=1)
    assert len(callback.history) == 1
    *_, (callback,) = trained(tmp_path, {"model": "body", "strict": True}, model=Plain(), num_train_epochs=1)
    assert len(callback.history) == 1


def test_bad_arguments(tmp_path):
    trainer = trainer_of(tmp_path)
    for arguments, options, error, message in (
        (["classifier"], {}, pf.errors.InputError, "a Trainer of transformers is wanted, got str"),
        ([trainer], {"model": "nowhere"}, pf.errors.InputError, "has no module of that name"),
        ([trainer], {"process_group": False}, TypeError, "no argument 'process_group'"),
    ):
        with pytest.raises(error, match=message):
            FlatnessTrainerCallback(*arguments, **options)
    copy.copy(FlatnessTrainerCallback(trainer, model="bert"))
