"""Random networks from seeds, and what the library says of them held against brute force; see :mod:`support.fuzz`."""
