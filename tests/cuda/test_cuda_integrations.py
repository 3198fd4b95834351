"""Trainers of other libraries, their metrics and the command line, with the network on a GPU."""

import csv

import pytest
import torch
from torch import nn

import pyflatness as pf
from support import trainings
from support.on_cuda import on_a_gpu, random_states
from support.public_calls import batches, network
from support.score_runs import status
from support.trainings import lightning_module, lightning_trainer, loaders, rows

pytestmark = [on_a_gpu, *trainings.quiet(pytest)]


@pytest.mark.parametrize("options", [{"data": "val"}, {"data": "train", "probes": 2, "model": "net"}])
def test_a_training_by_lightning(cuda_device, options):
    """It is bit for bit what it is without the callback, GPU's random numbers of dropout included."""
    pl = pytest.importorskip("lightning.pytorch")
    from pyflatness.integrations.lightning import FlatnessCallback

    def trained(*callbacks):
        pl.seed_everything(0)
        module = lightning_module(pl)
        accelerator = {"accelerator": "gpu" if cuda_device.type == "cuda" else "cpu", "devices": 1}
        lightning_trainer(pl, callbacks, **accelerator).fit(module, *loaders())
        return trainings.bits(module.cpu()), torch.stack(module.losses).tolist(), [s.tolist() for s in random_states()]

    callback = FlatnessCallback(**options)
    expected = trained()
    assert trained(callback) == expected
    assert {row["epoch"] for row in rows(callback)} == {0, 1, 2}


def test_a_training_by_transformers(cuda_device, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from pyflatness.integrations.transformers import FlatnessTrainerCallback

    generator = torch.Generator().manual_seed(1)
    texts = [{"input_ids": row, "labels": row[0] % 3} for row in torch.randint(1, 20, (14, 5), generator=generator)]

    def trained(measured):
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = transformers.BertConfig(vocab_size=20, num_labels=3, max_position_embeddings=5, **sizes)
        config._attn_implementation = "eager"  # torch's fused attention may add in another order each time
        torch.manual_seed(0)
        arguments = transformers.TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, learning_rate=0.01, seed=1,
            logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
            use_cpu=cuda_device.type == "cpu",
        )  # fmt: skip
        model = transformers.BertForSequenceClassification(config)
        trainer = transformers.Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:6])
        callback = FlatnessTrainerCallback(trainer, layers="classifier", strict=True) if measured else None
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        found = trainings.bits(trainer.model.cpu()), losses, [state.tolist() for state in random_states()]
        return found, callback

    expected, _ = trained(measured=False)
    found, callback = trained(measured=True)
    assert found == expected
    assert {row["epoch"] for row in rows(callback)} == {1, 2}


@pytest.mark.parametrize("of", ["tensor", "module"])
def test_the_streaming_metric(cuda_device, of):
    pytest.importorskip("torchmetrics")
    from pyflatness.integrations.torchmetrics import RelativeFlatness

    head, states = network().head, random_states()
    features = torch.randn(37, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.arange(37) % 3
    there = network().head.to(cuda_device)
    metric = RelativeFlatness(there) if of == "module" else RelativeFlatness(there.weight, there.bias)
    metric = metric.to(cuda_device)
    for part, y in zip(features.split(10), targets.split(10), strict=True):
        metric.update(part.to(cuda_device), y.to(cuda_device))
    found = metric.compute()
    assert found.device.type == cuda_device.type
    expected = pf.head_flatness(features, head.weight, head.bias, targets).value
    assert found.item() == pytest.approx(expected, rel=1e-10)
    metric.reset()
    single = metric(features.to(cuda_device), targets.to(cuda_device))
    assert single.item() == pytest.approx(expected, rel=1e-10)
    assert all(map(torch.equal, random_states(), states))


def test_a_history_beside_a_training(cuda_device):
    """Weights that are averaged too, in a loop of the user's with BatchNorm and dropout in training mode."""

    def trained(record):
        torch.manual_seed(0)
        net = trainings.Network().to(cuda_device)
        x, y = torch.randn(24, trainings.FEATURES), torch.arange(24) % trainings.CLASSES
        data = [(x[:16].to(cuda_device), y[:16].to(cuda_device)), (x[16:].to(cuda_device), y[16:].to(cuda_device))]
        loss, optimizer = nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        averaged = torch.optim.swa_utils.AveragedModel(net)
        history = pf.track(net, loss, data, weights=["live", "swa"], averaged=averaged, layers=["body", "head"])
        for step in range(4):
            if record:
                history.record(step=step)
            for inputs, targets in data:
                optimizer.zero_grad()
                loss(net(inputs), targets).backward()
                optimizer.step()
            averaged.update_parameters(net)
        return trainings.bits(net.cpu()), [state.tolist() for state in random_states()], history

    *expected, _ = trained(record=False)
    *found, history = trained(record=True)
    assert found == expected
    assert [set(record.reports) for record in history] == [{"live"}] + [{"live", "swa"}] * 3


def test_scores_by_the_command_line(cuda_device, tmp_path):
    from safetensors.torch import save_file

    save_file(network().state_dict(), tmp_path / "first.safetensors")
    (tmp_path / "mine.py").write_text(
        "from support.public_calls import batches, network\n"
        "def made(device='cpu'):\n    return network().to(device)\n"
        "data = batches\n"
    )
    arguments = [str(tmp_path / "first.safetensors"), "--model", f"{tmp_path / 'mine.py'}:made"]
    arguments += ["--data", f"{tmp_path / 'mine.py'}:data", "--loss", "cross_entropy", "--layers", "*"]

    def scored(device):
        out = tmp_path / f"{device.type}.csv"
        options = ["--model-args", f'{{"device": "{device.type}"}}', "--out", str(out)]
        assert status("score", *arguments, *options) == 0
        with out.open() as file:
            return [(row["layer"], row["measure"], float(row["value"])) for row in csv.DictReader(file)]

    found, expected = scored(cuda_device), scored(torch.device("cpu"))
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    assert [row[2] for row in found] == pytest.approx([row[2] for row in expected], rel=1e-8)


def test_models_in_worker_processes(cuda_device):
    """A process of its own begins with a GPU that it has not used yet."""
    data = batches()
    models = {"first": network().to(cuda_device), "second": network().to(cuda_device)}
    found = pf.score(models, nn.CrossEntropyLoss(), data, workers=2)
    expected = pf.score({name: network() for name in models}, nn.CrossEntropyLoss(), data)
    assert [row.error for row in found] == [""] * len(found)
    assert [row.value for row in found] == pytest.approx([row.value for row in expected], rel=1e-8)
