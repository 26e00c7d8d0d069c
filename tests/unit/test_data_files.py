"""Finding and reading text files: every packing, every place, and errors that help."""

import gzip
import lzma
import zipfile

import pytest

from equipoise.data.files import (
    DamagedDataError,
    DataError,
    MissingDataError,
    Source,
    TextFile,
    checksum,
    data_root,
    find_text,
    read_text,
)

TEXT = "the cat sat\nthe dog ran – far\n"
FILE = TextFile("toy.txt")


def pack(folder, suffix, text=TEXT, name="toy.txt"):
    folder.mkdir(parents=True, exist_ok=True)
    path, data = folder / (name + suffix), text.encode()
    if suffix == ".xz":
        path.write_bytes(lzma.compress(data))
    elif suffix == ".gz":
        path.write_bytes(gzip.compress(data))
    elif suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"deep/{name}", data)
    else:
        path.write_bytes(data)
    return path


@pytest.fixture(autouse=True)
def _no_data_directory(monkeypatch):
    monkeypatch.delenv("EQUIPOISE_DATA", raising=False)


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zip"])
@pytest.mark.parametrize("inside", [True, False])
def test_every_packing_is_found_in_the_directory_and_in_its_folder(tmp_path, suffix, inside):
    path = pack(tmp_path / "toy" if inside else tmp_path, suffix)
    source = find_text(FILE, data_dir=tmp_path, folders=("toy",))
    assert source.path == path
    assert read_text(source) == (TEXT, checksum(TEXT.encode()))


def test_a_folder_of_its_own_comes_before_the_directory(tmp_path):
    pack(tmp_path, "", "another text\n")
    pack(tmp_path / "toy", ".xz")
    assert read_text(find_text(FILE, data_dir=tmp_path, folders=("toy",)))[0] == TEXT


def test_the_environment_variable_names_the_directory(tmp_path, monkeypatch):
    pack(tmp_path, "")
    assert data_root() is None
    monkeypatch.setenv("EQUIPOISE_DATA", str(tmp_path))
    assert data_root() == tmp_path
    assert find_text(FILE).path == tmp_path / "toy.txt"
    assert data_root("elsewhere").name == "elsewhere"


def test_a_file_inside_an_archive_of_the_whole_corpus(tmp_path):
    with zipfile.ZipFile(tmp_path / "toy-v1.zip", "w") as archive:
        archive.writestr("toy/", "")
        archive.writestr("toy/toy.txt", TEXT)
        archive.writestr("toy/other.txt", "x")
    source = find_text(FILE, data_dir=tmp_path, archives=("absent.zip", "toy-v1.zip"))
    assert source == Source(tmp_path / "toy-v1.zip", "toy/toy.txt")
    assert str(source).endswith("toy-v1.zip[toy/toy.txt]")
    assert read_text(source)[0] == TEXT
    with pytest.raises(MissingDataError):
        find_text(TextFile("third.txt"), data_dir=tmp_path, archives=("toy-v1.zip",))


def test_missing_file_names_file_places_contents_and_how_to_get_it(tmp_path):
    (tmp_path / "other.txt").write_text("x", encoding="utf-8")
    with pytest.raises(MissingDataError) as raised:
        find_text(FILE, data_dir=tmp_path, folders=("toy",), how_to_get="Get it: from the moon.")
    message = str(raised.value)
    assert message.startswith("toy.txt (or with .xz, .gz, .zip) was not found.")
    assert f"{tmp_path / 'toy'} (no such folder)" in message
    assert f"{tmp_path} (holds: other.txt)" in message
    assert message.endswith("Get it: from the moon.")
    assert isinstance(raised.value, FileNotFoundError)
    assert isinstance(raised.value, DataError)


def test_no_directory_at_all_says_how_to_name_one():
    with pytest.raises(MissingDataError, match=r"toy\.txt .*--data-dir .*EQUIPOISE_DATA\. Get it: there\."):
        find_text(FILE, how_to_get="Get it: there.")


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zip"])
def test_a_cut_off_file_is_named(tmp_path, suffix):
    path = pack(tmp_path, suffix, TEXT * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedDataError, match="fetch it again") as raised:
        read_text(find_text(FILE, data_dir=tmp_path))
    assert str(path) in str(raised.value)


def test_a_damaged_byte_inside_a_zip_is_noticed(tmp_path):
    path = pack(tmp_path, ".zip")
    data = bytearray(path.read_bytes())
    data[data.index(b"cat")] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(DamagedDataError, match="CRC"):
        read_text(find_text(FILE, data_dir=tmp_path))


def test_wrong_size_and_wrong_checksum(tmp_path):
    source = Source(pack(tmp_path, ""))
    data = TEXT.encode()
    right = TextFile("toy.txt", checksum(data), len(data))
    assert read_text(source, right)[0] == TEXT
    with pytest.raises(DamagedDataError, match=rf"unpacks to {len(data)} bytes instead of 7\. Get it: there\."):
        read_text(source, TextFile("toy.txt", size=7), "Get it: there.")
    with pytest.raises(DamagedDataError, match=f"md5 is {checksum(data)} instead of abc") as raised:
        read_text(source, TextFile("toy.txt", md5="abc"))
    assert f"give its folder as the corpus: {tmp_path}" in str(raised.value)


def test_text_that_is_no_utf8_and_empty_files(tmp_path):
    (tmp_path / "toy.txt").write_bytes(b"abc\xff\n")
    with pytest.raises(DamagedDataError, match="byte 3 of 5 is 0xff"):
        read_text(Source(tmp_path / "toy.txt"))
    (tmp_path / "toy.txt").write_bytes(b"")
    with pytest.raises(DamagedDataError, match="is empty"):
        read_text(Source(tmp_path / "toy.txt"))


def test_byte_order_mark_and_carriage_returns_are_dropped(tmp_path):
    (tmp_path / "toy.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\r\n")
    assert read_text(Source(tmp_path / "toy.txt"))[0] == "a\nb\n"


def test_zip_with_a_lone_member_of_another_name_and_with_none_of_the_name(tmp_path):
    path = tmp_path / "toy.txt.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("anything.txt", TEXT)
    assert read_text(Source.of(path))[0] == TEXT
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("one.txt", TEXT)
        archive.writestr("two.txt", TEXT)
    with pytest.raises(DamagedDataError, match=r"holds no toy\.txt; it holds: one\.txt, two\.txt"):
        Source.of(path)
