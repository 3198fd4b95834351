"""Arguments of the kernels, which are nested tuples."""


def changed(values, place, *path):
    """The arguments with the item that ``path[:-1]`` names, inside the one at ``place``, set to ``path[-1]``."""
    *indices, new = path
    if not indices:
        return [*values[:place], new, *values[place + 1 :]]
    inner = values[place]
    return [*values[:place], type(inner)(changed(list(inner), *indices, new)), *values[place + 1 :]]
