"""Finding and reading text files: plain, .xz, .gz or inside a .zip."""

import gzip
import hashlib
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "EQUIPOISE_DATA"
SUFFIXES = ("", ".xz", ".gz", ".zip")
_UNREADABLE = (lzma.LZMAError, zlib.error, zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError)


class DataError(Exception):
    """Data are missing, damaged or not what they should be."""


class MissingDataError(DataError, FileNotFoundError):
    """A file was not found; the message says which, where it was sought and how to get it."""


class DamagedDataError(DataError, ValueError):
    """A file was found, but it cannot be read or is not the file expected."""


@dataclass(frozen=True)
class TextFile:
    """A text file to look for.

    Attributes:
        name: File name without the suffix of a compression.
        md5: Checksum of the unpacked bytes; empty if unknown.
        size: Number of unpacked bytes; 0 if unknown.
    """

    name: str
    md5: str = ""
    size: int = 0


@dataclass(frozen=True)
class Source:
    """Where a file was found.

    Attributes:
        path: The file, or the archive that holds it.
        member: Name inside the archive; empty for a file of its own.
    """

    path: Path
    member: str = ""

    @classmethod
    def of(cls, path: Path) -> "Source":
        """A text file at a known place; in `name.zip` it is the member `name`, or the only one."""
        return cls(path, _member(path, path.name.removesuffix(".zip")) if path.suffix == ".zip" else "")

    def __str__(self) -> str:
        return f"{self.path}[{self.member}]" if self.member else str(self.path)


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The data directory: `data_dir`, else that of the environment variable EQUIPOISE_DATA, else None."""
    given = data_dir if data_dir is not None else os.environ.get(ENVIRONMENT) or None
    return None if given is None else Path(given).expanduser()


def find_text(
    file: TextFile,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    folders: Iterable[str] = (),
    archives: Iterable[str] = (),
    how_to_get: str = "",
) -> Source:
    """Find a text file, packed or not, in the data directory or in one of its folders.

    Args:
        file: The file sought.
        data_dir: The data directory, or the folder itself; by default that of EQUIPOISE_DATA.
        folders: Folders of the data directory to look in first.
        archives: Names of .zip archives that may hold the file, looked for in the same places.
        how_to_get: A sentence for the error.

    Raises:
        MissingDataError: If the file is nowhere.
    """
    root = data_root(data_dir)
    if root is None:
        raise MissingDataError(
            f"{file.name} was not sought, because no data directory is known: pass --data-dir (data_dir=...) or set "
            f"{ENVIRONMENT}. {how_to_get}".rstrip()
        )
    places = [root / folder for folder in folders] + [root]
    for place in places:
        for suffix in SUFFIXES:
            path = place / (file.name + suffix)
            if path.is_file():
                return Source.of(path)
        for archive in archives:
            path = place / archive
            if path.is_file() and (member := _member(path, file.name, required=False)):
                return Source(path, member)
    raise MissingDataError(_missing(file.name, places, how_to_get))


def _member(path: Path, name: str, required: bool = True) -> str:
    """The member of an archive with this file name, wherever it lies; a lone member may have any name."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info.filename for info in archive.infolist() if not info.is_dir()]
    except _UNREADABLE as error:
        raise DamagedDataError(f"{path} cannot be read as a zip archive ({error}); fetch it again.") from error
    for member in members:
        if member.rsplit("/", 1)[-1] == name:
            return member
    if required and len(members) == 1:
        return members[0]
    if required:
        raise DamagedDataError(f"{path} holds no {name}; it holds: {_some(members)}.")
    return ""


def _missing(name: str, places: list[Path], how_to_get: str) -> str:
    lines = []
    for place in places:
        if place.is_dir():
            lines.append(f"{place} (holds: {_some(sorted(path.name for path in place.iterdir()))})")
        else:
            lines.append(f"{place} (no such folder)")
    packed = ", ".join(suffix for suffix in SUFFIXES if suffix)
    return f"{name} (or with {packed}) was not found. Sought in: {'; '.join(lines)}. {how_to_get}".rstrip()


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "nothing") + more


def read_bytes(source: Source) -> bytes:
    """The unpacked bytes of a file that was found.

    Raises:
        DamagedDataError: If it cannot be unpacked or is empty.
    """
    try:
        data = _unpack(source)
    except _UNREADABLE as error:
        raise DamagedDataError(
            f"{source} cannot be read ({type(error).__name__}: {error}); if it is cut off or damaged, fetch it again."
        ) from error
    if not data:
        raise DamagedDataError(f"{source} is empty; fetch it again.")
    return data


def _unpack(source: Source) -> bytes:
    if source.member:
        with zipfile.ZipFile(source.path) as archive:
            return archive.read(source.member)
    if source.path.suffix == ".xz":
        with lzma.open(source.path) as stream:
            return stream.read()
    if source.path.suffix == ".gz":
        with gzip.open(source.path) as stream:
            return stream.read()
    return source.path.read_bytes()


def checksum(data: bytes) -> str:
    """The MD5 checksum, which tells versions of a file apart; it is no defence against forgery."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def read_text(source: Source, file: TextFile | None = None, how_to_get: str = "") -> tuple[str, str]:
    """Read a UTF-8 text file with line ends as newlines.

    Args:
        source: Where the file is.
        file: What is known about it; checked if given.
        how_to_get: A sentence for the error.

    Returns:
        The text and the checksum of the unpacked bytes.

    Raises:
        DamagedDataError: If the file cannot be read or is another than expected.
    """
    data = read_bytes(source)
    found = checksum(data)
    if file is not None:
        _check(data, found, source, file, how_to_get)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DamagedDataError(
            f"{source} is not UTF-8 text: byte {error.start} of {len(data):,} is {data[error.start]:#04x}; convert it "
            "to UTF-8 or fetch it again."
        ) from error
    return text.replace("\r\n", "\n") if "\r" in text else text, found


def _check(data: bytes, found: str, source: Source, file: TextFile, how_to_get: str) -> None:
    if file.size and len(data) != file.size:
        fault = f"it unpacks to {len(data):,} bytes instead of {file.size:,}"
    elif file.md5 and found != file.md5:
        fault = f"its md5 is {found} instead of {file.md5}"
    else:
        return
    raise DamagedDataError(
        f"{source} is damaged or another version of {file.name}: {fault}. {how_to_get} To use a version of your own, "
        f"give its folder as the corpus: {source.path.parent}."
    )
