"""A script for torchrun: it measures a language model under FSDP2, or ends as it is told to.

torchrun --nproc-per-node 2 rank_fsdp_script.py FOLDER MODEL [die]
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard

import pyflatness as pf
from support.ranks import launched

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
    with launched(folder, kind) as (rank, size, write):
        torch.set_num_threads(1)
        network = model(of)
        for layer in network.model.layers:
            fully_shard(layer)
        fully_shard(network)
        mine = batches(of)[-(-3 * rank // size) : -(-3 * (rank + 1) // size)]  # of four ranks the last has none
        if kind == "die":
            mine = (Dying if rank == 1 else list)(batches(of))
        write(pf.measure(network, data=mine, **CHOICE).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
