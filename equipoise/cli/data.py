"""The command `data`."""

from typing import Annotated, Any

import typer

from equipoise.cli.options import AsJson, DataDir
from equipoise.cli.output import show, table

_SAMPLE = 3  # lines shown of a text


def data(
    corpus: Annotated[
        str | None, typer.Argument(help="A known corpus or a folder of text; none to list.", show_default=False)
    ] = None,
    tokens: Annotated[str, typer.Option(help="Of one corpus: word, character, byte or bpe.")] = "word",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say which text corpora are there, and what is in one.

    Without CORPUS: every known corpus, where it was found, or which file is missing and how to get it. With CORPUS: it
    is read and checked; vocabulary, tokens and scored tokens of each split, and its first lines are shown.
    """
    if corpus is None:
        _list(data_dir, as_json)
        return
    record = describe(corpus, data_dir, tokens)
    if as_json:
        show(record, True)
        return
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


def _list(data_dir: str | None, as_json: bool) -> None:
    from equipoise.data.files import ENVIRONMENT, data_root

    root = data_root(data_dir)
    found = locate_all(data_dir)
    if as_json:
        show({"data_dir": None if root is None else str(root), "corpora": found}, True)
        return
    print(f"data directory: {root}" if root else f"data directory: none; pass --data-dir or set {ENVIRONMENT}")
    rows = [[entry["name"], entry["status"], entry["where"] or f"no {entry['missing'] or 'data'}"] for entry in found]
    table(("corpus", "status", "where"), rows)
    for entry in found:
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
