"""A script for torchrun: it measures a model and loaders that accelerate has prepared.

torchrun --nproc-per-node 2 accelerate_script.py FOLDER
"""

import sys
from pathlib import Path

from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

import pyflatness as pf
from support import rank_script, ranks


def main(folder):
    for name, even in (("even", True), ("each_once", False)):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=even))
        model, loader = accelerator.prepare(rank_script.model(), DataLoader(rank_script.dataset(), batch_size=4))
        assert isinstance(model, nn.parallel.DistributedDataParallel)
        report = pf.measure(model, nn.CrossEntropyLoss(), loader, measures=["relative_flatness", "trace"])
        Path(folder, f"{name}{accelerator.process_index}").write_text(report.to_json())
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
