"""The CUDA module's door for layers: a size that does not fit an element count never reaches memory."""

import pytest
import torch

from support.nested import changed


def calls(suffix):
    """A correct call of each kernel, and the places of the tensors in it."""
    dtype, sums = {
        "_f32": (torch.float32, torch.float32),
        "_f64": (torch.float64, torch.float64),
        "_bf16": (torch.bfloat16, torch.float32),
    }[suffix]
    sizes = ((4, 2, 3, 2), (1, 5, 4), (1, 3, 3), (1, 3, 2), (1, 1, 1), (1, 1, 1))
    inputs, signal = torch.ones(4, 6, 1, 5, 4, dtype=dtype), torch.ones(4, 4, 1, 3, 3, dtype=dtype)
    root, weight, gram = (torch.ones(*s, dtype=sums) for s in ((2, 7, 2), (2, 2, 18), (4, 2, 9, 9)))
    totals, columns, rows, pairs = (
        torch.ones(*s, dtype=torch.float64) for s in ((4, 2, 1, 3), (4, 2, 18), (4, 2, 2), (8,))
    )
    found = {
        "direct": [
            sizes, inputs, inputs.stride(), signal, signal.stride(), root, 7, weight, 1, totals, columns, rows, 0,
        ],
        "patch_gram": [sizes, inputs, inputs.stride(), gram, 0],
        "gram": [signal, (36, 18, 1, 9), 4, 2, 9, 2, gram, pairs, 0],
    }  # fmt: skip
    if suffix != "_bf16":
        found["sum_shifts"] = [sizes, torch.ones(4, 2, 20, 20, dtype=sums), gram, 0]
    return found


def call(module, name, values):
    plain = [(v.data_ptr(), v.numel()) if isinstance(v, torch.Tensor) else v for v in values]
    return getattr(module, name)(*plain)


@pytest.mark.parametrize("suffix", ["_f32", "_f64", "_bf16"])
def test_wrong_element_counts_are_refused(emulated_cuda, suffix):
    for name, values in calls(suffix).items():
        call(emulated_cuda, name + suffix, values)
        for place, value in enumerate(values):
            if not isinstance(value, torch.Tensor):
                continue
            for wrong in ((value.data_ptr(), value.numel() - 1), (value.data_ptr(), value.numel() + 1)):
                with pytest.raises(ValueError, match="elements"):
                    call(emulated_cuda, name + suffix, [*values[:place], wrong, *values[place + 1 :]])
            with pytest.raises(ValueError, match="null pointer"):
                call(emulated_cuda, name + suffix, [*values[:place], (0, value.numel()), *values[place + 1 :]])


def test_bad_sizes_are_refused(emulated_cuda):
    bad = {
        "direct": {
            (0, 0, 1, 0): "0 groups",
            (0, 1, 1, 6): "does not have 3 places in 6 pixels",
            (0, 0, 2, 2**50): "multiply-adds|not those of an array",
            (2, 0, 1000): "`inputs` has 480 elements",
            (2, 1, 2**62): "not those of an array",
            (2, 1, 2**31): "`inputs` has 480 elements",
            (4, 2, -9): "not those of an array",
            (6, 6): "`root` has 28 elements",
            (8, 0): "0 splits of 1 tiles",
            (8, 2): "2 splits of 1 tiles",
        },
        "patch_gram": {(0, 3, 1, 4): "kernel of 4 pixels", (0, 5, 1, -1): "dilation -1"},
        "gram": {(1, 2, 2): "`rows` has", (4, 0): "0 places", (5, 0): "0 elements", (4, -1): "not those"},
        "sum_shifts": {(0, 4, 0, 2): "stride 2 is not 1", (0, 0, 0, 5): "elements"},
    }
    for name, values in calls("_f32").items():
        for path, message in bad[name].items():
            with pytest.raises(ValueError, match=message):
                call(emulated_cuda, name + "_f32", changed(values, *path))


def test_what_32_bits_cannot_hold_is_refused(emulated_cuda):
    """No element is read: the sizes are refused first."""
    far = (4, 2**31, 1, 1, 1), (4, 2**40, 1, 1, 1)
    for strides in far:
        values = calls("_f32")["direct"]
        last = 3 * strides[0] + 5 * strides[1] + 4 + 3
        values = [*values[:1], (values[1].data_ptr(), last + 1), strides, *values[3:]]
        with pytest.raises(ValueError, match=r"a sample of `inputs` spans .* more than 2\^31"):
            call(emulated_cuda, "direct_f32", values)
    huge = ((1, 1, 1, 9000), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    x, d, r = torch.ones(1), torch.ones(9000), torch.ones(9000)
    totals = torch.ones(3, dtype=torch.float64)
    nothing = (0, 0)
    with pytest.raises(ValueError, match="9000 rows do not fit"):
        call(
            emulated_cuda,
            "direct_f32",
            [huge, x, (1,) * 5, d, (9000, 1, 1, 1, 1), r, 1, nothing, 1, totals, nothing, nothing, 0],
        )
