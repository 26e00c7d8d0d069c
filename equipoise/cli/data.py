"""The command `data`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from equipoise._errors import unknown_name
from equipoise.cli.options import AsJson, DataDir
from equipoise.cli.output import show, table

LIST = "list"
_SAMPLE = 3  # lines shown of a text
_CLASSES = 40  # shown of a set of images
_ONE = {"corpora": "corpus", "images": "images"}


def data(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A known corpus or set of images, or a folder; none, or list, to list.", show_default=False
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Of one corpus: word, character, byte or bpe.")] = "word",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say which text corpora and sets of images are there, and what is in one.

    Without NAME: every known one, where it was found, or which file is missing and how to get it. With NAME: it is read
    and checked. Of a corpus, vocabulary, tokens and scored tokens of each split and its first lines are shown; of
    images, their number, size and classes in each split.
    """
    if name is None or name == LIST:
        _list(data_dir, as_json)
        return
    images = _is_images(name, data_dir)
    record = describe_images(name, data_dir) if images else describe(name, data_dir, tokens)
    if as_json:
        show(record, True)
    else:
        _show_images(record) if images else _show_text(record)


def _is_images(name: str, data_dir: str | None) -> bool:
    """Whether a name means images; a name that means nothing raises."""
    from equipoise.data.files import data_root
    from equipoise.data.images import IMAGES
    from equipoise.data.text import CORPORA, EMBEDDED

    if name in IMAGES or name in CORPORA or name == EMBEDDED:
        return name in IMAGES
    root = data_root(data_dir)
    folder = next((p for p in (Path(name), *([root / name] if root else [])) if p.is_dir()), None)
    if folder is None:
        known = unknown_name("data set", name, [*CORPORA, EMBEDDED, *IMAGES])
        raise ValueError(f"{known} A folder of text, or of images in train/CLASS, may be given too.")
    return (folder / "train").is_dir()


def _show_text(record: dict[str, Any]) -> None:
    print(f"{record['corpus']}: {record['vocabulary']:,} kinds of {record['tokens']} tokens")
    rows = [
        [name, *(f"{split[key]:,}" for key in ("tokens", "scored_tokens", "unknown", "characters"))]
        for name, split in record["splits"].items()
    ]
    table(("split", "tokens", "scored", "unknown", "characters"), rows)
    for check in record["checks"]:
        print(f"check: {check['what']} has {check['found']:,} entries, as published")
    for name, place in record["sources"].items():
        print(f"{name}: {place} (md5 {record['md5'][name]})")
    print("first lines of the training text:")
    for line in record["sample"]:
        print(f"  {line}")


def _show_images(record: dict[str, Any]) -> None:
    of = "pixels" if record["masks"] else "images"
    print(f"{record['images']}: {len(record['classes'])} classes of {of}, {record['channels']} channels")
    splits = record["splits"]
    rows = [[name, f"{split['images']:,}", f"{split['width']}×{split['height']}"] for name, split in splits.items()]
    table(("split", "images", "size"), rows)
    counted = {name: split["shares"] for name, split in splits.items() if split["shares"]}
    if counted:
        shown = [
            [label, *(f"{100 * shares[k]:.2f}" for shares in counted.values())]
            for k, label in enumerate(record["classes"][:_CLASSES])
        ]
        table(("class", *counted), shown, f"share of the {of}, %")
    if len(record["classes"]) > _CLASSES:
        print(f"and {len(record['classes']) - _CLASSES} more classes")
    for key, value in record["info"].items():
        print(f"{key}: {value}")


def _list(data_dir: str | None, as_json: bool) -> None:
    from equipoise.data.files import ENVIRONMENT, data_root
    from equipoise.data.image_places import locate_images

    root = data_root(data_dir)
    found = {"corpora": locate_all(data_dir), "images": locate_images(data_dir)}
    if as_json:
        show({"data_dir": None if root is None else str(root), **found}, True)
        return
    print(f"data directory: {root}" if root else f"data directory: none; pass --data-dir or set {ENVIRONMENT}")
    for kind, entries in found.items():
        rows = [[one["name"], one["status"], one["where"] or f"no {one.get('missing') or 'data'}"] for one in entries]
        table((_ONE[kind], "status", "where"), rows)
    for entry in (*found["corpora"], *found["images"]):
        if entry["status"] != "found":
            print(f"{entry['name']}: {entry['problem']}")


def locate_all(data_dir: str | None) -> list[dict[str, Any]]:
    """For each known corpus its status ("found", "missing" or "damaged"), place, missing file and remedy."""
    from equipoise.data.text import CORPORA, EMBEDDED

    embedded = {"name": EMBEDDED, "status": "found", "where": "comes with Python", "missing": None, "problem": None}
    return [embedded, *(_locate(corpus, data_dir) for _, corpus in sorted(CORPORA.items()))]


def _locate(corpus: Any, data_dir: str | None) -> dict[str, Any]:
    """Find the files of a corpus without reading them."""
    from equipoise.data.files import DamagedDataError, MissingDataError, find_text

    entry: dict[str, Any] = {"name": corpus.name, "status": "found", "where": None, "missing": None, "problem": None}
    folders, archives = (corpus.name, *corpus.folders), (f"{corpus.name}.zip", *corpus.archives)
    for file in corpus.files:
        try:
            source = find_text(file, data_dir=data_dir, folders=folders, archives=archives)
        except MissingDataError:
            return {**entry, "status": "missing", "where": None, "missing": file.name, "problem": corpus.how_to_get}
        except DamagedDataError as error:
            return {**entry, "status": "damaged", "where": None, "missing": file.name, "problem": str(error)}
        entry["where"] = str(source.path.parent)
    return entry


def describe(name: str, data_dir: str | None, tokens: str) -> dict[str, Any]:
    """Read a corpus, check it, and say what is in it.

    Args:
        name: A known corpus, or a folder.
        data_dir: Where data files are.
        tokens: Kind of tokens.
    """
    from equipoise.data.readers import SPLITS
    from equipoise.data.stream import TokenStream
    from equipoise.data.text import CORPORA, load_text

    text = load_text(name, data_dir, tokens)
    info = text.info
    splits = {
        split: {
            "tokens": info[f"{split}_tokens"],
            # All but the first, which nothing predicts; evaluation in several streams scores a few less.
            "scored_tokens": TokenStream(text.split(split), 1, 64).scored_tokens,
            "unknown": info[f"{split}_unknown"],
            "characters": info[f"{split}_characters"],
        }
        for split in SPLITS
        if len(getattr(text, split)) > 1
    }
    found = {split: info[f"{split}_tokens"] for split in SPLITS} | {"vocabulary": len(text.vocabulary)}
    known = CORPORA[name].expected if name in CORPORA and tokens == "word" else {}  # load_text raises if one differs
    sample = [line[:100] for line in text.vocabulary.decode(text.train[:2000]).splitlines() if line.strip()]
    return {
        "corpus": text.name,
        "tokens": tokens,
        "vocabulary": len(text.vocabulary),
        "splits": splits,
        "checks": [{"what": what, "found": found[what], "expected": count} for what, count in known.items()],
        "sources": info["sources"],
        "md5": info["md5"],
        "sample": sample[:_SAMPLE],
    }


def describe_images(name: str, data_dir: str | None) -> dict[str, Any]:
    """Read a set of images, check it, and say what is in it.

    Args:
        name: A known set, or a folder.
        data_dir: Where data files are.
    """
    from equipoise.data.images import load_images

    found = load_images(name, data_dir)
    return {
        "images": found.name,
        "masks": found.masks,
        "classes": list(found.classes),
        "channels": found.channels,
        "splits": {split: _split(part, len(found.classes)) for split, part in found.splits.items()},
        "info": found.info,
    }


def _split(part: Any, classes: int) -> dict[str, Any]:
    """Number and size of the images of a split, and shares of the classes if they are in memory."""
    import torch

    from equipoise.data.images import IGNORE, Stored

    height, width = (part.images if isinstance(part, Stored) else part.decode(0)[0]).shape[-2:]
    shares = None
    if isinstance(part, Stored):
        labels = part.targets.flatten()
        if part.targets.dim() > 1:
            labels = labels[labels != IGNORE]
        counts = torch.bincount(labels.long(), minlength=classes).double()
        shares = (counts / counts.sum()).tolist()
    return {"images": len(part), "height": height, "width": width, "shares": shares}
