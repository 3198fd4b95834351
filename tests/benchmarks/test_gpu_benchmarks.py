"""The GPU benchmarks' own work, small and on the CPU: what they time is set up right."""

import functools
import subprocess
import sys

import pytest
import torch

from pyflatness.contractions.backends import cuda, reference
from support import ROOT

CPU = torch.device("cpu")


@pytest.fixture
def gpu_layers(benchmark_modules):
    return benchmark_modules("gpu_layers")


def model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 16, 3, stride=2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(3600, 10),
    ).eval()  # fmt: skip


def test_rows_of_layers(gpu_layers):
    network = gpu_layers.network(model(), 2, CPU, reference, rounds=1)
    call = gpu_layers.public_call(model(), 2, CPU, rounds=1)
    sequence = gpu_layers.sequence(2, 16, 128, CPU, reference, rounds=1)
    for row in (network, call, sequence):
        assert min(row.floor_ms, row.ours_ms, *row.others_ms.values()) > 0
        assert {"reference", "torch"} & row.others_ms.keys()


def test_the_row_of_hessian_products(gpu_layers):
    row = gpu_layers.hessian_products(model(), 2, 3, CPU, rounds=1)
    assert min(row.floor_ms, row.ours_ms) > 0
    assert row.note == "3 products"


def test_precisions_are_put_back(gpu_layers):
    kinds = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = [kind.fp32_precision for kind in kinds]
    seen = []

    def take(network, n, device):
        seen.append([kind.fp32_precision for kind in kinds])
        raise ZeroDivisionError

    for convolutions, products in gpu_layers.PRECISIONS:
        with pytest.raises(ZeroDivisionError):
            gpu_layers.in_precision(convolutions, products, take, model, 2, CPU)
    assert seen == [[*pair] for pair in gpu_layers.PRECISIONS]
    assert [kind.fp32_precision for kind in kinds] == before


@pytest.mark.soak
@pytest.mark.parametrize("cuda_device", ["emulated"], indirect=True)
def test_a_sequence_on_the_kernels(cuda_device, gpu_layers):
    gpu_layers.sequence(1, 16, 128, cuda_device, cuda, rounds=1)


def test_a_row_that_fails_leaves_the_others(benchmark_modules, capsys):
    gpu, rows = benchmark_modules("gpu"), benchmark_modules("gpu_rows")

    def row(took):
        return lambda: rows.Row(2.0, took, {"composed": 7.0}, 1.0, 3.0)

    found = gpu.taken({"first": row(2.5), "second": lambda: 1 / 0, "third": row(4.0)})
    assert [*found] == ["first", "third"]
    said = capsys.readouterr()
    assert ["FAILED" in line for line in said.out.splitlines()] == [False, True, False]
    assert "ZeroDivisionError" in said.err
    lines = gpu.markdown(found, "python benchmarks/gpu.py").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    assert {len(line) for line in cells} == {1 + len(rows.COLUMNS)}
    first, third = (dict(zip(cells[0], line, strict=True)) for line in cells[2:])
    assert (first["work"], first["took / floor"], first["reached"]) == ("first", "1.25", "yes")
    assert (third["work"], third["took / floor"], third["reached"]) == ("third", "2.00", "no")
    assert "by `python benchmarks/gpu.py`" in lines[-1]


def test_every_row_has_a_name_and_work(benchmark_modules):
    works = [benchmark_modules(name).works(CPU) for name in ("gpu_head", "gpu_kernels", "gpu_layers")]
    names = [name for found in works for name in found]
    assert len({*names}) == len(names)
    kinds = "head (", "kernel ", "ResNet-18, ", "linear ", "eigenvalues "
    assert all(name.startswith(kinds) for name in names)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("exponentiate_tile", (3, 40)), ("norms_about", (6, 8)), ("rejoin", (3, 8)), ("mean_row", (3, 8)),
        ("row_dots", (3, 8)), ("sigmoid_curvature", (3, 10)),
    ],
)  # fmt: skip
def test_rows_of_kernels(benchmark_modules, name, sizes):
    kernels = benchmark_modules("gpu_kernels")
    row = kernels.row(functools.partial(getattr(kernels, name), *sizes), CPU, reference, rounds=1)
    assert row.ours_ms > 0
    assert row.note.endswith("GB/s")


# --- heads ------------------------------------------------------------------------------------------------------------


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
