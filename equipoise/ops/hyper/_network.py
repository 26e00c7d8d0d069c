# mypy: disable-error-code="no-untyped-def,assignment,var-annotated"
# ruff: noqa: RUF005 (kernels know no unpacking)
"""The step network of a learned solver inside a kernel, for a few rows at a time.

Steps are numbered by their place in the window of the last MEMORY ones: the newest has the last place, and while there
are fewer, the first places are empty. Rings and tables are by slot. What belongs to each step is a tuple of tiles, and
loops over steps are unrolled, so that hardly any number has to go from one thread to another.
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
    """The slot of a step."""
    return (count + 1 + place) % MEMORY


@triton.jit
def is_filled(place, count, MEMORY: tl.constexpr):
    """Whether there is a step at a place."""
    return place >= MEMORY - 1 - count


@triton.jit
def filled(place, count, MEMORY: tl.constexpr):
    """1 if there is a step at a place, else 0."""
    return tl.where(is_filled(place, count, MEMORY), 1.0, 0.0)


@triton.jit
def inverse_size(square):
    return tl.rsqrt(tl.maximum(square, TINY))


@triton.jit
def _inverse_sizes(gram_ptr, rows, real, products, count, MEMORY: tl.constexpr):
    """For each step, (R,) one over the size of its residual."""
    inverse = ()
    for s in tl.static_range(MEMORY - 1):
        place = gram_ptr + rows * (MEMORY * MEMORY) + slot_of(s, count, MEMORY) * (MEMORY + 1)
        known = real & is_filled(0 * rows + s, count, MEMORY)
        inverse = inverse + (inverse_size(tl.load(place, mask=known, other=1.0)),)
    return inverse + (inverse_size(products[MEMORY - 1]),)


@triton.jit
def _told(gram_ptr, rows, real, products, count, MEMORY: tl.constexpr):
    """For each step, MEMORY + 1 times (R,): what the network is told of it besides its few numbers.

    That is the products of its residual with those of all steps, relative to sizes, then its own size, relative to the
    newest one.
    """
    inverse = _inverse_sizes(gram_ptr, rows, real, products, count, MEMORY)
    newest = tl.log2(inverse[MEMORY - 1])
    told = ()
    for s in tl.static_range(MEMORY):
        here = filled(s, count, MEMORY)
        for c in tl.static_range(MEMORY):
            if s == MEMORY - 1:
                product = products[c]
            elif c == MEMORY - 1:
                product = products[s]
            else:
                place = rows * MEMORY + slot_of(s, count, MEMORY)
                known = real & is_filled(0 * rows + min(s, c), count, MEMORY)
                product = tl.load(gram_ptr + place * MEMORY + slot_of(c, count, MEMORY), mask=known, other=0.0)
            there = filled(min(s, c), count, MEMORY)
            told = told + (product * inverse[s] * inverse[c] * there,)
        size = (newest - tl.log2(inverse[s])) * LOG10_OF_2
        told = told + (tl.minimum(tl.maximum(size, -MOST_DECADES), MOST_DECADES) * here,)
    return told


@triton.jit
def _heard(
    layer,
    shares_ptr,
    rows,
    real,
    told,
    shares,
    weights,
    count,
    S: tl.constexpr,
    TAP: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    INNER: tl.constexpr,
):
    """An inner layer (R, INNER) with what step S adds to it by one tap; nothing if there is no such step."""
    if S >= 0 and S < MEMORY:
        if S == MEMORY - 1:
            layer += shares[TAP]
        else:
            unit = tl.arange(0, INNER)
            place = ((rows * MEMORY + slot_of(S, count, MEMORY)) * 3 + TAP) * WIDTH
            known = real & is_filled(0 * rows + S, count, MEMORY)
            known = known[:, None] & (unit < WIDTH)[None, :]
            layer += tl.load(shares_ptr + place[:, None] + unit[None, :], mask=known, other=0.0)
        for c in tl.static_range(MEMORY + 1):
            layer += told[S * (MEMORY + 1) + c][:, None] * weights[c]
    return layer


@triton.jit
def _hidden(
    shares_ptr,
    taps_ptr,
    bias_ptr,
    rows,
    real,
    told,
    shares,
    count,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    INNER: tl.constexpr,
):
    """For each step, (R, INNER) the inner layer."""
    unit = tl.arange(0, INNER)
    bias = tl.load(bias_ptr + unit, mask=unit < WIDTH, other=0.0).to(tl.float32)[None, :]
    hidden = ()
    for _ in tl.static_range(MEMORY):
        hidden = hidden + (bias + 0.0 * shares[0],)
    for tap in tl.static_range(3):
        weights = ()
        for c in tl.static_range(MEMORY + 1):
            read = taps_ptr + (tap * (COMPRESSED + MEMORY + 1) + COMPRESSED + c) * WIDTH + unit
            weights = weights + (tl.load(read, mask=unit < WIDTH, other=0.0)[None, :],)
        layers = ()
        for a in tl.static_range(MEMORY):
            layer = _heard(
                hidden[a],
                shares_ptr,
                rows,
                real,
                told,
                shares,
                weights,
                count,
                a + tap - 1,
                tap,
                WIDTH,
                MEMORY,
                INNER,
            )
            layers = layers + (layer,)
        hidden = layers
    layers = ()
    for a in tl.static_range(MEMORY):
        layers = layers + (tl.maximum(hidden[a], 0.0) * filled(a, count, MEMORY),)
    return layers


@triton.jit
def _output(out_ptr, last_ptr, hidden, S: tl.constexpr, OUTPUT: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr):
    """(R,) one of the two outputs at step S."""
    unit = tl.arange(0, INNER)
    terms = 0.0 * hidden[0]
    for tap in tl.static_range(3):
        if S + tap >= 1 and S + tap <= len(hidden):
            weight = tl.load(out_ptr + (3 * OUTPUT + tap) * WIDTH + unit, mask=unit < WIDTH, other=0.0).to(tl.float32)
            terms += hidden[S + tap - 1] * weight[None, :]
    return tl.sum(terms, axis=1) + tl.load(last_ptr + OUTPUT).to(tl.float32)


@triton.jit
def _normalised(scores, count, MEMORY: tl.constexpr, KIND: tl.constexpr):
    """For each step, (R,) its weight."""
    total = 0.0 * scores[0]
    if KIND == "softmax":
        most = scores[MEMORY - 1] + NEWEST_LOGIT
        for s in tl.static_range(MEMORY - 1):
            most = tl.maximum(most, tl.where(is_filled(s, count, MEMORY), scores[s], most))
        shares = ()
        for s in tl.static_range(MEMORY):
            raised = scores[s] + (NEWEST_LOGIT if s == MEMORY - 1 else 0.0)
            # At an empty place the score may be above the greatest.
            share = tl.exp(tl.minimum(raised - most, 0.0)) * filled(s, count, MEMORY)
            shares = shares + (share,)
            total += share
        weights = ()
        for s in tl.static_range(MEMORY):
            weights = weights + (shares[s] / total,)
        return weights
    else:
        if KIND == "shift":
            for s in tl.static_range(MEMORY):
                total += scores[s] * filled(s, count, MEMORY)
            total = total / tl.minimum(count + 1, MEMORY)
        weights = ()
        for s in tl.static_range(MEMORY):
            raised = scores[s] - total + (1.0 if s == MEMORY - 1 else 0.0)
            weights = weights + (raised * filled(s, count, MEMORY),)
        return weights


@triton.jit
def weigh(
    gram_ptr,
    shares_ptr,
    taps_ptr,
    bias_ptr,
    out_ptr,
    last_ptr,
    rows,
    real,
    products,
    shares,
    count,
    COMPRESSED: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMORY: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
):
    """For each step, (R,) its weight, and after these 1 less than the step length.

    What tables hold in the newest step's slot is not read: it may be on its way there. INNER is a power of two, more
    than MEMORY and not less than WIDTH.

    Args:
        rows: (R,) which ones, and `real` (R,) whether they exist.
        products: For each step, (R,) the inner product of its residual with the newest one.
        shares: For each tap, (R, INNER) what the newest step's few numbers add to the inner layer.
    """
    told = _told(gram_ptr, rows, real, products, count, MEMORY)
    hidden = _hidden(shares_ptr, taps_ptr, bias_ptr, rows, real, told, shares, count, COMPRESSED, WIDTH, MEMORY, INNER)
    scores = ()
    for s in tl.static_range(MEMORY):
        scores = scores + (_output(out_ptr, last_ptr, hidden, s, 0, WIDTH, INNER),)
    lengthening = _output(out_ptr, last_ptr, hidden, MEMORY - 1, 1, WIDTH, INNER)
    return _normalised(scores, count, MEMORY, KIND) + (lengthening,)


@triton.jit
def side_by_side(tiles, INNER: tl.constexpr):
    """(R, INNER) columns (R,), and zeros after them: what is stored together need not change threads on its own."""
    column = tl.arange(0, INNER)
    whole = 0.0 * tiles[0][:, None] + 0.0 * column[None, :]
    for i in tl.static_range(len(tiles)):
        whole = tl.where((column == i)[None, :], tiles[i][:, None], whole)
    return whole


@triton.jit
def remember_products(gram_ptr, rows, real, products, count, MEMORY: tl.constexpr, INNER: tl.constexpr):
    """Store the inner products of the newest residual with each in the window."""
    column = tl.arange(0, INNER)
    slot = slot_of(column, count, MEMORY)
    newest = count % MEMORY
    known = real[:, None] & (is_filled(column, count, MEMORY) & (column < MEMORY))[None, :]
    whole = side_by_side(products, INNER)
    table = gram_ptr + (rows * (MEMORY * MEMORY))[:, None]
    tl.store(table + (newest * MEMORY + slot)[None, :], whole, mask=known)
    tl.store(table + (slot * MEMORY + newest)[None, :], whole, mask=known)


@triton.jit
def remember_shares(
    shares_ptr, rows, real, shares, count, WIDTH: tl.constexpr, MEMORY: tl.constexpr, INNER: tl.constexpr
):
    """Store what the newest step's few numbers add to the inner layer; return where."""
    unit = tl.arange(0, INNER)
    inside = real[:, None] & (unit < WIDTH)[None, :]
    place = shares_ptr + ((rows * MEMORY + count % MEMORY) * (3 * WIDTH))[:, None] + unit[None, :]
    for tap in tl.static_range(3):
        tl.store(place + tap * WIDTH, shares[tap], mask=inside)
    return place


@triton.jit
def remember_weights(
    weights_ptr, mixing_ptr, rows, real, found, MEMORY: tl.constexpr, INNER: tl.constexpr, MIXING: tl.constexpr
):
    """Store what `weigh` has found."""
    column = tl.arange(0, INNER)
    whole = side_by_side(found, INNER)
    within = real[:, None] & (column < MEMORY)[None, :]
    tl.store(weights_ptr + (rows * MEMORY)[:, None] + column[None, :], whole, mask=within)
    if MIXING:
        within = real[:, None] & (column == MEMORY)[None, :]
        tl.store(mixing_ptr + rows[:, None] + 0 * column[None, :], 1.0 + whole, mask=within)
