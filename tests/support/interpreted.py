"""Run Triton's kernels on the CPU, by its interpreter, where there is no GPU; import this before anything of Triton's."""

import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def mend() -> None:
    """Make scalars of Triton 3.6's interpreter integers, which NumPy 2.4 does not make of arrays of one element."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
