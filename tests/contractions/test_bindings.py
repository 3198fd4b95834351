"""The compiled module's door: a size that does not fit an element count never reaches memory."""

import functools
import os
import subprocess
import sys

import pytest
import torch

from pyflatness.contractions import softmax
from pyflatness.contractions.backends import compiled
from pyflatness.errors import BackendError
from support.nested import changed

_C = pytest.importorskip("pyflatness._C", reason="the compiled kernels are not built")


def arguments(name, dtype):
    """A correct call of a kernel: (tensor or scalar) arguments with sizes n=4, d=3, m=5."""
    x, w, z, b = (torch.ones(*shape, dtype=dtype) for shape in ((4, 5), (3, 5), (4, 3), (3,)))
    square, out, place = (
        torch.ones(3, 3, dtype=dtype),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.int64),
    )
    sources = torch.arange(9, dtype=torch.int32).repeat(4, 4, 1)
    # a layer of 4 samples, 2 groups of 3 channels and 2 rows, 5 x 4 pixels under a kernel of 3 x 2: 3 x 3 places
    layer = ((4, 2, 3, 2), (1, 5, 4), (1, 3, 3), (1, 3, 2), (1, 1, 1), (1, 1, 1))
    inputs, signal, root, weight, places, totals, channels, rows = (
        torch.ones(*shape, dtype=kind)
        for shape, kind in (
            ((4, 6, 1, 5, 4), dtype),
            ((4, 4, 1, 3, 3), dtype),
            ((2, 7, 2), dtype),
            ((2, 2, 18), dtype),
            ((4, 2, 9, 9), dtype),
            ((4, 2, 2, 3), torch.float64),
            ((4, 6), torch.float64),
            ((4, 2, 2, 2), torch.float64),
        )
    )
    suffix = "_f32" if dtype == torch.float32 else "_f64"
    works = [
        torch.ones(getattr(_C, f"{kernel}_workspace{suffix}")(*sizes), dtype=dtype)
        for kernel, sizes in (
            ("direct", (layer, 7, True, 1)),
            ("patch_gram", (layer, 1)),
            ("gram", (9, 2, 1)),
            ("direct_gathered", (layer, 9, 7, 2, 1)),
        )
    ]
    return {
        "pair_distances": [w, 3, 5, square, 1],
        "softmax_variance": [x, 5, w, b, square, 4, 5, 3, out, 1],
        "softmax_variance_sum": [
            x, 5, w, b, torch.ones(3 * (_C.packed_columns(5) + 1 + 3), dtype=dtype), True, place % 3, -100, 4, 5, 3,
            out.clone(), 1,
        ],
        "softmax_variance_gradient": [
            x, 5, w, b, torch.ones(3 * (_C.packed_columns(5) + 1 + 3), dtype=dtype), out, 4, 5, 3,
            *(torch.ones(shape, dtype=dtype) for shape in ((3, 4), (3, 4), (2, 4))), 1,
        ],
        "exponentiate": [z, b, 1.0, 4, 3, torch.zeros(4, dtype=dtype), out, out.clone(), place, 1],
        "row_dots": [x, 5, x, 5, 4, 5, out, 1],
        "sigmoid_curvature": [z, z, b, 4, 3, out, 1],
        "direct": [
            layer, inputs, inputs.stride(), signal, signal.stride(), root, 7, weight, 2, totals, channels, rows,
            works[0], 1,
        ],
        "direct_gathered": [
            layer, inputs, inputs.stride(), [signal, signal.clone()], [signal.stride()] * 2, sources, 9, root, 7,
            totals.flatten()[:32].clone(), works[3], 1,
        ],
        "patch_gram": [layer, inputs, inputs.stride(), places, works[1], 1],
        "gram": [signal, (36, 18, 1, 9), 4, 2, 9, 2, places, totals[..., 0, 0].contiguous(), works[2], 1],
        "small_eigenvalues": [places[0, 0, :3, :3].contiguous(), 1, 3, places[0, 0, 0, :3].contiguous(), 1],
    }[name]  # fmt: skip


KERNELS = [
    "pair_distances",
    "softmax_variance",
    "softmax_variance_sum",
    "softmax_variance_gradient",
    "exponentiate",
    "row_dots",
    "sigmoid_curvature",
    "direct",
    "direct_gathered",
    "patch_gram",
    "gram",
    "small_eigenvalues",
]


def plain(value):
    """As the binding takes it: addresses and element counts."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return (value.data_ptr(), value.numel()) if isinstance(value, torch.Tensor) else value


def call(name, dtype, values):
    suffix = "_f32" if dtype == torch.float32 else "_f64"
    return getattr(_C, name + suffix)(*map(plain, values))


def tensors(values):
    """Paths of all tensors."""
    for place, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            yield (place,)
        elif isinstance(value, list):
            yield from ((place, *path) for path in tensors(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_wrong_element_counts_are_refused(name, dtype):
    if name == "small_eigenvalues" and dtype == torch.float32:
        pytest.skip("float64 only")
    values = arguments(name, dtype)
    call(name, dtype, values)
    for path in tensors(values):
        address, count = functools.reduce(lambda inner, place: inner[place], path, [plain(v) for v in values])
        for wrong, message in {(address, count - 1): "elements", (address, count + 1): "elements",
                               (0, count): "null pointer"}.items():  # fmt: skip
            with pytest.raises(ValueError, match=message):
                call(name, dtype, changed([plain(v) for v in values], *path, wrong))


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


@pytest.mark.parametrize("name", ["direct", "direct_gathered", "patch_gram"])
def test_a_layer_that_reaches_outside_is_refused(name):
    values = arguments(name, torch.float32)
    call(name, torch.float32, values)
    for path, message in {
        (0, 0, 0, -1): "-1 samples",
        (0, 0, 1, 0): "0 groups",
        (0, 0, 2, 0): "0 channels",
        (0, 0, 3, 0): "0 rows",
        (0, 1, 1, 6): "does not have 3 places in 6 pixels",
        (0, 1, 2, 0): "in 0 pixels",
        (0, 2, 1, 4): "does not have 4 places",
        (0, 2, 0, 0): "does not have 0 places",
        (0, 3, 1, 4): "kernel of 4 pixels",
        (0, 3, 1, 2**62): "does not have",
        (0, 3, 2, 0): "kernel of 0 pixels",
        (0, 4, 1, 2): "stride 2",
        (0, 4, 1, 0): "stride 0",
        (0, 5, 1, 2): "dilation 2",
        (0, 5, 1, -1): "dilation -1",
        (2, 0, 1000): "`inputs` has 480 elements",
        (2, 1, 2**62): "not those of an array",
        (2, 4, -1): "not those of an array",
        (2, 3, 2**61): "`inputs` has 480 elements|not those of an array",
        (0, 0, 2, 2**50): "multiply-adds|not those of an array",
    }.items():
        with pytest.raises(ValueError, match=message):
            call(name, torch.float32, changed(values, *path))


def test_sizes_of_the_layer_kernels_are_checked():
    direct = arguments("direct", torch.float32)
    for path, message in {
        (4, 1, 100): "`signal` has 144 elements",
        (4, 2, -9): "not those of an array",
        (6, 6): "`root` has 28 elements",
        (6, 2**60): "multiply-adds|not those of an array",
        (8, 0): "0 splits",
        (8, 3): "`totals` has",
        (13, 2): "`workspace` has",
    }.items():
        with pytest.raises(ValueError, match=message):
            call("direct", torch.float32, changed(direct, *path))
    gathered = arguments("direct_gathered", torch.float32)
    for wrong, message in ((3, "1 signals, strides of 2"), (10, "`workspace` has")):
        with pytest.raises(ValueError, match=message):
            call("direct_gathered", torch.float32, changed(gathered, wrong, gathered[wrong][:1]))
    for path, message in {
        (4, 1, (36, 9, 9, 3, 100)): "`signal` has 144 elements",
        (6, 8): "`signal` has 144 elements",
        (6, 0): "rows of 0 elements",
        (8, 6): "`root` has 28 elements",
        (8, 2**60): "multiply-adds|not those of an array",
        (11, 2): "`workspace` has",
    }.items():
        with pytest.raises(ValueError, match=message):
            call("direct_gathered", torch.float32, changed(gathered, *path))
    gram = arguments("gram", torch.float32)
    for path, message in {
        (1, 2, 2): "`rows` has",
        (4, 0): "0 places",
        (5, 0): "0 elements",
        (4, -1): "not those",
    }.items():
        with pytest.raises(ValueError, match=message):
            call("gram", torch.float32, changed(gram, *path))
    eigen = arguments("small_eigenvalues", torch.float64)
    for size in (0, -3, 33):
        with pytest.raises(ValueError, match=f"1 to 32 rows, got {size}"):
            call("small_eigenvalues", torch.float64, changed(eigen, 2, size))


def test_tensors_of_the_wrong_kind_are_refused():
    with pytest.raises(BackendError, match=r"row_dots: .* got torch\.float32 on cpu, torch\.float64 on cpu"):
        compiled.row_dots(torch.ones(2, 2), torch.ones(2, 2).double())
    with pytest.raises(BackendError, match="contiguous"):
        compiled.exponentiate(torch.ones(3, 2).t(), None, 1.0, torch.zeros(2))


def test_the_widest_fused_head_fits_the_kernel():
    assert softmax.FUSED_OUTPUTS <= _C.MAX_FUSED_OUTPUTS


def test_instruction_sets():
    assert compiled.engines()[-1] == "base"
    before = compiled.instruction_set()
    with compiled.forced("base"):
        assert compiled.instruction_set() == "base"
    assert compiled.instruction_set() == before
    with pytest.raises(ValueError, match=r"'sse9' cannot run here; .*base"), compiled.forced("sse9"):
        pass


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_instruction_set_from_the_environment():
    code = "from pyflatness.contractions.backends import compiled; print(compiled.instruction_set())"
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
except pf.errors.BackendError as error:
    print(error)
"""
    result = run_python(code)
    assert result.stdout.startswith("reference reference\nthe compiled kernels are not here"), result.stderr
    assert "pip install ." in result.stdout
