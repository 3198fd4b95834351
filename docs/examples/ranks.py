"""
Measure with several processes
==============================

On a cluster, ``torchrun`` or ``accelerate launch`` starts several processes, each with a
part of the data. A call of pyflatness in such a script is made by all processes together,
and each gets the value of all data. This example does so with two processes on one
machine. It needs the extra ``demo`` (``pip install 'pyflatness[demo]'``).
"""

# %%
# The script
# ----------
#
# Only three things differ from a script for one process: it initialises
# ``torch.distributed``, each process takes its own part of the data set, and only the
# first process prints. With GPUs the backend is ``"nccl"``, and model and data go to the
# GPU as in any script for ``torchrun``.

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from torch import nn

import pyflatness as pf

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import pyflatness as pf

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
model.load_state_dict(torch.load("model.pt"))
dataset = TensorDataset(*torch.load("digits.pt"))
part = Subset(dataset, range(rank, len(dataset), ranks))

loader = DataLoader(part, batch_size=256)
report = pf.measure(model, nn.CrossEntropyLoss(), loader, progress=False)
if rank == 0:
    print(f"{ranks} processes, of which the first has {len(part)} samples")
    print(report)
dist.destroy_process_group()
"""

# %%
# Launch it
# ---------
#
# The weights and the data are files that every process reads. The command is the one that
# you would type into a terminal: ``torchrun --standalone --nproc-per-node 2
# evaluate.py``. Over several machines it also has ``--nnodes`` and ``--rdzv-endpoint``;
# the script stays the same.

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
digits = load_digits()
data = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

torchrun = [sys.executable, "-m", "torch.distributed.run"]
command = [*torchrun, "--standalone", "--nproc-per-node", "2", "evaluate.py"]
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "evaluate.py").write_text(SCRIPT)
    torch.save(model.state_dict(), Path(folder, "model.pt"))
    torch.save(data, Path(folder, "digits.pt"))
    run = subprocess.run(
        command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
    )
print(run.stdout)

# %%
# The same in one process
# -----------------------
#
# The values do not depend on the number of processes, but for rounding: the sums over
# samples are taken in each process, and added up when all are through with their data.

report = pf.measure(model, nn.CrossEntropyLoss(), data)
print(report)
figure, axes = plt.subplots(2, 1, sharex=True, figsize=(6, 4.5), layout="constrained")
report.plot(axes=axes)
plt.show()

# %%
# :doc:`/ranks` says what else holds: random probes are the same for any number of
# processes, models may be wrapped in ``DistributedDataParallel`` or spread over the
# processes by FSDP2, and an error in one process is an error in all. ``torchrun … -m
# pyflatness score`` measures a folder of checkpoints in this way, without a script.
