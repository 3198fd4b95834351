"""A script for torchrun: it measures a language model under FSDP2, or ends as it is told to.

torchrun --nproc-per-node 2 rank_fsdp_script.py FOLDER MODEL [die]
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import pyflatness as pf
from support.ranks import leave

CHOICE = {"measures": ["relative_flatness", "trace"], "curvature": "ggn", "probes": 2, "seed": 3}


def model(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def batches(folder):
    """Return three batches of four texts."""
    tokens = torch.from_numpy(np.load(Path(folder, "stories_tokens.npz"))["input_ids"].astype(np.int64))
    return [{"input_ids": part, "labels": part} for part in tokens[:12, :10].split(4)]


class Dying(list):
    """Batches whose process ends at the second of them, once the sweep has begun."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            if number == 1:
                os._exit(1)
            yield batch


def main(folder, of, kind=""):
    if kind == "die":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others, too
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    network = model(of)
    for layer in network.model.layers:
        fully_shard(layer)
    fully_shard(network)
    mine = batches(of)[-(-3 * rank // size) : -(-3 * (rank + 1) // size)]  # of four ranks the last has none
    if kind == "die":
        mine = (Dying if rank == 1 else list)(batches(of))
    try:
        report = pf.measure(network, data=mine, **CHOICE)
    except pf.errors.RankError as error:
        Path(folder, f"{rank}").write_text(str(error))
        raise
    Path(folder, f"{rank}").write_text(report.to_json())
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
