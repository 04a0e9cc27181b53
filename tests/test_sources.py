"""What a party may have besides a table in memory: images, texts, sequences, and large tables."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.organisations import ID, Organisations, cancer, change, cut, read, small, write
from vfl_flower.data import kept, sources
from vfl_flower.data.augmentation import crop_flip
from vfl_flower.data.images import ImageColumn, ImageFolder
from vfl_flower.data.kept import LargeTable
from vfl_flower.data.row_file import RowFile
from vfl_flower.data.sequences import SequenceColumn
from vfl_flower.data.source import Preparation, Source
from vfl_flower.data.text import TextColumn
from vfl_flower.errors import ConfigError, PartyError
from vfl_flower.holder import results

Array = NDArray[Any]

SHORT = {"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
ALL = np.arange(40)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "draw_curves", lambda histories, path: None)


def source_of(path: Path, **words: Any) -> Source:
    return sources.source_of({"file": str(path), "id": ID, **words}, 1)


def loaded(own: Source, places: Array, train: Array = ALL[:30]) -> tuple[Any, Preparation]:
    """These rows, and what the training rows have taught."""
    preparation = own.learn(train)
    own.load(places, preparation)
    return own.rows(places, preparation), preparation


def photographs(rows: int = 40, size: tuple[int, int] = (8, 6)) -> list[bytes]:
    """Little images, of which the first column of pixels tells the row."""
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
    monkeypatch.setattr(kept, "_LARGE", 0)
    monkeypatch.setattr(kept, "_AT_ONCE", 3 * 8 * 60)
    monkeypatch.setattr(LargeTable, "piece", 7)


def mixed(rows: int = 60) -> pd.DataFrame:
    """A table of all that a column can be."""
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
    monkeypatch.setattr(kept, "_LARGE", 2**29)
    whole = source_of(path, **words)
    assert isinstance(large, LargeTable) and not whole.lazy
    places = np.random.default_rng(0).permutation(60)
    rows, preparation = loaded(large, places[50:], places[:40])
    expected, known = loaded(whole, places[50:], places[:40])
    assert (preparation.numbers, preparation.texts) == (known.numbers, known.texts)
    np.testing.assert_allclose(preparation.mean, known.mean, rtol=1e-12)
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    again = large.rows(places[::-1], preparation)  # of which some are not at hand yet
    np.testing.assert_array_equal(again, whole.rows(places[::-1], preparation))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_run_on_large_tables_is_that_on_small_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, all_is_large: None, suffix: str
) -> None:
    organisations = cut(tmp_path, cancer(8, 100), suffixes=(suffix,))
    keys = {**SHORT, "noise-seed": 0, "party-lr": 0.05}
    large = organisations.run("large", keys)
    predicted = organisations.predict("large")
    monkeypatch.setattr(kept, "_LARGE", 2**29)
    whole = organisations.run("whole", keys)
    for name, parameters in whole.parameters("party-1").items():
        np.testing.assert_allclose(parameters, large.parameters("party-1")[name], atol=1e-5)
    pd.testing.assert_frame_equal(organisations.predict("whole"), predicted)


@pytest.mark.usefixtures("all_is_large")
@pytest.mark.parametrize(
    ("value", "words", "sentence"),
    [
        (np.nan, {}, "has missing values in its features"),
        (np.inf, {}, "has infinite values"),
        ("zebra", {}, "has a column that is not numeric"),
        (1e300, {}, "has numbers that are too large"),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_large_table_is_said_before_training(
    tmp_path: Path, value: Any, words: dict[str, str], sentence: str
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


def test_rows_that_are_kept_are_read_by_number_and_have_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    file, rows = RowFile(np.float32, (3, 2)), np.arange(60, dtype=np.float32).reshape(10, 3, 2)
    assert file.append(rows[:4]).tolist() == [0, 1, 2, 3]
    assert file.append(rows[4:]).tolist() == [4, 5, 6, 7, 8, 9]
    np.testing.assert_array_equal(file.read(np.array([7, 0, 7])), rows[[7, 0, 7]])
    assert (tmp_path / "vfl-flower").stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "vfl-flower").iterdir())
