"""The GPU benchmarks of heads and their scripts, small and on the CPU: what they time is set up right."""

import subprocess
import sys

import pytest
import torch

from pyflatness.contractions import cuda, reference
from support import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpu_head(benchmark_modules):
    return benchmark_modules("gpu_head")


def test_rows_of_heads(gpu_head):
    found = [
        gpu_head.few(60, 10, 8, CPU, reference, compiles=False),
        gpu_head.more(60, 70, 90, CPU, reference, compiles=False),
        gpu_head.flat(20, 1500, 16, CPU),
    ]
    assert all(min(row.floor_ms, row.ours_ms, row.others_ms["composed"]) > 0 for row in found)


def test_rows_to_a_tolerance(gpu_head):
    alike = gpu_head.peaked(20, 4000, 16, 1.5, True, 0.05, CPU)
    independent = gpu_head.peaked(20, 4000, 16, 1.5, False, 1e-3, CPU)
    assert int(alike.note.removeprefix("kept ").split("%")[0]) < 70
    assert independent.note.startswith("kept 100%")
    features, weight = gpu_head.zipf(40, 300, 20, 1.5, True, CPU)
    p = torch.softmax(features.double() @ weight.double().t(), 1)
    assert 0.02 < float((1 - p.amax(dim=1)).median()) < 0.12


@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_a_row_on_the_kernels(cuda_device, gpu_head):
    gpu_head.few(60, 10, 8, cuda_device, cuda, compiles=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["tests/gpu.py", "benchmarks/gpu.py"])
def test_scripts_without_a_gpu_say_so(script):
    done = subprocess.run([sys.executable, ROOT / script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert f"{script}: needs a CUDA GPU" in done.stderr
