"""Triton's kernels interpreted on the CPU where there is no GPU."""

import os

import torch

ON_GPU = torch.cuda.is_available()


def choose() -> None:
    """Have Triton interpret kernels if there is no GPU; before it is imported by whatever a test imports."""
    if not ON_GPU:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def mend() -> None:
    """Let Triton 3.6's interpreter make numbers of arrays of one element, as NumPy did before 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    if patch.__name__ != patched.__name__:
        interpreter._patch_lang_tensor = patched
