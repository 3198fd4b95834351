"""What ``tests/sass.py`` reads out of a disassembly and of the compiler's words."""

import pytest

import sass

LOADS = """
        /*0000*/                   LDG.E.128 R4, desc[UR10][R2.64] ;
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR10][R2.64+0x200] ;
        /*0020*/                   IADD3 R2, R2, 0x10, RZ ;
        /*0030*/                   LDG.E.64.CONSTANT R12, desc[UR10][R2.64] ;
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (LOADS, "2 × 16, 1 × 8"),
        (
            LOADS + "        /*0040*/                   LDG.E R20, desc[UR10][R12.64] ;",
            "2 × 16, 1 × 8",
        ),  # needs the third
        (LOADS + "        /*0040*/                   LDG.E.U16 R20, desc[UR10][R16.64] ;", "2 × 16, 1 × 8, 1 × 2"),
        (LOADS.replace("IADD3 R2, R2, 0x10", "IADD3 R2, R11, 0x10"), "2 × 16"),  # the last word of the second
        (LOADS.replace("        /*0020*/", ".L_x_1:\n        /*0020*/"), "2 × 16"),
        ("        /*0000*/                   FADD R0, R1, R2 ;", ""),
    ],
)
def test_loads_on_their_way(code, expected):
    assert sass.on_their_way(code.splitlines()) == expected


def test_resources():
    said = """ptxas info    : Compiling entry function '_Z1kPf' for 'sm_90'
ptxas info    : Function properties for _Z1kPf
    48 bytes stack frame, 80 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 48 bytes cumulative stack size, 256 bytes smem
ptxas info    : Compiling entry function '_Z1gv' for 'sm_90'
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert sass.resources(said) == {"_Z1kPf": (168, 256, 80, 72), "_Z1gv": (8, 0, 0, 0)}


def test_names():
    name = "_ZN10pyflatness4cuda44_GLOBAL__N__20a71ca5_7_rows_cu_3a2438b6_470415row_dots_kernelIfLi4EEEvPKT_lS5_llPd"
    assert sass.readable("_ZN10pyflatness4cuda5plainEv") == "plain"
    assert sass.readable(name) == "row_dots_kernel<float, 4>"
