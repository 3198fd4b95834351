"""Define the kernels of :mod:`.triton_head` in Triton's language; its compiler infers the types of arguments."""

import triton
import triton.language as tl

_LIMIT = tl.constexpr(60.0)
"""How far logits may be above the reference of their exponentials.

Float32 overflows at e^88; with e^60 for each of 2^20 classes, a factor of e^14 is left for the weight's squared norms.
"""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["first", "n", "width", "m"])
def product(
    features, weight, values, bias, norms, reference, order, count, maxima, rests, moments, first, n, width, m,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write exponentials of the first ``count`` blocks of rows in ``order``, and their sums by block of classes.

    A block of threads computes one block of exponentials after another, those of the same classes first, so that
    features and a few blocks of the weight stay in the cache. The next blocks are loaded meanwhile.
    """
    row_blocks = tl.load(count)
    blocks = row_blocks * tl.cdiv(width, CLASSES)
    for index in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row = tl.load(order + index % row_blocks) * ROWS
        block = index // row_blocks
        scores = tl.zeros((ROWS, CLASSES), tl.float32)
        for k in range(0, tl.cdiv(m, DEPTH)):
            scores = tl.dot(features.load([row, k * DEPTH]), weight.load([block * CLASSES, k * DEPTH]).T, scores)
        rows, classes = row + tl.arange(0, ROWS), block * CLASSES + tl.arange(0, CLASSES)
        inside, present = rows < n, classes < width
        scores += tl.load(bias + first + classes, mask=present, other=_LOWEST)[None, :]
        about = _finite(tl.load(reference + rows, mask=inside, other=0.0))
        exponentials = tl.exp2(scores * _LOG2_E - (about * _LOG2_E)[:, None])
        if PAIRS:  # rounding two numbers at once makes the product 4 % faster than Triton's own conversion
            rounded = tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [exponentials], dtype=values.dtype, is_pure=True, pack=2
            )
        else:
            rounded = exponentials.to(values.dtype)
        values.store([row, block * CLASSES], rounded)
        written = rounded.to(tl.float32)
        place = block * n + rows
        tl.store(maxima + place, tl.max(scores, axis=1), mask=inside)
        tl.store(rests + place, tl.sum(written, axis=1), mask=inside)
        squares = tl.load(norms + first + classes, mask=present, other=0.0)
        tl.store(moments + place, tl.sum(written * squares[None, :], axis=1), mask=inside)


@triton.jit
def _finite(reference):
    """Return the reference, or 0 before the first tile, where it is -inf."""
    return tl.where(reference > _LOWEST, reference, 0.0)


@triton.jit(do_not_specialize=["n", "blocks"])
def surpassed(maxima, reference, order, count, n, blocks, ROWS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Raise the reference of rows with logits far above it, and list their blocks of rows, to be computed again."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    about = tl.load(reference + rows, mask=inside, other=0.0)
    largest = tl.full((ROWS,), _LOWEST, tl.float32)
    for start in range(0, blocks, AT_ONCE):
        block = (start + tl.arange(0, AT_ONCE))[:, None]
        found = tl.load(maxima + block * n + rows[None, :], mask=(block < blocks) & inside[None, :], other=_LOWEST)
        largest = tl.maximum(largest, tl.max(found, axis=0))
    far = largest > about + _LIMIT
    tl.store(reference + rows, largest, mask=inside & far)
    if tl.max(far.to(tl.int32), axis=0) > 0:
        tl.store(order + tl.atomic_add(count, 1), tl.program_id(0))  # results do not depend on the order


@triton.jit(do_not_specialize=["first", "n", "width", "blocks"])
def settle(
    maxima, rests, moments, norms, reference, values, maximum, top, rest, moment, early, late, factor,
    first, n, width, blocks, stride, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Add the blocks of classes to each row's sums; set the class that raises the maximum to 0 in ``values``."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    best, best_block = tl.full((ROWS,), _LOWEST, tl.float32), tl.zeros((ROWS,), tl.int32)
    for start in range(0, blocks, AT_ONCE):
        block = (start + tl.arange(0, AT_ONCE))[:, None]
        fits = (block < blocks) & inside[None, :]
        found = tl.load(maxima + block * n + rows[None, :], mask=fits, other=_LOWEST)
        largest = tl.max(found, axis=0)
        which = tl.min(tl.where(found == largest[None, :], block, blocks - 1), axis=0)
        best_block = tl.where(largest > best, which, best_block)
        best = tl.maximum(largest, best)
    # The block with the largest logit is summed again without that class, as a difference would lose digits.
    columns = best_block[:, None] * CLASSES + tl.arange(0, CLASSES)[None, :]
    present = inside[:, None] & (columns < width)
    places = values + rows[:, None].to(tl.int64) * stride + columns
    written = tl.load(places, mask=present, other=0.0).to(tl.float32)
    before, old = tl.load(maximum + rows, mask=inside, other=0.0), tl.load(top + rows, mask=inside, other=-1)
    raised = best > before
    place = tl.min(tl.where(written == tl.max(written, axis=1)[:, None], columns, width - 1), axis=1)
    taken = (columns == place[:, None]) & raised[:, None]
    tl.store(places, tl.zeros((ROWS, CLASSES), values.dtype.element_ty), mask=taken & present)
    written = tl.where(taken, 0.0, written)
    tile_rest = tl.sum(written, axis=1).to(tl.float64)
    squares = tl.load(norms + first + columns, mask=present, other=0.0)
    tile_moment = tl.sum(written * squares, axis=1).to(tl.float64)
    for start in range(0, blocks, AT_ONCE):
        block = (start + tl.arange(0, AT_ONCE))[:, None]
        index, fits = block * n + rows[None, :], (block < blocks) & (block != best_block[None, :]) & inside[None, :]
        tile_rest += tl.sum(tl.load(rests + index, mask=fits, other=0.0).to(tl.float64), axis=0)
        tile_moment += tl.sum(tl.load(moments + index, mask=fits, other=0.0).to(tl.float64), axis=0)
    now, joined = tl.where(raised, best, before), raised & (old >= 0)
    about = tl.load(reference + rows, mask=inside, other=0.0)
    scale = tl.where(joined, tl.exp((before - now).to(tl.float64)), 1.0)
    tile_scale = tl.where(about < now, scale, 1.0)
    old_rest = tl.load(rest + rows, mask=inside, other=0.0) + joined.to(tl.float64)
    old_moment = tl.load(moment + rows, mask=inside, other=0.0)
    old_moment += tl.load(norms + old, mask=joined, other=0.0).to(tl.float64)
    tl.store(rest + rows, scale * old_rest + tile_scale * tile_rest, mask=inside)
    tl.store(moment + rows, scale * old_moment + tile_scale * tile_moment, mask=inside)
    tl.store(maximum + rows, now, mask=inside)
    tl.store(top + rows, tl.where(raised, first + place, old), mask=inside)
    tl.store(factor + rows, scale, mask=inside)
    tl.store(early + rows, tl.where(joined & (about == now), old, -1), mask=inside)
    tl.store(late + rows, tl.where(joined & (about < now), old, -1), mask=inside)


@triton.jit(do_not_specialize=["n"])
def dots(a, b, centre, out, n, m, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the dot products of rows of ``a`` and ``b``, both minus ``centre`` if it is not None."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, starts = rows < n, rows.to(tl.int64) * m
    total = tl.zeros((ROWS, WIDTH), tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, m, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        places, fits = starts[:, None] + columns[None, :], inside[:, None] & (columns < m)[None, :]
        left, right = tl.load(a + places, mask=fits, other=0.0), tl.load(b + places, mask=fits, other=0.0)
        left, right = left.to(total.dtype), right.to(total.dtype)
        if centre is not None:
            about = tl.load(centre + columns, mask=columns < m, other=0.0)[None, :]
            left, right = left - about, right - about
        total += left * right
    tl.store(out + rows, tl.sum(total.to(tl.float64), axis=1), mask=inside)


@triton.jit(do_not_specialize=["n"])
def rejoin(summed, weight, centre, top, factor, n, m, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Add the weight's row of a class to each sum, and scale it; a row with -1 stays unchanged."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    classes = tl.load(top + rows, mask=rows < n, other=-1)
    if tl.max(classes, axis=0) >= 0:
        chosen = classes >= 0
        scale = tl.load(factor + rows, mask=chosen, other=0.0).to(tl.float32)
        for first in range(0, m, WIDTH):
            columns = first + tl.arange(0, WIDTH)
            fits = chosen[:, None] & (columns < m)[None, :]
            joined = tl.load(weight + classes[:, None] * m + columns[None, :], mask=fits, other=0.0).to(tl.float32)
            if centre is not None:
                joined -= tl.load(centre + columns, mask=columns < m, other=0.0)[None, :]
            places = summed + rows[:, None].to(tl.int64) * m + columns[None, :]
            tl.store(places, (joined + tl.load(places, mask=fits, other=0.0)) * scale[:, None], mask=fits)


@triton.jit(do_not_specialize=["n"])
def mean_row(summed, weight, centre, top, rest, uncentred, others, away, n, m, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Replace the sums by means of the weight's rows, in place, and write squared norms about the centre."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < n
    classes = tl.maximum(tl.load(top + rows, mask=inside, other=0), 0)
    others_rest = tl.load(rest + rows, mask=inside, other=1.0)
    share = (1 / (1 + others_rest)).to(tl.float32)
    divisor = tl.maximum(others_rest.to(tl.float32), 1.1754943508222875e-38)  # float32's least normal number
    taken = tl.zeros((ROWS,), tl.float32)
    if uncentred is not None:
        taken = tl.load(uncentred + rows, mask=inside, other=0.0).to(tl.float32)
    squares, distances = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, m, WIDTH):
        columns = first + tl.arange(0, WIDTH)
        fits = inside[:, None] & (columns < m)[None, :]
        about = tl.load(centre + columns, mask=columns < m, other=0.0)[None, :]
        best = tl.load(weight + classes[:, None] * m + columns[None, :], mask=fits, other=0.0).to(tl.float32) - about
        places = summed + rows[:, None].to(tl.int64) * m + columns[None, :]
        mean = (tl.load(places, mask=fits, other=0.0) - taken[:, None] * about) / divisor[:, None]
        squares += tl.where(fits, mean * mean, 0.0)
        distances += tl.where(fits, (mean - best) * (mean - best), 0.0)
        mean -= share[:, None] * (mean - best)
        if uncentred is not None:
            mean += about
        tl.store(places, mean, mask=fits)
    tl.store(others + rows, tl.sum(squares.to(tl.float64), axis=1), mask=inside)
    tl.store(away + rows, tl.sum(distances.to(tl.float64), axis=1), mask=inside)


@triton.jit(do_not_specialize=["n", "d"])
def spread(
    features, maximum, mean, weight, centre, bias, order, count, out, n, d, m,
    ROWS: tl.constexpr, CLASSES: tl.constexpr, DEPTH: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write Σ_s e_s |w_s - centre - mean|² over a span of classes, for the first ``count`` rows of ``order``."""
    chosen = tl.load(count).to(tl.int32)
    last = tl.minimum(tl.program_id(1) * SPAN + SPAN, d)
    for listed in range(tl.program_id(0) * ROWS, chosen, tl.num_programs(0) * ROWS):
        inside = listed + tl.arange(0, ROWS) < chosen
        rows = tl.load(order + listed + tl.arange(0, ROWS), mask=inside, other=0)
        top = tl.load(maximum + rows, mask=inside, other=0.0)
        total = tl.zeros((ROWS,), tl.float64)
        for start in range(tl.program_id(1) * SPAN, last, CLASSES):
            classes = start + tl.arange(0, CLASSES)
            present = classes < last
            squares = tl.zeros((ROWS, CLASSES, DEPTH), tl.float32)
            scores = tl.zeros((ROWS, CLASSES, DEPTH), tl.float32)
            for k in range(0, m, DEPTH):
                columns = k + tl.arange(0, DEPTH)
                there = (columns < m)[None, :]
                w = tl.load(
                    weight + classes[:, None].to(tl.int64) * m + columns[None, :],
                    mask=present[:, None] & there,
                    other=0.0,
                ).to(tl.float32)
                if centre is not None:
                    w -= tl.load(centre + columns, mask=columns < m, other=0.0)[None, :]
                places, fits = rows[:, None] * m + columns[None, :], inside[:, None] & there
                x = tl.load(features + places, mask=fits, other=0.0)
                u = tl.load(mean + places, mask=fits, other=0.0)
                away = w[None, :, :] - u[:, None, :]
                squares += away * away
                scores += x[:, None, :] * w[None, :, :]
            logits = tl.sum(scores, axis=2) + tl.load(bias + classes, mask=present, other=_LOWEST)[None, :]
            total += tl.sum(tl.exp(logits - top[:, None]) * tl.sum(squares, axis=2), axis=1)
        tl.store(out + tl.program_id(1) * n + rows, total, mask=inside)
