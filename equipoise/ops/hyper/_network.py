# mypy: disable-error-code="no-untyped-def,assignment"
"""The step network of a learned solver inside a kernel, for a few rows at a time.

Steps are numbered by their place in the window of the last MEMORY ones: the newest has the last place, and while there
are fewer, the first places are empty. Rings and tables are by slot. The inner layer is one product of matrices, with a
line for each pair of a row and a step, so that the network is a handful of operations whatever the memory.
"""

import triton
import triton.language as tl

from equipoise.solvers import hyper_anderson

# A kernel sees a module's constants only in this wrapping.
MOST_DECADES = tl.constexpr(hyper_anderson.MOST_DECADES)
NEWEST_LOGIT = tl.constexpr(hyper_anderson.NEWEST_LOGIT)
LOG10_OF_2 = tl.constexpr(0.3010299956639812)
TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal float32


@triton.jit
def slot_of(place, count, MEMORY: tl.constexpr):
    """The slot of a step; of a place out of the window, that of some other one."""
    return (count + 1 + place) % MEMORY


@triton.jit
def is_filled(place, count, MEMORY: tl.constexpr):
    """Whether there is a step at a place."""
    return place >= MEMORY - 1 - count


@triton.jit
def is_step(place, count, MEMORY: tl.constexpr):
    """Likewise for places that may be out of the window."""
    return is_filled(place, count, MEMORY) & (place >= 0) & (place < MEMORY)


@triton.jit
def inverse_size(square):
    return tl.rsqrt(tl.maximum(square, TINY))


@triton.jit
def _told(gram_ptr, row, real, step, other, wanted, count, MEMORY: tl.constexpr):
    """(L, K) what the network is told of a step besides its few numbers, at `other` in 0 … MEMORY.

    That is the product of its residual with that of the other one, relative to sizes, and at MEMORY its own size,
    relative to the newest one.
    """
    partner = tl.minimum(other, MEMORY - 1)  # sizes are relative to the newest one
    table = gram_ptr + row * (MEMORY * MEMORY)
    slot, facing = slot_of(step, count, MEMORY), slot_of(partner, count, MEMORY)
    known = wanted & real & is_step(step, count, MEMORY) & is_filled(partner, count, MEMORY)
    product = tl.load(table + slot * MEMORY + facing, mask=known, other=0.0)
    own = inverse_size(tl.load(table + slot * (MEMORY + 1), mask=known, other=1.0))
    theirs = inverse_size(tl.load(table + facing * (MEMORY + 1), mask=known, other=1.0))
    size = (tl.log2(theirs) - tl.log2(own)) * LOG10_OF_2
    size = tl.minimum(tl.maximum(size, -MOST_DECADES), MOST_DECADES)
    return tl.where(known, tl.where(other < MEMORY, product * own * theirs, size), 0.0)


@triton.jit
def _hidden(
    gram_ptr,
    shares_ptr,
    taps_ptr,
    bias_ptr,
    row,
    real,
    place,
    count,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    TOLD: tl.constexpr,
    INNER: tl.constexpr,
):
    """(L, INNER) the inner layer, for pairs of a row and a place; nothing at empty ones."""
    unit, column = tl.arange(0, INNER)[None, :], tl.arange(0, 4 * TOLD)
    tap, other = column // TOLD, column % TOLD
    wanted = (tap < 3) & (other <= MEMORY)
    told = _told(gram_ptr, row, real, place + tap[None, :] - 1, other[None, :], wanted[None, :], count, MEMORY)
    read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + COMPRESSED + other)[:, None] * WIDTH + unit
    weight = tl.load(read, mask=wanted[:, None] & (unit < WIDTH), other=0.0).to(tl.float32)  # (4·TOLD, INNER)
    layer = tl.load(bias_ptr + unit + 0 * place, mask=(unit < WIDTH) & (place >= 0), other=0.0).to(tl.float32)
    for t in tl.static_range(3):
        step = place + (t - 1)
        read = shares_ptr + ((row * MEMORY + slot_of(step, count, MEMORY)) * 3 + t) * WIDTH + unit
        known = real & is_step(step, count, MEMORY) & (unit < WIDTH)
        layer += tl.load(read, mask=known, other=0.0).to(tl.float32)
    layer += tl.dot(told, weight, input_precision="tf32x3")
    return tl.where(is_step(place, count, MEMORY), tl.maximum(layer, 0.0), 0.0)


@triton.jit
def _heard(
    hidden,
    out_ptr,
    TAP: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """(ROWS, SLOTS) what each step adds to an output by one tap; the taps of the second output follow the first's."""
    unit = tl.arange(0, INNER)
    weight = tl.load(out_ptr + TAP * WIDTH + unit, mask=unit < WIDTH, other=0.0).to(tl.float32)
    return tl.reshape(tl.sum(hidden * weight[None, :], axis=1), [ROWS, SLOTS])


@triton.jit
def _normalised(scores, place, count, MEMORY: tl.constexpr, KIND: tl.constexpr):
    """(ROWS, SLOTS) weights of steps; zero at empty places."""
    used, newest = is_step(place, count, MEMORY), place == MEMORY - 1
    if KIND == "softmax":
        scores = tl.where(used, scores + tl.where(newest, NEWEST_LOGIT, 0.0), float("-inf"))
        shares = tl.exp(scores - tl.max(scores, axis=1)[:, None])
        return shares / tl.sum(shares, axis=1)[:, None]
    else:
        if KIND == "shift":
            total = tl.sum(tl.where(used, scores, 0.0), axis=1)
            scores -= (total / tl.minimum(count + 1, MEMORY))[:, None]
        return tl.where(used, scores + tl.where(newest, 1.0, 0.0), 0.0)


@triton.jit
def weigh(
    gram_ptr,
    shares_ptr,
    weights_ptr,
    mixing_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    first,
    num_real,
    count,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    MIXING: tl.constexpr,
    KIND: tl.constexpr,
    SLOTS: tl.constexpr,
    TOLD: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the weights of steps, and step lengths, of the rows from `first` on, ROWS at the most.

    Tables must have the newest step's numbers by now: this program has stored them, and its threads wait for that here.
    SLOTS is a power of two and not less than MEMORY, as is TOLD, which is more; ROWS times SLOTS is 16 or more.
    """
    tl.debug_barrier()
    pair = tl.arange(0, ROWS * SLOTS)[:, None]
    line = pair // SLOTS
    hidden = _hidden(
        gram_ptr,
        shares_ptr,
        taps_ptr,
        bias_ptr,
        first + line,
        line < num_real,
        pair % SLOTS,
        count,
        COMPRESSED,
        WIDTH,
        MEMORY,
        TOLD,
        INNER,
    )
    # Each step hears the one before it, itself, and the next.
    here, there = tl.arange(0, SLOTS)[None, None, :], tl.arange(0, SLOTS)[None, :, None]
    spread = tl.where(there == here - 1, _heard(hidden, out_ptr, 0, WIDTH, INNER, ROWS, SLOTS)[:, :, None], 0.0)
    spread += tl.where(there == here, _heard(hidden, out_ptr, 1, WIDTH, INNER, ROWS, SLOTS)[:, :, None], 0.0)
    spread += tl.where(there == here + 1, _heard(hidden, out_ptr, 2, WIDTH, INNER, ROWS, SLOTS)[:, :, None], 0.0)
    scores = tl.sum(spread, axis=1) + tl.load(last_ptr).to(tl.float32)
    place, line = tl.arange(0, SLOTS)[None, :], tl.arange(0, ROWS)
    weights = _normalised(scores, place, count, MEMORY, KIND)
    inside = (line < num_real)[:, None] & (place < MEMORY)
    tl.store(weights_ptr + (first + line)[:, None] * MEMORY + place, weights, mask=inside)
    if MIXING:
        terms = tl.where(place == MEMORY - 2, _heard(hidden, out_ptr, 3, WIDTH, INNER, ROWS, SLOTS), 0.0)
        terms += tl.where(place == MEMORY - 1, _heard(hidden, out_ptr, 4, WIDTH, INNER, ROWS, SLOTS), 0.0)
        lengths = 1.0 + tl.load(last_ptr + 1).to(tl.float32) + tl.sum(terms, axis=1)
        tl.store(mixing_ptr + first + line, lengths, mask=line < num_real)
