"""Sources of a party besides a table in memory: images, texts, sequences, and large tables."""

import gzip
import io
import json
import os
import struct
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from flwr.app import Context, RecordDict
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from tests.organisations import ID, Organisations, cancer, change, cut, read, small, write
from tests.strategy.test_checkpoint import Cut, assert_equal_runs, cut_after
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data import at_party, formats, images, on_disk, sources, table_file, tables
from vfl_flower.data.ids import id_kind
from vfl_flower.data.images import ImageColumn, ImageFolder, decoded
from vfl_flower.data.on_disk import LargeTable, RowFile, SequenceColumn
from vfl_flower.data.own_files import OwnFile
from vfl_flower.data.samples import augmented, crop_flip
from vfl_flower.data.source import Preparation, Source
from vfl_flower.data.split import Alignment
from vfl_flower.data.text import TextColumn
from vfl_flower.party import inputs
from vfl_flower.party.party import Party
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import refuse_places, resolve

Array = NDArray[Any]

SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
ALL = np.arange(40)


def source_of(path: Path, **words: Any) -> Source:
    return sources.source_of({"file": str(path), "id": ID, **words}, 1)


def loaded(own: Source, places: Array, train: Array = ALL[:30]) -> tuple[Any, Preparation]:
    preparation = own.learn(train)
    own.load(places, preparation)
    return own.rows(places, preparation), preparation


def photographs(rows: int = 40, size: tuple[int, int] = (8, 6)) -> list[bytes]:
    """Return small images whose first column of pixels tells the row."""
    made = []
    for row in range(rows):
        pixels = np.random.default_rng(row).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        made.append(file.getvalue())
    return made


def pixels_of(content: bytes) -> Array:
    return np.asarray(Image.open(io.BytesIO(content)))


# --- tables that are too large for memory --------------------------------------------------------


@pytest.fixture
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "_LARGE", 0)
    monkeypatch.setattr(tables, "_AT_ONCE", 3 * 8 * 60)
    monkeypatch.setattr(LargeTable, "piece", 7)


def mixed(rows: int = 60) -> pd.DataFrame:
    generator = np.random.default_rng(3)
    table = small(rows)
    table["gaps"] = np.where(generator.random(rows) < 0.2, np.nan, 1e9 + np.arange(rows))
    table["number"] = generator.integers(0, 9, rows)
    table["colour"] = generator.choice(["red", "blue", "12"], rows)
    table["late"] = ["1"] * 50 + ["other"] * (rows - 50)  # looks like a number for seven pieces
    table["true"] = generator.random(rows) < 0.5
    return table.drop(columns="label")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_large_table_gives_what_it_would_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_is_large: None, suffix: str
) -> None:
    path, words = tmp_path / f"table{suffix}", {"missing": "median", "text": "one-hot"}
    write(mixed(), path)
    large = source_of(path, **words)
    monkeypatch.setattr(on_disk, "_LARGE", 2**29)
    whole = source_of(path, **words)
    assert isinstance(large, LargeTable) and not whole.lazy
    places = np.random.default_rng(0).permutation(60)
    rows, preparation = loaded(large, places[50:], places[:40])
    expected, known = loaded(whole, places[50:], places[:40])
    assert (preparation.numbers, preparation.texts) == (known.numbers, known.texts)
    np.testing.assert_allclose(preparation.mean, known.mean, rtol=1e-12)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    again = large.rows(places[::-1], preparation)  # some are not cached yet
    np.testing.assert_array_equal(again, whole.rows(places[::-1], preparation))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_prepared_few_at_a_time_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path, words = tmp_path / f"table{suffix}", {"missing": "median", "text": "one-hot"}
    write(mixed(), path)
    places = np.random.default_rng(0).permutation(60)
    expected, known = loaded(source_of(path, **words), places, places[:40])
    monkeypatch.setattr(tables, "_AT_ONCE", 2 * 8 * 60)
    own = source_of(path, **words)
    assert isinstance(own, OwnFile)
    read: list[int] = []
    columns = OwnFile._read

    def counted(self: OwnFile, names: list[str], texts: Any = ()) -> Any:
        read.append(len(names))
        return columns(self, names, texts)

    monkeypatch.setattr(OwnFile, "_read", counted)
    rows, preparation = loaded(own, places, places[:40])
    assert max(read) == (len(own.feature_names) if suffix == ".csv" else 2)
    assert (preparation.numbers, preparation.texts) == (known.numbers, known.texts)
    np.testing.assert_allclose(preparation.mean, known.mean, rtol=1e-12)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "vafl"])  # rows of a window, and all rows
def test_a_label_holder_reads_its_own_large_table_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_is_large: None, strategy: str
) -> None:
    organisations = cut(tmp_path, cancer(8, 100), own=3)
    keys = {**SHORT, "strategy": strategy, "noise-seed": 0, "party-lr": 0.05, "batch-size": 8}
    read: list[int] = []
    rows = LargeTable.rows

    def counted(self: LargeTable, places: Any, preparation: Preparation) -> Any:
        read.append(len(places) if self.party is None else 0)
        return rows(self, places, preparation)

    monkeypatch.setattr(LargeTable, "rows", counted)
    large = organisations.run("large", keys)
    predicted = organisations.predict("large")
    assert (sum(map(bool, read)) > 10) == (strategy == "split-nn")  # a window at a time
    assert any(read)
    monkeypatch.setattr(on_disk, "_LARGE", 2**29)
    read.clear()
    whole = organisations.run("whole", keys)
    for party in ("party-0", "top"):
        for name, parameters in whole.parameters(party).items():
            np.testing.assert_allclose(parameters, large.parameters(party)[name], atol=1e-5)
    pd.testing.assert_frame_equal(organisations.predict("whole"), predicted)
    assert not read  # so the first run alone read from disk


@pytest.mark.one_by_day
@pytest.mark.usefixtures("all_is_large")
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.nan, "has missing values in its features"),
        (np.inf, "has infinite values"),
        ("zebra", "has a column that is not numeric"),
        (1e300, "has numbers that are too large"),
    ],
)
def test_a_wrong_large_table_is_said_before_training(
    tmp_path: Path, value: Any, sentence: str
) -> None:
    organisations = cut(tmp_path, small(), known=1, suffixes=(".csv",))

    def spoil(frame: pd.DataFrame) -> pd.DataFrame:
        frame["f2"] = frame["f2"].astype(object)
        frame.loc[55, "f2"] = value
        return frame

    change(organisations.files[1], spoil)
    with pytest.raises(PartyError, match=f"Party 1's file {sentence}") as error:
        organisations.run("run", SHORT)
    assert "f2" not in str(error.value) and "zebra" not in str(error.value)


def test_kept_rows_are_read_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    file, rows = RowFile(np.float32, (3, 2)), np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    assert file.append(rows[:4]).tolist() == [0, 1, 2, 3]
    assert file.append(rows[4:]).tolist() == [4, 5, 6, 7, 8, 9]
    np.testing.assert_array_equal(file.read(np.array([7, 0, 7])), rows[[7, 0, 7]])
    assert (tmp_path / "vfl-flower").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "vfl-flower").iterdir())


def test_a_refusing_disk_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_is_large: None
) -> None:
    organisations = cut(tmp_path / "files", small())
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    with pytest.raises(PartyError, match="failed: cannot keep its rows on its disk"):
        organisations.run("run", SHORT)


# --- files that hold much more than their bytes ------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", [OwnFile, LargeTable])
@pytest.mark.parametrize("column", ["numbers", "text", "lists"])
def test_a_file_that_would_fill_the_memory_is_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own_log: list[str],
    column: str,
    kind: type[OwnFile],
) -> None:
    many = 20_000
    made = {
        "numbers": pa.array(np.zeros(100 * many)),
        "text": pa.array(["a" * 1000] * many).dictionary_encode(),  # as parquet keeps it
        "lists": pa.array([[0.0] * 200] * many),
    }[column]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": np.arange(len(made)), "x": made}), path, compression="zstd")
    free = 18e6 if column == "numbers" else 10e6
    assert path.stat().st_size < free / 3
    own = kind(str(path), party=1)
    monkeypatch.setattr(table_file, "free_memory", lambda: free)
    with pytest.raises(ConfigError, match="Party 1's file needs more memory than is free"):
        own._read(["x"] if column != "numbers" else ["id", "x"])
    assert "GB are free" in own_log[-1]
    monkeypatch.setattr(table_file, "free_memory", lambda: 1e9)
    assert len(own._read(["x"])) == len(made)  # the control


LONG = {
    "header": b"a" * 2**24,
    "row": b"id,x\n1," + b"a" * 2**24,
    "quote": b'id,x\n1,"' + b"a" * 2**24,
    "bytes": b"\xff" + b"a" * 2**24,
    "values": b'"\n",' * 2**20,
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("content", LONG.values(), ids=LONG)
def test_a_compressed_csv_file_of_one_long_line_is_refused_before_it_is_read(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(content))
    assert path.stat().st_size < 1e5

    def most_memory() -> int:
        tracemalloc.start()
        with pytest.raises(ConfigError, match="Party 1's file"):
            OwnFile(str(path), id="id", party=1).id_column  # noqa: B018
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    with monkeypatch.context() as patch:
        patch.setattr(table_file, "_BLOCK", 2**16)
        assert most_memory() < 4e6
    monkeypatch.setattr(table_file, "_BLOCK", 2**26)
    assert most_memory() > 6e6  # the control


def test_too_many_ids_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"id\n" + b"1\n" * 200_000))
    own = OwnFile(str(path), id="id", party=1)
    monkeypatch.setattr(table_file, "free_memory", lambda: 1e5)
    with pytest.raises(ConfigError, match="Party 1's file needs more memory than is free"):
        own._read_ids()
    monkeypatch.setattr(table_file, "free_memory", lambda: 1e9)
    assert len(own._read_ids()) == 200_000  # the control


def test_an_archive_that_is_too_large_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "a.npz"
    np.savez_compressed(place, X=np.zeros((100_000, 10)), y=np.arange(100_000) % 2)
    assert place.stat().st_size < 1e6
    config = resolve({"dataset": f"npz:{place}"})
    with monkeypatch.context() as patch:
        patch.setattr(formats, "free_memory", lambda: 1e6)
        with pytest.raises(ConfigError, match=r"needs 0\.0 GB of memory"):
            at_party.load_partition(config, 0, 2)
    assert len(at_party.load_partition(config, 0, 2).train) > 0  # the control


# --- images --------------------------------------------------------------------------------------


def folder_of_images(folder: Path, ids: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for each, content in zip(ids, photographs(len(ids)), strict=True):
        (folder / f"{each}.png").write_bytes(content)
    return folder


@pytest.mark.parametrize("in_folder", [True, False], ids=["folder", "column"])
def test_images_are_read_by_id_and_scaled_by_training_images(
    tmp_path: Path, in_folder: bool
) -> None:
    if in_folder:
        own = sources.source_of({"images": str(folder_of_images(tmp_path / "a", ALL))}, 1)
    else:  # as Hugging Face writes images
        cells = [{"bytes": each, "path": f"{n}.png"} for n, each in enumerate(photographs())]
        write(pd.DataFrame({ID: ALL, "photo": cells}), tmp_path / "a.parquet")
        own = source_of(tmp_path / "a.parquet")
    assert isinstance(own, ImageFolder if in_folder else ImageColumn) and own.lazy
    where = {int(each): place for place, each in enumerate(own.id_column)}
    train = np.array([where[row] for row in range(30)])
    rows, preparation = loaded(own, np.array([where[35], where[3]]), train)
    raw = np.stack([pixels_of(content) for content in photographs()]).astype(float)
    mean, deviation = raw[:30].mean((0, 1, 2)), raw[:30].std((0, 1, 2))
    assert rows.dtype == np.float32 and rows.shape == (2, 6, 8, 3)
    np.testing.assert_allclose(rows, (raw[[35, 3]] - mean) / deviation, rtol=1e-5)
    assert Preparation(**json.loads(json.dumps(preparation.as_json()))) == preparation


def test_names_that_look_like_numbers_are_numbers_and_others_texts(tmp_path: Path) -> None:
    for name, ids, kind in (("a", [7, 12], "whole numbers"), ("b", ["07", "12"], "texts")):
        folder = folder_of_images(tmp_path / name, ids)
        (folder / "._1.png").write_bytes(b"of a file system, and no image")
        own = sources.source_of({"images": str(folder)}, 0)
        assert id_kind(own.id_column) == kind and sorted(own.id_column) == ids


def test_images_are_brought_to_one_size_or_refused(tmp_path: Path, own_log: list[str]) -> None:
    folder = folder_of_images(tmp_path, range(9))
    Image.new("L", (30, 20)).save(folder / "9.png")  # grey
    words = {"images": str(folder)}
    own = sources.source_of(words, 1)
    with pytest.raises(ConfigError, match="Party 1 has an image that is of another size than the"):
        own.load(np.arange(10), own.learn(np.arange(9)))
    assert "image 9.png" in own_log[-1]
    rows, _ = loaded(sources.source_of({**words, "image-size": 4}, 1), np.arange(10), np.arange(9))
    assert rows.shape == (10, 4, 4, 3)


def test_an_unreadable_image_is_named_in_the_partys_log_alone(
    tmp_path: Path, own_log: list[str]
) -> None:
    organisations = with_images(tmp_path)
    path = organisations.folder / "photos" / "1013.png"
    for number, content in enumerate((b"no image", path.read_bytes()[:60])):
        path.write_bytes(content)
        with pytest.raises(PartyError, match="Party 1 has an image that cannot be read") as e:
            organisations.run(f"run {number}", SHORT)
        assert "1013" not in str(e.value) and "photos" not in str(e.value)
        assert any("1013.png of this party cannot be read" in line for line in own_log)
        own_log.clear()


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def saved(image: Image.Image, kind: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **more)
    return file.getvalue()


def with_a_chunk(content: bytes, name: bytes, text: bytes) -> bytes:
    chunk = name + b"k\0\0" + zlib.compress(text)
    chunk = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:33] + chunk + content[33:]


def of_a_tile(side: int) -> bytes:
    """A TIFF of 8 x 8 grey pixels in one tile of this side, which is decoded whole."""
    data = zlib.compress(b"\0" * side**2)
    tags = {256: 8, 257: 8, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    tags |= {324: 8 + 2 + 12 * 10 + 4, 325: len(data)}
    lines = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + lines + b"\0" * 4 + data


def of_scans(more: int) -> bytes:
    """A JPEG whose last scan comes again and again."""
    first, *scans = saved(Image.new("L", (64, 64)), "jpeg", progressive=True).split(b"\xff\xda")
    scans[-1] = scans[-1][:-2]
    return b"\xff\xda".join([first, *scans, *scans[-1:] * more]) + b"\xff\xd9"


@pytest.mark.parametrize("kind", ["png", "jpeg", "bmp", "tiff", "webp"])
def test_a_file_of_other_formats_is_no_image_whatever_its_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"who.{kind}"
    for other in (EPS, saved(Image.new("P", (8, 8)), "gif"), saved(Image.new("L", (8, 8)), "ppm")):
        path.write_bytes(other)
        assert Image.open(path).format in ("EPS", "GIF", "PPM")  # the control
        for content in (path, other):
            with pytest.raises(ValueError, match="cannot identify image file"):
                decoded(content, 8)
    path.write_bytes(saved(Image.new("L", (8, 8), 7), kind))
    assert decoded(path).shape == (8, 8, 3)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (saved(Image.new("1", (300, 200)), "png"), "more than 50,000 pixels"),
        (saved(Image.new("1", (1, 60_000)), "png"), "more than 50,000 pixels"),
        (saved(Image.new("L", (300, 200)), "jpeg"), "more than 50,000 pixels"),
        (saved(Image.new("RGB", (300, 200)), "webp", lossless=True), "more than 50,000 pixels"),
        (of_a_tile(256), "more than 50,000 pixels"),
        (of_scans(100), "more than 100 scans"),
        (saved(Image.new("RGB", (220, 220)), "tiff"), "more than 100,000 bytes"),
        (with_a_chunk(saved(Image.new("L", (8, 8)), "png"), b"zTXt", b"a" * 2**24), "too large"),
        (with_a_chunk(saved(Image.new("L", (8, 8)), "png"), b"iCCP", b"a" * 2**24), "too large"),
    ],
    ids=["png", "column", "jpeg", "webp", "tile", "scans", "bytes", "text", "profile"],
)
def test_an_image_that_would_fill_the_memory_is_refused_before_it_is_decoded(
    content: bytes, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_log: list[str]
) -> None:
    monkeypatch.setattr(images, "_PIXELS", 50_000)
    monkeypatch.setattr(images, "_BYTES", 100_000)
    (tmp_path / "a\nb.png").write_bytes(content)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it is decoded"))
        own = sources.source_of({"images": str(tmp_path), "image-size": 8}, 1)
        with pytest.raises(ConfigError, match="Party 1 has an image that cannot be read") as e:
            own.learn(np.arange(1))
    assert what in own_log[-1] and r"a\nb.png" in own_log[-1] and "png" not in str(e.value)
    for limit in ("_PIXELS", "_BYTES", "_SCANS"):
        monkeypatch.setattr(images, limit, 10**6)
    if what == "too large":  # Pillow's own limit
        monkeypatch.setattr(PngImagePlugin, "MAX_TEXT_CHUNK", 2**25)
    assert len(own.learn(np.arange(1)).mean) == 3  # the control: it can be read


def test_the_first_of_several_images_is_read_and_a_pipe_is_no_image(tmp_path: Path) -> None:
    first, other = Image.new("L", (8, 8), 7), Image.new("L", (500, 400))
    path = tmp_path / "a.tiff"
    first.save(path, save_all=True, append_images=[other] * 50)
    assert decoded(path).shape == (8, 8, 3)
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(ValueError, match="it is not a file"):
        decoded(tmp_path / "b.png")


def test_sixteen_bits_are_not_cut_off_at_eight() -> None:
    levels, file = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8), io.BytesIO()
    Image.fromarray(levels).save(file, "png")
    np.testing.assert_array_equal(decoded(file.getvalue())[..., 0], levels >> 8)
    file = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.float32)).save(file, "tiff")
    with pytest.raises(ValueError, match="floating-point numbers"):
        decoded(file.getvalue())


def with_images(folder: Path) -> Organisations:
    """Party 0 has a table, and party 1 has images whose brightness tells the label."""
    table = small()
    organisations = cut(folder, table, known=1)
    photos = folder / "photos"
    photos.mkdir()
    for each, label in zip(table[ID], table["label"], strict=True):
        pixels = np.random.default_rng(each).integers(0, 128, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels + np.uint8(100 * label)).save(photos / f"{each}.png")
    organisations.files[1].unlink()
    organisations.words = [{}, {"file": "", "images": str(photos), "augment": "crop-flip"}]
    return organisations


@pytest.mark.nightly
def test_a_run_on_images_goes_on_and_predicts(tmp_path: Path) -> None:
    organisations = with_images(tmp_path)
    keys = {**SHORT, "epochs": 4, "noise-seed": 0, "checkpoint-every": 2, "optimizer": "momentum"}
    keys |= {"party-lr": 0.2, "server-lr": 0.2}
    whole = organisations.run("whole", keys)
    assert whole.summary["test_accuracy"] > 0.8
    with cut_after(3), pytest.raises(Cut):
        organisations.run("cut", keys)
    assert_equal_runs(organisations.resume("cut", **{"checkpoint-every": 2}), whole, 2)
    organisations.words[1].pop("augment")
    plain = organisations.run("plain", keys).parameters("party-1")
    assert any((plain[name] != each).any() for name, each in whole.parameters("party-1").items())
    labels = tmp_path / "new.csv"
    write(read(organisations.labels).drop(columns="label")[:20], labels)
    predicted = [
        organisations.predict("whole", labels, out=str(tmp_path / f"{n}.csv")) for n in "ab"
    ]
    assert len(predicted[0]) == 20
    pd.testing.assert_frame_equal(*predicted)


# --- texts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of a few words, as transformers saves it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "a", "good", "bad", "day", "night"]
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


TEXTS = ["a good day", "a bad night", "bad", "", "a long and good good day"]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_texts_become_tokens_of_one_length(tmp_path: Path, tokenizer: str, suffix: str) -> None:
    path = tmp_path / f"notes{suffix}"
    write(pd.DataFrame({ID: range(5), "note": TEXTS, "other": range(5)}), path)
    words = {"text": "tokens", "tokenizer": tokenizer, "text-length": 4, "columns": "note"}
    own = source_of(path, **words, missing="median")  # an empty text in csv is missing
    assert isinstance(own, TextColumn)
    rows, preparation = loaded(own, np.array([4, 0, 3, 2]), np.arange(3))
    assert rows["input_ids"].dtype == rows["attention_mask"].dtype == np.int64
    assert rows["input_ids"].tolist() == [[2, 1, 1, 3], [2, 3, 5, 0], [0] * 4, [4, 0, 0, 0]]
    assert rows["attention_mask"].sum(1).tolist() == [4, 3, 0, 1]
    assert preparation.shape == [4]
    other = Preparation(**{**preparation.as_json(), "tokenizer": "another"})
    with pytest.raises(ConfigError, match="Party 1 has another tokenizer than its model was tra"):
        source_of(path, **words).load(np.arange(2), other)


def test_no_tokenizer_is_a_sentence(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.csv"
    write(pd.DataFrame({ID: range(4), "note": "a good day"}), path)

    def refusal(**words: str) -> str:
        with pytest.raises(ConfigError) as error:
            source_of(path, text="tokens", **words).learn(np.arange(4))
        return str(error.value)

    node = "Party 1's node configuration"
    assert f"{node} reads text as tokens and names no tokenizer. Set " in refusal()
    there_is_none = refusal(tokenizer=str(tmp_path / "none"))
    assert f"{node} names a tokenizer whose folder does not exist" in there_is_none
    (tmp_path / "empty").mkdir()
    unreadable = refusal(tokenizer=str(tmp_path / "empty"))
    assert f"{node} names a tokenizer that cannot be read (" in unreadable
    assert str(tmp_path) not in there_is_none + unreadable
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs transformers. Install vfl-flower[hf]" in refusal(tokenizer=f"{tokenizer}/.")


# --- sequences -----------------------------------------------------------------------------------


def test_sequences_are_scaled_and_filled_up_in_front(tmp_path: Path) -> None:
    values = [[1.0, 3.0], [5.0], [], [7.0, 9.0, 11.0, 13.0]]
    write(pd.DataFrame({ID: range(4), "heart": values}), tmp_path / "a.parquet")
    own = source_of(tmp_path / "a.parquet")
    assert isinstance(own, SequenceColumn)
    rows, preparation = loaded(own, np.arange(4), np.arange(2))
    mean, deviation = 3.0, np.std([1, 3, 5])
    assert preparation.shape == [2, 1]
    expected = (np.array([[1, 3], [3, 5], [3, 3], [11, 13]]) - mean) / deviation
    np.testing.assert_allclose(rows[:, :, 0], expected, rtol=1e-6)
    longer, _ = loaded(
        source_of(tmp_path / "a.parquet", **{"sequence-length": 5}), ALL[:4], ALL[:4]
    )
    assert longer.shape == (4, 5, 1)


def test_sequences_may_have_signals(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    values = [generator.standard_normal((3, 2)) for _ in range(4)]
    write(pd.DataFrame({ID: range(4), "x": [v.tolist() for v in values]}), tmp_path / "a.parquet")
    rows, _ = loaded(source_of(tmp_path / "a.parquet"), np.arange(4), np.arange(4))
    whole = np.stack(values)
    expected = (whole - whole.mean((0, 1))) / whole.std((0, 1))
    np.testing.assert_allclose(rows, expected, atol=1e-5)
    spoilt = [v.tolist() for v in values[:3]] + [[[1.0, np.nan]]]
    write(pd.DataFrame({ID: range(4), "x": spoilt}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="Party 1's file has a sequence with missing or infinite"):
        loaded(source_of(tmp_path / "a.parquet"), np.arange(4), np.arange(4))


def test_one_kind_of_data_a_party(tmp_path: Path) -> None:
    cells = [{"bytes": content, "path": ""} for content in photographs()]
    write(pd.DataFrame({ID: ALL, "photo": cells, "age": ALL}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="Party 1's file holds images beside other columns"):
        source_of(tmp_path / "a.parquet")
    assert isinstance(source_of(tmp_path / "a.parquet", columns="photo"), ImageColumn)
    with pytest.raises(ConfigError, match="Party 1 has named a file and a folder of images"):
        source_of(tmp_path / "a.parquet", images=str(tmp_path))
    for key in ("image-size", "text-length", "sequence-length"):
        for value in (0, -1, 1.5, "8", True):
            with pytest.raises(ConfigError, match=f"gives {key} = .*, which must be "):
                source_of(tmp_path / "a.parquet", columns="photo", text="tokens", **{key: value})


# --- augmentation --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50, 6, 5), (50, 6, 5, 3)])
def test_images_are_moved_and_mirrored(shape: tuple[int, ...]) -> None:
    images = torch.randn(shape)
    moved = crop_flip(images, torch.Generator().manual_seed(0))
    assert isinstance(moved, torch.Tensor) and moved.shape == images.shape
    padded = np.pad(images.numpy(), [(0, 0), (4, 4), (4, 4), *[(0, 0)] * (len(shape) - 3)])
    seen = set()
    for row, image in zip(padded, moved.numpy(), strict=True):
        crops = {
            (y, x, flip): row[y : y + 6, x : x + 5][:, :: -1 if flip else 1]
            for y in range(9)
            for x in range(9)
            for flip in (False, True)
        }
        found = [which for which, crop in crops.items() if np.array_equal(crop, image)]
        assert found
        seen.add(found[0])
    assert len(seen) > 30 and {flip for *_, flip in seen} == {False, True}
    again = crop_flip(images, torch.Generator().manual_seed(0))
    assert isinstance(again, torch.Tensor) and torch.equal(moved, again)
    with pytest.raises(ConfigError, match="is for images"):
        crop_flip(torch.randn(3, 4), torch.Generator())


def test_an_augmentation_repeats_and_changes_neither_samples_nor_their_shape() -> None:
    x = torch.ones(6, 4)

    def jittered(samples: Any, generator: torch.Generator) -> Any:  # by torch's own numbers
        return samples.add_(torch.randn(6, 4))

    def shortened(samples: Any, generator: torch.Generator) -> Any:
        return samples[:3]

    def of(secret: bytes, seed: int) -> Any:
        return augmented(jittered, x, secret, seed)

    first, again = of(b"secret", 3), of(b"secret", 3)
    assert torch.equal(first, again) and torch.equal(x, torch.ones(6, 4))
    assert not torch.equal(first, of(b"secret", 4))
    assert not torch.equal(first, of(b"other", 3))
    with pytest.raises(VflError, match="changes the shape or the type of samples"):
        augmented(shortened, x, b"secret", 3)


def node_of(words: dict[str, Any], keys: dict[str, Any]) -> Context:
    seat: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, **words}
    return Context(1, 1, seat, RecordDict(), keys)


def test_augmentation_repeats_and_is_for_training_alone() -> None:
    config = resolve({"augment": "crop-flip", "embedding-size": 4, "batch-size": 32})
    plain = at_party.load_features(config, 0, 2)
    party = Party(config, 0, 2, 10, inputs.load_block(node_of({}, {}), config))
    window = sampling_of(config, party.inputs.rows).window(0, 0, 0, 1, b"")

    def seen(exchange: int) -> Any:
        party.learner.exchange = exchange
        return np.asarray(party.learner.features(window))

    first = seen(3)
    assert not np.allclose(first, plain.train[window.ids]) and (first != seen(4)).any()
    np.testing.assert_array_equal(seen(3), first)
    party.learner.secret = b"another"
    assert (seen(3) != first).any()
    np.testing.assert_array_equal(party.inputs.block.test[:], plain.test)


def test_a_party_names_its_own_augmentation(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def zeroed(samples, generator):\n    return 0 * samples\n")
    mine, keys = f"{tmp_path}/mine.py:zeroed", {"augment": "crop-flip"}
    block = inputs.load_block(node_of({"augment": mine}, {}), resolve(keys))
    made = block.augment(torch.ones(3, 2, 2), torch.Generator())
    assert isinstance(made, torch.Tensor) and not made.any()
    with pytest.raises(ConfigError, match="augment names code, which a node does not take from"):
        refuse_places({"augment": mine})


# --- divided data sets ---------------------------------------------------------------------------


def hugging_face(folder: Path, column: str, values: list[Any]) -> str:
    import datasets

    kind = datasets.Image() if isinstance(values[0], bytes) else datasets.Value("string")
    features = datasets.Features({column: kind, "label": datasets.Value("int64")})
    folder.mkdir()
    for name, rows in (("train", slice(0, 30)), ("test", slice(30, 40))):
        frame = pd.DataFrame({column: values[rows], "label": (ALL % 2)[rows]})
        datasets.Dataset.from_pandas(frame, features).to_parquet(folder / f"{name}.parquet")
    return f"hf:{folder}"


@pytest.mark.parametrize("many", [True, False])
def test_a_data_set_of_images_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    if many:
        monkeypatch.setattr(at_party, "_MANY_PIXELS", 0)
    dataset = hugging_face(tmp_path / "images", "picture", photographs())
    config = resolve({"dataset": dataset, "image-split": "columns"})
    raw = np.stack([pixels_of(content) for content in photographs()]).astype(float)
    for party, columns in enumerate((slice(0, 4), slice(4, 8))):
        block = at_party.load_partition(config, party, 2)
        assert isinstance(block, at_party.ArrayBlock) == (not many)
        half = raw[:, :, columns]
        expected = (half - half[:30].mean()) / half[:30].std()
        np.testing.assert_allclose(np.asarray(block.train[:]), expected[:30], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(
            np.asarray(block.test[3:5]), expected[33:35], rtol=1e-4, atol=1e-6
        )


def test_an_unreadable_image_of_a_data_set_is_a_sentence(tmp_path: Path) -> None:
    images = [*photographs()[:39], b"no image"]
    config = resolve({"dataset": hugging_face(tmp_path / "images", "picture", images)})
    with pytest.raises(ConfigError, match=r"hf:.* has an image that cannot be read"):
        at_party.load_partition(config, 0, 2)


def test_texts_of_a_data_set_are_divided_by_words(tmp_path: Path, tokenizer: str) -> None:
    texts = ["good day", "bad", "", "a good bad night day"] * 10
    keys = {"dataset": hugging_face(tmp_path / "texts", "sentence", texts), "text-length": 4}
    config = resolve({**keys, "tokenizer": tokenizer})
    samples: list[Any] = [at_party.load_partition(config, party, 2).train[:4] for party in range(2)]
    ids = [each["input_ids"].tolist() for each in samples]
    assert ids[0] == [[3, 0, 0, 0], [0] * 4, [0] * 4, [2, 3, 0, 0]]
    assert ids[1] == [[5, 0, 0, 0], [4, 0, 0, 0], [0] * 4, [4, 6, 5, 0]]
    with pytest.raises(ConfigError, match=r"reads text as tokens and names no tokenizer\. Set tok"):
        at_party.load_partition(resolve(keys), 0, 2)


# --- a class of one's own ------------------------------------------------------------------------

OWN = """
import numpy as np
from vfl_flower.data.source import Source

class Pairs(Source):
    lazy = {lazy}

    @property
    def id_column(self):
        return np.arange(1000, 1060)

    def rows(self, places, preparation):
        values = self.id_column[places]
        tokens = np.stack([values % 5, values % 7], axis=1)
        return {{"tokens": tokens, "level": values[:, None].astype(np.float32)}}
"""


@pytest.mark.parametrize("lazy", [True, False])
def test_samples_of_a_source_of_ones_own_may_be_dictionaries(tmp_path: Path, lazy: bool) -> None:
    (tmp_path / "own.py").write_text(OWN.format(lazy=lazy))
    own = sources.source_of({"source": f"{tmp_path}/own.py:Pairs"}, 0)
    common = Alignment("a" * 32, np.arange(60))
    block = at_party.load_own_features(resolve({}).data, own, common)
    assert (len(block.train), len(block.test)) == (48, 12)
    found: Any = block.train[np.array([5, 0])]
    places = own.id_column[np.random.default_rng(0).permutation(60)[12:]][[5, 0]]
    assert found["level"].tolist() == [[each] for each in places.tolist()]
    assert found["tokens"].dtype == np.int64
    none: Any = block.train[:0]
    assert none["tokens"].shape == (0, 2)
