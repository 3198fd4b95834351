"""Text made safe to print and to put into a CSV file, and read back."""

from hypothesis import given
from hypothesis import strategies as st

from pyflatness import messages

FORMULAS = tuple("=+-@\t\r\n＝＋－＠")
anything = st.text(st.characters() | st.sampled_from("=+-@'\\nrtxuU019af\t\r\n\x1b\udcff"))


@given(anything)
def test_cells_are_safe_and_read_back(name: str) -> None:
    cell = messages.to_cell(name)
    assert messages.from_cell(cell) == name
    assert cell.isprintable()
    assert not cell.startswith(FORMULAS)
    cell.encode()


@given(anything)
def test_what_is_printed_is_one_printable_line(name: str) -> None:
    shown = messages.printable(name)
    assert shown.isprintable()
    assert shown == name or not name.isprintable()
    shown.encode()


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("runs/seed 3/lr=0.1,é.safetensors", "layer1.0.conv1", "", "re:a+b"):
        assert messages.printable(name) == messages.to_cell(name) == messages.from_cell(name) == name
    assert messages.to_cell("=cmd|' /C calc'!A1") == "'=cmd|' /C calc'!A1"
    assert messages.to_cell("'quoted'") == "''quoted'"
    assert messages.to_cell("a\\b\x1b[31m\udcff") == r"a\\b\x1b[31m\udcff"
