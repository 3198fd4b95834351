"""A script that trains by Lightning's ddp strategy, with the callback or without, and writes what came out.

torchrun --nproc-per-node 2 rank_lightning_script.py FOLDER
"""

import json
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch

from pyflatness.integrations.lightning import FlatnessCallback
from support import trainings
from support.ranks import leave


def main(folder):
    warnings.simplefilter("ignore")  # of the libraries
    found = []
    for callbacks in ([], [FlatnessCallback(model="net", strict=True), FlatnessCallback(data="train", name="train")]):
        pl.seed_everything(0)
        module = trainings.lightning_module(pl)
        # The last epoch has no validation, in which DistributedDataParallel sends one rank's buffers.
        options = {"max_epochs": 3, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
        ranks = {"strategy": "ddp", "devices": 2, "logger": pl.loggers.CSVLogger(folder)}
        trainer = trainings.lightning_trainer(pl, callbacks, **options, **ranks)
        train, val = trainings.loaders(noise=0)
        trainer.fit(module, train, val)
        buffers = {name: buffer.tolist() for name, buffer in module.named_buffers()}
        losses = torch.stack(module.losses).tolist()
        found.append({"losses": losses, "buffers": buffers, "random": repr(trainings.random_states())})
        weights = {name: parameter.tolist() for name, parameter in module.net.named_parameters()}
        histories = [trainings.rows(callback) for callback in callbacks]
    facts = {"same": found[0] == found[1], "weights": weights, "buffers": buffers, "histories": histories}
    Path(folder, f"{trainer.global_rank}.json").write_text(json.dumps(facts))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
