"""The GPU benchmarks of heads and their scripts, small and on the CPU: what they time is set up right."""

import subprocess
import sys

import pytest
import torch

from pyflatness.contractions.backends import cuda, reference
from support import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpu_head(benchmark_modules):
    return benchmark_modules("gpu_head")


def test_rows_of_heads(gpu_head):
    found = [
        gpu_head.few(60, 10, 8, CPU, reference, compiles=False),
        gpu_head.more(60, 70, 90, CPU, reference, compiles=False),
        *(gpu_head.half(*given) for given in heads(gpu_head)),
    ]
    assert all(min(row.floor_ms, row.ours_ms, row.others_ms["composed"]) > 0 for row in found)


def heads(gpu_head):
    return gpu_head.flat(20, 1500, 16, CPU), gpu_head.ill(20, 1500, 64, 0.1, CPU), gpu_head.peaked(40, 1500, 20, CPU)


def test_heads_are_what_they_are_called(gpu_head):
    most = []
    for features, weight in heads(gpu_head):
        p = torch.softmax(features.double() @ weight.double().t(), 1)
        most.append(p.topk(2, dim=1).values)
    flat, ill, peaked = most
    assert flat[:, 0].max() < 0.2
    assert int((ill.sum(dim=1) > 0.99).sum()) == 2
    assert 0.02 < float((1 - peaked[:, 0]).median()) < 0.12


@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_a_row_on_the_kernels(cuda_device, gpu_head):
    gpu_head.few(60, 10, 8, cuda_device, cuda, compiles=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", ["tests/gpu.py", "benchmarks/gpu.py"])
def test_scripts_without_a_gpu_say_so(script):
    done = subprocess.run([sys.executable, ROOT / script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert f"{script}: needs a CUDA GPU" in done.stderr
