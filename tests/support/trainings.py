"""Small trainings by Lightning and by transformers, in which random numbers matter: shuffled data, dropout, noise."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

FEATURES, CLASSES = 6, 3


class Noisy(Dataset):
    """Samples with noise from numpy, random, torch, and a generator of their own."""

    def __init__(self, samples, seed, noise=0.05):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.targets = self.inputs[:, :CLASSES].argmax(dim=1)
        self.noise, self.own, self.drawn = noise, np.random.default_rng(seed), 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, place):
        self.drawn += 1
        drawn = np.random.rand() + random.random() + torch.rand(()).item() + self.own.random()  # noqa: NPY002
        return self.inputs[place] + self.noise * drawn, self.targets[place]


class Network(nn.Module):
    """Dropout and BatchNorm between two layers."""

    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(8, CLASSES)

    def forward(self, inputs):
        return self.head(self.dropout(torch.relu(self.norm(self.body(inputs)))))


def lightning_module(pl, *, criterion=True, logs=True):
    """Return a LightningModule of ``pl`` (lightning.pytorch or pytorch_lightning), which keeps its training losses."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net, self.losses = Network(), []
            if criterion:
                self.criterion = nn.CrossEntropyLoss()

        def forward(self, inputs):
            return self.net(inputs)

        def training_step(self, batch, index):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            if logs:
                self.log("loss", loss)
            self.losses.append(loss.detach().clone())
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    return Module()


def loaders(noise=0.05, **options):
    """Return a shuffled loader of 24 samples for training, and one for validation."""
    train = DataLoader(Noisy(24, 1, noise), batch_size=8, shuffle=True, **options)
    return train, DataLoader(Noisy(12, 2, noise), batch_size=5, **options)


def lightning_trainer(pl, callbacks=(), **options):
    """Return a Trainer of three epochs on the CPU that prints and writes nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"max_epochs": 3, "accelerator": "cpu", "logger": False, "log_every_n_steps": 1, **quiet, **options}
    return pl.Trainer(callbacks=[*callbacks], **options)


def rows(callback):
    """Return a dict for each value in a callback's history."""
    return [
        {
            **{"epoch": record.epoch, "step": record.step, "layer": layer, "measure": measure},
            **{"value": found.value, "samples": found.samples, "exact": found.exact},
        }
        for record in callback.history
        for measure, values in record.reports["live"].by_measure().items()
        for layer, found in values.items()
    ]


def random_states():
    """Return the states of torch's, Python's and NumPy's generators."""
    return torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state(legacy=False))  # noqa: NPY002


def bits(module):
    """Return all of a module's parameters and buffers as bytes."""
    return {name: tensor.numpy().tobytes() for name, tensor in module.state_dict().items()}


def quiet(pytest):
    """Return marks that ignore what the trainers' own code warns of: torch's deprecations, few workers, small data."""
    messages = (
        "isinstance.treespec, LeafSpec.. is deprecated",
        "The '.*_dataloader' does not have many workers",
        "Checkpoint directory .* exists and is not empty",
    )
    return [pytest.mark.filterwarnings(f"ignore:.*{message}") for message in messages]
