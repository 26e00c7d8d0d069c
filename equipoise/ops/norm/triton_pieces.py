# mypy: disable-error-code="no-untyped-def"
"""What the kernels of `group_norm` and `residual_norm` have in common: pieces of them, and how maps are cut."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

# How many numbers of a group that does not fit in registers are taken at a time. With fewer programs than this, one per
# group and sample, most of the device would wait for them: then every chunk of a group is a program's.
CHUNK, FEW_PROGRAMS = 4096, 512
# Numbers per thread, and the most warps of a program.
PER_THREAD, MOST_WARPS = 16, 16
# With channels last, groups, or their chunks, are taken together until this many bytes of a pixel are contiguous.
TOGETHER_BYTES, CHUNK_BYTES = 12, 32


@triton.jit
def rows_of(CHANNELS: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr):
    """The sample of a program, its channels, and which of them exist."""
    PER_SAMPLE: tl.constexpr = CHANNELS // (WIDTH * TOGETHER)
    row = tl.arange(0, ROWS)
    sample = (tl.program_id(0) // PER_SAMPLE).to(tl.int64)
    return sample, tl.program_id(0) % PER_SAMPLE * (TOGETHER * WIDTH) + row, row < TOGETHER * WIDTH


@triton.jit
def place_of(channel, pixel, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, LAST: tl.constexpr):
    """Where numbers of one sample are, (ROWS, COLUMNS)."""
    if LAST:
        return pixel[None, :] * CHANNELS + channel[:, None]
    else:
        return channel[:, None] * PIXELS + pixel[None, :]


@triton.jit
def read(place, inside):
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rectified(x):
    return tl.where(x <= 0.0, 0.0, x)  # a maximum would hide NaN


@triton.jit
def read_channels(ptr, channel, exists, otherwise, GIVEN: tl.constexpr):
    """One number per channel, or a constant."""
    if GIVEN:
        return tl.load(ptr + channel, mask=exists, other=0.0).to(tl.float32)
    else:
        return tl.zeros([channel.shape[0]], dtype=tl.float32) + otherwise


@triton.jit
def _is_of(channel, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """(ROWS, TOGETHER), which of a program's groups a channel is of; one that does not exist may be of any."""
    return (channel // WIDTH % TOGETHER)[:, None] == tl.arange(0, TOGETHER)[None, :]


@triton.jit
def for_channels(values, channel, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """For each channel the number of its group, given those of a program's groups, (TOGETHER,)."""
    if TOGETHER == 1:
        return tl.zeros([channel.shape[0]], dtype=tl.float32) + tl.sum(values, axis=0)
    else:
        return tl.sum(tl.where(_is_of(channel, WIDTH, TOGETHER), values[None, :], 0.0), axis=1)


@triton.jit
def over_groups(sums, channel, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """For each channel the sum over the channels of its group; those of channels that do not exist are zero."""
    if TOGETHER == 1:
        return tl.zeros([channel.shape[0]], dtype=tl.float32) + tl.sum(sums, axis=0)
    else:
        totals = tl.sum(tl.where(_is_of(channel, WIDTH, TOGETHER), sums[:, None], 0.0), axis=0)
        return for_channels(totals, channel, WIDTH, TOGETHER)


@triton.jit
def update(x, inside, mean, spread, block):
    """Welford's update of each lane's mean and squared deviations by its number in a later block."""
    delta = tl.where(inside, x - mean, 0.0)
    mean += delta / (block + 1.0)
    return mean, spread + tl.where(inside, delta * (x - mean), 0.0)


@triton.jit
def moments_of_lanes(
    mean,
    spread,
    channel,
    exists,
    eps,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Mean and 1/deviation of each channel's group from those of lanes."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    column = tl.arange(0, COLUMNS)
    seen = tl.where(column < PIXELS, (PIXELS - column + COLUMNS - 1) // COLUMNS, 0).to(tl.float32)[None, :]
    middle = over_groups(tl.sum(mean * seen, axis=1), channel, WIDTH, TOGETHER) / SIZE
    apart = tl.where(exists[:, None], mean - middle[:, None], 0.0)
    total = over_groups(tl.sum(spread + seen * apart * apart, axis=1), channel, WIDTH, TOGETHER)
    return middle, 1.0 / tl.sqrt(total / SIZE + eps)


@triton.jit
def read_moments(mean_ptr, rstd_ptr, sample, channel, exists, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    at = sample * (CHANNELS // WIDTH) + channel // WIDTH
    return tl.load(mean_ptr + at, mask=exists, other=0.0), tl.load(rstd_ptr + at, mask=exists, other=0.0)


@triton.jit
def write_moments(mean_ptr, rstd_ptr, sample, channel, exists, mean, rstd, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    at = sample * (CHANNELS // WIDTH) + channel // WIDTH
    leads = exists & (channel % WIDTH == 0)
    tl.store(mean_ptr + at, mean, mask=leads)
    tl.store(rstd_ptr + at, rstd, mask=leads)


@triton.jit
def source_of(large, ACROSS: tl.constexpr, LARGE_ACROSS: tl.constexpr, FACTOR: tl.constexpr):
    """Which pixel one of the larger map is a copy of."""
    return large // LARGE_ACROSS // FACTOR * ACROSS + large % LARGE_ACROSS // FACTOR


@triton.jit
def finish(x, mean, scale, bias, plus_place, y_place, inside, HAS_PLUS: tl.constexpr, RELU: tl.constexpr):
    y = (x - mean[:, None]) * scale[:, None] + bias[:, None]
    if HAS_PLUS:
        y += read(plus_place, inside)
    if RELU:
        y = rectified(y)
    tl.store(y_place, y, mask=inside)


@triton.jit
def _cotangent(
    dy_ptr,
    y_ptr,
    dplus_ptr,
    channel,
    pixel,
    inside,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    FACTOR: tl.constexpr,
    COPIES: tl.constexpr,
    LAST: tl.constexpr,
    BY_RESULT: tl.constexpr,
    WRITES_PLUS: tl.constexpr,
):
    """The cotangent of the normalised map: that of the result, where it is not rectified, summed over equal pixels."""
    if FACTOR == 1:
        at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        dy = read(dy_ptr + at, inside)
        if BY_RESULT:
            dy = tl.where(read(y_ptr + at, inside) <= 0.0, 0.0, dy)
        if WRITES_PLUS:
            tl.store(dplus_ptr + at, dy, mask=inside)
        return dy
    else:
        step = tl.arange(0, COPIES)[None, :]
        row = (pixel // ACROSS * FACTOR)[:, None] + step // FACTOR
        across = (pixel % ACROSS * FACTOR)[:, None] + step % FACTOR
        large = row * LARGE_ACROSS + across
        exists = (step < FACTOR * FACTOR) & (across < LARGE_ACROSS) & (large < LARGE_PIXELS)
        there = inside[:, :, None] & exists[None, :, :]
        if LAST:
            at = large[None, :, :] * CHANNELS + channel[:, None, None]
        else:
            at = channel[:, None, None] * LARGE_PIXELS + large[None, :, :]
        dy = read(dy_ptr + at, there)
        if BY_RESULT:
            dy = tl.where(read(y_ptr + at, there) <= 0.0, 0.0, dy)
        if WRITES_PLUS:
            tl.store(dplus_ptr + at, dy, mask=there)
        return tl.sum(dy, axis=2)


@triton.jit
def hat_and_cotangent(
    x_ptr,
    y_ptr,
    mean,
    rstd,
    weight,
    bias,
    dy_ptr,
    dplus_ptr,
    sample,
    channel,
    pixel,
    inside,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    FACTOR: tl.constexpr,
    COPIES: tl.constexpr,
    LAST: tl.constexpr,
    RELU: tl.constexpr,
    BY_RESULT: tl.constexpr,
    WRITES_PLUS: tl.constexpr,
):
    """x̂ = (x − mean)/deviation at these pixels of a sample, and the cotangent of what it is scaled to."""
    place = x_ptr + sample * (CHANNELS * PIXELS) + place_of(channel, pixel, CHANNELS, PIXELS, LAST)
    xhat = (read(place, inside) - mean[:, None]) * rstd[:, None]
    origin = sample * (CHANNELS * LARGE_PIXELS)
    dy = _cotangent(
        dy_ptr + origin, y_ptr + origin, dplus_ptr + origin, channel, pixel, inside,
        CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, BY_RESULT, WRITES_PLUS,
    )  # fmt: skip
    if RELU:
        dy = tl.where(xhat * weight[:, None] + bias[:, None] <= 0.0, 0.0, dy)
    return xhat, dy


@triton.jit
def through_norm(dy, xhat, weight, level, slope, rstd):
    """dx = (w·dy − ⟨w·dy⟩ − x̂⟨w·dy·x̂⟩)/deviation, ⟨⟩ the mean over a group, given as level and slope."""
    return (dy * weight[:, None] - level[:, None] - xhat * slope[:, None]) * rstd[:, None]


# Those of the end of a residual block


@triton.jit
def added(t_ptr, x_ptr, factor, at, inside, HAS_X: tl.constexpr):
    """u, zero outside."""
    u = read(t_ptr + at, inside) * factor[:, None]
    if HAS_X:
        u += read(x_ptr + at, inside)
    return u


@triton.jit
def activation(u, mean, scale, bias, z_ptr, at, inside):
    """relu(v), zero outside."""
    v = (u - mean[:, None]) * scale[:, None] + bias[:, None] + read(z_ptr + at, inside)
    return tl.where(inside, rectified(v), 0.0)


@triton.jit
def again(
    t_ptr,
    x_ptr,
    z_ptr,
    factor,
    mean_in,
    rstd_in,
    weight_in,
    bias_in,
    mean_out,
    rstd_out,
    at,
    inside,
    HAS_X: tl.constexpr,
):
    """What the VJP needs of the forward pass: û, where relu(v) is constant, and relu(v) normalised."""
    u = (added(t_ptr, x_ptr, factor, at, inside, HAS_X) - mean_in[:, None]) * rstd_in[:, None]
    v = u * weight_in[:, None] + bias_in[:, None] + read(z_ptr + at, inside)
    w = (rectified(v) - mean_out[:, None]) * rstd_out[:, None]
    return u, (v <= 0.0) | (inside == 0), w


@triton.jit
def total_cotangent(dy_ptr, dy2_ptr, dy3_ptr, dy4_ptr, at, inside, COTANGENTS: tl.constexpr):
    """The sum of all cotangents of the result."""
    dy = read(dy_ptr + at, inside)
    if COTANGENTS > 1:
        dy += read(dy2_ptr + at, inside)
    if COTANGENTS > 2:
        dy += read(dy3_ptr + at, inside)
    if COTANGENTS > 3:
        dy += read(dy4_ptr + at, inside)
    return dy


@triton.jit
def write_cotangents(du, dv, factor, dt_ptr, dz_ptr, dx_ptr, at, inside, WRITES_X: tl.constexpr):
    tl.store(dz_ptr + at, dv, mask=inside)
    tl.store(dt_ptr + at, du * factor[:, None], mask=inside)
    if WRITES_X:
        tl.store(dx_ptr + at, du, mask=inside)


# Those of groups in chunks


@triton.jit
def write_part(
    ptr, value, sample, channel, exists, chunk, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr
):
    """What a chunk adds to a number of its group: (N, groups, CHUNKS)."""
    at = (sample * (CHANNELS // WIDTH) + channel // WIDTH) * CHUNKS + chunk
    tl.store(ptr + at, value, mask=exists & (channel % WIDTH == 0))


@triton.jit
def measure_chunk(
    x,
    inside,
    means_ptr,
    spreads_ptr,
    sample,
    channel,
    exists,
    chunk,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Write mean and squared deviations of a chunk of each group; x is zero outside."""
    numbers = tl.minimum(PIXELS - chunk * COLUMNS, COLUMNS) * WIDTH
    mean = over_groups(tl.sum(x, axis=1), channel, WIDTH, TOGETHER) / numbers
    apart = tl.where(inside, x - mean[:, None], 0.0)
    spread = over_groups(tl.sum(apart * apart, axis=1), channel, WIDTH, TOGETHER)
    write_part(means_ptr, mean, sample, channel, exists, chunk, CHANNELS, WIDTH, CHUNKS)
    write_part(spreads_ptr, spread, sample, channel, exists, chunk, CHANNELS, WIDTH, CHUNKS)


@triton.jit
def read_parts(
    ptr,
    sample,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """What all chunks of a program's groups have: (TOGETHER, LANES)."""
    GROUPS: tl.constexpr = CHANNELS // WIDTH
    lane = tl.arange(0, LANES)[None, :]
    first = tl.program_id(0) % (GROUPS // TOGETHER) * TOGETHER
    group = sample * GROUPS + first + tl.arange(0, TOGETHER)[:, None]
    return tl.load(ptr + group * CHUNKS + lane, mask=lane < CHUNKS, other=0.0)


@triton.jit
def total_of_parts(
    ptr,
    sample,
    channel,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """For each channel the sum over the chunks of its group."""
    parts = read_parts(ptr, sample, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
    return for_channels(tl.sum(parts, axis=1), channel, WIDTH, TOGETHER)


@triton.jit
def moments_of_parts(
    means_ptr,
    spreads_ptr,
    mean_ptr,
    rstd_ptr,
    sample,
    channel,
    exists,
    chunk,
    eps,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Mean and 1/deviation of each channel's group from those of its chunks; one of them keeps them for the VJP."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    lane = tl.arange(0, LANES)
    numbers = (tl.where(lane < CHUNKS, tl.minimum(PIXELS - lane * COLUMNS, COLUMNS), 0) * WIDTH).to(tl.float32)[None, :]
    means = read_parts(means_ptr, sample, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
    spreads = read_parts(spreads_ptr, sample, CHANNELS, WIDTH, TOGETHER, CHUNKS, LANES)
    middle = tl.sum(means * numbers, axis=1) / SIZE
    apart = means - middle[:, None]
    total = tl.sum(spreads + numbers * apart * apart, axis=1)
    mean = for_channels(middle, channel, WIDTH, TOGETHER)
    rstd = for_channels(1.0 / tl.sqrt(total / SIZE + eps), channel, WIDTH, TOGETHER)
    if chunk == 0:
        write_moments(mean_ptr, rstd_ptr, sample, channel, exists, mean, rstd, CHANNELS, WIDTH)
    return mean, rstd


@triton.jit
def write_sums(
    dy,
    xhat,
    weight,
    levels_ptr,
    slopes_ptr,
    dweight_ptr,
    dbias_ptr,
    sample,
    channel,
    exists,
    chunk,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    CHUNKS: tl.constexpr,
    WRITES_AFFINE: tl.constexpr,
):
    """The sums of w·dy and w·dy·x̂ over a chunk of each group, and those of dy and dy·x̂ over its pixels."""
    dbias, dweight = tl.sum(dy, axis=1), tl.sum(dy * xhat, axis=1)
    if WRITES_AFFINE:
        at = (sample * CHUNKS + chunk) * CHANNELS + channel
        tl.store(dweight_ptr + at, dweight, mask=exists)
        tl.store(dbias_ptr + at, dbias, mask=exists)
    level = over_groups(weight * dbias, channel, WIDTH, TOGETHER)
    slope = over_groups(weight * dweight, channel, WIDTH, TOGETHER)
    write_part(levels_ptr, level, sample, channel, exists, chunk, CHANNELS, WIDTH, CHUNKS)
    write_part(slopes_ptr, slope, sample, channel, exists, chunk, CHANNELS, WIDTH, CHUNKS)


# How they are launched


def is_last(x: Tensor) -> bool:
    """Whether channels are last in memory."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def sizes(
    shape: torch.Size, groups: int, last: bool, itemsize: int, block: int, copies: int = 1, large_pixels: int = 1
) -> tuple[dict[str, int], int | None]:
    """How maps (N, C, H, W) are cut, and into how many chunks groups are; None if a program takes whole groups.

    Args:
        shape: Of the maps.
        groups: Of channels.
        last: Whether channels are last in memory.
        itemsize: Bytes of a number.
        block: The most numbers that a program may hold.
        copies: Of each pixel that it holds at once.
        large_pixels: Of the larger map that is written.
    """
    channels, pixels = shape[1], shape[2] * shape[3]
    width = channels // groups
    together = _together(width, groups, itemsize, TOGETHER_BYTES) if last else 1
    rows, columns = triton.next_power_of_2(together * width), triton.next_power_of_2(pixels)
    large = rows * max(columns * copies, large_pixels) > block
    chunked = large and shape[0] * (groups // together) < FEW_PROGRAMS
    if chunked:
        together = _together(width, groups, itemsize, CHUNK_BYTES) if last else 1
        rows = triton.next_power_of_2(together * width)
    if rows * columns * copies > block or chunked:
        columns = min(columns, max(1, min(block, CHUNK) // (rows * copies)))
    cut = {
        "CHANNELS": channels,
        "PIXELS": pixels,
        "WIDTH": width,
        "TOGETHER": together,
        "ROWS": rows,
        "COLUMNS": columns,
        "LAST": last,
        "num_warps": warps(rows * columns * copies),
    }
    return cut, triton.cdiv(pixels, columns) if chunked else None


def columns_of(pixels: int, rows: int) -> int:
    """How many pixels of a map that is only written a program takes at a time, of so many channels."""
    return min(triton.next_power_of_2(pixels), max(1, CHUNK // rows))


def in_chunks(cut: Mapping[str, int], chunks: int) -> dict[str, int]:
    """What a kernel has to know that puts together what chunks have written."""
    return {**cut, "CHUNKS": chunks, "LANES": triton.next_power_of_2(chunks)}


def _together(width: int, groups: int, itemsize: int, least: int) -> int:
    """How many groups a program takes, so that those of one pixel are so many contiguous bytes."""
    together = 1
    while together * width * itemsize < least and groups % (2 * together) == 0:
        together *= 2
    return together


def warps(numbers: int) -> int:
    """Of a program that takes so many numbers at a time."""
    return max(1, min(MOST_WARPS, numbers // (32 * PER_THREAD)))


def programs(shape: torch.Size, cut: Mapping[str, int]) -> tuple[int]:
    return (shape[0] * (cut["CHANNELS"] // (cut["WIDTH"] * cut["TOGETHER"])),)


def enlarging(x: Tensor, large: torch.Size, enlarge: int) -> dict[str, int]:
    """What a kernel has to know of the larger map."""
    return {"ACROSS": x.shape[3], "LARGE_PIXELS": large[2] * large[3], "LARGE_ACROSS": large[3], "FACTOR": enlarge}
