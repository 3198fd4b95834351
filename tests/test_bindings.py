"""The compiled module's door: a size that does not fit an element count never reaches memory."""

import os
import subprocess
import sys

import pytest
import torch

from pyflatness import BackendError
from pyflatness.contractions import compiled, softmax

_C = pytest.importorskip("pyflatness._C", reason="the compiled kernels are not built")


def arguments(name, dtype):
    """A correct call of a kernel: (tensor or scalar) arguments with sizes n=4, d=3, m=5."""
    x, w, z, b = (torch.ones(*shape, dtype=dtype) for shape in ((4, 5), (3, 5), (4, 3), (3,)))
    square, out, place = (
        torch.ones(3, 3, dtype=dtype),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.int64),
    )
    return {
        "pair_distances": [w, 3, 5, square, 1],
        "softmax_variance": [x, 5, w, b, square, 4, 5, 3, out, 1],
        "exponentiate": [z, b, 1.0, 4, 3, torch.zeros(4, dtype=dtype), out, out.clone(), place, 1],
        "row_dots": [x, 5, x, 5, 4, 5, out, 1],
        "sigmoid_curvature": [z, z, b, 4, 3, out, 1],
    }[name]


def call(name, dtype, values):
    suffix = "_f32" if dtype == torch.float32 else "_f64"
    plain = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
    return getattr(_C, name + suffix)(*plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "name", ["pair_distances", "softmax_variance", "exponentiate", "row_dots", "sigmoid_curvature"]
)
def test_wrong_element_counts_are_refused(name, dtype):
    values = arguments(name, dtype)
    call(name, dtype, values)
    tensors = [place for place, value in enumerate(values) if isinstance(value, torch.Tensor)]
    for place in tensors:
        for change in (-1, 1):
            wrong = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
            wrong[place] = (wrong[place][0], wrong[place][1] + change)
            with pytest.raises(ValueError, match="elements"):
                getattr(_C, name + ("_f32" if dtype == torch.float32 else "_f64"))(*wrong)
        null = list(values)
        wrong = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in null]
        wrong[place] = (0, wrong[place][1])
        with pytest.raises(ValueError, match="null pointer"):
            getattr(_C, name + ("_f32" if dtype == torch.float32 else "_f64"))(*wrong)


@pytest.mark.parametrize("sizes", [(-4, 5), (4, -5), (2**62, 2**62)])
def test_impossible_sizes_are_refused(sizes):
    values = arguments("sigmoid_curvature", torch.float32)
    values[3], values[4] = sizes
    with pytest.raises(ValueError, match="not those of an array"):
        call("sigmoid_curvature", torch.float32, values)


def test_strides_and_outputs_are_checked():
    values = arguments("row_dots", torch.float32)
    values[1] = 4
    with pytest.raises(ValueError, match="row stride 4 < row length 5"):
        call("row_dots", torch.float32, values)
    many = torch.ones(65, 5)
    with pytest.raises(ValueError, match="takes 1 to 64 outputs, got 65"):
        compiled.softmax_variance(torch.ones(4, 5), many, torch.ones(65), torch.ones(65, 65))


def test_tensors_of_the_wrong_kind_are_refused():
    with pytest.raises(BackendError, match=r"row_dots: .* got torch\.float32 on cpu, torch\.float64 on cpu"):
        compiled.row_dots(torch.ones(2, 2), torch.ones(2, 2).double())
    with pytest.raises(BackendError, match="contiguous"):
        compiled.exponentiate(torch.ones(3, 2).t(), None, 1.0, torch.zeros(2))


def test_the_widest_fused_head_fits_the_kernel():
    assert softmax._FUSED_OUTPUTS <= _C.MAX_FUSED_OUTPUTS


def test_instruction_sets():
    assert compiled.instruction_sets()[-1] == "base"
    before = compiled.instruction_set()
    with compiled.forced_instruction_set("base"):
        assert compiled.instruction_set() == "base"
    assert compiled.instruction_set() == before
    with pytest.raises(ValueError, match=r"'sse9' cannot run here; .*base"), compiled.forced_instruction_set("sse9"):
        pass


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_instruction_set_from_the_environment():
    code = "from pyflatness.contractions import compiled; print(compiled.instruction_set())"
    assert run_python(code, PYFLATNESS_ISA="base").stdout.strip() == "base"
    assert "BackendError: PYFLATNESS_ISA: instruction set 'sse9'" in run_python(code, PYFLATNESS_ISA="sse9").stderr


def test_without_the_compiled_module():
    """A missing module says what to do; the reference works, and "auto" takes it."""
    code = """
import sys
sys.modules["pyflatness._C"] = None
import torch, pyflatness as pf
x, w = torch.ones(3, 2), torch.eye(2)
print(pf.head_flatness(x, w).backend, pf.head_flatness(x, w, backend="reference").backend)
try:
    pf.head_flatness(x, w, backend="compiled")
except pf.BackendError as error:
    print(error)
"""
    result = run_python(code)
    assert result.stdout.startswith("reference reference\nthe compiled kernels are not here"), result.stderr
    assert "pip install ." in result.stdout
