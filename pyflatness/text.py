"""Names and messages from outside, made safe to print and to put into a CSV file.

File names, layers' names and the names in a checkpoint may hold anything: escape sequences that a terminal obeys, bytes
that are not UTF-8, or the beginning of a formula that a spreadsheet would run.
"""

import re

_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # and tab, CR and LF, which are escaped anyway
_ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def printable(text: str) -> str:
    r"""Return the text with characters that cannot be printed as Python's escapes, such as ``\n`` or ``\x1b``."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_cell(text: str) -> str:
    """Return the text as a cell of a CSV file: one printable line that no spreadsheet takes for a formula.

    Characters that cannot be printed become Python's escapes and a backslash becomes two. A cell that would begin with
    ``=``, ``+``, ``-``, ``@`` or the wide form of one gets an apostrophe in front, and so does a cell that begins with
    an apostrophe: :func:`from_cell` gives the text back. Source: OWASP, "CSV Injection".
    """
    cell = printable(text.replace("\\", "\\\\"))
    return f"'{cell}" if cell.startswith((*_FORMULA, "'")) else cell


def from_cell(cell: str) -> str:
    """Return the text that :func:`to_cell` made the cell of."""
    return _ESCAPE.sub(lambda found: found[0].encode().decode("unicode_escape"), cell.removeprefix("'"))
