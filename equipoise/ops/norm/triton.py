# mypy: disable-error-code="no-untyped-def"
"""The kernels of `group_norm`, and what those of `residual_norm` share with them."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from equipoise.ops._backend import apart, through_twin
from equipoise.ops.norm import naive

# The most numbers that stay in registers, forward and in the VJP, and how many of a larger group are taken at a time.
BLOCK, VJP_BLOCK, LOOP_BLOCK = 16384, 16384, 4096
# Numbers per thread, and the most warps of a program.
PER_THREAD, MOST_WARPS = 16, 16
# With channels last, groups are taken together until this many bytes of a pixel are contiguous.
TOGETHER_BYTES = 12


# Pieces of kernels


@triton.jit
def channels_of(first, WIDTH: tl.constexpr, TOGETHER: tl.constexpr, ROWS: tl.constexpr):
    """The channels of a program, and which of them exist."""
    row = tl.arange(0, ROWS)
    return first * (TOGETHER * WIDTH) + row, row < TOGETHER * WIDTH


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
def over_groups(sums, channel, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """For each channel the sum over the channels of its group."""
    if TOGETHER == 1:
        return tl.zeros([channel.shape[0]], dtype=tl.float32) + tl.sum(sums, axis=0)
    else:
        group = channel // WIDTH
        return tl.sum(tl.where(group[:, None] == group[None, :], sums[None, :], 0.0), axis=1)


@triton.jit
def update(x, inside, mean, spread, block):
    """Welford's update of each lane's mean and squared deviations by its number in a later block."""
    delta = tl.where(inside, x - mean, 0.0)
    mean += delta / (block + 1.0)
    return mean, spread + tl.where(inside, delta * (x - mean), 0.0)


@triton.jit
def moments(
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


# The kernels


@triton.jit
def _forward(
    x_ptr,
    weight_ptr,
    bias_ptr,
    plus_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    eps,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    LARGE_COLUMNS: tl.constexpr,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    AFFINE: tl.constexpr,
    HAS_PLUS: tl.constexpr,
    RELU: tl.constexpr,
):
    sample = (tl.program_id(0) // (CHANNELS // (WIDTH * TOGETHER))).to(tl.int64)
    first = tl.program_id(0) % (CHANNELS // (WIDTH * TOGETHER))
    channel, exists = channels_of(first, WIDTH, TOGETHER, ROWS)
    x_ptr += sample * (CHANNELS * PIXELS)
    plus_ptr += sample * (CHANNELS * LARGE_PIXELS)
    y_ptr += sample * (CHANNELS * LARGE_PIXELS)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    at = place_of(channel, column, CHANNELS, PIXELS, LAST)
    x = read(x_ptr + at, inside)
    means, spreads = x, tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later = read(x_ptr + place_of(channel, pixel, CHANNELS, PIXELS, LAST), there)
        means, spreads = update(later, there, means, spreads, block)
    mean, rstd = moments(means, spreads, channel, exists, eps, PIXELS, WIDTH, TOGETHER, COLUMNS)
    write_moments(mean_ptr, rstd_ptr, sample, channel, exists, mean, rstd, CHANNELS, WIDTH)
    scale = rstd * read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    if FACTOR == 1:
        _finish(x, mean, scale, bias, plus_ptr + at, y_ptr + at, inside, HAS_PLUS, RELU)
        for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
            pixel = block * COLUMNS + column
            there = exists[:, None] & (pixel < PIXELS)[None, :]
            at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
            _finish(read(x_ptr + at, there), mean, scale, bias, plus_ptr + at, y_ptr + at, there, HAS_PLUS, RELU)
    else:
        for start in range(0, LARGE_PIXELS, LARGE_COLUMNS):
            large = start + tl.arange(0, LARGE_COLUMNS)
            source = large // LARGE_ACROSS // FACTOR * ACROSS + large % LARGE_ACROSS // FACTOR
            reached = exists[:, None] & (large < LARGE_PIXELS)[None, :]
            target = place_of(channel, large, CHANNELS, LARGE_PIXELS, LAST)
            copied = read(x_ptr + place_of(channel, source, CHANNELS, PIXELS, LAST), reached)
            _finish(copied, mean, scale, bias, plus_ptr + target, y_ptr + target, reached, HAS_PLUS, RELU)


@triton.jit
def _finish(x, mean, scale, bias, plus_place, y_place, inside, HAS_PLUS: tl.constexpr, RELU: tl.constexpr):
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
def _backward(
    x_ptr,
    y_ptr,
    weight_ptr,
    bias_ptr,
    mean_ptr,
    rstd_ptr,
    dy_ptr,
    dx_ptr,
    dplus_ptr,
    dweight_ptr,
    dbias_ptr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    ACROSS: tl.constexpr,
    LARGE_PIXELS: tl.constexpr,
    LARGE_ACROSS: tl.constexpr,
    FACTOR: tl.constexpr,
    COPIES: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LAST: tl.constexpr,
    AFFINE: tl.constexpr,
    RELU: tl.constexpr,
    BY_RESULT: tl.constexpr,
    WRITES_PLUS: tl.constexpr,
    WRITES_AFFINE: tl.constexpr,
):
    """dx = (w·dy − ⟨w·dy⟩ − x̂⟨w·dy·x̂⟩)/deviation, ⟨⟩ the mean over a group, x̂ = (x − mean)/deviation."""
    SIZE: tl.constexpr = WIDTH * PIXELS
    sample = (tl.program_id(0) // (CHANNELS // (WIDTH * TOGETHER))).to(tl.int64)
    first = tl.program_id(0) % (CHANNELS // (WIDTH * TOGETHER))
    channel, exists = channels_of(first, WIDTH, TOGETHER, ROWS)
    x_ptr += sample * (CHANNELS * PIXELS)
    dx_ptr += sample * (CHANNELS * PIXELS)
    y_ptr += sample * (CHANNELS * LARGE_PIXELS)
    dy_ptr += sample * (CHANNELS * LARGE_PIXELS)
    dplus_ptr += sample * (CHANNELS * LARGE_PIXELS)
    mean, rstd = read_moments(mean_ptr, rstd_ptr, sample, channel, exists, CHANNELS, WIDTH)
    weight = read_channels(weight_ptr, channel, exists, 1.0, AFFINE)
    bias = read_channels(bias_ptr, channel, exists, 0.0, AFFINE)
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < PIXELS)[None, :]
    at = place_of(channel, column, CHANNELS, PIXELS, LAST)
    xhat = (read(x_ptr + at, inside) - mean[:, None]) * rstd[:, None]
    dy = _cotangent(
        dy_ptr, y_ptr, dplus_ptr, channel, column, inside,
        CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, BY_RESULT, WRITES_PLUS,
    )  # fmt: skip
    if RELU:
        dy = tl.where(xhat * weight[:, None] + bias[:, None] <= 0.0, 0.0, dy)
    plain, product = dy, dy * xhat
    for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        later = read(x_ptr + place_of(channel, pixel, CHANNELS, PIXELS, LAST), there)
        later = (later - mean[:, None]) * rstd[:, None]
        dlater = _cotangent(
            dy_ptr, y_ptr, dplus_ptr, channel, pixel, there,
            CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, BY_RESULT, WRITES_PLUS,
        )  # fmt: skip
        if RELU:
            dlater = tl.where(later * weight[:, None] + bias[:, None] <= 0.0, 0.0, dlater)
        plain += dlater
        product += dlater * later
    dbias, dweight = tl.sum(plain, axis=1), tl.sum(product, axis=1)
    if WRITES_AFFINE:
        tl.store(dweight_ptr + sample * CHANNELS + channel, dweight, mask=exists)
        tl.store(dbias_ptr + sample * CHANNELS + channel, dbias, mask=exists)
    level = (over_groups(weight * dbias, channel, WIDTH, TOGETHER) / SIZE)[:, None]
    slope = (over_groups(weight * dweight, channel, WIDTH, TOGETHER) / SIZE)[:, None]
    dx = (dy * weight[:, None] - level - xhat * slope) * rstd[:, None]
    tl.store(dx_ptr + at, dx, mask=inside)
    for block in range(1, (PIXELS + COLUMNS - 1) // COLUMNS):
        pixel = block * COLUMNS + column
        there = exists[:, None] & (pixel < PIXELS)[None, :]
        at = place_of(channel, pixel, CHANNELS, PIXELS, LAST)
        xhat = (read(x_ptr + at, there) - mean[:, None]) * rstd[:, None]
        dy = _cotangent(
            dy_ptr, y_ptr, dplus_ptr, channel, pixel, there,
            CHANNELS, PIXELS, ACROSS, LARGE_PIXELS, LARGE_ACROSS, FACTOR, COPIES, LAST, BY_RESULT, False,
        )  # fmt: skip
        if RELU:
            dy = tl.where(xhat * weight[:, None] + bias[:, None] <= 0.0, 0.0, dy)
        dx = (dy * weight[:, None] - level - xhat * slope) * rstd[:, None]
        tl.store(dx_ptr + at, dx, mask=there)


# Their launches


def is_last(x: Tensor) -> bool:
    """Whether channels are last in memory."""
    return not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def laid_out(x: Tensor, last: bool) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def sizes(shape: torch.Size, groups: int, last: bool, itemsize: int, block: int, copies: int = 1) -> dict[str, int]:
    """How maps (N, C, H, W) are cut, each pixel of which stands for so many copies."""
    channels, pixels = shape[1], shape[2] * shape[3]
    width, together = channels // groups, 1
    while last and together * width * itemsize < TOGETHER_BYTES and groups % (2 * together) == 0:
        together *= 2
    rows = triton.next_power_of_2(together * width)
    columns = triton.next_power_of_2(pixels)
    if rows * columns * copies > block:
        columns = min(columns, max(1, min(block, LOOP_BLOCK) // (rows * copies)))
    return {
        "CHANNELS": channels,
        "PIXELS": pixels,
        "WIDTH": width,
        "TOGETHER": together,
        "ROWS": rows,
        "COLUMNS": columns,
        "LAST": last,
        "num_warps": warps(rows * columns * copies),
    }


def warps(numbers: int) -> int:
    """Of a program that takes so many numbers at a time."""
    return max(1, min(MOST_WARPS, numbers // (32 * PER_THREAD)))


def programs(shape: torch.Size, cut: dict[str, int]) -> tuple[int]:
    return (shape[0] * (cut["CHANNELS"] // (cut["WIDTH"] * cut["TOGETHER"])),)


def _enlarging(x: Tensor, large: torch.Size, enlarge: int) -> dict[str, int]:
    """What a kernel has to know of the larger map."""
    return {"ACROSS": x.shape[3], "LARGE_PIXELS": large[2] * large[3], "LARGE_ACROSS": large[3], "FACTOR": enlarge}


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plus: Tensor | None,
    groups: int,
    eps: float,
    enlarge: int,
    relu: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `group_norm`; also mean and 1/deviation, (N, groups)."""
    last = is_last(x)
    x = laid_out(x, last)
    like = x if plus is None else laid_out(plus, last)
    y = torch.empty_like(like, dtype=dtype)
    mean, rstd = (x.new_empty((len(x), groups), dtype=torch.float32) for _ in range(2))
    cut = sizes(x.shape, groups, last, x.element_size(), BLOCK)
    columns = cut["COLUMNS"]
    if enlarge > 1:
        columns = min(triton.next_power_of_2(y.shape[2] * y.shape[3]), max(1, LOOP_BLOCK // cut["ROWS"]))
        cut["num_warps"] = max(cut["num_warps"], warps(cut["ROWS"] * columns))
    _forward[programs(x.shape, cut)](
        x,
        x if weight is None else weight,  # what is None is neither read nor written
        x if bias is None else bias,
        like,
        y,
        mean,
        rstd,
        eps,
        **_enlarging(x, y.shape, enlarge),
        LARGE_COLUMNS=columns,
        AFFINE=weight is not None,
        HAS_PLUS=plus is not None,
        RELU=relu,
        **cut,
    )
    return y, mean, rstd


def norm_vjp(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dy: Tensor,
    plus: torch.dtype | None,
    enlarge: int,
    relu: bool,
    affine: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Cotangents of x, of weight and bias for each sample, and of what was added.

    Args:
        x: As in `norm`, and so are the others not named here.
        y: The result where it says what was rectified; None if the normalised map does.
        dy: Cotangent of the result.
        plus: Dtype of what was added, if its cotangent is to be written: without `relu` it is `dy`.
        affine: Whether cotangents of weight and bias are wanted.
    """
    last = is_last(x)
    x, dy = laid_out(x, last), laid_out(dy, last)
    dx = torch.empty_like(x)
    dplus = None if plus is None else torch.empty_like(dy, dtype=plus)
    dweight, dbias = (mean.new_empty((len(x), x.shape[1])) for _ in range(2)) if affine else (None, None)
    copies = triton.next_power_of_2(enlarge * enlarge)
    cut = sizes(x.shape, mean.shape[1], last, x.element_size(), VJP_BLOCK, copies)
    _backward[programs(x.shape, cut)](
        x,
        x if y is None else laid_out(y, last),  # what is None is neither read nor written
        x if weight is None else weight,
        x if bias is None else bias,
        mean,
        rstd,
        dy,
        dx,
        dx if dplus is None else dplus,
        mean if dweight is None else dweight,
        mean if dbias is None else dbias,
        **_enlarging(x, dy.shape, enlarge),
        COPIES=copies,
        AFFINE=weight is not None,
        RELU=relu and y is None,
        BY_RESULT=relu and y is not None,
        WRITES_PLUS=plus is not None,
        WRITES_AFFINE=affine,
        **cut,
    )
    return dx, dweight, dbias, dplus


class Norm(torch.autograd.Function):
    """`group_norm` by kernels; where derivatives of derivatives are taken the plain twin stands in.

    Scale and offset come spread over samples, (N, C), but the same for all of them.
    """

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        plus: Tensor | None,
        groups: int,
        eps: float,
        enlarge: int,
        relu: bool,
        dtype: torch.dtype,
    ) -> Any:
        return norm(x, weight, bias, plus, groups, eps, enlarge, relu, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.groups, eps, enlarge, relu, dtype = inputs
        ctx.options = {"eps": eps, "enlarge": enlarge, "relu": relu, "dtype": dtype}
        y, mean, rstd = output
        ctx.save_for_backward(*tensors, y if relu and tensors[3] is not None else None, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *inputs, y, mean, rstd = ctx.saved_tensors
        dy, needed, rest = grads[0], ctx.needs_input_grad[:4], (None,) * 5
        if dy is None:
            return None, None, None, None, *rest
        if torch.is_grad_enabled():
            x, *others = inputs = apart(inputs)
            twin = naive.group_norm(x, ctx.groups, *others, **ctx.options)
            return *through_twin([twin], [dy], inputs, needed), *rest
        x, weight, bias, plus = inputs
        relu, enlarge = ctx.options["relu"], ctx.options["enlarge"]
        written = plus.dtype if needed[3] and relu else None
        affine = needed[1] or needed[2]
        found = norm_vjp(x, weight, bias, y, mean, rstd, dy, written, enlarge, relu, affine)
        dx, dweight, dbias, dplus = found
        if dweight is not None and dbias is not None:
            dweight, dbias = dweight.to(weight.dtype), dbias.to(bias.dtype)
        if needed[3] and dplus is None:
            dplus = dy.to(plus.dtype)
        return dx, dweight, dbias, dplus, *rest
