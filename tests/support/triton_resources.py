"""Compile Triton's kernels for processors that are not here, and print what they take.

    python tests/support/triton_resources.py

For Hopper and Ampere, by the compiler and tools that come with Triton, and for AMD's MI300.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyflatness.contractions import triton_head as head
from pyflatness.contractions import triton_kernels as kernels

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    **dict.fromkeys(("values", "weight"), "*bf16"),
    **dict.fromkeys(("order", "count"), "*i32"),
    **dict.fromkeys(("top", "early", "late"), "*i64"),
    **dict.fromkeys(("rest", "moment", "factor", "out", "uncentred", "others", "away"), "*fp64"),
    **dict.fromkeys(("n", "d", "m", "stride", "first", "blocks", "width"), "i32"),
}
"""Of arguments; of all others: float32."""
ALIGNED = {"m", "stride"}  # numbers that are multiples of 16


def arguments(target):
    """Return each kernel's constants, warps, stages and types that are not those of :data:`TYPES`."""
    blocks = head.LARGE if target == "sm_90" else head.SMALL
    sizes = {"ROWS": blocks.rows, "CLASSES": blocks.classes, "DEPTH": blocks.depth, "PAIRS": target != "gfx942"}
    tiles = {
        name: f"tensordesc<bf16[{rows},{columns}]>"
        for name, rows, columns in (
            ("features", blocks.rows, blocks.depth),
            ("weight", blocks.classes, blocks.depth),
            ("values", blocks.rows, blocks.classes),
        )
    }
    at_once = head.SETTLED["AT_ONCE"]
    return {
        "product": (kernels.product, sizes, blocks.warps, blocks.stages, tiles),
        "surpassed": (kernels.surpassed, {"ROWS": blocks.rows, "AT_ONCE": at_once}, 4, 3, {}),
        "settle": (kernels.settle, {**head.SETTLED, "CLASSES": blocks.classes}, 4, 3, {}),
        "dots, of norms_about": (kernels.dots, head.ROWS, 4, 3, {"a": "*bf16", "b": "*bf16"}),
        "dots, of row_dots": (kernels.dots, {**head.ROWS, "centre": None}, 4, 3, {}),
        "mean_row": (kernels.mean_row, head.ROWS, 4, 3, {}),
        "rejoin": (kernels.rejoin, {**head.ROWS, "centre": None}, 4, 3, {}),
        "spread": (
            kernels.spread,
            {**head.SPREAD, "SPAN": 501, "centre": None},
            4,
            3,
            {"order": "*i64", "count": "*i64"},
        ),
    }


def compiled(target, kernel, constants, warps, stages, types):
    """Return a kernel compiled for a target."""
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "*fp32")) for name in names
    }
    aligned = [name for name in names if signature[name].startswith("*") or name in ALIGNED]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps, "num_stages": stages})


def resources(code):
    """Return registers a thread, bytes of stack and bytes of shared memory."""
    if "amdgcn" in code.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size): *(\d+)", code.asm["amdgcn"]))
        return int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), code.metadata.shared
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", shown).groups()
    return int(registers), int(stack), code.metadata.shared


def table(targets):
    """Return resources by target and kernel."""
    return {
        (target, name): resources(compiled(target, *parts))
        for target in targets
        for name, parts in arguments(target).items()
    }


if __name__ == "__main__":
    print("| target | kernel | registers | stack | shared memory |\n|---|---|---|---|---|")
    for (target, name), numbers in table(sys.argv[1:] or TARGETS).items():
        print(f"| {target} | `{name}` |", " | ".join(f"{number:,}" for number in numbers), "|")
