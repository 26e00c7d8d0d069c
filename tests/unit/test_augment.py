"""Augmentation: pixels come from where they should, whatever the split of a batch, and masks follow their images."""

import pytest
import torch

from equipoise._draws import Rows
from equipoise.data.augment import (
    CUTMIX_DRAWS,
    CentreCrop,
    CropFlip,
    ResizedCrop,
    ScaleCrop,
    cutmix_windows,
    normalise,
    row_draws,
)


def ramp(count, height, width, channels=1):
    """Images whose pixel values tell their place: 10·row + column, plus the sample's number."""
    place = 10 * torch.arange(height)[:, None] + torch.arange(width)
    return (place + torch.arange(count)[:, None, None])[:, None].expand(-1, channels, -1, -1).to(torch.uint8)


CLASSES = torch.arange(4)


# Draws


def test_draws_of_shares_are_those_of_the_whole_batch():
    whole = row_draws(Rows(0, 7, 7), 3, 5, "augment", 11)
    parts = [row_draws(Rows.share(7, k, 3), 3, 5, "augment", 11) for k in range(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert whole.shape == (7, 3)
    assert whole.dtype == torch.float32


def test_draws_depend_on_every_key_and_are_uniform():
    first = row_draws(Rows(0, 5000, 5000), 2, 0, "augment", 0)
    for keys in ((1, "augment", 0), (0, "order", 0), (0, "augment", 1)):
        assert not torch.equal(row_draws(Rows(0, 5000, 5000), 2, *keys), first)
    assert first.min() >= 0
    assert first.max() < 1
    # Standard errors of mean and correlation over 5000 draws are 0.004 and 0.014.
    assert first.mean(0) == pytest.approx([0.5, 0.5], abs=0.02)
    assert torch.corrcoef(first.T)[0, 1].abs() < 0.06


# Classification


def test_a_crop_without_a_frame_or_a_mirror_changes_nothing():
    images = ramp(4, 6, 6)
    changed, targets = CropFlip(0, flip=False)(images, CLASSES, torch.rand(4, 3))
    assert torch.equal(changed, images)
    assert targets is CLASSES


def test_crops_are_those_of_a_plain_loop():
    images, draws = ramp(40, 6, 7, 3), row_draws(Rows(0, 40, 40), 3, "plain")
    changed, _ = CropFlip(2)(images, torch.zeros(40), draws)
    for image, found, (u, v, w) in zip(images, changed, draws.tolist(), strict=True):
        framed = torch.nn.functional.pad(image, (2, 2, 2, 2))
        top, left = int(5 * u), int(5 * v)
        expected = framed[:, top : top + 6, left : left + 7]
        assert torch.equal(found, expected if w < 0.5 else expected.flip(-1))
    assert changed.dtype == torch.uint8


def test_the_middle_is_cut_out():
    images = ramp(2, 8, 6)
    changed, _ = CentreCrop(4)(images, CLASSES, torch.zeros(2, 0))
    assert torch.equal(changed, images[:, :, 2:6, 1:5])
    with pytest.raises(ValueError, match="8 × 6 have no crop of 7"):
        CentreCrop(7)(images, CLASSES, torch.zeros(2, 0))


def test_a_resized_crop_of_everything_is_the_image():
    images = ramp(3, 8, 8)
    draws = torch.full((3, 23), 0.5)
    draws[:, 22] = 0.9  # no mirror
    rule = ResizedCrop(8, area=(1.0, 1.0), aspect=(1.0, 1.0))
    assert rule(images, CLASSES, draws)[0] == pytest.approx(images.float(), abs=1e-3)
    draws[:, 22] = 0.1
    assert rule(images, CLASSES, draws)[0] == pytest.approx(images.flip(-1).float(), abs=1e-3)


def test_resized_crops_are_windows_of_a_linear_image():
    """On a linear image bilinear sampling is exact, so corners tell the window: its area and shape are in range."""
    size = 32
    x = torch.linspace(0.5, size - 0.5, size).expand(200, 1, size, size)
    draws = row_draws(Rows(0, 200, 200), 23, "windows")
    rule = ResizedCrop(16, area=(0.1, 0.8))
    across = rule(x, CLASSES, draws)[0][:, 0, 8]
    down = rule(x.mT, CLASSES, draws)[0][:, 0, :, 8]
    inner = slice(4, 12)  # away from the border, where values are held
    wide = (across[:, inner].diff(dim=1).abs()).mean(1) * 16
    tall = (down[:, inner].diff(dim=1).abs()).mean(1) * 16
    share, aspect = wide * tall / size**2, wide / tall
    assert share.min() >= 0.1 - 1e-3
    assert share.max() <= 0.8 + 1e-3
    assert aspect.min() >= 0.74
    assert aspect.max() <= 1.35
    mirrored = across[:, 0] > across[:, -1]
    assert torch.equal(mirrored, draws[:, 22] < 0.5)


def linear(height, width, count):
    """How far down and how far across pixels lie, as shares of the image."""
    down, across = ((torch.arange(size) + 0.5) / size for size in (height, width))
    size = (count, 1, height, width)
    return down[:, None].expand(size), across.expand(size)


@pytest.mark.parametrize("seen", [0.4, 1.0, 2.5])
def test_windows_of_a_squeezed_picture_have_the_area_and_shape_asked_for_as_it_was(seen):
    rows, size = 400, 64
    draws, classes = row_draws(Rows(0, rows, rows), 23, "squeezed"), torch.zeros(rows)
    rule, pixels = ResizedCrop(16, area=(0.08, 1.0)), torch.full((rows,), seen)
    down, across = (rule(x, classes, draws, pixels)[0][:, 0] for x in linear(size, size, rows))
    # Steps between pixels, as shares of the picture; the outermost ones may lie where values are held.
    tall, wide = (side.diff(dim=1)[:, 2:-2].abs().mean(1) * 16 for side in (down[:, :, 8], across[:, 8]))
    share, aspect = wide * tall, seen * wide / tall
    assert share.min() >= 0.08 - 1e-3
    assert share.max() <= min(1, 4 / 3 / seen, 4 / 3 * seen) + 1e-3  # what the largest allowed shape can show
    assert share.max() > 0.95 * min(1, 4 / 3 / seen, 4 / 3 * seen)
    assert aspect.min() == pytest.approx(3 / 4, abs=0.01)
    assert aspect.max() == pytest.approx(4 / 3, abs=0.01)


@pytest.mark.parametrize("size", [(40, 100), (100, 40), (40, 40), (8, 100)])
def test_windows_of_a_squeezed_picture_are_those_of_the_picture_as_it_was(size):
    """The plain twin: the same draws on the picture before it was squeezed, which is too narrow for any window once."""
    rows, (height, width) = 200, size
    draws, classes = row_draws(Rows(0, rows, rows), 23, "twins"), torch.zeros(rows)
    rule, pixels = ResizedCrop(12), torch.full((rows,), width / height)
    for side, squeezed in zip(linear(height, width, rows), linear(64, 64, rows), strict=True):
        expected, found = rule(side, classes, draws)[0], rule(squeezed, classes, draws, pixels)[0]
        edge = 0.5 / min(size)  # within half a pixel of the border values are held
        torch.testing.assert_close(found.clamp(edge, 1 - edge), expected.clamp(edge, 1 - edge), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [(9, 9), (4, 20)])
def test_square_pixels_change_nothing(size):
    draws, images = row_draws(Rows(0, 90, 90), 23, "square"), torch.rand(90, 3, *size)
    for area in ((0.08, 1.0), (0.9, 1.0)):
        plain, _ = ResizedCrop(6, area)(images, torch.zeros(90), draws)
        assert torch.equal(ResizedCrop(6, area)(images, torch.zeros(90), draws, torch.ones(90))[0], plain)


def test_a_window_that_never_fits_gives_the_largest_one_in_the_middle():
    images = ramp(2, 4, 20)
    draws = torch.full((2, 23), 0.999)
    draws[:, 10:20] = 0.5
    changed, _ = ResizedCrop(4, area=(0.9, 1.0))(images, CLASSES, draws)
    # Of height 4 the widest allowed window is 16/3; its middle is that of the image.
    assert changed.mean(-1)[0, 0] == pytest.approx(images.float().mean(-1)[0, 0], abs=0.05)


def test_erasing_blackens_one_square_cut_by_the_border():
    images = torch.full((30, 3, 9, 11), 7, dtype=torch.uint8)
    draws = torch.rand(30, CropFlip.draws)
    changed, _ = CropFlip(0, erase=4)(images, torch.zeros(30), draws)
    for image, row in zip(changed, draws, strict=True):
        top, left = int(row[3] * 9) - 2, int(row[4] * 11) - 2
        expected = torch.full((3, 9, 11), 7, dtype=torch.uint8)
        expected[:, max(0, top) : top + 4, max(0, left) : left + 4] = 0
        assert torch.equal(image, expected)
    with pytest.raises(ValueError, match="erase"):
        CropFlip(erase=-1)


def test_windows_of_cutmix_have_any_size_and_lie_anywhere():
    images, draws = torch.zeros(40, 3, 9, 11), torch.rand(40, CUTMIX_DRAWS)
    windows = cutmix_windows(images, draws, share=0.5)
    for window, row in zip(windows, draws, strict=True):
        side = float(row[1]) ** 0.5
        high, wide = round(side * 9), round(side * 11)
        top, left = int(row[2] * 9) - high // 2, int(row[3] * 11) - wide // 2
        expected = torch.zeros(9, 11, dtype=torch.bool)
        if row[0] < 0.5:
            expected[max(0, top) : max(0, top + high), max(0, left) : max(0, left + wide)] = True
        assert torch.equal(window, expected)
    assert len(windows.sum((1, 2)).unique()) > 10
    assert not cutmix_windows(images, draws, share=0.0).any()


@pytest.mark.parametrize("rule", [CropFlip(1), ResizedCrop(4)])
def test_rules_for_classes_refuse_masks(rule):
    with pytest.raises(ValueError, match="ScaleCrop"):
        rule(ramp(2, 4, 4), torch.zeros(2, 4, 4), torch.rand(2, rule.draws))


# Segmentation


def test_a_factor_of_one_moves_pixels_without_mixing_them():
    images, masks = ramp(50, 9, 9, 2), (ramp(50, 9, 9)[:, 0] % 7)
    draws = row_draws(Rows(0, 50, 50), 4, "unscaled")
    changed, moved = ScaleCrop((5, 6), (1.0, 1.0))(images, masks, draws)
    for k, (_, u, v, w) in enumerate(draws.tolist()):
        top, left = round(4 * u), round(3 * v)
        window = (slice(top, top + 5), slice(left, left + 6))
        expected, mask = images[k][:, *window], masks[k][window]
        if w < 0.5:
            expected, mask = expected.flip(-1), mask.flip(-1)
        assert changed[k] == pytest.approx(expected.float(), abs=1e-2)
        assert torch.equal(moved[k], mask)


def test_masks_follow_their_images_at_every_scale():
    """An image that is its own mask, in large blocks: inside a block both agree."""
    masks = torch.arange(4).repeat_interleave(16).expand(64, 64).to(torch.uint8).expand(60, 64, 64)
    images = masks[:, None].clone()
    draws = row_draws(Rows(0, 60, 60), 4, "scaled")
    changed, moved = ScaleCrop((40, 48), (0.5, 2.0))(images, masks, draws)
    labelled = moved != 255
    assert (changed[:, 0] - moved)[labelled].abs().max() <= 0.5 + 1e-3
    assert (changed[:, 0][~labelled] == 0).all()
    scale = 0.5 + 0.1 * (draws[:, 0] * 16).floor()
    # Height and width of what is labelled: the scaled image or the crop, whichever is less.
    for size, axis in ((40, 1), (48, 2)):
        seen = labelled.any(3 - axis).sum(1)
        assert (seen - (64 * scale).clamp(max=size)).abs().max() <= 1


@pytest.mark.parametrize(
    ("scales", "factors"),
    [((0.75, 1.3), 6), ((0.5, 0.57), 1), ((0.5, 2.1), 17), ((0.5, 2.0), 16), ((0.7, 2.0), 14), ((1.0, 1.3), 4)],
)
def test_no_factor_is_above_the_greatest(scales, factors):
    """Seen from how far a bright half of the image reaches, at the last of evenly drawn factors."""
    draws = torch.zeros(400, 9)
    draws[:, 0], draws[:, 3] = torch.linspace(0, 1 - 1e-6, 400), 0.9
    image = torch.zeros(400, 1, 1, 1000, dtype=torch.uint8)
    image[..., :500] = 200
    found, _ = ScaleCrop((1, 2200), scales)(image, image[:, 0], draws)
    reached = (found[:, 0, 0] > 100).sum(1) / 500
    assert reached.max() <= scales[1] + 0.01
    assert len(reached.unique()) == factors


def test_what_lies_outside_is_ignored_with_the_label_asked_for():
    masks = torch.ones(3, 4, 4, dtype=torch.uint8)
    _, moved = ScaleCrop((8, 8), (1.0, 1.0), ignore=7)(masks[:, None], masks, torch.rand(3, 4))
    assert ((moved == 1).sum((1, 2)) == 16).all()
    assert ((moved == 7).sum((1, 2)) == 48).all()


def test_scaling_refuses_what_it_cannot_use():
    with pytest.raises(ValueError, match="needs masks"):
        ScaleCrop()(ramp(4, 4, 4), CLASSES, torch.rand(4, 4))
    with pytest.raises(ValueError, match="in order"):
        ScaleCrop(scales=(2.0, 1.0))
    with pytest.raises(ValueError, match=r"colour must be"):
        ScaleCrop(colour=1.5)


# Normalisation


def test_images_are_normalised_by_channel():
    images = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = (0.1, 0.5, 0.9), (0.2, 0.3, 0.4)
    found = normalise(images, mean, std)
    for k in range(3):
        assert found[:, k] == pytest.approx((images[:, k].double() / 255 - mean[k]) / std[k], abs=1e-5)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        (ScaleCrop, {"step": 0.0}, r"step must be a number in \(0, inf\)"),
        (ScaleCrop, {"size": (0, 4)}, "size must be an integer of at least 1, got 0"),
        (ScaleCrop, {"size": 12}, r"a height and a width, .* got 12"),
        (ResizedCrop, {"area": (2.0, 1.0)}, r"shares of the image in order, .* got \(2.0, 1.0\)"),
        (ResizedCrop, {"aspect": (0.0, 1.0)}, "aspect must be positive and in order"),
    ],
)
def test_settings_are_checked_when_they_are_given(make, settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        make(**settings)


def test_colours_change_by_row_within_their_limits():
    """Brightness and the balance of channels by factors, contrast about the mean; masks and black outside stay."""
    images = torch.tensor([0.0, 100.0, 127.5, 255.0]).repeat(3, 3, 4, 1)
    masks = torch.zeros(3, 4, 4, dtype=torch.long)
    draws = torch.full((3, 9), 0.5)
    draws[:, 3] = 0.9  # not mirrored
    draws[1, 4] = 1.0  # brighter
    draws[2, 5:7] = torch.tensor([0.0, 1.0])  # less contrast, more of the first channel
    plain, _ = ScaleCrop(scales=(1.0, 1.0))(images, masks, draws)
    changed, moved = ScaleCrop(scales=(1.0, 1.0), colour=0.2)(images, masks, draws)
    torch.testing.assert_close(plain, images)
    torch.testing.assert_close(changed[0], images[0])
    torch.testing.assert_close(changed[1], (images[1] * 1.2).clamp(0, 255))
    mean = images[2].mean()
    for channel, gain in enumerate((1.1, 1.0, 1.0)):
        torch.testing.assert_close(changed[2, channel], ((images[2, channel] - mean) * 0.8 + mean) * gain)
    assert torch.equal(moved, masks)
    larger, _ = ScaleCrop((6, 6), scales=(1.0, 1.0), colour=0.2)(images, masks, draws)
    assert (larger == 0).sum() >= 3 * 3 * 20  # what lies outside


def test_images_of_one_channel_change_in_brightness_and_contrast():
    images, masks = torch.full((2, 1, 3, 3), 200.0), torch.zeros(2, 3, 3, dtype=torch.long)
    changed, _ = ScaleCrop(scales=(1.0, 1.0), colour=0.5)(images, masks, torch.rand(2, 9))
    assert changed.shape == images.shape
    assert not torch.allclose(changed, images)
