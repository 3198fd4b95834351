"""The same function at other weights."""
