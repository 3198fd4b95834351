"""The door to the head's CUDA kernels: a size that does not fit an element count never reaches memory."""

import pytest
import torch

from pyflatness.contractions import softmax
from pyflatness.contractions.backends import cuda

pytestmark = pytest.mark.parametrize("cuda_device", ["cuda", "emulated"], indirect=True)


def arguments(name, device, dtype=torch.float32):
    """A correct call of a kernel with sizes n=4, d=3, m=5, less the stream."""
    x, w, z, b, c, square = (
        torch.ones(*shape, dtype=dtype, device=device) for shape in ((4, 5), (3, 5), (4, 3), (3,), (5,), (3, 3))
    )
    out, moment, n = (torch.ones(4, dtype=torch.float64, device=device) for _ in range(3))
    place, chosen = torch.zeros(4, dtype=torch.int64, device=device), torch.ones(4, dtype=torch.bool, device=device)
    list_, parts = torch.zeros(5, dtype=torch.int64, device=device), out.new_ones(4, cuda.module().spread_splits(3))
    low = torch.zeros(4, dtype=dtype, device=device)
    return {
        "pair_distances": [w, 3, 5, square],
        "softmax_variance": [x, 5, w, b, square, 4, 5, 3, out],
        "exponentiate": [z, b, 1.0, 4, 3, low, out, moment, place],
        "exponentiate_tile": [z, 3, b, b.clone(), 3, 0, 4, 3, z.clone(), 3, low, place, out, moment, place.clone(), n],
        "row_dots": [x, 5, x, 5, 4, 5, out],
        "sigmoid_curvature": [z, z, b, 4, 3, out],
        "norms_about": [w, c, 3, 5, b],
        "rejoin": [x, w, c, place, n, 4, 3, 5],
        "mean_row": [x, w, c, place, out, moment, 4, 3, 5, torch.ones(12, dtype=torch.float64, device=device)],
        "spread": [x, low, x, w, c, b, chosen, 4, 3, 5, list_, parts, out],
    }[name]


KERNELS = [
    "pair_distances", "softmax_variance", "exponentiate", "exponentiate_tile", "row_dots", "sigmoid_curvature",
    "norms_about", "rejoin", "mean_row", "spread",
]  # fmt: skip
OPTIONAL = {("exponentiate", 1), ("exponentiate_tile", 2), ("rejoin", 2), ("mean_row", 5), ("spread", 4)}  # may be null


def call(name, values, dtype=torch.float32):
    suffix = "_f32" if dtype == torch.float32 else "_f64"
    plain = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    return getattr(cuda.module(), name + suffix)(*plain, stream)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", KERNELS)
def test_wrong_element_counts_are_refused(cuda_device, name, dtype):
    values = arguments(name, cuda_device, dtype)
    call(name, values, dtype)
    for place in (place for place, value in enumerate(values) if isinstance(value, torch.Tensor)):
        address, count = values[place].data_ptr(), values[place].numel()
        for wrong in ((address, count - 1), (address, count + 1)):
            with pytest.raises(ValueError, match="elements"):
                call(name, [*values[:place], wrong, *values[place + 1 :]], dtype)
        with pytest.raises(ValueError, match="null pointer"):
            call(name, [*values[:place], (0, count), *values[place + 1 :]], dtype)
        if (name, place) not in OPTIONAL:
            with pytest.raises(ValueError, match="elements"):
                call(name, [*values[:place], (address, 0), *values[place + 1 :]], dtype)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [-4, 2**62])
def test_impossible_sizes_are_refused(cuda_device, name, size):
    values = arguments(name, cuda_device)
    for place in (place for place, value in enumerate(values) if type(value) is int):
        with pytest.raises(
            ValueError, match=r"not those of an array|row stride|elements|1 to 64 outputs|a grid of blocks"
        ):
            call(name, [*values[:place], size, *values[place + 1 :]])


def test_strides_and_outputs_are_checked(cuda_device):
    values = arguments("row_dots", cuda_device)
    with pytest.raises(ValueError, match="row stride 4 < row length 5"):
        call("row_dots", [values[0], 4, *values[2:]])
    with pytest.raises(ValueError, match="takes 1 to 64 outputs, got 65"):
        cuda.softmax_variance(*(torch.ones(shape, device=cuda_device) for shape in ((4, 5), (65, 5), (65,), (65, 65))))
    assert softmax.FUSED_OUTPUTS <= cuda.module().MAX_FUSED_OUTPUTS
