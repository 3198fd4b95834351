"""The CUDA module's door for layers: a size that does not fit an element count never reaches memory."""

import pytest
import torch

from support.nested import changed

SIZES = ((4, 2, 3, 2), (1, 5, 4), (1, 3, 3), (1, 3, 2), (1, 1, 1), (1, 1, 1))


def calls():
    """A correct call of each kernel; the tensors in it stand for their address and size."""
    double = torch.float64
    found = {}
    for size, dtype in ((2, torch.bfloat16), (4, torch.float32), (8, double)):
        inputs, out = torch.ones(4, 6, 1, 5, 4, dtype=dtype), torch.ones(4, 2, 18, 9, dtype=dtype)
        found[f"patches_{size}"] = [SIZES, inputs, inputs.stride(), out, 0]
    for suffix, dtype in (("_f32", torch.float32), ("_f64", double)):
        matrices, weight = torch.ones(6, 5, 300, dtype=dtype), torch.ones(3, 5, 300, dtype=dtype)
        sums = (torch.ones(*s, dtype=double) for s in ((6, 2, 2), (6, 300), (6, 2, 5)))
        found[f"weighted{suffix}"] = [matrices, weight, 6, 3, 5, 300, *sums, 0]
    return found


def call(module, name, values):
    plain = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
    return getattr(module, name)(*plain)


@pytest.mark.parametrize("name", calls())
def test_wrong_element_counts_are_refused(emulated_cuda, name):
    values = calls()[name]
    call(emulated_cuda, name, values)
    for place, value in enumerate(values):
        if not isinstance(value, torch.Tensor):
            continue
        for wrong in ((value.data_ptr(), value.numel() - 1), (value.data_ptr(), value.numel() + 1)):
            with pytest.raises(ValueError, match="elements"):
                call(emulated_cuda, name, [*values[:place], wrong, *values[place + 1 :]])
        with pytest.raises(ValueError, match="null pointer"):
            call(emulated_cuda, name, [*values[:place], (0, value.numel()), *values[place + 1 :]])


def test_bad_sizes_are_refused(emulated_cuda):
    bad = {
        "patches_4": {
            (0, 0, 1, 0): "0 groups",
            (0, 1, 1, 6): "does not have 3 places in 6 pixels",
            (0, 3, 1, 4): "kernel of 4 pixels",
            (0, 5, 1, -1): "dilation -1",
            (2, 0, 1000): "`inputs` has 480 elements",
            (2, 1, 2**62): "not those of an array",
            (0, 0, 0, 2**60): "not those of an array",
            (0, 0, 0, 2**40): "more than 2",
        },
        "weighted_f32": {(2, 2**40): "more than 2", (2, -1): "not those", (3, 0): "0 groups", (4, 0): "matrices of 0"},
    }
    for name, changes in bad.items():
        for path, message in changes.items():
            with pytest.raises(ValueError, match=message):
                call(emulated_cuda, name, changed(calls()[name], *path))


def test_what_32_bits_cannot_hold_is_refused(emulated_cuda):
    """No element is read: the sizes are refused first."""
    sizes, inputs, _, out, stream = calls()["patches_4"]
    strides = 2**40, 2**31, 1, 2**30, 1
    last = 3 * strides[0] + 5 * strides[1] + 4 * strides[3] + 3
    with pytest.raises(ValueError, match=r"a channel of `inputs` spans .* more than 2\^31"):
        call(emulated_cuda, "patches_4", [sizes, (inputs.data_ptr(), last + 1), strides, out, stream])
