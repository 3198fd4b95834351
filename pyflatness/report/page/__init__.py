"""Make one HTML file of tables and charts, which loads nothing and is readable as tables without JavaScript."""

from .page import Page, Section, written
from .tables import Cell, Table

__all__ = ["Cell", "Page", "Section", "Table", "written"]
