"""Images with classes or masks: sets by name, held as bytes, and batches that are functions of their number."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from equipoise._draws import Rows
from equipoise._errors import require_count, require_number, unknown_name
from equipoise._registry import Registry
from equipoise._tree import register_record
from equipoise.data._draws import keyed_order
from equipoise.data.augment import CUTMIX_DRAWS, Augment, cutmix_windows, normalise, row_draws
from equipoise.data.files import DamagedDataError, MissingDataError, data_root
from equipoise.data.registry import register_data

IGNORE = 255
"""Label of pixels that count neither in losses nor in metrics."""

IN_MEMORY = 4 * 2**30  # bytes of decoded images up to which a set of files is read at once
_DEVICE_SHARE = 0.25  # of a device's free memory that a split may take
_THREADS = 16
_AHEAD = 8  # batches that may be decoded ahead of time: a process may have several shares


class Stored:
    """Images and targets in memory, copied to a device once if they fit.

    Args:
        images: (N, C, H, W) uint8.
        targets: (N,) int64 classes or (N, H, W) uint8 masks.
        pixels: (N,) what the width of a pixel is over its height, for pictures that were squeezed to one size.
        whole: Makes the split of whole pictures of which these images are parts, once; None if they are whole.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        pixels: Tensor | None = None,
        *,
        whole: "Callable[[], Stored | Decoded] | None" = None,
    ) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4 or len(images) != len(targets):
            raise ValueError(
                f"Stored: expected (N, C, H, W) uint8 images with N targets, got {tuple(images.shape)} {images.dtype} "
                f"and {tuple(targets.shape)}."
            )
        if pixels is not None and pixels.shape != (len(images),):
            raise ValueError(
                f"Stored: expected pixels of shape ({len(images)},), one number for each image, got "
                f"{tuple(pixels.shape)}; leave them out if they are square."
            )
        self.images, self.targets, self.whole = images, targets, whole
        self._parts = (images, targets) if pixels is None else (images, targets, pixels)
        self._copies: dict[torch.device, tuple[Tensor, ...] | None] = {}

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Tensor, device: torch.device | str) -> tuple[Tensor, ...]:
        """Images and targets of some samples, on a device, and their `pixels` if they were squeezed."""
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._copies:
            self._copies[device] = self._copy(device)
        held = self._copies[device]
        if held is not None:
            chosen = indices.to(device, non_blocking=True)
            return tuple(part[chosen] for part in held)
        return tuple(_send(part[indices], device) for part in self._parts)

    def _copy(self, device: torch.device) -> tuple[Tensor, ...] | None:
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(part.nbytes for part in self._parts) > _DEVICE_SHARE * free:
                return None
        return tuple(part.to(device) for part in self._parts)


class Decoded:
    """Images that are decoded from files when they are needed, by threads, the next batches ahead of time.

    Args:
        count: Number of samples.
        decode: The image (C, H, W) uint8 and the target of a sample, and its `pixels` if it was squeezed, as in
            `Stored`; all images must have one size.
        whole: As in `Stored`.
    """

    def __init__(
        self,
        count: int,
        decode: Callable[[int], tuple[Tensor, ...]],
        whole: "Callable[[], Stored | Decoded] | None" = None,
    ) -> None:
        self.count, self.decode, self.whole = count, decode, whole
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[int, ...], list[Future[tuple[Tensor, ...]]]] = {}

    def __len__(self) -> int:
        return self.count

    def announce(self, indices: Tensor) -> None:
        """Begin to decode samples that will be asked for next."""
        key = tuple(indices.tolist())
        if key and key not in self._ahead:
            while len(self._ahead) >= _AHEAD:  # what nobody came for
                self._ahead.pop(next(iter(self._ahead)))
            self._ahead[key] = self._submit(key)

    def fetch(self, indices: Tensor, device: torch.device | str) -> tuple[Tensor, ...]:
        """As of `Stored`."""
        key = tuple(indices.tolist())
        found = [future.result() for future in self._ahead.pop(key, None) or self._submit(key)]
        return tuple(_send(stacked(parts), torch.device(device)) for parts in zip(*found, strict=True))

    def _submit(self, key: tuple[int, ...]) -> list[Future[tuple[Tensor, ...]]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        return [self._pool.submit(self.decode, index) for index in key]

    def stored(self) -> Stored:
        """All samples, decoded now."""
        return Stored(*self.fetch(torch.arange(self.count), "cpu"), whole=self.whole)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """Images, or their targets, as one tensor."""
    shapes = sorted({tuple(part.shape) for part in parts})
    if len(shapes) > 1:
        one, other = shapes[0], shapes[-1]
        raise DamagedDataError(f"images of a set, and its masks, must have one size; found shapes {one} and {other}.")
    return torch.stack(list(parts))


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    # Copies from pageable memory would hold up the host.
    tensor = tensor.pin_memory() if device.type == "cuda" else tensor
    return tensor.to(device, non_blocking=True)


def hold(split: Decoded) -> Stored | Decoded:
    """The split in memory if it is small enough, else as it is."""
    if not len(split):
        raise MissingDataError("a split without images.")
    sample = sum(part.nbytes for part in split.decode(0))
    return split.stored() if len(split) * sample <= IN_MEMORY else split


@dataclass(frozen=True)
class ImageData:
    """A set of images.

    Attributes:
        name: Of the set.
        splits: "train", and "valid" or "test" or both.
        classes: Names of the classes, in the order of labels.
        mean: Of each channel, on the scale 0 to 1.
        std: Standard deviation, likewise.
        masks: Whether targets are masks, with `IGNORE` for pixels without a class.
        class_weights: Usual weights of the classes in the loss; empty if there are none.
        colours: Usual colours of the classes, 0 to 255; empty if there are none.
        info: Plain values to log with every number.
    """

    name: str
    splits: dict[str, Stored | Decoded]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    masks: bool = False
    class_weights: tuple[float, ...] = ()
    colours: tuple[tuple[int, int, int], ...] = ()
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, part in self.splits.items():
            if self.masks or not isinstance(part, Stored) or not len(part):
                continue
            low, high = (int(limit) for limit in part.targets.aminmax())
            if low < 0 or high >= len(self.classes):  # on a GPU a wrong one would end the process
                raise DamagedDataError(
                    f"{self.name!r} has labels from {low} to {high} in {split!r}, but {len(self.classes)} classes (0 "
                    f"to {len(self.classes) - 1}); the files are damaged, or of another set."
                )

    @property
    def channels(self) -> int:
        """Of the images."""
        return len(self.mean)

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values: sizes, classes, and where the images come from."""
        sizes = {f"{split}_images": len(part) for split, part in self.splits.items()}
        return {"data": self.name, "classes": len(self.classes), **sizes, **self.info}


@dataclass(frozen=True)
class ImageBatch:
    """Images as a model takes them.

    Attributes:
        images: (N, C, H, W) float32, normalised.
        targets: (N,) classes, (N, classes) shares of them where images are mixed, or (N, H, W) masks.
        indices: (N,) numbers of the samples in their split.
        epoch: Number of passes finished before this one.
        position: Number of the next batch.
        rows: Which rows of the whole batch these are.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    epoch: int
    position: int
    rows: Rows

    def to(self, device: torch.device | str) -> "ImageBatch":
        """The batch on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("images", "targets")}
        return dataclasses.replace(self, **moved)


# A tree of tensors, so that a batch can be cast and moved as inputs of models are.
register_record(ImageBatch, ("images", "targets", "indices"), ("epoch", "position", "rows"))


@dataclass(frozen=True)
class PendingBatch:
    """A batch that is put together on the device it is sent to.

    Attributes:
        stream: Where it comes from.
        indices: (N,) numbers of the samples in their split.
        epoch: Number of passes finished before this one.
        position: Number of the next batch.
        rows: Which rows of the whole batch these are.
        partners: (N,) samples that are mixed into them; None for none.
    """

    stream: "ImageStream"
    indices: Tensor
    epoch: int
    position: int
    rows: Rows
    partners: Tensor | None = None

    def to(self, device: torch.device | str) -> ImageBatch:
        """The batch, augmented and normalised on a device."""
        stream = self.stream
        images, targets = self._augmented(self.indices, "augment", device)
        if self.partners is not None:
            others, their_targets = self._augmented(self.partners, "augment partner", device)
            draws = self._draws(CUTMIX_DRAWS, "cutmix", images.device)
            pasted = cutmix_windows(images, draws, stream.cutmix)
            images = torch.where(pasted[:, None], others, images)
            if stream.data.masks:
                targets = torch.where(pasted, their_targets, targets)
            else:  # each class by its area
                own, theirs = (one_hot(labels, len(stream.data.classes)).float() for labels in (targets, their_targets))
                targets = torch.lerp(own, theirs, pasted.float().mean((1, 2))[:, None])
        images = normalise(images, stream.data.mean, stream.data.std)
        return ImageBatch(images, targets, self.indices, self.epoch, self.position, self.rows)

    def _augmented(self, indices: Tensor, key: str, device: torch.device | str) -> tuple[Tensor, Tensor]:
        stream = self.stream
        images, targets, *pixels = stream.shown.fetch(indices, device)
        if stream.augment is not None:
            draws = self._draws(stream.augment.draws, key, images.device)
            images, targets = stream.augment(images, targets, draws, *pixels)
        return images, targets.long()

    def _draws(self, count: int, key: str, device: torch.device) -> Tensor:
        return row_draws(self.rows, count, self.stream.seed, key, self.position).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class ImageStream:
    """Batches of a split.

    Training samples come in an order drawn by (seed, epoch), and what does not fill a batch is left out of the pass;
    others come in order, all of them.

    Attributes:
        data: The set.
        split: Of it.
        batch_size: Samples in a batch, of all ranks together.
        samples: Numbers of the samples to use; None for all.
        shuffle: Whether this is training.
        augment: How images are changed; None for not at all.
        cutmix: Share of the images that get a window of another one, with its mask, or its class by the area.
        seed: Key of order and augmentation.
        rank: Which share of the rows of each batch to take.
        world_size: Number of shares; together they are the rows of one process.
    """

    data: ImageData
    split: Stored | Decoded
    batch_size: int
    samples: Tensor | None = None
    shuffle: bool = False
    augment: Augment | None = None
    cutmix: float = 0.0
    seed: int = 0
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        require_count("ImageStream", "batch_size", self.batch_size)
        require_count("ImageStream", "world_size", self.world_size)
        require_number("ImageStream", "cutmix", self.cutmix, low=0.0, high=1.0, closed_high=True)
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"ImageStream: rank {self.rank} does not exist among {self.world_size}; ranks begin at 0.")
        if self.shuffle and self.batch_size > len(self):
            raise ValueError(
                f"batch_size={self.batch_size} exceeds the {len(self)} training images of {self.data.name!r}; lower it "
                "to that at most."
            )

    @functools.cached_property
    def shown(self) -> Stored | Decoded:
        """What batches are made of: the whole pictures of the split if it has them and augmentation cuts them."""
        # Late, since whole pictures of a small set are read here: who only evaluates never needs them.
        if self.split.whole is not None and self.augment is not None and self.augment.whole:
            return self.split.whole()
        return self.split

    def __len__(self) -> int:
        return len(self.split) if self.samples is None else len(self.samples)

    @property
    def batches_per_epoch(self) -> int:
        """Batches in a pass: whole ones for training, all samples otherwise."""
        return len(self) // self.batch_size if self.shuffle else -(-len(self) // self.batch_size)

    def batch(self, position: int) -> PendingBatch:
        """Batch number `position`, or the share of it that this rank has; passes follow one another."""
        require_count("ImageStream", "position", position, low=0)
        pending = self._pending(position)
        if isinstance(self.shown, Decoded):
            goes_on = self.shuffle or position + 1 < self.batches_per_epoch
            for coming in (pending, *([self._pending(position + 1)] if goes_on else [])):
                self.shown.announce(coming.indices)
                if coming.partners is not None:
                    self.shown.announce(coming.partners)
        return pending

    def _pending(self, position: int) -> PendingBatch:
        epoch, index = divmod(position, self.batches_per_epoch)
        order = _order(len(self), self.seed, "image order", epoch) if self.shuffle else torch.arange(len(self))
        places = slice(index * self.batch_size, (index + 1) * self.batch_size)
        chosen, partners = order[places], None
        rows = Rows.share(len(chosen), self.rank, self.world_size)
        if self.cutmix:
            partners = self._numbers(_order(len(self), self.seed, "partners", epoch)[places], rows)
        return PendingBatch(self, self._numbers(chosen, rows), epoch, position + 1, rows, partners)

    def _numbers(self, chosen: Tensor, rows: Rows) -> Tensor:
        """Numbers in the split of this rank's rows of a batch."""
        mine = chosen[rows.start : rows.stop]
        return mine if self.samples is None else self.samples[mine]

    def batches(self) -> Iterator[PendingBatch]:
        """One pass."""
        return map(self.batch, range(self.batches_per_epoch))


_order = functools.lru_cache(maxsize=4)(keyed_order)  # one pass is read batch by batch


IMAGES = Registry("image data set")


def register_images(name: str) -> Callable[[Callable[..., ImageData]], Callable[..., ImageData]]:
    """Decorator that makes a loader known by name, to `load_images` and to the registry of data sets."""

    def add(loader: Callable[..., ImageData]) -> Callable[..., ImageData]:
        IMAGES.register(name)(loader)
        register_data(name)(loader)
        return loader

    return add


def load_images(name: str, data_dir: str | os.PathLike[str] | None = None, **options: Any) -> ImageData:
    """Load a set of images.

    Args:
        name: A known set, or a folder with train/CLASS/*.jpg and val/CLASS/*.jpg.
        data_dir: Where the files are; by default the environment variable EQUIPOISE_DATA says it.
        **options: Of the loader.

    Raises:
        MissingDataError: If a file is not there; the message says where it was sought and how to get it.
        DamagedDataError: If a file cannot be read or is another than expected.
    """
    if name in IMAGES:
        loader, given = IMAGES[name], {"data_dir": data_dir}
    else:
        loader, given = IMAGES["imagenet"], {"data_dir": _folder(name, data_dir)}
    known = [key for key in inspect.signature(loader).parameters if key != "data_dir"]
    for key in options:
        if key not in known:
            raise unknown_name(f"option of the data set {name!r}", key, known)
    found: ImageData = loader(**given, **options)
    return found


def _folder(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder meant by a name that is no known set."""
    root = data_root(data_dir)
    places = [Path(name).expanduser(), *([] if root is None else [root / name])]
    for place in places:
        if place.is_dir():
            return place
    error = unknown_name("image data set", name, IMAGES)
    raise ValueError(f"{error} A folder of images may be given too, but there is none at {_either(places)}.")


def _either(places: Sequence[Path]) -> str:
    return " or ".join(str(place) for place in places)
